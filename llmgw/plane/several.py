"""Nodes for a replica of several nodes: those that pass by themselves, reach one another and fit it best (D6).

Pure. All members have one way to reach each other and one version of the engine. Preferred: NVLink before RDMA, weights
there on most of them, pairs that a test found good, most rails, the tightest fit. Deciding looks at the groups of nodes
that reach one another and takes the best of each, never at combinations of nodes.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice

import attrs

from llmgw.plane.checks import Need, unreadable
from llmgw.plane.groups import Liking, Way, together
from llmgw.plane.members import Choice, Ports, members
from llmgw.plane.reach import Reach, of_one
from llmgw.plane.rooms import Room
from llmgw.plane.unreached import refusals
from llmgw.plane.world import Reason, Shard
from llmgw.wire.facts import ModelName, NodeId

#: Not installed yet, GPUs left, threads left, memory left: the smaller, the tighter.
Score = tuple[bool, int, int, int]
#: Other replicas in the same place, without the weights, less for every node it was tested well with, other replicas of
#: the model there, the score, the node. The smallest is the best.
Entry = tuple[int, bool, int, int, bool, int, int, int, NodeId]

#: Models whose groups are kept: most plans place replicas of few, and each takes as much as the fleet is large.
KEPT = 16

RoomOf = Callable[[NodeId], Room | None]


@attrs.define
class _Groups:
    """The nodes that have room, by the ways they have, each group in order; for one need, and one model's likings."""

    seen: int
    entries: dict[NodeId, Entry] = attrs.field(factory=dict)
    ways: dict[NodeId, tuple[Way, ...]] = attrs.field(factory=dict)
    by_way: dict[Way, list[Entry]] = attrs.field(factory=dict)

    def put(self, entry: Entry, ways: tuple[Way, ...]) -> None:
        node = entry[-1]
        if self.entries.get(node) == entry and self.ways.get(node) == ways:
            return
        self.drop(node)
        self.entries[node], self.ways[node] = entry, ways
        for way in ways:
            insort(self.by_way.setdefault(way, []), entry)

    def drop(self, node: NodeId) -> None:
        entry = self.entries.pop(node, None)
        for way in self.ways.pop(node, ()):
            assert entry is not None
            group = self.by_way[way]
            del group[bisect_left(group, entry)]


@attrs.define
class _Ways:
    seen: int
    by_node: dict[NodeId, tuple[Way, ...]]
    of: Mapping[NodeId, Score]  # the scores that it was last asked for


@attrs.define
class Several:
    """What placing knows of groups, while one plan is made. `touched` names, in order, the nodes on which something
    was held or released; who looked before looks again from there on.

    `room` gives a node's room. It is passed with each question: kept here it would keep the rooms alive that ask.
    """

    reach: Reach
    ports: Ports
    touched: list[NodeId]
    _ways: dict[Need, _Ways] = attrs.field(factory=dict)
    _groups: dict[tuple[Need, ModelName], _Groups] = attrs.field(factory=dict)
    _orders: dict[Way, tuple[object, ...]] = attrs.field(factory=dict)

    def choose(
        self,
        need: Need,
        model: ModelName,
        scores: Mapping[NodeId, Score],
        entry: Callable[[NodeId, Score], Entry],
        avoid: Collection[NodeId],
        room: RoomOf,
        *,
        keep: bool,
    ) -> Choice | None:
        """The best nodes for one more replica, by rank. `keep`: the groups are of use to the next decision, too."""
        groups = self._grouped(need, model, scores, entry, room, keep=keep)
        shut = set(avoid)
        while True:
            found = self._best(groups, need, shut, room)
            if found is None:
                return None
            way, nodes = found
            others = sum(groups.entries[node][3] for node in nodes)
            made = members(self.reach, self.ports, way, _ranked(nodes, need, room), need, others=others)
            if isinstance(made, Choice):
                return made
            shut.add(made)  # no number is left there

    def here(self, shards: Sequence[Shard], rooms: Sequence[Room], need: Need) -> Choice | None:
        """The same nodes again, if they still reach one another and no test found a pair of them bad."""
        nodes = [room.node.id for room in rooms]
        if len(set(nodes)) < len(nodes):
            return None
        for way in of_one([self.reach.ways(room, need) for room in rooms]):
            foes = self.reach.foes(way)
            if not any(foes.get(node, frozenset()) & set(nodes) for node in nodes):
                made = members(self.reach, self.ports, way, rooms, need, shards)
                if isinstance(made, Choice):
                    return made
        return None

    def refused(self, passing: Sequence[Room], need: Need) -> Iterator[Reason]:
        """Why nodes that pass by themselves make no replica: what is wrong with their wires, or between them."""
        return refusals(self.reach, passing, need, self.ports.taken)

    # The groups -------------------------------------------------------------------------------------------

    def ways(self, need: Need, scores: Mapping[NodeId, Score], room: RoomOf) -> Mapping[NodeId, tuple[Way, ...]]:
        """The ways of every node that has room; the same for all models that ask for as much."""
        key = attrs.evolve(need, source="", model=ModelName(""), spread="", nodes=2)
        kept = self._ways.get(key)
        if kept is None:
            kept = self._ways[key] = _Ways(0, {}, scores)
            fresh = set(scores)
        else:
            fresh = set(self.touched[kept.seen :])
            if kept.of is not scores:
                fresh |= scores.keys() - kept.by_node.keys()
        kept.of = scores
        for node in fresh:
            here = room(node)
            if here is not None and here.node.facts is not None:
                kept.by_node[node] = self.reach.ways(here, need)
        kept.seen = len(self.touched)
        return kept.by_node

    def _grouped(
        self,
        need: Need,
        model: ModelName,
        scores: Mapping[NodeId, Score],
        entry: Callable[[NodeId, Score], Entry],
        room: RoomOf,
        *,
        keep: bool,
    ) -> _Groups:
        ways = self.ways(need, scores, room)
        kept = self._groups.get((need, model)) if keep else None
        if kept is None:
            kept = _Groups(len(self.touched))
            for node, score in scores.items():
                kept.entries[node] = made = entry(node, score)
                kept.ways[node] = ways[node]
                for way in ways[node]:
                    kept.by_way.setdefault(way, []).append(made)
            for group in kept.by_way.values():
                group.sort()
            if keep:
                while len(self._groups) >= KEPT:
                    del self._groups[next(iter(self._groups))]
                self._groups[need, model] = kept
            return kept
        for node in set(self.touched[kept.seen :]):
            if node in scores:
                kept.put(entry(node, scores[node]), ways[node])
            else:
                kept.drop(node)
        kept.seen = len(self.touched)
        return kept

    def _best(
        self, groups: _Groups, need: Need, avoid: Collection[NodeId], room: RoomOf
    ) -> tuple[Way, tuple[NodeId, ...]] | None:
        best: tuple[tuple[int, ...], Way, tuple[NodeId, ...]] | None = None
        for way, group in groups.by_way.items():
            nodes = self._together(way, groups, need.nodes, avoid) if len(group) >= need.nodes else None
            if nodes is not None and need.leader_reads:
                nodes = _led(nodes, [entry[-1] for entry in group if entry[-1] not in avoid], need, room)
            if nodes is None:
                continue
            chosen = [groups.entries[node] for node in nodes]
            friends = self.reach.friends(way)
            good = sum(node in friends.get(other, ()) for node in nodes for other in nodes) if friends else 0
            network, rails, family = way.rank
            rank = (
                sum(entry[0] for entry in chosen),
                network,
                sum(entry[1] for entry in chosen) if not need.leader_reads else _lacks(nodes[0], need, room),
                -good,
                rails,
                family,
                sum(entry[4] for entry in chosen),
                sum(entry[5] for entry in chosen),
                len(group),
            )
            if best is None or rank < best[0] or (rank == best[0] and self._order(way) < self._order(best[1])):
                best = rank, way, nodes
        return None if best is None else best[1:]

    def _order(self, way: Way) -> tuple[object, ...]:
        found = self._orders.get(way)
        if found is None:
            found = self._orders[way] = way.order
        return found

    def _together(self, way: Way, groups: _Groups, count: int, avoid: Collection[NodeId]) -> tuple[NodeId, ...] | None:
        """The best nodes of one group. Its first ones are looked at first: most often they do."""
        group, foes, friends = groups.by_way[way], self.reach.foes(way), self.reach.friends(way)
        if not foes and not friends:
            first = tuple(islice((entry[-1] for entry in group if entry[-1] not in avoid), count))
            return first if len(first) == count else None
        liking: Liking[NodeId] = Liking(
            lambda node: node not in avoid and way in groups.ways.get(node, ()),
            lambda node: groups.entries[node][:2],
            lambda node: groups.entries[node],
        )
        for most in dict.fromkeys((min(len(group), 4 * count + len(avoid)), len(group))):
            order = [entry[-1] for entry in group[:most] if entry[-1] not in avoid]
            nodes = together(order, count, foes, friends, liking)
            if nodes is not None:
                return nodes
        return None


def _ranked(nodes: Sequence[NodeId], need: Need, room: RoomOf) -> list[Room]:
    """By name, so that neighbours in a rack are so in a ring; the first one first where it must lead."""
    rooms = [found for node in nodes if (found := room(node)) is not None]
    return sorted(rooms, key=lambda found: (need.leader_reads and found.node.id != nodes[0], _natural(found.node.id)))


def _led(nodes: Sequence[NodeId], group: Sequence[NodeId], need: Need, room: RoomOf) -> tuple[NodeId, ...] | None:
    """The same nodes, the leader first; one of the group takes the place of the last where none of them can lead as
    well: one that has the weights, else one that has the disk for them. None when the group has no such node."""
    among, here = [*sorted(nodes, key=_natural), *(node for node in group if node not in nodes)], set(nodes)
    leader = next((node for node in among if not _lacks(node, need, room)), None)
    if leader is None:
        able = (node for node in among if (at := room(node)) is not None and next(unreadable(at, need), None) is None)
        leader = next(able, None)
    if leader is None:
        return None
    others = [node for node in nodes if node != leader]
    return (leader, *(others if leader in here else others[:-1]))


def _lacks(node: NodeId, need: Need, room: RoomOf) -> bool:
    found = room(node)
    return found is None or need.source not in found.weights


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    return tuple((1, int(p), "") if p.isdecimal() else (0, 0, p) for p in re.split(r"([0-9]+)", name)[:20] if p)

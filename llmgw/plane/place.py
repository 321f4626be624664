"""Which node takes a shard (D6).

Pure and deterministic. Hard checks come first (checks.py); among the nodes that pass, the one wins that has the
weights already, then has fewest replicas of the model, then is left with the least room. A replica of several
nodes goes to some that pass and reach one another (several.py); the checks of one node stay what they are.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, TypeVar

import attrs

from llmgw.plane.checks import Need, fetched, installed, pick, refusals, took, unreadable
from llmgw.plane.members import Choice, Member, Ports
from llmgw.plane.memory import Runs, estimate, key
from llmgw.plane.reach import Reach
from llmgw.plane.rooms import FULL_DISK, Room, labels_of, room
from llmgw.plane.several import Entry, Score, Several
from llmgw.plane.world import DEFAULT, Model, Node, Reason, Settings, Shard, World
from llmgw.wire.facts import ModelName, NodeId, ShardId, Weights

__all__ = ["Choice", "Member", "Rooms", "place"]

T = TypeVar("T")

#: Other replicas of the model in the same place (of the label they spread over), without the weights, other replicas
#: of the model there, the score, the node.
_Entry = tuple[int, bool, int, bool, int, int, int, NodeId]


@attrs.define
class _Kept(Generic[T]):
    """Something computed, and how many touches it has seen."""

    value: T
    seen: int


class Rooms:
    """Every node's room while one plan is made. Choosing costs a logarithm of the fleet, not the fleet.

    Scores are kept by need and refreshed only for nodes on which something was held or released since.
    """

    def __init__(self, world: World, now: float, settings: Settings = DEFAULT) -> None:
        self._nodes: Mapping[NodeId, Node] = world.nodes
        self._now = now
        self._apart = _apart(world)
        self._learned = world.learned
        self._shapes: dict[str, Weights] = {}
        self._wholes: dict[Need, Need] = {}
        self._held: dict[NodeId, dict[ShardId, Shard]] = {}
        self._leaving: dict[NodeId, dict[ShardId, Shard]] = {}
        self._replicas: dict[ModelName, dict[NodeId, int]] = {}
        for shard in world.shards.values():
            self._count(shard, 1)
            self._held.setdefault(shard.node, {})[shard.id] = shard
        self._ahead: dict[NodeId, dict[str, int]] = {}
        for (node, source), size in world.ahead.items():
            self._ahead.setdefault(node, {})[source] = size
        self._rooms: dict[NodeId, Room] = {}
        self._touched: list[NodeId] = []  # in order: who looked before a touch looks again from there on
        self._scores: dict[Need, _Kept[dict[NodeId, Score]]] = {}
        self._heaps: dict[tuple[Need, ModelName], _Kept[list[_Entry]]] = {}
        self._asked: set[tuple[Need, ModelName]] = set()
        self._sources: dict[str, set[NodeId]] | None = None
        self._values: dict[str, dict[NodeId, str]] = {}
        self._disk_full: bool | None = None
        self._reach = Reach(world, now, settings)
        self._several = Several(self._reach, Ports(self._nodes, self._held), self._touched)

    def room(self, node: NodeId, *, without: ShardId | None = None) -> Room | None:
        """A node's room; `without` one shard that is placed there."""
        known = self._nodes.get(node)
        if known is None:
            return None
        held = self._held.get(node, {})
        if without is not None and without in held:
            rest = [shard for id, shard in held.items() if id != without]
            return room(known, rest, self._now, [held[without]], self._ahead.get(node, {}))
        found = self._rooms.get(node)
        if found is None:
            leaving = self._leaving.get(node, {}).values()
            found = self._rooms[node] = room(known, held.values(), self._now, leaving, self._ahead.get(node, {}))
        return found

    def hold(self, shard: Shard) -> None:
        """The shard is placed: its node has so much less to give."""
        self._leaving.get(shard.node, {}).pop(shard.id, None)
        self._held.setdefault(shard.node, {})[shard.id] = shard
        self._count(shard, 1)
        self._touch(shard.node)

    def release(self, shard: Shard, *, leaving: bool = False) -> None:
        """The shard is there no more. `leaving`: what its processes still hold is given back before another starts."""
        if leaving:
            self._leaving.setdefault(shard.node, {})[shard.id] = shard
        if self._held.get(shard.node, {}).pop(shard.id, None) is not None:
            self._count(shard, -1)
            self._touch(shard.node)

    def here(self, shards: Sequence[Shard], need: Need) -> Choice | None:
        """The places of a replica that starts again where it is, cordoned or not; None when it fits there no more.

        `shards` are all of its members, by rank.
        """
        rooms: list[Room]
        need, rooms = self.whole(need), []
        for shard in shards:
            found = self.room(shard.node, without=shard.id)
            if found is None or next(refusals(found, need, despite_cordon=True), None) is not None:
                return None
            rooms.append(found)
        if need.leader_reads and next(unreadable(rooms[0], need), None) is not None:
            return None
        if need.nodes > 1:
            return self._several.here(shards, rooms, need) if len(rooms) == need.nodes else None
        return Choice(tuple(Member(found.node.id, pick(found, need)) for found in rooms), "it ran here before")

    def choose(self, need: Need, model: ModelName, avoid: Collection[NodeId] = ()) -> Choice | None:
        """The best nodes for one more replica of a model, none of `avoid`; None when too few have room."""
        need = self.whole(need)
        scores = self._fresh(need)
        entry = self._entries(need, model)
        if need.nodes > 1:
            # What was placed changes the order of nodes that were not touched where replicas are spread.
            keep, liked = not need.spread, self._liked(need, entry)
            return self._several.choose(need, model, scores, liked, avoid, self.room, keep=keep)
        if (need, model) in self._asked and not need.spread:
            chosen = self._from_heap(need, model, scores, entry, avoid)
        else:
            # Most models have few replicas: one look at all scores is cheaper than a heap of them.
            self._asked.add((need, model))
            chosen = min((entry(node, scores[node]) for node in scores if node not in avoid), default=None)
        if chosen is None:
            return None
        found = self.room(chosen[-1])
        assert found is not None
        return Choice((Member(chosen[-1], pick(found, need)),), self._why(found, need, model, chosen[0]))

    def refused(self, need: Need) -> tuple[Reason, ...]:
        """Every node's failing checks, by node name; and why those that pass make no replica of several nodes."""
        need = self.whole(need)
        found: dict[NodeId, list[Reason]] = {}
        passing: list[Room] = []
        for node in sorted(self._nodes):
            here = self.room(node)
            assert here is not None
            found[node] = list(refusals(here, need))
            if not found[node]:
                passing.append(here)
        if need.leader_reads and not any(next(unreadable(here, need), None) is None for here in passing):
            for here in passing:
                found[here.node.id] += unreadable(here, need)
            passing = []
        if need.nodes > 1:
            for reason in self._several.refused(passing, need):
                found[reason.node].append(reason)
        return tuple(reason for reasons in found.values() for reason in reasons)

    def whole(self, need: Need) -> Need:
        """The need with what the world adds to it: the models that name this one as apart, and the memory that its
        kind of run takes. Two models that ask for as much are the same from there on."""
        found = self._wholes.get(need)
        if found is None:
            apart = self._apart.get(need.model, frozenset()) if need.model else frozenset()
            asked = need.resources
            runs = Runs(need.engine, need.source, need.args, need.context, asked.gpus, need.nodes)
            learned = self._learned.get(key(runs)) if self._learned else None
            guess = None
            if asked.gpus and not asked.gpu_memory_bytes:
                self._look_at_weights()
                guess = estimate(runs, self._shapes.get(need.source), learned)
            took = learned.memory_bytes if learned is not None and learned.memory_bytes > asked.memory_bytes else 0
            found = self._wholes[need] = attrs.evolve(
                need,
                apart=tuple(sorted({*need.apart, *apart})),
                model=ModelName(""),
                args=(),
                context=None,
                estimate=guess,
                took=took,
            )
        return found

    def bring(self, node: NodeId, source: str, size: int) -> None:
        """The weights are brought there: whoever looks after this has so much less of the disk."""
        if source not in self._ahead.setdefault(node, {}):
            self._ahead[node][source] = size
            self._touch(node)

    def _from_heap(
        self,
        need: Need,
        model: ModelName,
        scores: dict[NodeId, Score],
        entry: Callable[[NodeId, Score], _Entry],
        avoid: Collection[NodeId],
    ) -> _Entry | None:
        kept = self._heaps.get((need, model))
        if kept is None:
            heap = [entry(node, score) for node, score in scores.items()]
            heapq.heapify(heap)
            kept = self._heaps[need, model] = _Kept(heap, len(self._touched))
        heap = kept.value
        for node in set(self._touched[kept.seen :]):
            if node in scores:
                heapq.heappush(heap, entry(node, scores[node]))
        kept.seen = len(self._touched)
        aside: list[_Entry] = []
        found: _Entry | None = None
        while heap and found is None:
            top = heap[0]
            score = scores.get(top[-1])
            if score is None or top != entry(top[-1], score):
                heapq.heappop(heap)  # an older score; where there is a newer one it is in the heap as well
            elif top[-1] in avoid:
                aside.append(heapq.heappop(heap))
            else:
                found = top
        for passed in aside:
            heapq.heappush(heap, passed)
        return found

    def _entries(self, need: Need, model: ModelName) -> Callable[[NodeId, Score], _Entry]:
        """How the nodes are ordered for one model: the smallest entry is the best."""
        # Where only the leader needs the weights, they are no matter of each node.
        there: Collection[NodeId] = self._nodes if need.leader_reads else self._look_at_weights().get(need.source, ())
        replicas = self._replicas.get(model, {})
        if not need.spread:
            return lambda node, score: (0, node not in there, replicas.get(node, 0), *score, node)
        where = self._values.get(need.spread)
        if where is None:
            where = {node: labels_of(known).get(need.spread, "") for node, known in self._nodes.items()}
            self._values[need.spread] = where
        counts: dict[str, int] = {}
        for node, count in replicas.items():
            if node in where:
                counts[where[node]] = counts.get(where[node], 0) + count
        return lambda node, score: (
            counts.get(where[node], 0),
            node not in there,
            replicas.get(node, 0),
            *score,
            node,
        )

    def _look_at_weights(self) -> Mapping[str, set[NodeId]]:
        """Where each source is complete; and the weights of each that say most of their model."""
        if self._sources is None:
            self._sources = {}
            for node, known in self._nodes.items():
                for weights in known.facts.weights if known.facts is not None else ():
                    if weights.complete and not weights.error:
                        self._sources.setdefault(weights.source, set()).add(node)
                        shape = self._shapes.get(weights.source)
                        if shape is None or (shape.kv_bytes_per_token is None and weights.kv_bytes_per_token):
                            self._shapes[weights.source] = weights
        return self._sources

    def _liked(self, need: Need, entry: Callable[[NodeId, Score], _Entry]) -> Callable[[NodeId, Score], Entry]:
        """The same order for a replica of several nodes, to which it matters with whom a node was tested well."""
        if "rdma" not in need.network or not (friends := self._reach.friendly()):
            return lambda node, score: _with_friends(entry(node, score), 0)
        most = need.nodes - 1
        return lambda node, score: _with_friends(entry(node, score), -min(most, len(friends.get(node, ()))))

    def _why(self, room: Room, need: Need, model: ModelName, crowd: int) -> str:
        others = self._replicas.get(model, {}).get(room.node.id, 0)
        words = ["the weights are there"] if need.source in room.weights else []
        if need.spread:
            value = labels_of(room.node).get(need.spread)
            where = f"{need.spread}={value}" if value is not None else f"places without the label {need.spread}"
            words.append(f"{crowd or 'no'} other replica{'s' if crowd != 1 else ''} in {where}")
        words.append(
            f"{others} other replica{'s' if others > 1 else ''} of the model there"
            if others
            else "no other replica of the model there"
        )
        if need.took:
            words.append(took(need))
        if need.resources.gpus:
            left = sum(not u.holder and not u.broken for u in room.units) - need.resources.gpus
            words.append(f"{left} GPU{'s' if left != 1 else ''} left")
        elif need.resources.cpu_threads:
            left = room.threads_free - need.resources.cpu_threads
            words.append(f"{left} CPU thread{'s' if left != 1 else ''} left")
        return ", ".join(words)

    def _count(self, shard: Shard, by: int) -> None:
        counts = self._replicas.setdefault(shard.model, {})
        counts[shard.node] = counts.get(shard.node, 0) + by

    def _touch(self, node: NodeId) -> None:
        self._rooms.pop(node, None)
        self._touched.append(node)

    def _score(self, node: NodeId, need: Need) -> Score | None:
        found = self.room(node)
        if found is None or next(refusals(found, need), None) is not None:
            return None
        resources = need.resources
        gpus = sum(not u.holder and not u.broken for u in found.units) - resources.gpus
        return (
            not installed(found.node, need),
            gpus,
            found.threads_free - resources.cpu_threads,
            (found.memory_free - resources.memory_bytes) >> 30,  # what is measured differs by some MiB between equals
        )

    def _some_disk_is_full(self) -> bool:
        if self._disk_full is None:
            self._disk_full = any(
                ("node", FULL_DISK) in node.problems for node in self._nodes.values() if node.problems
            )
        return self._disk_full

    def _fresh(self, need: Need) -> dict[NodeId, Score]:
        """The scores of all nodes that pass, which are the same for all models that ask for as much."""
        by_source = need.resources.disk_bytes or (fetched(need.source) and self._some_disk_is_full())
        # What a model prefers and what joins its nodes are no matter of one node.
        plain = attrs.evolve(need, nodes=min(need.nodes, 2), network=(), rails=0, spread="", took=0)
        same = plain if by_source else attrs.evolve(plain, source="")
        kept = self._scores.get(same)
        if kept is None:
            scores = {node: score for node in self._nodes if (score := self._score(node, same)) is not None}
            kept = self._scores[same] = _Kept(scores, len(self._touched))
        for node in set(self._touched[kept.seen :]):
            score = self._score(node, same)
            if score is None:
                kept.value.pop(node, None)
            else:
                kept.value[node] = score
        kept.seen = len(self._touched)
        return kept.value


def _with_friends(entry: _Entry, friends: int) -> Entry:
    crowd, absent, others, missing, gpus, threads, memory, node = entry
    return crowd, absent, friends, others, missing, gpus, threads, memory, node


def _apart(world: World) -> Mapping[ModelName, frozenset[ModelName]]:
    """By model, those that name it as apart: it shares no node with them either."""
    found: dict[ModelName, set[ModelName]] = {}
    for name, model in world.models.items():
        for other in model.profile.apart:
            found.setdefault(other, set()).add(name)
    return {name: frozenset(others) for name, others in found.items()}


def place(world: World, model: Model, now: float) -> Choice | tuple[Reason, ...]:
    """One decision by itself: where one more replica of a model goes, or why it goes nowhere."""
    rooms, need = Rooms(world, now), Need.of(model)
    return rooms.choose(need, model.name) or rooms.refused(need)

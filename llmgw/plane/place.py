"""Which node takes a shard (D6).

Pure and deterministic. Hard checks come first (checks.py); among the nodes that pass, the one wins that has the
weights already, then has fewest replicas of the model, then is left with the least room. A replica of several
nodes will choose among groups of rooms that reach one another; the checks of one node stay what they are.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, TypeVar

import attrs

from llmgw.plane.checks import Need, fetched, installed, pick, refusals
from llmgw.plane.rooms import FULL_DISK, Room, room, weights_of
from llmgw.plane.world import Model, Node, Reason, Shard, World
from llmgw.wire.facts import ModelName, NodeId, ShardId


@attrs.frozen
class Member:
    """The place of one shard: its node, the GPUs it takes, and what it needs to find the others of its replica.

    `address` is where the others reach it, `ports` are the numbers reserved there, `network` the environment that the
    wires between them ask for, `rdma` the ports they use. All empty for a replica of one node.
    """

    node: NodeId
    gpus: tuple[str, ...]
    address: str = ""
    ports: Mapping[str, int] = attrs.field(factory=dict)
    network: Mapping[str, str] = attrs.field(factory=dict)
    rdma: tuple[str, ...] = ()


@attrs.frozen
class Choice:
    """The nodes that take a replica, by rank, and why these. `version`: the engine's, where all must have the same."""

    members: tuple[Member, ...]
    why: str
    version: str = ""

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return tuple(member.node for member in self.members)


T = TypeVar("T")

#: Not installed yet, GPUs left, threads left, memory left: the smaller, the tighter.
_Score = tuple[bool, int, int, int]
#: Without the weights, other replicas of the model there, the score, the node.
_Entry = tuple[bool, int, bool, int, int, int, NodeId]


@attrs.define
class _Kept(Generic[T]):
    """Something computed, and how many touches it has seen."""

    value: T
    seen: int


class Rooms:
    """Every node's room while one plan is made. Choosing costs a logarithm of the fleet, not the fleet.

    Scores are kept by need and refreshed only for nodes on which something was held or released since.
    """

    def __init__(self, world: World, now: float) -> None:
        self._nodes: Mapping[NodeId, Node] = world.nodes
        self._now = now
        self._held: dict[NodeId, dict[ShardId, Shard]] = {}
        self._replicas: dict[ModelName, dict[NodeId, int]] = {}
        for shard in world.shards.values():
            self._count(shard, 1)
            self._held.setdefault(shard.node, {})[shard.id] = shard
        self._rooms: dict[NodeId, Room] = {}
        self._touched: list[NodeId] = []  # in order: who looked before a touch looks again from there on
        self._scores: dict[Need, _Kept[dict[NodeId, _Score]]] = {}
        self._heaps: dict[tuple[Need, ModelName], _Kept[list[_Entry]]] = {}
        self._asked: set[tuple[Need, ModelName]] = set()
        self._sources: dict[str, set[NodeId]] | None = None
        self._disk_full: bool | None = None

    def room(self, node: NodeId, *, without: ShardId | None = None) -> Room | None:
        """A node's room; `without` one shard that is placed there."""
        known = self._nodes.get(node)
        if known is None:
            return None
        held = self._held.get(node, {})
        if without is not None and without in held:
            rest = [shard for id, shard in held.items() if id != without]
            return room(known, rest, self._now, leaving=held[without])
        found = self._rooms.get(node)
        if found is None:
            found = self._rooms[node] = room(known, held.values(), self._now)
        return found

    def hold(self, shard: Shard) -> None:
        """The shard is placed: its node has so much less to give."""
        self._held.setdefault(shard.node, {})[shard.id] = shard
        self._count(shard, 1)
        self._touch(shard.node)

    def release(self, shard: Shard) -> None:
        if self._held.get(shard.node, {}).pop(shard.id, None) is not None:
            self._count(shard, -1)
            self._touch(shard.node)

    def here(self, shards: Sequence[Shard], need: Need) -> Choice | None:
        """The places of a replica that starts again where it is, cordoned or not; None when it fits there no more.

        `shards` are all of its members, by rank.
        """
        members: list[Member] = []
        for shard in shards:
            found = self.room(shard.node, without=shard.id)
            if found is None or next(refusals(found, need, despite_cordon=True), None) is not None:
                return None
            members.append(Member(shard.node, pick(found, need)))
        return Choice(tuple(members), "it ran here before")

    def choose(self, need: Need, model: ModelName, avoid: Collection[NodeId] = ()) -> Choice | None:
        """The best node for one more shard of a model, none of `avoid`; None when no node has room."""
        scores = self._fresh(need)
        entry = self._entries(need, model)
        if (need, model) in self._asked:
            chosen = self._from_heap(need, model, scores, entry, avoid)
        else:
            # Most models have few replicas: one look at all scores is cheaper than a heap of them.
            self._asked.add((need, model))
            chosen = min((entry(node, scores[node]) for node in scores if node not in avoid), default=None)
        if chosen is None:
            return None
        found = self.room(chosen[-1])
        assert found is not None
        return Choice((Member(chosen[-1], pick(found, need)),), self._why(found, need, model))

    def refused(self, need: Need) -> tuple[Reason, ...]:
        """Every node's failing checks, by node name."""
        found: list[Reason] = []
        for node in sorted(self._nodes):
            here = self.room(node)
            assert here is not None
            found += refusals(here, need)
        return tuple(found)

    def _from_heap(
        self,
        need: Need,
        model: ModelName,
        scores: dict[NodeId, _Score],
        entry: Callable[[NodeId, _Score], _Entry],
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

    def _entries(self, need: Need, model: ModelName) -> Callable[[NodeId, _Score], _Entry]:
        """How the nodes are ordered for one model: the smallest entry is the best."""
        if self._sources is None:
            self._sources = {}
            for node in self._nodes:
                for source in weights_of(self._nodes[node]):
                    self._sources.setdefault(source, set()).add(node)
        there: Collection[NodeId] = self._sources.get(need.source, ())
        replicas = self._replicas.get(model, {})
        return lambda node, score: (node not in there, replicas.get(node, 0), *score, node)

    def _why(self, room: Room, need: Need, model: ModelName) -> str:
        others = self._replicas.get(model, {}).get(room.node.id, 0)
        words = ["the weights are there"] if need.source in room.weights else []
        words.append(f"{others} other replicas of the model there" if others else "no other replica of the model there")
        if need.resources.gpus:
            left = sum(not u.holder and not u.broken for u in room.units) - need.resources.gpus
            words.append(f"{left} GPUs left")
        elif need.resources.cpu_threads:
            words.append(f"{room.threads_free - need.resources.cpu_threads} CPU threads left")
        return ", ".join(words)

    def _count(self, shard: Shard, by: int) -> None:
        counts = self._replicas.setdefault(shard.model, {})
        counts[shard.node] = counts.get(shard.node, 0) + by

    def _touch(self, node: NodeId) -> None:
        self._rooms.pop(node, None)
        self._touched.append(node)

    def _score(self, node: NodeId, need: Need) -> _Score | None:
        found = self.room(node)
        if found is None or next(refusals(found, need), None) is not None:
            return None
        resources = need.resources
        gpus = sum(not u.holder and not u.broken for u in found.units) - resources.gpus
        return (
            not installed(found.node, need),
            gpus,
            found.threads_free - resources.cpu_threads,
            found.memory_free - resources.memory_bytes,
        )

    def _some_disk_is_full(self) -> bool:
        if self._disk_full is None:
            self._disk_full = any(
                ("node", FULL_DISK) in node.problems for node in self._nodes.values() if node.problems
            )
        return self._disk_full

    def _fresh(self, need: Need) -> dict[NodeId, _Score]:
        """The scores of all nodes that pass, which are the same for all models that ask for as much."""
        by_source = need.resources.disk_bytes or (fetched(need.source) and self._some_disk_is_full())
        key = need if by_source else attrs.evolve(need, source="")
        kept = self._scores.get(key)
        if kept is None:
            scores = {node: score for node in self._nodes if (score := self._score(node, key)) is not None}
            kept = self._scores[key] = _Kept(scores, len(self._touched))
        for node in set(self._touched[kept.seen :]):
            score = self._score(node, key)
            if score is None:
                kept.value.pop(node, None)
            else:
                kept.value[node] = score
        kept.seen = len(self._touched)
        return kept.value


def place(world: World, model: Model, now: float) -> Choice | tuple[Reason, ...]:
    """One decision by itself: where one more replica of a model goes, or why it goes nowhere."""
    rooms, need = Rooms(world, now), Need.of(model)
    return rooms.choose(need, model.name) or rooms.refused(need)

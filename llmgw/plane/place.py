"""Which node takes a shard (D6).

Pure and deterministic. Hard checks come first (checks.py); among the nodes that pass, the one wins that has the
weights already, then has fewest replicas of the model, then is left with the least room. A replica of several
nodes will choose among groups of rooms that reach one another; the checks of one node stay what they are.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping

import attrs

from llmgw.plane.checks import Need, installed, pick, refusals
from llmgw.plane.rooms import Room, room
from llmgw.plane.world import Model, Node, Reason, Shard, World
from llmgw.wire.facts import ModelName, NodeId, ShardId


@attrs.frozen
class Choice:
    """The node that takes the shard, the GPUs it takes, and why this one."""

    node: NodeId
    gpus: tuple[str, ...]
    why: str


_Score = tuple[bool, int, int, int]


class Rooms:
    """Every node's room while one plan is made. Choosing costs a logarithm of the fleet, not the fleet.

    Scores are kept by need and refreshed only for nodes on which something was held or released since.
    """

    def __init__(self, world: World, now: float) -> None:
        self._nodes: Mapping[NodeId, Node] = world.nodes
        self._now = now
        self._held: dict[NodeId, dict[ShardId, Shard]] = {}
        self._replicas: dict[tuple[ModelName, NodeId], int] = {}
        for shard in world.shards.values():
            self._count(shard, 1)
            self._held.setdefault(shard.node, {})[shard.id] = shard
        self._rooms: dict[NodeId, Room] = {}
        self._log: list[NodeId] = []
        self._scores: dict[Need, tuple[dict[NodeId, _Score], list[int]]] = {}
        self._heaps: dict[tuple[Need, ModelName], tuple[list[tuple[object, ...]], list[int]]] = {}

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

    def here(self, node: NodeId, need: Need, shard: ShardId) -> Choice | None:
        """The place of a shard that starts again on its node, cordoned or not; None when it fits there no more."""
        found = self.room(node, without=shard)
        if found is None or next(refusals(found, need, despite_cordon=True), None) is not None:
            return None
        return Choice(node, pick(found, need), "it ran here before")

    def choose(self, need: Need, model: ModelName, avoid: Collection[NodeId] = ()) -> Choice | None:
        """The best node for one more shard of a model, none of `avoid`; None when no node has room."""
        heap = self._heap(need, model)
        aside: list[tuple[object, ...]] = []
        chosen: NodeId | None = None
        while heap:
            entry = heap[0]
            node = entry[-1]
            assert isinstance(node, str)
            if entry != self._entry(need, model, NodeId(node)):
                heapq.heappop(heap)  # an older score; the newer one is in the heap as well
            elif node in avoid:
                aside.append(heapq.heappop(heap))
            else:
                chosen = NodeId(node)
                break
        for entry in aside:
            heapq.heappush(heap, entry)
        if chosen is None:
            return None
        found = self.room(chosen)
        assert found is not None
        return Choice(chosen, pick(found, need), self._why(found, need, model))

    def refused(self, need: Need) -> tuple[Reason, ...]:
        """Every node's failing checks, by node name."""
        found: list[Reason] = []
        for node in sorted(self._nodes):
            here = self.room(node)
            assert here is not None
            found += refusals(here, need)
        return tuple(found)

    def _why(self, room: Room, need: Need, model: ModelName) -> str:
        others = self._replicas.get((model, room.node.id), 0)
        words = ["the weights are there"] if need.source in room.weights else []
        words.append(f"{others} other replicas of the model there" if others else "no other replica of the model there")
        if need.resources.gpus:
            left = sum(not u.holder and not u.broken for u in room.units) - need.resources.gpus
            words.append(f"{left} GPUs left")
        elif need.resources.cpu_threads:
            words.append(f"{room.threads_free - need.resources.cpu_threads} CPU threads left")
        return ", ".join(words)

    def _count(self, shard: Shard, by: int) -> None:
        key = (shard.model, shard.node)
        self._replicas[key] = self._replicas.get(key, 0) + by

    def _touch(self, node: NodeId) -> None:
        self._rooms.pop(node, None)
        self._log.append(node)

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

    def _fresh(self, need: Need) -> dict[NodeId, _Score]:
        kept = self._scores.get(need)
        if kept is None:
            scores = {node: score for node in self._nodes if (score := self._score(node, need)) is not None}
            kept = self._scores[need] = (scores, [len(self._log)])
        scores, seen = kept
        for node in set(self._log[seen[0] :]):
            score = self._score(node, need)
            if score is None:
                scores.pop(node, None)
            else:
                scores[node] = score
        seen[0] = len(self._log)
        return scores

    def _entry(self, need: Need, model: ModelName, node: NodeId) -> tuple[object, ...] | None:
        score = self._scores[need][0].get(node)
        if score is None:
            return None
        found = self.room(node)
        assert found is not None
        return (need.source not in found.weights, self._replicas.get((model, node), 0), *score, node)

    def _heap(self, need: Need, model: ModelName) -> list[tuple[object, ...]]:
        scores = self._fresh(need)
        kept = self._heaps.get((need, model))
        if kept is None:
            heap = [entry for node in scores if (entry := self._entry(need, model, node)) is not None]
            heapq.heapify(heap)
            self._heaps[need, model] = (heap, [len(self._log)])
            return heap
        heap, seen = kept
        for node in set(self._log[seen[0] :]):
            entry = self._entry(need, model, node)
            if entry is not None:
                heapq.heappush(heap, entry)
        seen[0] = len(self._log)
        return heap


def place(world: World, model: Model, now: float) -> Choice | tuple[Reason, ...]:
    """One decision by itself: where one more replica of a model goes, or why it goes nowhere."""
    rooms, need = Rooms(world, now), Need.of(model)
    return rooms.choose(need, model.name) or rooms.refused(need)

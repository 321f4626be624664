"""Where in the fleet a node may have the weights that it is to fetch. Pure.

What is told with an order is advice: nodes ask those that they were told of how they stand, and decide. So one that is
old or wrong costs a second fetch from outside and nothing else.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

from msgspec.structs import replace

from llmgw.plane.checks import fetched
from llmgw.plane.rooms import labels_of, reads
from llmgw.plane.world import Node, Stage, Want, World
from llmgw.wire.control import ControlMessage, FetchWeights, StartShard
from llmgw.wire.facts import NodeId, ShardState

Order = TypeVar("Order", bound=ControlMessage)

#: So many nodes are named to one that wants weights: each is asked every few seconds while it waits.
NAMED = 8


def directed(world: World, orders: Sequence[tuple[NodeId, Order]]) -> tuple[tuple[NodeId, Order], ...]:
    """The same orders; those that let a node fetch say where in the fleet the source is to be had, and which commit.

    Of nodes that are about to fetch the same, each is told of those whose names come before its own; so one of them
    goes outside and the others wait for it. Who has it all is told nearest first: most labels in common, and among
    equals in another order for every node, so that not all take it from one.
    """
    sources = {source for _, order in orders if (source := _source(order))}
    if not sources:
        return tuple(orders)
    fleet = _Fleet(world, sources, orders)
    return tuple((node, fleet.advised(node, order)) for node, order in orders)


def _source(order: ControlMessage) -> str:
    """What a node fetches on this order; "" for nothing."""
    match order:
        case StartShard(spec=spec) if fetched(spec.source) and reads(spec.engine, spec.rank):
            return spec.source
        case FetchWeights(source=source) if fetched(source):
            return source
        case _:
            return ""


class _Fleet:
    """Who has, fetches or is about to fetch some sources. Advice for one node costs the same in a fleet of any size."""

    def __init__(self, world: World, sources: set[str], orders: Iterable[tuple[NodeId, ControlMessage]]) -> None:
        self.world = world
        self.has: dict[str, set[NodeId]] = {source: set() for source in sources}
        self.commits: dict[str, Counter[str]] = {source: Counter() for source in sources}
        fetching: dict[str, set[NodeId]] = {source: set() for source in sources}
        about: dict[str, set[NodeId]] = {source: set() for source in sources}
        for node in world.nodes.values():
            for held in node.facts.weights if node.facts is not None else ():
                if held.source not in sources:
                    continue
                if held.complete and not held.error:
                    self.has[held.source].add(node.id)
                    self.commits[held.source][held.revision] += 1
                elif held.fetching:
                    fetching[held.source].add(node.id)
        for shard in world.shards.values():
            loading = shard.want is Want.RUN and shard.state in (ShardState.STARTING, ShardState.FETCHING)
            if loading and shard.spec.source in sources and reads(shard.spec.engine, shard.spec.rank):
                about[shard.spec.source].add(shard.node)
        for id, order in orders:
            if source := _source(order):
                about[source].add(id)
        self.whole = {source: _Givers(self._giving(self.has[source])) for source in sources}
        self.fetching = {source: self._giving(fetching[source] - self.has[source]) for source in sources}
        self.about = {source: self._giving(about[source] - fetching[source] - self.has[source]) for source in sources}

    def _giving(self, ids: Iterable[NodeId]) -> list[Node]:
        nodes = (self.world.nodes.get(id) for id in sorted(ids))
        return [node for node in nodes if node is not None and _gives(node)]

    def advised(self, id: NodeId, order: Order) -> Order:
        source, node = _source(order), self.world.nodes.get(id)
        refresh = isinstance(order, FetchWeights) and order.refresh
        if not source or node is None or (id in self.has[source] and not refresh):
            return order
        soon = [other for other in self.fetching[source][: NAMED + 1] if other.id != id]
        earlier = self.about[source][: bisect_left(self.about[source], id, key=lambda other: other.id)]
        if len(earlier) > NAMED:
            # The first ones are those that go outside; of the others every node asks a few that not all ask.
            first, rest = earlier[: NAMED // 2], earlier[NAMED // 2 :]
            earlier = [*first, *_window(rest, _offset(source, id), NAMED - len(first))]
        commits = self.commits[source]
        most = max(commits.values(), default=0)
        advice = {
            "weights_from": tuple(shared_at(other) for other in self.whole[source].nearest(node, source)),
            "weights_soon": tuple(shared_at(other) for other in [*soon, *earlier][:NAMED]),
            "weights_revision": "" if refresh else min((r for r, n in commits.items() if n == most), default=""),
        }
        return replace(order, **advice)


class _Givers:
    """Nodes that have all of a source, and those of them with a label."""

    def __init__(self, nodes: list[Node]) -> None:
        self._nodes = nodes
        self._labels = {node.id: labels_of(node) for node in nodes}
        self._with: dict[tuple[str, str], list[Node]] = {}
        for node in nodes:
            for label in self._labels[node.id].items():
                self._with.setdefault(label, []).append(node)

    def nearest(self, node: Node, source: str) -> list[Node]:
        """Most labels in common first. Of many that would do, each node looks at a few, and not all at the same."""
        offset, mine = _offset(source, node.id), labels_of(node)
        near = sorted((self._with[label] for label in mine.items() if label in self._with), key=len)
        found = {other.id: other for other in _window(self._nodes, offset, 2 * NAMED) if other.id != node.id}
        for group in near[:4]:
            found |= {other.id: other for other in _window(group, offset, NAMED) if other.id != node.id}

        def distance(other: Node) -> tuple[int, bytes]:
            common = sum(self._labels[other.id].get(name) == value for name, value in mine.items())
            return -common, hashlib.sha256(f"{source}\0{node.id}\0{other.id}".encode()).digest()

        return sorted(found.values(), key=distance)[:NAMED]


def _offset(source: str, id: NodeId) -> int:
    return int.from_bytes(hashlib.sha256(f"{source}\0{id}".encode()).digest()[:8], "big")


def _window(nodes: Sequence[Node], offset: int, count: int) -> list[Node]:
    """So many of a list, from an offset on and round."""
    return [nodes[(offset + step) % len(nodes)] for step in range(min(count, len(nodes)))]


def _gives(node: Node) -> bool:
    return bool(node.connected and node.stage is Stage.READY and node.facts is not None and node.facts.share)


def shared_at(node: Node) -> str:
    """Where a node gives its weights to others, as HOST:PORT; "" where it does not."""
    share = node.facts.share if node.facts is not None else ""
    if not share.startswith(":") or not node.address:
        return share
    host = f"[{node.address}]" if ":" in node.address else node.address
    return host + share

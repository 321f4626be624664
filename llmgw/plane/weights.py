"""Which weights a node needs, which it may give up (C8), and which other node has them. Pure.

The plane only proposes: it knows what is wanted and who has what. The node checks again, since it knows what is used,
and asks those that it was told of how they stand now.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import attrs
from msgspec.structs import replace

from llmgw.plane.checks import fetched
from llmgw.plane.rooms import labels_of
from llmgw.plane.world import Node, Stage, Want, World
from llmgw.units import format_duration
from llmgw.wire.control import ControlMessage, FetchWeights, StartShard
from llmgw.wire.facts import NodeId, ShardState, Weights

Order = TypeVar("Order", bound=ControlMessage)

#: So many nodes are named to one that wants weights: each is asked every few seconds while it waits.
NAMED = 8


@attrs.frozen
class Proposal:
    """Sources that a node may remove, and the others with what keeps them."""

    remove: tuple[str, ...]
    kept: Mapping[str, str]


def needed(world: World) -> dict[str, str]:
    """Every source that something wants, and what: a model that is wanted, or a shard that is not stopped yet.

    A model of no replicas needs its weights too: they are kept for when it is scaled up again. Any node may be the
    next to serve a model, so this is one answer for all of them.
    """
    found = {shard.spec.source: f"shard {shard.id}" for _, shard in sorted(world.shards.items())}
    found |= {model.profile.source: f"model {name}" for name, model in sorted(world.models.items())}
    return found


def proposal(held: Iterable[Weights], needed: Mapping[str, str], grace: float) -> Proposal:
    """What of a node's cache nothing needs and no shard has used for `grace` seconds."""
    remove, kept = list[str](), dict[str, str]()
    for weights in sorted(held, key=lambda weights: weights.source):
        if reason := _keeping(weights, needed, grace):
            kept[weights.source] = reason
        else:
            remove.append(weights.source)
    return Proposal(tuple(remove), kept)


def _keeping(weights: Weights, needed: Mapping[str, str], grace: float) -> str:
    if who := needed.get(weights.source):
        return f"{who} needs it"
    if weights.in_use:
        return "a shard on this node uses it"
    if weights.fetching:
        return "it is being fetched"
    if weights.idle is None:
        return "the node does not say when it was last used"
    if weights.idle < grace:
        return f"it was used {format_duration(weights.idle)} ago, and the grace is {format_duration(grace)}"
    return ""


# --- who has them ----------------------------------------------------------------------------------------


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
        case StartShard(spec=spec) if fetched(spec.source) and not _remote(spec.engine, spec.rank):
            return spec.source
        case FetchWeights(source=source) if fetched(source):
            return source
        case _:
            return ""


def _remote(engine: str, rank: int) -> bool:
    """Whether a member has its weights from the leader: llama.cpp's followers lend memory and read no files."""
    return engine == "llamacpp" and rank > 0


@attrs.define(slots=False)
class _Fleet:
    """Who has, fetches or is about to fetch some sources."""

    world: World
    sources: set[str]
    orders: Sequence[tuple[NodeId, ControlMessage]]

    def __attrs_post_init__(self) -> None:
        self.whole: dict[str, list[Node]] = {source: [] for source in self.sources}
        self.fetching: dict[str, set[NodeId]] = {source: set() for source in self.sources}
        self.about: dict[str, set[NodeId]] = {source: set() for source in self.sources}
        self.commits: dict[str, Counter[str]] = {source: Counter() for source in self.sources}
        for _, node in sorted(self.world.nodes.items()):
            for held in node.facts.weights if node.facts is not None else ():
                if held.source not in self.sources:
                    continue
                if held.complete and not held.error:
                    self.commits[held.source][held.revision] += 1
                    if _gives(node):
                        self.whole[held.source].append(node)
                elif held.fetching:
                    self.fetching[held.source].add(node.id)
        for shard in self.world.shards.values():
            loading = shard.want is Want.RUN and shard.state in (ShardState.STARTING, ShardState.FETCHING)
            if loading and shard.spec.source in self.sources and not _remote(shard.spec.engine, shard.spec.rank):
                self.about[shard.spec.source].add(shard.node)
        for id, order in self.orders:
            if source := _source(order):
                self.about[source].add(id)

    def advised(self, id: NodeId, order: Order) -> Order:
        source, node = _source(order), self.world.nodes.get(id)
        if not source or node is None:
            return order
        has = {other.id for other in self.whole[source]}
        whole = sorted((o for o in self.whole[source] if o.id != id), key=lambda other: _distance(node, other, source))
        soon = sorted(self.fetching[source] - {id} - has)
        soon += sorted(o for o in self.about[source] - self.fetching[source] - has if o < id)
        giving = [other for name in soon if (other := self.world.nodes.get(name)) is not None and _gives(other)]
        refresh = isinstance(order, FetchWeights) and order.refresh
        commits = self.commits[source]
        most = max(commits.values(), default=0)
        advice = {
            "weights_from": tuple(shared_at(other) for other in whole[:NAMED]),
            "weights_soon": tuple(shared_at(other) for other in giving[:NAMED]),
            "weights_revision": "" if refresh else min((r for r, n in commits.items() if n == most), default=""),
        }
        return replace(order, **advice)


def _gives(node: Node) -> bool:
    return bool(node.connected and node.stage is Stage.READY and node.facts is not None and node.facts.share)


def shared_at(node: Node) -> str:
    """Where a node gives its weights to others, as HOST:PORT; "" where it does not."""
    share = node.facts.share if node.facts is not None else ""
    if not share.startswith(":") or not node.address:
        return share
    host = f"[{node.address}]" if ":" in node.address else node.address
    return host + share


def _distance(node: Node, other: Node, source: str) -> tuple[int, bytes]:
    mine, theirs = labels_of(node), labels_of(other)
    common = sum(theirs.get(name) == value for name, value in mine.items())
    return -common, hashlib.sha256(f"{source}\0{node.id}\0{other.id}".encode()).digest()


def differing(world: World) -> dict[str, dict[str, tuple[NodeId, ...]]]:
    """Sources of wanted models of which nodes hold different commits, and which node holds which.

    Replicas of one model would then answer differently; `ctl fetch --refresh` makes them one again.
    """
    wanted = {model.profile.source for model in world.models.values()}
    found: dict[str, dict[str, tuple[NodeId, ...]]] = {}
    for id, node in sorted(world.nodes.items()):
        for held in node.facts.weights if node.facts is not None else ():
            if held.source in wanted and held.complete and not held.error and held.revision:
                by = found.setdefault(held.source, {})
                by[held.revision] = (*by.get(held.revision, ()), id)
    return {source: by for source, by in sorted(found.items()) if len(by) > 1}


def warnings(world: World) -> tuple[str, ...]:
    """The same in sentences for an operator."""
    return tuple(
        f"{source} is not the same everywhere: "
        + "; ".join(f"{revision[:12]} on {_some(nodes)}" for revision, nodes in sorted(by.items()))
        + f". `llmgw ctl fetch --refresh {source}` brings the newest to all"
        for source, by in differing(world).items()
    )


def _some(nodes: tuple[NodeId, ...]) -> str:
    return ", ".join(nodes) if len(nodes) < 4 else f"{', '.join(nodes[:3])} and {len(nodes) - 3} more"

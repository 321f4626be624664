"""Draining: how long what leaves may finish what it serves, and when a node is empty. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from llmgw.plane.event import Event
from llmgw.plane.world import Node, Settings, Shard, Want, World
from llmgw.wire.facts import NodeId, ReplicaId


def within(nodes: Iterable[Node | None], settings: Settings) -> float:
    """Seconds that a replica on these nodes may finish once it gets no new requests.

    What an operator said of a node that is being drained counts for all members of a replica there, the shortest
    of several; else `Settings.drain`.
    """
    said = [node.drain_within for node in nodes if node is not None and node.draining and node.drain_within is not None]
    return min(said) if said else settings.drain


def of_replica(world: World, members: Iterable[Shard], settings: Settings) -> float:
    """The same for the members of one replica."""
    return within((world.nodes.get(shard.node) for shard in members), settings)


def kept(before: World, after: World, settings: Settings) -> World:
    """The world after a drain was taken back, in which what finishes already has as long as it had before."""
    leaving: dict[ReplicaId, list[Shard]] = {s.replica: [] for s in after.shards.values() if s.want is Want.DRAIN}
    for shard in after.shards.values() if leaving else ():
        if shard.replica in leaving:
            leaving[shard.replica].append(shard)
    shards = after.shards
    for members in leaving.values():
        longer = of_replica(before, members, settings) - of_replica(after, members, settings)
        if longer > 0:
            for shard in members:
                if shard.want_at is not None:
                    moved = attrs.evolve(shard, want_at=shard.want_at + longer, want_clock=shard.want_clock + longer)
                    shards = shards.set(shard.id, moved)
    return after if shards is after.shards else attrs.evolve(after, shards=shards)


def left(world: World, node: NodeId) -> int:
    """How many shards and strays are still on a node."""
    placed = sum(shard.node == node for shard in world.shards.values())
    return placed + sum(stray.node == node for stray in world.strays.values())


def emptied(before: World, after: World, clock: float) -> tuple[Event, ...]:
    """An event for each node whose drain has come to its end: what was there is there no more."""
    if before.shards is after.shards and before.strays is after.strays:
        return ()
    draining = {node.id for node in after.nodes.values() if node.draining}
    ended = draining - _used(after) if draining else draining
    return tuple(drained(node, clock) for node in sorted(ended & _used(before))) if ended else ()


def _used(world: World) -> set[NodeId]:
    """The nodes on which a shard or a stray is."""
    return {shard.node for shard in world.shards.values()} | {stray.node for stray in world.strays.values()}


def drained(node: NodeId, clock: float) -> Event:
    text = f"{node} is drained: nothing runs there any more"
    return Event(kind="node-drained", subject=f"node:{node}", text=text, clock=clock, data={"node": str(node)})

"""The steps of a plan, and the world in which they are decided. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from immutables import Map

from llmgw.plane.event import Event
from llmgw.plane.gang import size
from llmgw.plane.world import ENDED, Shard, Stage, Stray, Unplaced, Want, World
from llmgw.wire.agent import ShardStatus
from llmgw.wire.facts import ModelName, NodeId, ShardId, ShardState

#: Shards that are no more, of which the generation is kept one by one.
KEPT = 1024


@attrs.frozen
class Start:
    """Place a shard, or begin its next attempt: the whole record as it will be stored."""

    shard: Shard
    why: str


@attrs.frozen
class Drain:
    """Send a shard no new requests; its stop follows."""

    shard: ShardId
    why: str


@attrs.frozen
class Stop:
    shard: ShardId
    why: str


@attrs.frozen
class GiveUp:
    """Forget a placement: it has ended, or its node is lost and nobody needs it."""

    shard: ShardId
    why: str


Step = Start | Drain | Stop | GiveUp


@attrs.frozen
class Plan:
    """Steps in order; the models that cannot be placed whole; the monotonic time at which something may be due.

    `ahead`: the weights that are brought to nodes before a rollout goes on.
    """

    steps: tuple[Step, ...] = ()
    unplaced: Map[ModelName, Unplaced] = Map()
    look_again: float | None = None
    ahead: Map[tuple[NodeId, str], int] = Map()


def enact(world: World, steps: Iterable[Step], now: float, clock: float) -> World:
    """The world in which these steps are decided. Applied to a newer world than the planned one it still holds:
    statuses that came meanwhile stay, since a step names only what it decides."""
    shards, strays, retired = world.shards, world.strays, world.retired
    changed = False
    for step in steps:
        changed = True
        match step:
            case Start(shard=shard):
                before = shards.get(shard.id)
                if before is not None and (before.node != shard.node or (before.rank == 0 and size(before) > 1)):
                    # A leader starts again only when the others are ready: until then its older process is a stray.
                    strays = _with_strays(strays, _left_behind(world, before, now))
                shards = shards.set(shard.id, attrs.evolve(shard, placed_clock=clock, want_at=now, want_clock=0.0))
                retired = retired.delete(shard.id) if shard.id in retired else retired
            case Drain(shard=id, why=why) | Stop(shard=id, why=why):
                if (known := shards.get(id)) is not None:
                    want = Want.DRAIN if isinstance(step, Drain) else Want.STOP
                    gone = attrs.evolve(known, want=want, want_at=now, want_clock=clock, why=why, not_before=None)
                    shards = shards.set(id, gone)
            case GiveUp(shard=id):
                if (known := shards.get(id)) is not None:
                    strays = _with_strays(strays, _left_behind(world, known, now))
                    shards = shards.delete(id)
                    retired = retired.set(id, known.generation)
    if not changed:
        return world
    retired, floor = _bounded(retired, world.floor)
    return attrs.evolve(world, shards=shards, strays=strays, retired=retired, floor=floor, version=world.version + 1)


def _bounded(retired: Map[ShardId, int], floor: int) -> tuple[Map[ShardId, int], int]:
    """Where the shards that are no more have become too many, one number stands for those of the lowest generations."""
    if len(retired) > KEPT:
        floor = max(floor, sorted(retired.values())[-KEPT - 1])
        retired = Map({id: generation for id, generation in retired.items() if generation > floor})
    return retired, floor


def told(step: Step, world: World, clock: float) -> Event:
    """A step as an event; `world` is the one it was planned in."""
    match step:
        case Start(shard=shard, why=why):
            text = f"{shard.id} is placed on {shard.node} at generation {shard.generation}: {why}"
            data = {"node": str(shard.node), "model": str(shard.model), "generation": str(shard.generation)}
            return Event(kind="shard-placed", subject=f"shard:{shard.id}", text=text, clock=clock, data=data)
        case Drain(shard=id, why=why):
            kind, text = "shard-drained", f"{id} gets no new requests: {why}"
        case Stop(shard=id, why=why):
            kind, text = "shard-told-to-stop", f"{id} is to be stopped: {why}"
        case GiveUp(shard=id, why=why):
            kind, text = "shard-dropped", f"{id} is no more: {why}"
    known = world.shards.get(id)
    data = {"node": str(known.node), "model": str(known.model)} if known is not None else {}
    return Event(kind=kind, subject=f"shard:{id}", text=text, clock=clock, data=data)


def _with_strays(
    strays: Map[tuple[NodeId, ShardId], Stray], found: dict[tuple[NodeId, ShardId], Stray]
) -> Map[tuple[NodeId, ShardId], Stray]:
    for key, stray in found.items():
        known = strays.get(key)
        if known is None or known.status.generation <= stray.status.generation:
            strays = strays.set(key, stray)
    return strays


def _left_behind(world: World, shard: Shard, now: float) -> dict[tuple[NodeId, ShardId], Stray]:
    """What may still run where a shard was: to be stopped, on a lost node as soon as that is heard again (D4).

    A node that was lost when the step was planned may have come back while it was stored, and told what it runs.
    """
    node, status = world.nodes.get(shard.node), shard.status
    if node is None or shard.state in ENDED or (node.stage is not Stage.LOST and status is None):
        return {}
    if status is None or status.generation != shard.generation:
        status = ShardStatus(
            shard=shard.id,
            replica=shard.replica,
            model=shard.model,
            generation=shard.generation,
            state=ShardState.UNKNOWN,
        )
    return {(shard.node, shard.id): Stray(shard.node, status, now)}

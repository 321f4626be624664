"""How many replicas a model shall have now, where it is unloaded while nobody asks for it. Pure.

A model with `idle` has none until a request comes, all of them from then on, and none again after so many seconds
without one. `World.asked` is when it was asked for last; a model that is not in it was never asked for.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from llmgw.plane.event import Event
from llmgw.plane.world import Model, Want, World
from llmgw.wire.facts import ModelName, ShardState

_LOADING = (ShardState.STARTING, ShardState.FETCHING)


def wanted(world: World, model: Model, now: float) -> int:
    """The replicas that a model shall have at this moment."""
    if not model.idle or awake_until(world, model) > now:
        return model.replicas
    return 0


def awake_until(world: World, model: Model) -> float:
    """Until when a model stays loaded if nobody asks for it again, on the plane's monotonic clock."""
    asked = world.asked.get(model.name)
    return float("-inf") if asked is None else asked + model.idle


def asked(world: World, names: Iterable[str], now: float, clock: float) -> tuple[World, tuple[Event, ...]]:
    """The world in which requests for these models wait or are being answered now.

    The version grows only with a model that this wakes: a later mark puts off what is planned already, and whoever
    planned it looks again by itself.
    """
    marks, events = world.asked, list[Event]()
    for name in sorted(set(names)):
        model = world.models.get(ModelName(name))
        if model is None or not model.idle:
            continue
        if model.replicas and not wanted(world, model, now):
            many = f"{model.replicas} replica{'s' if model.replicas != 1 else ''}"
            text = f"{name}: a request waits for it, so it is loaded ({many})"
            events.append(Event(kind="model-asked", subject=f"model:{name}", text=text, clock=clock))
        marks = marks.set(model.name, now)
    if marks is world.asked:
        return world, ()
    return attrs.evolve(world, asked=marks, version=world.version + bool(events)), tuple(events)


def kept(world: World, now: float) -> World:
    """The world with the marks that take no request; ask for it before each plan.

    A model that runs and of which nothing is known, since the plane or its `idle` is new, counts from now. So does one
    that loads: who waited for it may come back only when it is there. One that has failed has no such excuse, or it
    would be tried for ever. Marks of models that are never unloaded go.
    """
    idle = {name for name, model in world.models.items() if model.idle}
    if not idle and not world.asked:
        return world
    marks = world.asked
    for name in marks:
        if name not in idle:
            marks = marks.delete(name)
    for shard in world.shards.values() if idle else ():
        if shard.model not in idle or shard.want is not Want.RUN:
            continue
        if shard.model not in marks or (shard.state in _LOADING and not shard.restarts):
            marks = marks.set(shard.model, now)
    return world if marks is world.asked else attrs.evolve(world, asked=marks)

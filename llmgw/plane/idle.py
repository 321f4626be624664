"""How many replicas a model shall have now, where it is unloaded while nobody asks for it. Pure.

A model with `idle` has none until a request comes, all of them from then on, and none again after so many seconds
without one. `World.asked` is when it was asked for last; a model that is not in it was never asked for.
"""

from __future__ import annotations

from llmgw.plane.world import Model, World


def wanted(world: World, model: Model, now: float) -> int:
    """The replicas that a model shall have at this moment."""
    if not model.idle or awake_until(world, model) > now:
        return model.replicas
    return 0


def awake_until(world: World, model: Model) -> float:
    """Until when a model stays loaded if nobody asks for it again, on the plane's monotonic clock."""
    asked = world.asked.get(model.name)
    return float("-inf") if asked is None else asked + model.idle

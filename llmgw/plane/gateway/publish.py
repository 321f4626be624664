"""The plane's own routes, kept as the world changes."""

from __future__ import annotations

from collections.abc import Sequence

from llmgw.cell import Cell
from llmgw.plane.gateway.route import Routes, StaticEndpoint, routes_of
from llmgw.plane.world import World


def first_routes(endpoints: Sequence[StaticEndpoint]) -> Routes:
    """The routes before the plane was heard of: what is configured, and that the rest is to come."""
    return Routes(models=routes_of(World(), endpoints).models, settling=True, blind=True)


async def keep_routes(world: Cell[World], endpoints: Sequence[StaticEndpoint], routes: Cell[Routes]) -> None:
    """Make `routes` follow `world`, until cancelled. Equal routes are not set again, so nobody is woken for load."""
    version = -1
    while True:
        value, version = await world.next(version)
        fresh = routes_of(value, endpoints)
        if fresh != routes.value:
            routes.set(fresh)

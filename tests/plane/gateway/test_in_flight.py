from __future__ import annotations

import trio

from llmgw.cell import Cell
from llmgw.plane.gateway.in_flight import InFlight
from llmgw.plane.gateway.route import Routes


def make() -> tuple[InFlight, Cell[Routes]]:
    routes = Cell(Routes())
    return InFlight(routes), routes


def test_counts_are_the_own_ones_and_those_of_other_processes() -> None:
    flying, _ = make()
    flying.begin("a")
    flying.report(1, 0, {"a": 2, "b": 1})
    flying.report(2, 0, {"a": 1})
    assert (flying.of("a"), flying.all()) == (4, {"a": 4, "b": 1})
    flying.gone(1)
    flying.end("a")
    assert flying.all() == {"a": 1}


async def test_a_replica_is_idle_when_its_last_request_ends(autojump_clock: trio.testing.MockClock) -> None:
    flying, _ = make()
    flying.begin("a")
    flying.begin("a")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(flying.idle, "a")
        await trio.testing.wait_all_tasks_blocked()
        flying.end("a")
        await trio.testing.wait_all_tasks_blocked()
        assert nursery.child_tasks
        flying.end("a")


async def test_a_gateway_that_has_not_taken_the_newest_routes_may_still_ask_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    flying, routes = make()
    flying.report(1, routes.version, {})
    routes.set(Routes(settling=True))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(flying.idle, "a")
        await trio.testing.wait_all_tasks_blocked()
        assert nursery.child_tasks
        flying.report(1, routes.version, {"a": 1})
        await trio.testing.wait_all_tasks_blocked()
        assert nursery.child_tasks
        flying.report(1, routes.version, {})


async def test_a_gateway_process_that_is_gone_holds_nobody_up(autojump_clock: trio.testing.MockClock) -> None:
    flying, _ = make()
    flying.report(1, -1, {"a": 3})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(flying.idle, "a")
        await trio.testing.wait_all_tasks_blocked()
        flying.gone(1)

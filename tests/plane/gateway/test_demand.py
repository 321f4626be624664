"""What a gateway tells of the models that it is asked for: at once when it is news, and then a few times a second."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
import trio
import trio.testing

from llmgw.cell import Cell
from llmgw.plane.gateway import feed
from llmgw.plane.gateway.demand import TELL_EVERY, Demand, tell_demand
from llmgw.plane.gateway.in_flight import InFlight
from llmgw.plane.gateway.route import UNLOADED, ModelRoute, ModelState, Routes
from tests.plane.gateway.parts import Call, House, chat, until

Clock = trio.testing.MockClock


def routes(*sleepers: str, others: Collection[str] = ()) -> Routes:
    models = {name: ModelRoute(state=ModelState.STARTING, reason=UNLOADED, idle=60.0) for name in sleepers}
    return Routes(models={**models, **{name: ModelRoute(state=ModelState.STARTING) for name in others}})


def make(*sleepers: str, others: Collection[str] = ()) -> Demand:
    return Demand(Cell(routes(*sleepers, others=others)))


def test_open_requests_and_such_as_ended_since_are_told_once_each() -> None:
    demand = make("a", "b", "c")
    for model in ("a", "b", "b"):
        demand.begin(model, 10.0)
    demand.end("b")
    demand.end("b")
    assert demand.take() == ("a", "b")
    assert demand.take() == ("a",)
    demand.end("a")
    assert demand.take() == ("a",)
    assert demand.take() == ()


def test_models_that_are_never_unloaded_are_nobodys_news() -> None:
    demand = make("a", others=["always"])
    demand.begin("always", 10.0)
    demand.begin("gone", 10.0)
    assert demand.take() == ()
    assert demand.bell.version == 0


def test_many_requests_ring_once_in_a_while() -> None:
    demand = make("a", "b")
    for n in range(100):
        demand.begin("a", 10.0 + n * TELL_EVERY / 200)
    assert demand.bell.version == 1
    demand.begin("a", 10.0 + TELL_EVERY)
    assert demand.bell.version == 2
    demand.begin("b", 10.0 + TELL_EVERY)
    assert demand.bell.version == 3


async def test_the_first_request_is_told_at_once_and_a_long_one_again_and_again(autojump_clock: Clock) -> None:
    demand, told = make("a"), list[tuple[float, tuple[str, ...]]]()
    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            tell_demand, demand, lambda models: told.append((trio.current_time() - start, tuple(models)))
        )
        await trio.sleep(10.1)
        demand.begin("a", 10.1)
        await trio.testing.wait_all_tasks_blocked()
        assert [at for at, _ in told] == pytest.approx([10.1])
        await trio.sleep(2 * TELL_EVERY + 0.01)
        assert len(told) == 3
        demand.end("a")
        await trio.sleep(10)
        assert len(told) == 4
        nursery.cancel_scope.cancel()
    assert {models for _, models in told} == {("a",)}


@pytest.mark.real
async def test_a_held_request_and_a_served_one_are_told(house: House) -> None:
    told: list[str] = []
    engine = await house.engine()
    house.nursery.start_soon(tell_demand, house.gateway.demand, told.extend)
    house.route("tiny", ModelRoute(state=ModelState.STARTING, reason=UNLOADED, idle=60.0))
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            assert (await house.ask(chat())).status == 200

        nursery.start_soon(ask)
        await until(lambda: "tiny" in told)
        house.route("tiny", ModelRoute(state=ModelState.READY, endpoints=(engine.endpoint(),), idle=60.0))
    await until(lambda: house.gateway.demand.take() == ())
    told.clear()
    assert (await house.ask(chat())).status == 200
    await until(lambda: "tiny" in told)


@pytest.mark.real
async def test_nothing_stays_open_after_a_client_that_left_or_a_request_that_was_refused(house: House) -> None:
    asked = trio.Event()

    async def never(call: Call) -> None:
        asked.set()
        await call.hung_up()

    engine = await house.engine(never)
    house.route("tiny", ModelRoute(state=ModelState.READY, endpoints=(engine.endpoint(),), idle=60.0))
    browser = await house.browser()
    await browser.stream.send_all(chat())
    await asked.wait()
    assert house.gateway.demand.take() == ("tiny",)
    assert house.gateway.demand.take() == ("tiny",)
    browser.reset()
    await until(lambda: house.gateway.demand.take() == ())
    house.route("tiny", ModelRoute(state=ModelState.UNPLACED, idle=60.0))
    assert (await house.ask(chat())).status == 503
    assert house.gateway.demand.take() == ("tiny",)
    assert house.gateway.demand.take() == ()


@pytest.mark.real
async def test_a_gateway_process_tells_the_plane_and_tells_the_next_plane_again_what_still_waits(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    mine: Cell[Routes] = Cell(Routes())
    demand = Demand(mine)
    nursery.start_soon(feed.follow_routes, tmp_path, mine, InFlight(mine), demand)

    async def plane(told: list[str], *, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        theirs: Cell[Routes] = Cell(routes("a", "b"))
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as inner:
                await inner.start(feed.serve_routes, tmp_path, theirs, InFlight(theirs), told.extend)
                task_status.started(scope)

    first: list[str] = []
    scope = await nursery.start(plane, first)
    await until(lambda: "a" in mine.value.models)
    demand.begin("a", 10.0)
    await until(lambda: "a" in first)
    scope.cancel()
    await until(lambda: not feed.socket_path(tmp_path).exists())
    demand.begin("b", 20.0)  # came and went while there was no plane
    demand.end("b")
    second: list[str] = []
    await nursery.start(plane, second)
    await until(lambda: second.count("a") >= 2)
    assert "b" not in second

"""Requests for a model of which nothing is ready (F4)."""

from __future__ import annotations

import pytest
import trio

from llmgw.plane.gateway.route import ModelRoute, ModelState, Routes
from tests.plane.gateway.parts import (
    House,
    Houses,
    chat,
    until,
)

pytestmark = pytest.mark.real


async def test_a_request_for_a_model_that_starts_waits_for_it(house: House) -> None:
    house.route("tiny", ModelRoute(state=ModelState.STARTING, reason="replica tiny-0 on n1 is starting"))
    engine = await house.engine()
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            assert (await house.ask(chat())).status == 200

        nursery.start_soon(ask)
        await until(lambda: house.gateway.metrics.held == {"tiny": 1})
        house.serves(engine)
    assert house.gateway.metrics.held == {}


async def test_waiting_ends_with_503_the_reason_and_when_to_try_again(houses: Houses) -> None:
    house = await houses(hold_within=0.05)
    house.route("tiny", ModelRoute(state=ModelState.STARTING, reason="replica tiny-0 on n1 is fetching"))
    answer = await house.ask(chat())
    assert (answer.status, answer.error["code"]) == (503, "model_not_ready")
    assert "is fetching" in str(answer.error["message"])
    assert int(answer.header(b"retry-after") or 0) > 0


async def test_a_model_that_cannot_be_placed_is_refused_at_once(house: House) -> None:
    house.route("tiny", ModelRoute(state=ModelState.UNPLACED, reason="no node fits (gpus)"))
    with trio.fail_after(20):
        answer = await house.ask(chat())
    assert answer.status == 503
    assert "no node fits (gpus)" in str(answer.error["message"])


async def test_no_more_than_so_many_requests_wait(houses: Houses) -> None:
    house = await houses(most_held=2)
    house.route("tiny", ModelRoute(state=ModelState.STARTING))
    browsers = [await house.browser() for _ in range(2)]
    for browser in browsers:
        await browser.send(chat())
    await until(lambda: house.gateway.metrics.held == {"tiny": 2})
    with trio.fail_after(20):
        answer = await house.ask(chat())
    assert answer.status == 503
    assert "2 requests wait for it already" in str(answer.error["message"])


async def test_a_model_that_leaves_the_routes_ends_the_wait(house: House) -> None:
    house.route("tiny", ModelRoute(state=ModelState.STARTING))
    house.route("other", ModelRoute(state=ModelState.STARTING))
    browser = await house.browser()
    await browser.send(chat())
    await until(lambda: house.gateway.metrics.held == {"tiny": 1})
    house.routes.set(Routes())
    assert (await browser.answer()).status == 503

"""A client that goes away, or does not read (F2)."""

from __future__ import annotations

import pytest
import trio

from llmgw.plane.gateway.route import ModelRoute, ModelState
from tests.plane.gateway.parts import (
    STREAM,
    Browser,
    Call,
    HangUp,
    House,
    Houses,
    chat,
    chunk,
    until,
)

pytestmark = pytest.mark.real


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_ends_its_request_at_the_engine_within_100_ms(
    house: House, streamed: bool, how: str
) -> None:
    ended: list[float] = []

    async def script(call: Call) -> None:
        if streamed:
            await call.send(STREAM + chunk(b"data: 1\n\n"))
        await call.hung_up()
        ended.append(trio.current_time())
        raise HangUp

    engine = await house.engine(script)
    house.serves(engine)
    took: list[float] = []
    while not took or (took[-1] >= 0.1 and len(took) < 20):  # the machine may be busy, the gateway must not be
        number = len(took) + 1
        browser = await house.browser()
        await browser.send(chat(stream=streamed))
        if streamed:
            await browser.head()
        await until(lambda number=number: len(engine.calls) == number)  # type: ignore[misc]
        left = trio.current_time()
        await _leave(browser.stream, how)
        await until(lambda number=number: len(ended) == number == house.counted(499))  # type: ignore[misc]
        took.append(ended[-1] - left)
    assert took[-1] < 0.1
    assert not house.gateway.out  # the engine did nothing wrong


async def test_a_client_that_leaves_while_it_is_held_leaves_no_trace(house: House) -> None:
    house.route("tiny", ModelRoute(state=ModelState.STARTING))
    browser = await house.browser()
    await browser.send(chat())
    await until(lambda: house.gateway.metrics.held == {"tiny": 1})
    await browser.stream.aclose()
    await until(lambda: house.counted(499) == 1)
    assert house.gateway.metrics.held == {}


async def test_a_client_that_does_not_read_holds_the_engine_back_and_is_given_up(houses: Houses) -> None:
    house = await houses(send_within=0.2)
    ended = trio.Event()

    async def script(call: Call) -> None:
        await call.send(STREAM)
        try:
            while True:
                await call.send(chunk(b"x" * 65536))
        finally:
            ended.set()

    house.serves(await house.engine(script))
    browser = await house.browser()
    await browser.send(chat(stream=True))
    with trio.fail_after(30):
        await ended.wait()
    await until(lambda: house.counted(499) == 1)


async def _leave(stream: trio.abc.Stream, how: str) -> None:
    assert isinstance(stream, trio.SocketStream)
    if how == "close":
        await stream.aclose()
    elif how == "half-close":
        await stream.send_eof()
    else:
        Browser(stream).reset()


async def test_a_slow_client_is_not_taken_for_a_silent_engine(houses: Houses) -> None:
    house = await houses(stream_idle_within=2.0, send_within=60)
    sent = b"x" * (8 << 20)

    async def script(call: Call) -> None:
        await call.send(STREAM + chunk(sent) + b"0\r\n\r\n")

    house.serves(await house.engine(script))
    browser = await house.browser()
    await browser.send(chat(stream=True))
    head = await browser.head()
    await trio.sleep(3.0)  # the slowness is the point
    answer = await browser.rest(head)
    assert answer.whole
    assert answer.body == sent
    assert not house.gateway.metrics.failures

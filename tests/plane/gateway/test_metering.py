"""Counting tokens without changing what a client gets."""

from __future__ import annotations

import json

import pytest

from tests.plane.gateway.parts import (
    STREAM,
    Call,
    House,
    Houses,
    chat,
    chunk,
    post,
)

pytestmark = pytest.mark.real


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}}\n\n'


async def test_metering_asks_for_counts_and_keeps_them_from_a_client_that_did_not(houses: Houses) -> None:
    house = await houses(meter=True)

    async def script(call: Call) -> None:
        assert json.loads(call.body)["stream_options"] == {"include_usage": True}
        assert call.header(b"accept-encoding") is None
        await call.send(STREAM + chunk(b"data: 1\n\n" + USAGE[:20]))
        await call.send(chunk(USAGE[20:] + b"data: [DONE]\n\n") + b"0\r\n\r\n")

    house.serves(await house.engine(script))
    answer = await house.ask(chat(stream=True))
    assert answer.body == b"data: 1\n\ndata: [DONE]\n\n"
    assert house.gateway.metrics.tokens == {("tiny", "", "prompt"): 3, ("tiny", "", "completion"): 4}


async def test_metering_leaves_the_counts_to_a_client_that_asked(houses: Houses) -> None:
    house = await houses(meter=True)

    async def script(call: Call) -> None:
        await call.send(STREAM + chunk(b"data: 1\n\n" + USAGE) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    house.serves(await house.engine(script))
    answer = await house.ask(chat(stream=True, stream_options={"include_usage": True}))
    assert answer.body == b"data: 1\n\n" + USAGE + b"data: [DONE]\n\n"
    assert house.gateway.metrics.tokens["tiny", "", "prompt"] == 3


@pytest.mark.parametrize("path", [b"/v1/messages", b"/v1/responses"])
async def test_metering_neither_asks_nor_keeps_anything_where_streams_are_of_another_kind(
    houses: Houses, path: bytes
) -> None:
    house = await houses(meter=True)
    body = b'{"model":"tiny","stream":true}'
    events = b'event: message_delta\ndata: {"delta":{},"usage":{"input_tokens":3,"output_tokens":4}}\n\n' + USAGE

    async def script(call: Call) -> None:
        assert call.body == body
        await call.send(STREAM + chunk(events[:50]) + chunk(events[50:]) + b"0\r\n\r\n")

    house.serves(await house.engine(script))
    assert (await house.ask(post(body, path=path))).body == events
    assert house.gateway.metrics.tokens == {("tiny", "", "prompt"): 3, ("tiny", "", "completion"): 4}


async def test_without_metering_an_unasked_for_count_is_passed_on_as_it_is(house: House) -> None:
    async def script(call: Call) -> None:
        assert b"stream_options" not in call.body
        await call.send(STREAM + chunk(USAGE) + b"0\r\n\r\n")

    house.serves(await house.engine(script))
    assert (await house.ask(chat(stream=True))).body == USAGE


async def test_a_metered_stream_that_is_cut_ends_at_the_last_whole_event(houses: Houses) -> None:
    house = await houses(meter=True)

    async def script(call: Call) -> None:
        await call.send(STREAM + chunk(b'data: 1\n\ndata: {"hal'))
        call.reset()

    house.serves(await house.engine(script))
    answer = await house.ask(chat(stream=True))
    assert not answer.whole
    assert answer.body.startswith(b'data: 1\n\ndata: {"error":')

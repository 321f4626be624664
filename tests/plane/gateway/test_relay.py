"""What reaches the engine, and what of its answer reaches the client."""

from __future__ import annotations

import gzip
import json

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmgw.plane.gateway.settings import GatewaySettings
from tests.plane.gateway.parts import (
    OK,
    STREAM,
    Call,
    HangUp,
    House,
    Houses,
    chat,
    chunk,
    get,
    post,
    until,
)

pytestmark = pytest.mark.real


# --- there and back


async def test_a_chat_goes_to_the_engine_of_its_model_and_its_answer_comes_back(house: House) -> None:
    engine = await house.engine()
    house.serves(engine)
    answer = await house.ask(chat(temperature=0.5))
    assert (answer.status, answer.body) == (200, b'{"ok":true}')
    assert engine.calls[0].line == b"POST /v1/chat/completions HTTP/1.1"
    assert json.loads(engine.calls[0].body) == {"model": "tiny", "messages": [], "temperature": 0.5}
    assert house.counted(200) == 1


async def test_connections_are_kept_on_both_sides(house: House) -> None:
    engine = await house.engine()
    house.serves(engine)
    browser = await house.browser()
    for _ in range(5):
        assert (await browser.ask(chat())).status == 200
    assert [call.number for call in engine.calls] == [1, 2, 3, 4, 5]
    assert engine.connections == 1


async def test_everything_under_v1_is_passed_through_with_its_method_and_query(house: House) -> None:
    engine = await house.engine()
    house.serves(engine)
    await house.ask(post(b'{"model":"tiny","input":"x"}', path=b"/v1/embeddings?trace=1"))
    await house.ask(b"DELETE /v1/responses/resp_1 HTTP/1.1\r\nHost: x\r\n\r\n", b"DELETE")
    assert [call.line for call in engine.calls] == [
        b"POST /v1/embeddings?trace=1 HTTP/1.1",
        b"DELETE /v1/responses/resp_1 HTTP/1.1",
    ]


async def test_headers_of_one_hop_end_here(house: House) -> None:
    engine = await house.engine()
    house.serves(engine)
    lines = (b"Connection: keep-alive, X-Secret", b"X-Secret: 1", b"Keep-Alive: 5", b"TE: trailers", b"X-Kept: 2")
    await house.ask(post(b'{"model":"tiny"}', *lines))
    call = engine.calls[0]
    assert call.header(b"x-kept") == b"2"
    for name in (b"connection", b"x-secret", b"keep-alive", b"te"):
        assert call.header(name) is None
    assert call.header(b"host") == b"127.0.0.1:%d" % engine.port


async def test_a_request_id_is_kept_or_made_and_goes_both_ways(house: House) -> None:
    engine = await house.engine()
    house.serves(engine)
    answer = await house.ask(post(b'{"model":"tiny"}', b"X-Request-ID: mine-7"))
    assert answer.header(b"x-request-id") == engine.calls[0].header(b"x-request-id") == b"mine-7"
    first, second = await house.ask(chat()), await house.ask(chat())
    assert first.header(b"x-request-id") == engine.calls[1].header(b"x-request-id")
    assert first.header(b"x-request-id") != second.header(b"x-request-id")


async def test_a_static_endpoint_gets_its_key_its_path_and_its_own_name_of_the_model(house: House) -> None:
    engine = await house.engine()
    house.serves(engine, prefix="/openai", api_key="sk-upstream", upstream_model="org/big")
    await house.ask(post(b'{"n": 1.00, "model" : "tiny"}', b"Authorization: Bearer mine"))
    call = engine.calls[0]
    assert call.line == b"POST /openai/v1/chat/completions HTTP/1.1"
    assert call.header(b"authorization") == b"Bearer sk-upstream"
    assert call.body == b'{"n":1.00,"model":"org/big"}'


async def test_a_compressed_answer_is_relayed_as_it_is_with_its_header(house: House) -> None:
    packed = gzip.compress(b'{"ok":true}')

    async def script(call: Call) -> None:
        assert call.header(b"accept-encoding") == b"gzip"
        await call.send(
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed) + packed
        )

    house.serves(await house.engine(script))
    answer = await house.ask(post(b'{"model":"tiny"}', b"Accept-Encoding: gzip"))
    assert answer.header(b"content-encoding") == b"gzip"
    assert answer.body == packed


async def test_an_error_of_the_engine_is_passed_on_and_not_retried(house: House) -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 500 Oh Dear\r\nContent-Length: 2\r\n\r\nno")

    engine = await house.engine(script)
    house.serves(engine)
    answer = await house.ask(chat())
    assert (answer.status, answer.body, len(engine.calls)) == (500, b"no", 1)


async def test_an_answer_without_a_length_ends_with_the_engines_connection(house: House) -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\n\r\nsome")
        await call.send(b"thing")
        raise HangUp

    house.serves(await house.engine(script))
    browser = await house.browser()
    for _ in range(2):
        answer = await browser.ask(chat())
        assert (answer.body, answer.whole) == (b"something", True)


async def test_head_204_and_interim_responses_have_no_body(house: House) -> None:
    async def script(call: Call) -> None:
        if call.line.startswith(b"HEAD"):
            await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n")
        else:
            await call.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n")

    house.serves(await house.engine(script))
    browser = await house.browser()
    answer = await browser.ask(b"HEAD /v1/files HTTP/1.1\r\nHost: x\r\n\r\n", b"HEAD")
    assert (answer.status, answer.header(b"content-length"), answer.body) == (200, b"99", b"")
    assert (await browser.ask(chat())).status == 204


async def test_trailers_of_the_engine_are_tolerated(house: House) -> None:
    async def script(call: Call) -> None:
        await call.send(STREAM + chunk(b"data: 1\n\n") + b"0\r\nX-Checksum: 1\r\n\r\n")

    engine = await house.engine(script)
    house.serves(engine)
    browser = await house.browser()
    for _ in range(2):
        assert (await browser.ask(chat())).body == b"data: 1\n\n"
    assert engine.connections == 1


# --- streams


async def test_each_event_is_passed_on_when_it_comes(house: House) -> None:
    seen = trio.Event()

    async def script(call: Call) -> None:
        await call.send(STREAM)
        await call.send(chunk(b"data: first\n\n"))
        await seen.wait()
        await call.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    house.serves(await house.engine(script))
    browser = await house.browser()
    await browser.send(chat(stream=True))
    with trio.fail_after(20):
        head = await browser.head()
        assert await browser.data() == b"data: first\n\n"
        seen.set()
        assert (await browser.rest(head)).body == b"data: [DONE]\n\n"
    headers = dict(head.headers)
    assert headers[b"x-accel-buffering"] == b"no"
    assert headers[b"cache-control"] == b"no-cache"


async def test_a_thousand_streams_are_open_at_once_and_each_gets_its_own(houses: Houses, many_files: None) -> None:
    house = await houses(connect_within=60.0)
    count, open_, all_open, release = 1000, 0, trio.Event(), trio.Event()

    async def script(call: Call) -> None:
        nonlocal open_
        await call.send(STREAM)
        await call.send(chunk(b"data: %b\n\n" % (call.header(b"x-request-id") or b"")))
        open_ += 1
        if open_ == count:
            all_open.set()
        await release.wait()
        await call.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    engines = [await house.engine(script, replica=f"tiny-{n}") for n in range(2)]
    house.serves(*engines)
    heard: dict[bytes, bytes] = {}

    async def client(number: int) -> None:
        own = b"stream-%d" % number
        browser = await house.browser()
        await browser.send(post(b'{"model":"tiny","stream":true}', b"X-Request-Id: " + own))
        answer = await browser.answer()
        assert answer.whole
        heard[own] = answer.body

    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(client, number)
            await all_open.wait()
            release.set()
    assert heard == {b"stream-%d" % n: b"data: stream-%d\n\ndata: [DONE]\n\n" % n for n in range(count)}
    # The least busy replica is asked, so both have half of them.
    assert {engine.connections for engine in engines} == {count // 2}


async def test_a_streams_head_does_not_wait_for_its_first_event(house: House) -> None:
    seen = trio.Event()

    async def script(call: Call) -> None:
        await call.send(STREAM)
        await seen.wait()
        await call.send(b"0\r\n\r\n")

    house.serves(await house.engine(script))
    browser = await house.browser()
    await browser.send(chat(stream=True))
    with trio.fail_after(20):
        head = await browser.head()
        seen.set()
        assert (await browser.rest(head)).whole


async def test_every_line_of_a_typed_event_is_kept_and_split_letters_too(house: House) -> None:
    events = 'event: delta\nid: 7\nretry: 5\n: a comment\ndata: {"t":"é€😀"}\n\n'.encode()

    async def script(call: Call) -> None:
        await call.send(STREAM)
        for at in range(len(events)):
            await call.send(chunk(events[at : at + 1]))
        await call.send(b"0\r\n\r\n")

    house.serves(await house.engine(script))
    assert (await house.ask(chat(stream=True))).body == events


async def test_a_client_of_http_1_0_gets_a_stream_until_the_connection_ends(house: House) -> None:
    async def script(call: Call) -> None:
        await call.send(STREAM + chunk(b"data: 1\n\n") + b"0\r\n\r\n")

    house.serves(await house.engine(script))
    browser = await house.browser()
    body = b'{"model":"tiny"}'
    await browser.send(b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    got = b""
    while data := await browser.stream.receive_some():
        got += data
    head, _, rest = got.partition(b"\r\n\r\n")
    assert rest == b"data: 1\n\n"
    assert b"chunked" not in head
    assert b"connection: close" in head


# --- which replica


async def test_the_replica_with_the_fewest_requests_in_flight_is_asked(house: House) -> None:
    release = trio.Event()

    async def wait(call: Call) -> None:
        await release.wait()
        await call.send(OK)

    engines = [await house.engine(wait, f"tiny-{n}") for n in range(3)]
    house.serves(*engines)
    async with trio.open_nursery() as nursery:
        for _ in range(9):
            nursery.start_soon(house.ask, chat())
        await until(lambda: sum(len(engine.calls) for engine in engines) == 9)
        assert [len(engine.calls) for engine in engines] == [3, 3, 3]
        assert house.gateway.in_flight.own == {"tiny-0": 3, "tiny-1": 3, "tiny-2": 3}
        release.set()
    assert house.gateway.in_flight.own == {}


async def test_a_get_without_a_model_goes_to_the_only_one_there_is(house: House) -> None:
    engine = await house.engine()
    house.serves(engine)
    assert (await house.ask(get(b"/v1/files"), b"GET")).status == 200
    house.serves(engine, model="other")
    answer = await house.ask(get(b"/v1/files"), b"GET")
    assert (answer.status, answer.error["code"]) == (400, "missing_model")
    assert "other, tiny" in str(answer.error["message"])
    assert (await house.ask(get(b"/v1/files?model=other"), b"GET")).status == 200


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    pieces=st.lists(
        st.sampled_from([OK, OK[:40], STREAM, chunk(b"data: 1\n\n"), b"0\r\n\r\n"]) | st.binary(max_size=40)
    ),
    streamed=st.booleans(),
    metered=st.booleans(),
)
def test_whatever_an_engine_sends_the_client_gets_an_answer_or_a_cut_one(
    pieces: list[bytes], streamed: bool, metered: bool
) -> None:
    async def script(call: Call) -> None:
        for piece in pieces:
            await call.send(piece)
        raise HangUp

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            house = House(nursery, GatewaySettings(tries=2, hold_within=0.05, probe_first=0.01, meter=metered))
            await house.start()
            house.serves(await house.engine(script))
            with trio.fail_after(20):
                answer = await house.ask(chat(stream=streamed))
            assert b"internal_error" not in answer.body
            await house.close()
            nursery.cancel_scope.cancel()

    trio.run(main)

"""What reaches the engine, what reaches the client, and what happens when one of them fails (F1-F4)."""

from __future__ import annotations

import gzip
import json

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from llmgw.plane.gateway.route import ModelRoute, ModelState, Routes
from llmgw.plane.gateway.settings import GatewaySettings
from tests.plane.gateway.parts import (
    OK,
    STREAM,
    Browser,
    Call,
    HangUp,
    House,
    Houses,
    chat,
    chunk,
    fine,
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
    with trio.fail_after(5):
        head = await browser.head()
        assert await browser.data() == b"data: first\n\n"
        seen.set()
        assert (await browser.rest(head)).body == b"data: [DONE]\n\n"
    headers = dict(head.headers)
    assert headers[b"x-accel-buffering"] == b"no"
    assert headers[b"cache-control"] == b"no-cache"


async def test_a_thousand_streams_are_open_at_once_and_each_gets_its_own(house: House, many_files: None) -> None:
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

    with trio.fail_after(60):
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
    with trio.fail_after(5):
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


# --- a client that goes away (F2)


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
    for number in range(1, 4):  # one in time of three: the machine may be busy, the gateway must not be
        browser = await house.browser()
        await browser.send(chat(stream=streamed))
        if streamed:
            await browser.head()
        await until(lambda number=number: len(engine.calls) == number)  # type: ignore[misc]
        left = trio.current_time()
        await _leave(browser.stream, how)
        await until(lambda number=number: len(ended) == number == house.counted(499))  # type: ignore[misc]
        took.append(ended[-1] - left)
    assert min(took) < 0.1
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
    with trio.fail_after(5):
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


# --- failure (F3)


async def die(call: Call) -> None:
    call.reset()


async def test_a_request_moves_to_another_replica_when_the_first_dies_before_answering(house: House) -> None:
    dead, well = await house.engine(die, "tiny-0"), await house.engine(fine, "tiny-1")
    house.serves(dead, well)
    answers = [await house.ask(chat()) for _ in range(4)]
    assert [answer.status for answer in answers] == [200] * 4
    assert len(dead.calls) <= 2  # excluded after one failure, and back only by a probe
    assert house.gateway.metrics.failures["tiny-0", "closed"] >= 1


async def test_half_a_head_is_no_answer_and_is_retried(house: House) -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Le")
        raise HangUp

    bad, well = await house.engine(script, "tiny-0"), await house.engine(fine, "tiny-1")
    house.serves(bad, well)
    for _ in range(2):
        assert (await house.ask(chat())).body == b'{"ok":true}'
    assert bad.calls


async def test_an_answer_cut_before_its_first_byte_of_body_is_retried(house: House) -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
        raise HangUp

    bad, well = await house.engine(script, "tiny-0"), await house.engine(fine, "tiny-1")
    house.serves(bad, well)
    for _ in range(2):
        answer = await house.ask(chat())
        assert (answer.whole, answer.body) == (True, b'{"ok":true}')
    assert bad.calls


async def test_nothing_is_replayed_after_the_first_byte_and_the_client_can_tell(house: House) -> None:
    async def script(call: Call) -> None:
        await call.send(STREAM + chunk(b"data: 1\n\n"))
        call.reset()

    bad, well = await house.engine(script, "tiny-0"), await house.engine(fine, "tiny-1")
    house.serves(bad)
    answer = await house.ask(chat(stream=True))
    assert not answer.whole
    events = answer.body.split(b"\n\n")
    assert events[0] == b"data: 1"
    error = json.loads(events[1].removeprefix(b"data: "))["error"]
    assert error["code"] == "upstream_failed"
    assert b"[DONE]" not in answer.body
    assert len(bad.calls) == 1
    assert not well.calls
    assert house.counted(502) == 1


async def test_a_stream_cut_inside_an_event_ends_there_without_garbage(house: House) -> None:
    async def script(call: Call) -> None:
        await call.send(STREAM + chunk(b'data: 1\n\ndata: {"hal'))
        call.reset()

    house.serves(await house.engine(script))
    answer = await house.ask(chat(stream=True))
    assert (answer.whole, answer.body) == (False, b'data: 1\n\ndata: {"hal')


async def test_a_body_cut_short_of_its_length_is_cut_for_the_client_too(house: House) -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n12345")
        raise HangUp

    house.serves(await house.engine(script))
    answer = await house.ask(chat())
    assert (answer.whole, answer.body) == (False, b"12345")


async def test_a_kept_connection_that_the_engine_closed_is_no_failure(house: House) -> None:
    """The engine closes at the very moment the next request comes: what every keep-alive time-out does."""

    async def script(call: Call) -> None:
        if call.number == 2:
            raise HangUp
        await call.send(OK)

    engine = await house.engine(script)
    house.serves(engine)
    for _ in range(3):
        assert (await house.ask(chat())).status == 200
    assert [call.number for call in engine.calls] == [1, 2, 1, 2, 1]
    assert not house.gateway.metrics.failures
    assert not house.gateway.metrics.retries


async def test_an_engine_that_said_something_unasked_for_is_not_asked_on_that_connection_again(house: House) -> None:
    """Else the next client would get the answer that nobody asked for."""
    sent = trio.Event()

    async def script(call: Call) -> None:
        await call.send(OK)
        if len(engine.calls) == 1:
            await trio.sleep(0.01)
            await call.send(OK.replace(b"true", b"evil"))
            sent.set()

    engine = await house.engine(script)
    house.serves(engine)
    await house.ask(chat())
    await sent.wait()
    assert (await house.ask(chat())).body == b'{"ok":true}'
    assert engine.connections == 2


async def test_a_second_answer_right_behind_the_first_reaches_nobody(house: House) -> None:
    async def script(call: Call) -> None:
        await call.send(OK + OK.replace(b"true", b"evil"))

    engine = await house.engine(script)
    house.serves(engine)
    browser = await house.browser()
    for _ in range(3):
        assert (await browser.ask(chat())).body == b'{"ok":true}'
    assert engine.connections == 3


async def test_an_engine_that_cannot_be_reached_is_502_with_the_reason(houses: Houses) -> None:
    house = await houses(tries=1)
    engine = await house.engine()
    house.serves(engine)
    engine.kill()
    answer = await house.ask(chat())
    assert answer.status == 502
    assert "Connection refused" in str(answer.error["message"])
    assert answer.error["type"] == "server_error"


async def test_what_is_not_http_is_502_and_not_passed_on(houses: Houses) -> None:
    house = await houses(tries=1)

    async def script(call: Call) -> None:
        await call.send(b"SSH-2.0-OpenSSH\r\n")
        raise HangUp

    house.serves(await house.engine(script))
    answer = await house.ask(chat())
    assert (answer.status, answer.error["code"]) == (502, "upstream_failed")


async def test_a_replica_that_loads_is_left_for_one_that_is_ready(house: House) -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 503 Loading\r\nContent-Length: 7\r\n\r\nloading")

    loading, ready = await house.engine(script, "tiny-0"), await house.engine(fine, "tiny-1")
    house.serves(loading, ready)
    for _ in range(3):
        assert (await house.ask(chat())).status == 200
    assert loading.calls


async def test_when_all_replicas_say_503_the_last_ones_words_are_passed_on(houses: Houses) -> None:
    house = await houses(tries=2, probe_first=0.01, probe_most=0.01)

    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 503 Loading\r\nX-Why: model\r\nContent-Length: 7\r\n\r\nloading")

    engine = await house.engine(script)
    house.serves(engine)
    browser = await house.browser()
    answer = await browser.ask(chat())
    assert (answer.status, answer.header(b"x-why"), answer.body) == (503, b"model", b"loading")
    assert len(engine.calls) == 2


async def test_a_dead_replica_comes_back_when_a_probe_finds_it_alive(houses: Houses) -> None:
    house = await houses(probe_first=0.02, probe_most=0.05, hold_within=5)
    engine = await house.engine(die)
    house.serves(engine)
    port = engine.port
    engine.kill()
    statuses: list[int] = []
    answered = trio.Event()

    async def ask() -> None:
        statuses.append((await house.ask(chat())).status)
        answered.set()

    house.nursery.start_soon(ask)
    await until(lambda: "tiny-0" in house.gateway.out)
    again = await house.engine(fine, port=port)
    with trio.fail_after(5):
        await answered.wait()
    assert statuses == [200]
    assert len([call for call in again.calls if call.line.startswith(b"POST")]) == 1
    assert not house.gateway.out


async def test_an_engine_that_never_answers_is_504_after_its_time(houses: Houses) -> None:
    house = await houses(first_byte_within=0.1, retry_within=0.05)
    ended = trio.Event()

    async def script(call: Call) -> None:
        await call.hung_up()
        ended.set()

    house.serves(await house.engine(script))
    answer = await house.ask(chat())
    assert (answer.status, answer.error["code"]) == (504, "upstream_timeout")
    await ended.wait()


async def test_a_stream_that_falls_silent_is_cut_after_its_time(houses: Houses) -> None:
    house = await houses(stream_idle_within=0.1)

    async def script(call: Call) -> None:
        await call.send(STREAM + chunk(b"data: 1\n\n"))
        await call.hung_up()

    house.serves(await house.engine(script))
    answer = await house.ask(chat(stream=True))
    assert not answer.whole
    assert b"sent nothing for 0.1 s" in answer.body


async def test_an_answer_that_comes_before_the_request_was_read_is_passed_on(house: House) -> None:
    """An engine refuses a body that it finds too large without reading it."""
    engine_listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]

    async def refuse(stream: trio.SocketStream) -> None:
        await stream.receive_some(10)
        await stream.send_all(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nbig")
        await stream.send_eof()
        await trio.sleep(0.05)
        await stream.aclose()

    house.nursery.start_soon(trio.serve_listeners, refuse, [engine_listener])
    engine = await house.engine()
    engine.port = engine_listener.socket.getsockname()[1]
    house.serves(engine)
    answer = await house.ask(chat(padding="x" * 20_000_000))
    assert (answer.status, answer.body) == (413, b"big")


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


# --- nothing ready (F4)


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
    with trio.fail_after(2):
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
    with trio.fail_after(2):
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


# --- accounting

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


async def test_a_get_without_a_model_goes_to_the_only_one_there_is(house: House) -> None:
    engine = await house.engine()
    house.serves(engine)
    assert (await house.ask(get(b"/v1/files"), b"GET")).status == 200
    house.serves(engine, model="other")
    answer = await house.ask(get(b"/v1/files"), b"GET")
    assert (answer.status, answer.error["code"]) == (400, "missing_model")
    assert "other, tiny" in str(answer.error["message"])
    assert (await house.ask(get(b"/v1/files?model=other"), b"GET")).status == 200


async def test_a_slow_client_is_not_taken_for_a_silent_engine(houses: Houses) -> None:
    house = await houses(stream_idle_within=0.1, send_within=10)
    sent = b"x" * (8 << 20)

    async def script(call: Call) -> None:
        await call.send(STREAM + chunk(sent) + b"0\r\n\r\n")

    house.serves(await house.engine(script))
    browser = await house.browser()
    await browser.send(chat(stream=True))
    head = await browser.head()
    await trio.sleep(0.5)  # the slowness is the point
    answer = await browser.rest(head)
    assert answer.whole
    assert answer.body == sent
    assert not house.gateway.metrics.failures


async def test_a_metered_stream_that_is_cut_ends_at_the_last_whole_event(houses: Houses) -> None:
    house = await houses(meter=True)

    async def script(call: Call) -> None:
        await call.send(STREAM + chunk(b'data: 1\n\ndata: {"hal'))
        call.reset()

    house.serves(await house.engine(script))
    answer = await house.ask(chat(stream=True))
    assert not answer.whole
    assert answer.body.startswith(b'data: 1\n\ndata: {"error":')


async def test_failures_are_logged_with_the_id_that_the_client_got(houses: Houses) -> None:
    house = await houses(tries=1)
    engine = await house.engine(die)
    house.serves(engine)
    with capture_logs() as logs:
        answer = await house.ask(post(b'{"model":"tiny"}', b"X-Request-Id: mine-1"))
    assert answer.status == 502
    (entry,) = [entry for entry in logs if entry["event"] == "request failed"]
    assert (entry["request"], entry["model"], entry["status"]) == ("mine-1", "tiny", 502)
    assert entry["why"] == answer.error["message"]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
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
            with trio.fail_after(5):
                answer = await house.ask(chat(stream=streamed))
            assert b"internal_error" not in answer.body
            await house.close()
            nursery.cancel_scope.cancel()

    trio.run(main)

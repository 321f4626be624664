"""Engines that fail: what is asked of another replica, and what the client is told (F3)."""

from __future__ import annotations

import json

import pytest
import trio
from structlog.testing import capture_logs

from tests.plane.gateway.parts import (
    OK,
    STREAM,
    Call,
    HangUp,
    House,
    Houses,
    chat,
    chunk,
    fine,
    post,
    until,
)

pytestmark = pytest.mark.real


async def die(call: Call) -> None:
    call.reset()


async def test_a_request_moves_to_another_replica_when_the_first_dies_before_answering(houses: Houses) -> None:
    house = await houses(probe_first=600.0, probe_most=600.0)
    dead, well = await house.engine(die, "tiny-0"), await house.engine(fine, "tiny-1")
    house.serves(dead, well)
    answers = [await house.ask(chat()) for _ in range(4)]
    assert [answer.status for answer in answers] == [200] * 4
    assert len(dead.calls) == 1  # excluded after one failure, and back only by a probe
    assert house.gateway.metrics.failures == {("tiny-0", "closed"): 1}


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
    pool = house.gateway.pool
    await until(lambda: all(kept.link.stale() for kept in pool._idle.get(("127.0.0.1", engine.port, False), ())))
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
    house = await houses(probe_first=0.02, probe_most=0.05, hold_within=30)
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
    with trio.fail_after(30):
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

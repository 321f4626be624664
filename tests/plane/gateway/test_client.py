"""What a client may send, and what the gateway answers itself."""

from __future__ import annotations

import json

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmgw.plane.gateway.keys import new_key
from llmgw.plane.gateway.route import ModelRoute, ModelState
from llmgw.plane.gateway.settings import GatewaySettings
from tests.plane.gateway.parts import OK, Call, House, Houses, chat, get, post, until

pytestmark = pytest.mark.real


# --- its own pages


async def test_models_are_listed_with_their_states(house: House) -> None:
    house.serves(await house.engine())
    house.route("later", ModelRoute(state=ModelState.STARTING, reason="replica later-0 on n1 is starting"))
    document = json.loads((await house.ask(get(b"/v1/models"), b"GET")).body)
    assert document["object"] == "list"
    assert [(card["id"], card["object"], card["state"]) for card in document["data"]] == [
        ("tiny", "model", "ready"),
        ("later", "model", "starting"),
    ]
    assert document["data"][1]["reason"] == "replica later-0 on n1 is starting"


async def test_one_model_is_shown_by_its_name_slashes_and_all(house: House) -> None:
    house.route("org/big", ModelRoute(state=ModelState.STARTING))
    for path in (b"/v1/models/org/big", b"/v1/models/org%2Fbig"):
        answer = await house.ask(get(path), b"GET")
        assert (answer.status, json.loads(answer.body)["id"]) == (200, "org/big")
    assert (await house.ask(get(b"/v1/models/none"), b"GET")).error["code"] == "model_not_found"


async def test_health_is_the_process_and_ready_is_a_model(house: House) -> None:
    assert (await house.ask(get(b"/health"), b"GET")).status == 200
    assert (await house.ask(get(b"/ready"), b"GET")).status == 503
    house.serves(await house.engine())
    assert (await house.ask(get(b"/ready"), b"GET")).status == 200


async def test_metrics_tell_requests_times_and_failures(house: House) -> None:
    house.serves(await house.engine())
    await house.ask(chat())
    await house.ask(chat("none"))
    page = (await house.ask(get(b"/metrics"), b"GET")).body.decode()
    assert 'llmgw_gateway_requests_total{model="tiny",status="200"} 1.0' in page
    assert 'llmgw_gateway_requests_total{model="",status="404"} 1.0' in page
    assert 'llmgw_gateway_first_byte_seconds_count{model="tiny"} 1.0' in page
    assert 'llmgw_gateway_duration_seconds_count{model="tiny"} 1.0' in page
    assert "llmgw_gateway_connections 1.0" in page


async def test_names_that_clients_make_up_do_not_become_metrics(house: House) -> None:
    for n in range(5):
        await house.ask(chat(f"none-{n}"))
    assert {model for model, _ in house.gateway.metrics.requests} == {""}


@pytest.mark.parametrize(
    ("status", "code", "request_"),
    [
        (404, "model_not_found", chat("none")),
        (404, "not_found", get(b"/v2/chat")),
        (404, "not_found", get(b"/v1")),
        (405, "method_not_allowed", post(b"{}", path=b"/v1/models")),
        (405, "method_not_allowed", post(b"{}", path=b"/health")),
        (400, "invalid_json", post(b'{"model": "tiny"')),
        (400, "invalid_json", post(b"[1]")),
        (400, "invalid_json", post(b"\xff\xfe")),
        (400, "invalid_json", post(b'{"a":' * 100_000)),
        (400, "invalid_type", post(b'{"model": 7}')),
        (400, "missing_model", post(b"{}")),
        (400, "missing_model", post(b"")),
        (400, "bad_request", post(b'{"model":"tiny"}', path=b"/v1/../metrics")),
        (400, "bad_request", post(b'{"model":"tiny"}', path=b"/v1/%2E%2e/metrics")),
        (415, "content_encoding", post(b"\x1f\x8b", b"Content-Encoding: gzip")),
        (400, "invalid_multipart", post(b"--x--", kind=b"multipart/form-data")),
    ],
)
async def test_what_cannot_be_meant_is_refused_in_openais_shape_and_the_connection_lives(
    house: House, status: int, code: str, request_: bytes
) -> None:
    engine = await house.engine()
    house.serves(engine)
    house.serves(engine, model="other")
    browser = await house.browser()
    answer = await browser.ask(request_)
    assert (answer.status, answer.error["code"]) == (status, code)
    assert answer.header(b"x-request-id")
    assert not engine.calls
    assert (await browser.ask(chat())).status == 200


async def test_the_model_of_a_form_is_its_field(house: House) -> None:
    engine = await house.engine()
    house.serves(engine, upstream_model="whisper-1")
    house.serves(engine, model="other")
    form = (
        b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n--\x00\r\n'
        b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny\r\n--B--\r\n'
    )
    answer = await house.ask(post(form, path=b"/v1/audio/transcriptions", kind=b"multipart/form-data; boundary=B"))
    assert answer.status == 200
    assert engine.calls[0].body == form.replace(b"\r\n\r\ntiny\r\n", b"\r\n\r\nwhisper-1\r\n")


# --- API keys


async def test_with_keys_on_a_request_needs_one_and_it_goes_no_further(houses: Houses) -> None:
    secret, key = new_key("team-a")
    house = await houses(keys=(key,))
    engine = await house.engine()
    house.serves(engine)
    for lines in ((), (b"Authorization: Bearer wrong",), (b"Authorization: Basic eDp5",), (b"Authorization: Bearer ",)):
        answer = await house.ask(post(b'{"model":"tiny"}', *lines))
        assert answer.status == 401
        assert answer.header(b"www-authenticate") == b"Bearer"
    assert not engine.calls
    answer = await house.ask(post(b'{"model":"tiny"}', b"Authorization: Bearer " + secret.encode()))
    assert answer.status == 200
    assert engine.calls[0].header(b"authorization") is None


async def test_a_key_may_be_for_some_models_only(houses: Houses) -> None:
    secret, key = new_key("team-a", ["tiny"])
    house = await houses(keys=(key,))
    engine = await house.engine()
    house.serves(engine)
    house.serves(engine, model="other")
    bearer = b"Authorization: Bearer " + secret.encode()
    assert (await house.ask(post(b'{"model":"tiny"}', bearer))).status == 200
    assert (await house.ask(post(b'{"model":"other"}', bearer))).error["code"] == "model_not_allowed"
    listed = json.loads((await house.ask(get(b"/v1/models", bearer), b"GET")).body)
    assert [card["id"] for card in listed["data"]] == ["tiny"]


async def test_without_keys_the_clients_authorization_is_the_engines_business(house: House) -> None:
    engine = await house.engine()
    house.serves(engine)
    await house.ask(post(b'{"model":"tiny"}', b"Authorization: Bearer mine"))
    assert engine.calls[0].header(b"authorization") == b"Bearer mine"


async def test_health_and_metrics_need_no_key(houses: Houses) -> None:
    house = await houses(keys=(new_key("a")[1],))
    assert (await house.ask(get(b"/health"), b"GET")).status == 200
    assert (await house.ask(get(b"/metrics"), b"GET")).status == 200


# --- sizes, speeds, order


async def test_a_body_of_100_mb_gets_a_clear_413_while_it_is_still_being_sent(house: House) -> None:
    house.serves(await house.engine())
    browser = await house.browser()
    size = 100 << 20
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size

    async def upload() -> None:
        await browser.send(head)
        for _ in range(100):
            await browser.send(b"x" * (1 << 20))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(upload)
            answer = await browser.answer()
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")
    assert str(64 << 20) in str(answer.error["message"])
    assert house.gateway.body_bytes == 0


async def test_a_body_of_chunks_is_counted_as_it_comes(houses: Houses) -> None:
    house = await houses(most_body_bytes=100_000)
    house.serves(await house.engine())
    browser = await house.browser()
    await browser.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(3):
        await browser.send(b"c350\r\n%b\r\n" % (b"x" * 50_000))
    assert (await browser.answer()).status == 413
    assert house.gateway.body_bytes == 0


async def test_all_bodies_together_have_a_limit(houses: Houses) -> None:
    house = await houses(most_bodies_bytes=100_000)
    browsers = [await house.browser() for _ in range(2)]
    for browser in browsers:
        await browser.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 90000\r\n\r\n")
    await browsers[0].send(b"x" * 80_000)
    await until(lambda: house.gateway.body_bytes >= 80_000)
    await browsers[1].send(b"x" * 80_000)
    answer = await browsers[1].answer()
    assert (answer.status, answer.error["code"]) == (503, "overloaded")
    await browsers[0].stream.aclose()
    await until(lambda: house.gateway.body_bytes == 0)


async def test_a_large_body_reaches_the_engine_whole(house: House) -> None:
    engine = await house.engine()
    house.serves(engine)
    request = chat(padding="x" * 5_000_000)
    assert (await house.ask(request)).status == 200
    assert engine.calls[0].body == request.partition(b"\r\n\r\n")[2]


async def test_expect_100_continue_is_answered_before_the_body(house: House) -> None:
    engine = await house.engine()
    house.serves(engine)
    browser = await house.browser()
    body = b'{"model":"tiny"}'
    await browser.send(post(body, b"Expect: 100-continue")[: -len(body)])
    with trio.fail_after(20):
        got = b""
        while b"\r\n\r\n" not in got:
            got += await browser.stream.receive_some()
    assert got == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert (await browser.ask(body)).status == 200
    assert engine.calls[0].header(b"expect") is None


async def test_a_head_that_drips_in_is_408_after_its_time(houses: Houses) -> None:
    house = await houses(head_within=0.1)
    browser = await house.browser()
    await browser.send(b"POST /v1/chat")
    with trio.fail_after(20):
        answer = await browser.answer()
    assert (answer.status, answer.error["code"]) == (408, "request_timeout")


async def test_a_body_that_drips_in_is_408_after_its_time(houses: Houses) -> None:
    house = await houses(body_within=0.1)
    browser = await house.browser()
    await browser.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
    with trio.fail_after(20):
        answer = await browser.answer()
    assert answer.status == 408


async def test_an_idle_connection_is_closed_without_a_word(houses: Houses) -> None:
    house = await houses(idle_within=0.05)
    browser = await house.browser()
    with trio.fail_after(20):
        assert await browser.stream.receive_some() == b""
    await until(lambda: not house.gateway.clients)


async def test_pipelined_requests_are_answered_in_order(house: House) -> None:
    async def script(call: Call) -> None:
        body = call.body.rpartition(b'"n": ')[2].rstrip(b"}")
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    house.serves(await house.engine(script))
    browser = await house.browser()
    await browser.send(b"".join(chat(n=n) for n in range(5)) + get(b"/health") + b"nonsense\r\n\r\n")
    for n in range(5):
        assert (await browser.answer()).body == b"%d" % n
    assert (await browser.answer(b"GET")).status == 200
    assert (await browser.answer(b"GET")).status == 400
    await browser.closed()


async def test_connection_close_is_heeded(house: House) -> None:
    house.serves(await house.engine())
    browser = await house.browser()
    answer = await browser.ask(post(b'{"model":"tiny"}', b"Connection: close"))
    assert (answer.status, answer.header(b"connection")) == (200, b"close")
    await browser.closed()


async def test_more_connections_than_allowed_are_told_so(houses: Houses) -> None:
    house = await houses(most_connections=1)
    first = await house.browser()
    await until(lambda: len(house.gateway.clients) == 1)
    answer = await (await house.browser()).answer()
    assert (answer.status, answer.error["code"]) == (503, "overloaded")
    assert (await first.ask(get(b"/health"), b"GET")).status == 200


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.lists(st.binary(max_size=80), max_size=4), at=st.integers(0, 120))
def test_whatever_a_client_sends_gets_an_answer_or_an_end(data: list[bytes], at: int) -> None:
    request = chat()
    junk = b"".join(data)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            house = House(nursery, GatewaySettings(head_within=0.05, body_within=0.05, idle_within=0.05))
            await house.start()
            house.serves(await house.engine())
            for stream in (junk, request[:at] + junk + request[at:]):
                browser = await house.browser()
                with trio.fail_after(30):
                    await browser.send(stream)
                    got = b""
                    try:
                        await browser.stream.send_eof()  # type: ignore[attr-defined]
                        while piece := await browser.stream.receive_some():
                            got += piece
                    except trio.BrokenResourceError:
                        pass
                assert not got or got.startswith(b"HTTP/1.1 ")
                assert b"internal_error" not in got
            await house.close()
            nursery.cancel_scope.cancel()

    trio.run(main)


async def test_an_engine_that_answers_in_pieces_of_any_size_is_relayed_alike(house: House) -> None:
    whole = OK.replace(b"Content-Length: 11", b"Transfer-Encoding: chunked").replace(b'{"ok":true}', b"")
    whole += b'4;x=y\r\n{"ok\r\n7\r\n":true}\r\n0\r\nT: 1\r\n\r\n'
    cuts: list[int] = []

    async def script(call: Call) -> None:
        for a, b in zip((0, *cuts), (*cuts, len(whole)), strict=True):
            await call.send(whole[a:b])
            await trio.sleep(0.0005)

    house.serves(await house.engine(script))
    browser = await house.browser()
    for first in range(1, len(whole), 3):
        cuts[:] = [first, min(len(whole), first + 2)]
        answer = await browser.ask(chat())
        assert (answer.status, answer.body, answer.whole) == (200, b'{"ok":true}', True)

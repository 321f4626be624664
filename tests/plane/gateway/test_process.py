"""Gateways as processes of their own: real ones, on one port."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import pytest
import trio

from llmgw.cell import Cell
from llmgw.config import Listen
from llmgw.errors import Conflict
from llmgw.plane.gateway import feed
from llmgw.plane.gateway.in_flight import InFlight
from llmgw.plane.gateway.keys import new_key
from llmgw.plane.gateway.process import run, run_gateway
from llmgw.plane.gateway.route import ModelRoute, ModelState, Routes, StaticEndpoint
from llmgw.plane.gateway.settings import GatewaySettings
from llmgw.plane.settings import Gateway, PlaneSettings
from tests.plane.gateway.parts import STREAM, Browser, Call, Engine, chat, chunk, fine, get, until
from tests.ports import free_ports

pytestmark = pytest.mark.real


class Pair:
    """An engine, the plane's feed, and gateway processes."""

    def __init__(self, nursery: trio.Nursery, directory: Path) -> None:
        self.nursery = nursery
        self.directory = directory
        self.engine = Engine()
        self.port = 0
        self.feeding = trio.CancelScope()
        self.running = trio.CancelScope()
        self.ended = trio.Event()
        self.streams: list[trio.SocketStream] = []

    def routes(self) -> Routes:
        return Routes(models={"tiny": ModelRoute(state=ModelState.READY, endpoints=(self.engine.endpoint(),))})

    async def feed(self, routes: Routes) -> InFlight:
        cell = Cell(routes)
        in_flight = InFlight(cell)
        self.feeding = trio.CancelScope()

        async def run(*, task_status: trio.TaskStatus[None]) -> None:
            with self.feeding:
                await feed.serve_routes(self.directory, cell, in_flight, task_status=task_status)

        await self.nursery.start(run)
        return in_flight

    async def start(self, workers: int = 2) -> None:
        async def run(*, task_status: trio.TaskStatus[tuple[tuple[str, int], ...]]) -> None:
            with self.running:
                await run_gateway(
                    GatewaySettings(),
                    listen=[("127.0.0.1", free_ports(1)[0])],
                    directory=self.directory,
                    workers=workers,
                    task_status=task_status,
                )
            self.ended.set()

        ((_, self.port),) = await self.nursery.start(run)

    def workers(self) -> list[psutil.Process]:
        found = []
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.status() != psutil.STATUS_ZOMBIE and "llmgw.plane.gateway.worker" in child.cmdline():
                    found.append(child)
        return found

    async def browser(self) -> Browser:
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        self.streams.append(stream)
        return Browser(stream)

    async def ask(self, data: bytes, method: bytes = b"POST") -> tuple[int, bytes]:
        browser = await self.browser()
        async with browser.stream:
            answer = await browser.ask(data, method)
        return answer.status, answer.body


@pytest.fixture
async def pair(nursery: trio.Nursery, tmp_path: Path) -> AsyncIterator[Pair]:
    made = Pair(nursery, tmp_path)
    await nursery.start(made.engine.run)
    yield made
    made.running.cancel()
    with trio.fail_after(60):
        if made.port:
            await made.ended.wait()
    for stream in made.streams:
        stream.socket.close()
    assert not made.workers()


async def test_no_request_fails_while_the_plane_is_away_and_comes_back_settling(pair: Pair) -> None:
    await pair.feed(pair.routes())
    await pair.start()
    with trio.fail_after(120):
        assert await pair.ask(chat()) == (200, b'{"ok":true}')
        await until(lambda: feed.saved_routes(pair.directory) == pair.routes())
        answers: list[tuple[int, bytes]] = []
        enough = trio.Event()

        async def keep_asking() -> None:
            while not enough.is_set():
                answers.append(await pair.ask(chat()))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(keep_asking)
            await until(lambda: len(answers) > 50)
            pair.feeding.cancel()
            await until(lambda: len(answers) > 200)
            away = len(answers)
            # The plane is back, and knows of no replica yet.
            in_flight = await pair.feed(Routes(models={"tiny": ModelRoute(state=ModelState.STARTING)}, settling=True))
            await until(lambda: len(in_flight._reports) == 2)
            await until(lambda: len(answers) > away + 200)
            enough.set()
    assert {status for status, _ in answers} == {200}


async def test_a_gateway_that_starts_while_the_plane_is_away_routes_by_what_was_saved(pair: Pair) -> None:
    await pair.feed(pair.routes())
    await until(lambda: feed.saved_routes(pair.directory) == pair.routes())
    pair.feeding.cancel()
    await pair.start(workers=1)
    with trio.fail_after(120):
        assert (await pair.ask(chat()))[0] == 200


async def test_a_gateway_that_never_heard_of_a_plane_denies_no_model(pair: Pair) -> None:
    await pair.start(workers=1)
    with trio.fail_after(120):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{pair.port}", trust_env=False, timeout=60) as client:
            for answer in (
                await client.post("/v1/chat/completions", json={"model": "tiny"}),
                await client.post("/v1/chat/completions", json={}),
                await client.get("/v1/models"),
                await client.get("/v1/models/tiny"),
            ):
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_plane")
                assert answer.headers["retry-after"] == "5"
            assert (await client.get("/ready")).json()["reason"] == "no plane was heard of"
            await pair.feed(pair.routes())
            # Seen from outside only, so there is no event to wait for.
            while (  # noqa: ASYNC110
                answer := await client.post("/v1/chat/completions", json={"model": "tiny"})
            ).status_code == 503:
                await trio.sleep(0.05)
            assert answer.json() == {"ok": True}
            assert (await client.get("/v1/models/other")).status_code == 404


async def test_a_worker_that_is_killed_is_replaced_and_the_port_never_refuses(pair: Pair) -> None:
    await pair.feed(pair.routes())
    await pair.start()
    with trio.fail_after(120):
        assert (await pair.ask(chat()))[0] == 200
        await until(lambda: len(pair.workers()) == 2)
        before = {worker.pid for worker in pair.workers()}
        os.kill(min(before), signal.SIGKILL)
        for _ in range(40):
            assert (await pair.ask(chat()))[0] == 200
        await until(lambda: len({worker.pid for worker in pair.workers()} - before) == 1)


async def test_workers_count_for_each_other_and_report_to_the_plane(pair: Pair) -> None:
    release = trio.Event()

    async def script(call: Call) -> None:
        await call.send(STREAM + chunk(b"data: 1\n\n"))
        await release.wait()
        await call.send(b"0\r\n\r\n")

    in_flight = await pair.feed(pair.routes())
    await pair.start()
    with trio.fail_after(120):
        for _ in range(20):
            assert (await pair.ask(chat()))[0] == 200
        pair.engine.script = script
        browser = await pair.browser()
        await browser.send(chat(stream=True))
        head = await browser.head()
        await until(lambda: in_flight.of("tiny-0") == 1)

        async def counted() -> float:
            _, page = await pair.ask(get(b"/metrics"), b"GET")
            lines = [line for line in page.decode().splitlines() if line.startswith("llmgw_gateway_requests_total{")]
            return sum(float(line.rpartition(" ")[2]) for line in lines if 'status="200"' in line and "tiny" in line)

        with trio.fail_after(30):
            while await counted() != 20:  # noqa: ASYNC110 - who answers a sibling too late is left out
                await trio.sleep(0.05)
        release.set()
        await browser.rest(head)
        await in_flight.idle("tiny-0")


async def test_a_stop_lets_streams_finish(pair: Pair) -> None:
    release = trio.Event()

    async def script(call: Call) -> None:
        await call.send(STREAM + chunk(b"data: 1\n\n"))
        await release.wait()
        await call.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    pair.engine.script = script
    await pair.feed(pair.routes())
    await pair.start(workers=1)
    with trio.fail_after(120):
        browser = await pair.browser()
        await browser.send(chat(stream=True))
        head = await browser.head()
        os.kill(os.getpid(), signal.SIGTERM)
        await trio.sleep(0.2)
        assert not pair.ended.is_set()
        release.set()
        answer = await browser.rest(head)
        assert (answer.whole, answer.body) == (True, b"data: 1\n\ndata: [DONE]\n\n")
        await pair.ended.wait()


async def test_a_port_in_use_is_a_clear_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(Conflict, match=r"port \d+ is in use by another program.*ss -ltnp"):
            await run_gateway(GatewaySettings(), listen=[taken.getsockname()], directory=tmp_path)


async def test_common_clients_are_served(pair: Pair) -> None:
    """httpx is what OpenAI's own client is made of."""
    await pair.feed(pair.routes())
    await pair.start(workers=1)
    with trio.fail_after(120):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{pair.port}", trust_env=False, timeout=60) as client:
            for _ in range(3):
                answer = await client.post("/v1/chat/completions", json={"model": "tiny", "messages": []})
                assert answer.json() == {"ok": True}
    assert pair.engine.script is fine


async def test_static_endpoints_need_no_plane_and_keys_of_the_settings_count(pair: Pair) -> None:
    secret, key = new_key("team")
    endpoint = StaticEndpoint("tiny", f"http://127.0.0.1:{pair.engine.port}")
    settings = PlaneSettings(
        directory=pair.directory,
        gateway_listen=Listen("127.0.0.1", free_ports(1)[0]),
        endpoints=(endpoint,),
        gateway=Gateway(inside=False, keys=(key,)),
    )

    async def start(*, task_status: trio.TaskStatus[tuple[tuple[str, int], ...]]) -> None:
        with pair.running:
            await run(settings, workers=2, task_status=task_status)
        pair.ended.set()

    ((_, pair.port),) = await pair.nursery.start(start)
    url = f"http://127.0.0.1:{pair.port}/v1/chat/completions"
    with trio.fail_after(120):
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            for header, status in (
                ({}, 401),
                ({"Authorization": "Bearer sk-other"}, 401),
                ({"Authorization": f"Bearer {secret}"}, 200),
            ):
                answer = await client.post(url, json={"model": "tiny"}, headers=header)
                assert answer.status_code == status
    assert pair.engine.calls[-1].header(b"authorization") is None

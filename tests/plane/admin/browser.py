"""A real Chromium, driven over its DevTools protocol: opens pages, runs expressions there, takes pictures."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio_websocket as ws

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",  # in a container it is small
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--ignore-certificate-errors",
    "--remote-debugging-port=0",
    "--window-size=1366,900",
)


def chromium() -> str:
    """The browser's path. Without one the test is skipped, except where CI promises that it is there."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        if os.environ.get("CI") == "true":
            pytest.fail("there is no Chromium here: `apt-get install chromium`")
        pytest.skip("NO CHROMIUM HERE, so the page was not looked at: `apt-get install chromium`")
    return found


class Page:
    """One tab. `complaints` are what its console said: errors, exceptions, broken policies."""

    def __init__(self, connection: ws.WebSocketConnection) -> None:
        self._connection = connection
        self._ids = count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._came = trio.Event()
        self.complaints: list[str] = []

    async def read(self) -> None:
        while True:
            try:
                message = msgspec.json.decode(await self._connection.get_message())
            except ws.ConnectionClosed:
                return
            if "id" in message:
                self._answers[message["id"]] = message
                came, self._came = self._came, trio.Event()
                came.set()
            elif message["method"] == "Runtime.exceptionThrown":
                self.complaints.append(str(message["params"]["exceptionDetails"]))
            elif message["method"] == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.complaints.append(message["params"]["entry"]["text"])

    async def call(self, method: str, **params: object) -> dict[str, Any]:
        number = next(self._ids)
        await self._connection.send_message(
            msgspec.json.encode({"id": number, "method": method, "params": params}).decode()
        )
        with trio.fail_after(60):
            while number not in self._answers:
                await self._came.wait()
        answer = self._answers.pop(number)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str, within: float = 60.0) -> Any:
        """The expression's value once it is true."""
        with trio.fail_after(within):
            while True:
                try:
                    if value := await self.evaluate(expression):
                        return value
                except AssertionError:
                    pass  # between two documents
                await trio.sleep(0.05)

    async def picture(self, path: Path) -> None:
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        await trio.Path(path).write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    """A browser with an empty profile and one tab; gone, with its profile, when the block ends."""
    program = chromium()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        async with trio.open_nursery() as nursery:
            start = partial(
                trio.run_process,
                command,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
                deliver_cancel=_kill,
            )
            process: trio.Process = await nursery.start(start)
            address = await _address(trio.Path(profile) / "DevToolsActivePort", process)
            async with ws.open_websocket_url(address, max_message_size=64 << 20) as connection:
                page = Page(connection)
                nursery.start_soon(page.read)
                await page.call("Page.enable")
                await page.call("Runtime.enable")
                await page.call("Log.enable")
                yield page
                nursery.cancel_scope.cancel()


async def _kill(process: trio.Process) -> None:
    process.terminate()
    with trio.move_on_after(5):
        await process.wait()
    process.kill()


async def _address(file: trio.Path, process: trio.Process) -> str:
    """The tab's DevTools address, once the browser has written down its port."""
    with trio.fail_after(120):
        while not await file.exists() or "\n" not in await file.read_text():
            assert process.returncode is None, "Chromium ended at once"
            await trio.sleep(0.05)
        port = (await file.read_text()).split()[0]
        while True:
            async with await trio.open_tcp_stream("127.0.0.1", int(port)) as stream:
                await stream.send_all(f"GET /json/list HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
                tabs = await _listed(stream)
            if pages := [tab for tab in tabs if tab["type"] == "page"]:
                return str(pages[0]["webSocketDebuggerUrl"])
            await trio.sleep(0.05)


async def _listed(stream: trio.SocketStream) -> list[dict[str, Any]]:
    """The tabs in an answer, which is whole when its JSON is."""
    answer = b""
    while data := await stream.receive_some(65536):
        answer += data
        try:
            return msgspec.json.decode(answer.partition(b"\r\n\r\n")[2], type=list[dict[str, Any]])
        except msgspec.MsgspecError:
            continue
    return []

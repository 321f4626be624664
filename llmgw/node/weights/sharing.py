"""Sharing this node's weights beside the agent: the child that does it, and where the agent learns that somebody does.

What listens is never the agent (A1). It is a process of its own, which an operator runs (`llmgw-node share`) or which
the agent keeps (`share = true` in node.toml). Either leaves a file that says where it listens and which process it
is; a file of a process that is no more says nothing.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import structlog
import trio
from msgspec import Struct

from llmgw.backoff import Backoff
from llmgw.config import Listen, LogSettings
from llmgw.errors import LlmgwError
from llmgw.files import write_whole
from llmgw.node import processes
from llmgw.node.settings import NodeSettings

log = structlog.get_logger(__name__)

#: Seconds between two looks at whether somebody shares.
LOOK_EVERY = 2.0
_GRACE = 5.0
_ANYWHERE = ("0.0.0.0", "::", "")


class Orders(Struct, frozen=True, kw_only=True):
    """What is shared, by whose identity, and where."""

    directory: str
    weights: str
    host: str
    port: int
    bytes_per_second: int = 0
    at_once: int = 8
    logging: LogSettings = LogSettings()

    @classmethod
    def of(cls, settings: NodeSettings) -> Orders:
        return cls(
            directory=str(settings.directory.absolute()),
            weights=str(settings.path(settings.weights).absolute()),
            host=settings.weights_listen.host,
            port=settings.weights_listen.port,
            bytes_per_second=settings.weights_bytes_per_second,
            logging=settings.log,
        )


class _Announcement(Struct, frozen=True):
    pid: int
    started: str  # the process's start, in ticks since boot: a process id alone may be somebody else's by now
    address: str


def _path(directory: Path) -> Path:
    return directory / "share.json"


@contextmanager
def announced(directory: Path, at: Listen) -> Iterator[None]:
    """While the block runs, this node's agent can see where this process shares. Raises LlmgwError."""
    path, own = _path(directory), os.getpid()
    # An address that stands for all of them is told without a host: the plane knows where this node is reached.
    address = f":{at.port}" if at.host in _ANYWHERE else str(at)
    write_whole(path, msgspec.json.encode(_Announcement(own, _started(own), address)))
    try:
        yield
    finally:
        found = _read(path)
        if found is not None and found.pid == own:
            path.unlink(missing_ok=True)


def shared_at(directory: Path) -> str:
    """Where other nodes may have this one's weights now; "": nowhere."""
    found = _read(_path(directory))
    return found.address if found is not None and found.started and _started(found.pid) == found.started else ""


def _read(path: Path) -> _Announcement | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Announcement)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _started(pid: int) -> str:
    """A living process's start time; "" for one that is no more."""
    seen = processes.look(pid)
    return str(seen.started) if seen is not None and seen.alive else ""


class Sharing:
    """What the agent knows of it; with `orders` it keeps a child that shares."""

    def __init__(self, directory: Path, orders: Orders | None) -> None:
        self._directory = directory
        self._orders = orders
        self.address = shared_at(directory)

    async def run(self) -> None:
        """Keep the child, and look, until cancelled; the child ends with it."""
        async with trio.open_nursery() as nursery:
            if self._orders is not None:
                nursery.start_soon(self._keep, self._orders)
            while True:
                self.address = await trio.to_thread.run_sync(shared_at, self._directory)
                await trio.sleep(LOOK_EVERY)

    async def _keep(self, orders: Orders) -> None:
        backoff = Backoff(base=1.0, cap=60.0, stable=60.0)
        attempt = -1
        while True:
            began = trio.current_time()
            try:
                code = await child(orders)
            except (OSError, LlmgwError) as error:
                log.error("sharing of weights cannot be started", why=str(error))
            else:
                log.error("sharing of weights ended", code=code, held=round(trio.current_time() - began, 1))
            attempt = backoff.after(attempt, trio.current_time() - began)
            await trio.sleep(backoff.delay(attempt, random.random()))


async def child(orders: Orders) -> int:
    """One process from start to end; its exit code. Cancelled, it ends with its standard input."""
    process = await trio.lowlevel.open_process(
        [sys.executable, "-P", "-m", "llmgw.node.weights.share"], stdin=subprocess.PIPE, cwd="/"
    )
    assert process.stdin is not None
    try:
        with suppress(trio.BrokenResourceError):  # it died already; its exit code is the answer
            await process.stdin.send_all(msgspec.json.encode(orders) + b"\n")
        return await process.wait()
    finally:
        with trio.CancelScope(shield=True):
            await process.stdin.aclose()
            with trio.move_on_after(_GRACE):
                await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()

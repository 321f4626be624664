"""How gateway processes learn the routes from the plane, and the plane what they do: over a Unix socket.

A gateway process needs the plane for news only. It relays by the last routes it has while the plane is away, and
one that starts meanwhile takes those that the plane saved (F1).
"""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path

import msgspec
import structlog
import trio
from msgspec import Struct

from llmgw.backoff import Backoff
from llmgw.cell import Cell
from llmgw.errors import Conflict, LlmgwError, NotFound
from llmgw.files import PRIVATE, make_directory, read_whole, write_whole
from llmgw.plane.gateway.demand import TELL_EVERY, Demand, Tell
from llmgw.plane.gateway.in_flight import InFlight
from llmgw.plane.gateway.route import Routes, settled

log = structlog.get_logger()

_MOST_BYTES = 64 << 20


class News(Struct, frozen=True, kw_only=True, tag="news"):
    """The plane to a gateway: all routes. `version` is the plane's, to be said back."""

    version: int
    routes: Routes


class Report(Struct, frozen=True, kw_only=True, tag="report"):
    """A gateway to the plane: the version of the routes it works by, and its requests in flight by replica.

    `asked` are models that were asked for since its last report, of those that are unloaded while nobody does.
    """

    seen: int
    in_flight: dict[str, int] = {}
    asked: tuple[str, ...] = ()


_encoder = msgspec.msgpack.Encoder()
_news = msgspec.msgpack.Decoder(News)
_report = msgspec.msgpack.Decoder(Report)
_saved = msgspec.json.Decoder(Routes)


def socket_path(directory: Path) -> Path:
    """The plane's socket for gateways, in its state directory."""
    return directory / "gateway" / "routes.sock"


def saved_path(directory: Path) -> Path:
    """The routes as the plane last knew them, for gateways that start while it is away."""
    return directory / "gateway" / "routes.json"


# --- frames: four bytes of length, then MessagePack


async def send(stream: trio.abc.SendStream, frame: News | Report) -> None:
    data = _encoder.encode(frame)
    await stream.send_all(len(data).to_bytes(4, "big") + data)


class Frames:
    """The frames that come over a stream."""

    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self._stream = stream
        self._buffer = bytearray()

    async def next(self) -> bytes | None:
        """The next one, None at the end. Raises trio.BrokenResourceError for what is no frame."""
        buffer = self._buffer
        while True:
            if len(buffer) >= 4:
                length = int.from_bytes(buffer[:4], "big")
                if length > _MOST_BYTES:
                    raise trio.BrokenResourceError("a frame of the routes' feed is too large")
                if len(buffer) >= 4 + length:
                    frame = bytes(buffer[4 : 4 + length])
                    del buffer[: 4 + length]
                    return frame
            data = await self._stream.receive_some(64 << 10)
            if not data:
                return None
            buffer += data


@contextmanager
def reachable(path: Path) -> Iterator[str]:
    """A name for a Unix socket's path that fits into 107 bytes, which is all that the kernel takes."""
    if len(os.fsencode(path)) < 108:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


async def listen(path: Path) -> trio.SocketListener:
    """Listen on a Unix socket that only this user may open. Raises Conflict when somebody else does already."""
    make_directory(path.parent)
    sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with reachable(path) as name:
            try:
                await sock.bind(name)
            except OSError as taken:
                if taken.errno != errno.EADDRINUSE:
                    raise
                if await _answers(name):
                    raise Conflict(
                        f"{path} is in use: another process works in {path.parent.parent}",
                        remedy="stop that one, or give this one a directory of its own",
                    ) from None
                _unlink(path)  # what a killed process left
                await sock.bind(name)
            os.chmod(path, PRIVATE)
        sock.listen(64)
    except OSError as error:
        sock.close()
        raise LlmgwError(f"cannot listen on {path}: {error.strerror or error}") from None
    except BaseException:
        sock.close()
        raise
    return trio.SocketListener(sock)


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)


async def _answers(name: str) -> bool:
    with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            await sock.connect(name)
        except OSError:
            return False
        return True


@asynccontextmanager
async def connected(path: Path) -> AsyncIterator[trio.SocketStream]:
    """A stream to a Unix socket. Raises OSError."""
    sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with reachable(path) as name:
            await sock.connect(name)
        yield trio.SocketStream(sock)
    finally:
        sock.close()


# --- the plane's half


async def serve_routes(
    directory: Path,
    routes: Cell[Routes],
    in_flight: InFlight,
    asked: Tell = lambda models: None,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Feed every gateway process that connects, take its reports, and save the routes. Until cancelled.

    `asked` is called with the models that a gateway has requests for.
    Raises Conflict when another plane works in the same directory.
    """
    path = socket_path(directory)
    listener = await listen(path)
    gateways = count(1)

    async def feed(stream: trio.SocketStream) -> None:
        gateway = next(gateways)
        in_flight.report(gateway, -1, {})
        log.info("a gateway process connected", gateway=gateway)
        try:
            async with stream, trio.open_nursery() as nursery:
                nursery.start_soon(_tell, stream, routes)
                frames = Frames(stream)
                while (frame := await frames.next()) is not None:
                    report = _report.decode(frame)
                    in_flight.report(gateway, report.seen, report.in_flight)
                    if report.asked:
                        asked(report.asked)
                nursery.cancel_scope.cancel()
        except* (trio.BrokenResourceError, trio.ClosedResourceError, msgspec.DecodeError) as broken:
            log.warning("a gateway process was lost", gateway=gateway, why=str(broken.exceptions[0]))
        finally:
            in_flight.gone(gateway)

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_save, saved_path(directory), routes)
            nursery.start_soon(trio.serve_listeners, feed, [listener])
            task_status.started()
    finally:
        path.unlink(missing_ok=True)


async def _tell(stream: trio.SocketStream, routes: Cell[Routes]) -> None:
    version = -1
    while True:
        value, version = await routes.next(version)
        await send(stream, News(version=version, routes=value))


async def _save(path: Path, routes: Cell[Routes]) -> None:
    """Keep the newest routes in a file. Not while the plane settles, for then it knows less than the file does."""
    version = -1
    while True:
        value, version = await routes.next(version)
        if value.settling:
            continue
        data = msgspec.json.format(msgspec.json.encode(value), indent=1)
        try:
            await trio.to_thread.run_sync(write_whole, path, data, PRIVATE)  # it carries engines' keys
        except LlmgwError as error:
            log.error("the routes could not be saved", why=str(error))


# --- the gateway's half


def saved_routes(directory: Path) -> Routes | None:
    """The routes that the plane saved last; None when it never did, or when they cannot be read."""
    path = saved_path(directory)
    try:
        return _saved.decode(read_whole(path))
    except NotFound:
        return None
    except (LlmgwError, msgspec.DecodeError) as error:
        log.warning("saved routes cannot be used", path=str(path), why=str(error))
        return None


async def follow_routes(
    directory: Path, routes: Cell[Routes], in_flight: InFlight, demand: Demand | None = None
) -> None:
    """Keep `routes` as the plane tells them, for ever. While it is away they stay as they are."""
    demand = demand or Demand(routes)
    path = socket_path(directory)
    backoff = Backoff(base=0.2, cap=2.0, stable=10.0)
    attempt, told = 0, False
    while True:
        began = trio.current_time()
        try:
            async with connected(path) as stream:
                told = True
                log.info("connected to the plane", socket=str(path))
                demand.forget()  # what still waits is told anew
                await _follow(stream, routes, in_flight, demand)
            why = "it closed the connection"
        except OSError as error:
            why = error.strerror or str(error)
        if told or attempt == 0:
            last = "there are no routes yet" if routes.value.blind else "relaying by the last routes"
            log.warning(f"the plane is away; {last}", socket=str(path), why=why)
        told = False
        attempt = backoff.after(attempt, trio.current_time() - began)
        await trio.sleep(backoff.delay(attempt, random.random()))


async def _follow(stream: trio.SocketStream, routes: Cell[Routes], in_flight: InFlight, demand: Demand) -> None:
    seen: Cell[int] = Cell(-1)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_reports, stream, seen, in_flight, demand)
            frames = Frames(stream)
            while (frame := await frames.next()) is not None:
                news = _news.decode(frame)
                fresh = settled(routes.value, news.routes)
                if fresh != routes.value:
                    routes.set(fresh)
                seen.set(news.version)
            nursery.cancel_scope.cancel()
    except* (trio.BrokenResourceError, trio.ClosedResourceError) as broken:
        raise OSError(errno.EPIPE, str(broken.exceptions[0])) from None
    except* msgspec.DecodeError as broken:
        raise OSError(errno.EPROTO, f"the plane said what is no news: {broken.exceptions[0]}") from None


async def _reports(stream: trio.SocketStream, seen: Cell[int], in_flight: InFlight, demand: Demand) -> None:
    """Tell the version of the routes and who is asked for at once, and the counts when they changed."""
    stir: Cell[int] = Cell(0)

    async def on(cell: Cell[int]) -> None:
        async for _ in cell.values():
            stir.set(stir.value + 1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(on, seen)
        nursery.start_soon(on, demand.bell)
        version, last = -1, None
        while True:
            with trio.move_on_after(TELL_EVERY):
                _, version = await stir.next(version)
            report = Report(seen=seen.value, in_flight=dict(in_flight.own), asked=demand.take())
            if report != last or report.asked:
                await send(stream, report)
                last = report

"""Gateways as processes of their own (F1): this one keeps the workers alive, they do the relaying.

The listening sockets belong to this process and are handed down, one per worker on the same port, so that
connections which arrive while a worker is being replaced wait in its socket and are answered, not reset.
"""

from __future__ import annotations

import errno
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog
import trio

from llmgw.backoff import Backoff
from llmgw.config import LogSettings
from llmgw.errors import Conflict, LlmgwError
from llmgw.files import make_directory
from llmgw.plane.gateway.route import StaticEndpoint
from llmgw.plane.gateway.settings import GatewaySettings
from llmgw.plane.gateway.worker import Orders
from llmgw.plane.settings import PlaneSettings

log = structlog.get_logger()

#: After its time to stop, a worker gets so long before it is killed (seconds).
_GRACE = 5.0
#: A worker that held so long did not die of its start.
_STABLE = 5.0


async def run(
    settings: PlaneSettings,
    workers: int = 1,
    *,
    task_status: trio.TaskStatus[tuple[tuple[str, int], ...]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """`llmgw-plane gateway`: gateway processes beside a plane, by the same plane.toml."""
    await run_gateway(
        settings.gateway,
        listen=[(settings.gateway_listen.host, settings.gateway_listen.port)],
        directory=settings.directory,
        workers=workers,
        endpoints=settings.endpoints,
        logging=settings.log,
        task_status=task_status,
    )


async def run_gateway(
    settings: GatewaySettings,
    *,
    listen: Sequence[tuple[str, int]],
    directory: Path,
    workers: int = 1,
    endpoints: Sequence[StaticEndpoint] = (),
    logging: LogSettings | None = None,
    task_status: trio.TaskStatus[tuple[tuple[str, int], ...]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run `workers` gateway processes on the same port until SIGTERM or SIGINT, then let their streams finish.

    `directory` is the plane's state directory, where the routes come from; `endpoints` are served until it has told
    any, so that a run with nothing else needs no plane. Started with the addresses listened on.
    Raises Conflict when a port is taken.
    """
    make_directory(directory / "gateway")
    places = [place for host, port in listen for place in await _places(host, port)]
    sockets = [[_listening(family, address) for family, address in places] for _ in range(max(1, workers))]
    stop = trio.Event()
    try:
        async with trio.open_nursery() as nursery:
            for number, own in enumerate(sockets):
                orders = Orders(
                    name=str(number),
                    directory=str(directory),
                    settings=settings,
                    endpoints=tuple(endpoints),
                    logging=logging or LogSettings(),
                )
                nursery.start_soon(_keep, orders, own, places, stop)
            task_status.started(tuple(address[:2] for _, address in places))
            with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for number in signals:
                    log.info("stopping", signal=signal.Signals(number).name, within=settings.stop_within)
                    break
            stop.set()
    finally:
        for own in sockets:
            for sock in own:
                sock.close()


Place = tuple[int, tuple[str, int]]


async def _places(host: str, port: int) -> list[Place]:
    """The addresses of one name to listen on. Raises Conflict when another program has one of them."""
    try:
        found = await trio.socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as unknown:
        raise LlmgwError(
            f"cannot listen on {host}: {unknown.strerror or unknown}", remedy="see gateway_listen in plane.toml"
        ) from None
    places: list[Place] = []
    for family, _, _, _, address in found:
        # A first try without SO_REUSEPORT: with it, two gateways would silently share the port.
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                sock.bind(address)
            except OSError as error:
                raise cannot_listen(host, port, error) from None
            places.append((family, (str(address[0]), sock.getsockname()[1])))
    return places


def cannot_listen(host: str, port: int, error: OSError) -> LlmgwError:
    """A bind's failure in an operator's words."""
    where = f"{host or '*'} port {port}"
    if error.errno == errno.EADDRINUSE:
        return Conflict(
            f"{where} is in use by another program",
            remedy=f"`ss -ltnp sport = :{port}` shows which; stop it or change gateway_listen",
        )
    if error.errno == errno.EACCES:
        return LlmgwError(f"this user may not listen on {where}", remedy="take a port from 1024 up")
    return LlmgwError(f"cannot listen on {where}: {error.strerror}", remedy="see gateway_listen in plane.toml")


def _listening(family: int, address: tuple[str, int]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(4096)
    except OSError as error:
        sock.close()
        raise cannot_listen(*address, error) from None
    return sock


async def _keep(orders: Orders, sockets: list[socket.socket], places: list[Place], stop: trio.Event) -> None:
    """Run one worker, again and again until `stop`."""
    backoff = Backoff(base=0.5, cap=30.0, stable=_STABLE)
    attempt = 0
    while not stop.is_set():
        if not sockets:
            sockets.extend(_listening(family, address) for family, address in places)
        began = trio.current_time()
        code = await _worker(orders, sockets, stop)
        if stop.is_set():
            return
        held = trio.current_time() - began
        attempt = backoff.after(attempt, held)
        log.error("a gateway worker died", worker=orders.name, code=code, held=round(held, 1))
        if attempt > 1:
            # It dies again and again. Clients must not wait in its socket for a worker that does not come.
            for sock in sockets:
                sock.close()
            sockets.clear()
            with trio.move_on_after(backoff.delay(attempt - 2, random.random())):
                await stop.wait()


async def _worker(orders: Orders, sockets: list[socket.socket], stop: trio.Event) -> int:
    """One worker from start to end; its exit code."""
    fds = tuple(sock.fileno() for sock in sockets)
    process = await trio.lowlevel.open_process(
        [sys.executable, "-P", "-m", "llmgw.plane.gateway.worker"], stdin=subprocess.PIPE, pass_fds=fds
    )
    assert process.stdin is not None
    try:
        try:
            line = msgspec.json.encode(msgspec.structs.replace(orders, sockets=fds))
            await process.stdin.send_all(line + b"\n")
        except trio.BrokenResourceError:
            pass  # it died already; its exit code is the answer
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_until_stop, process, stop, orders.settings.stop_within + _GRACE)
            code = await process.wait()
            nursery.cancel_scope.cancel()
        return code
    finally:
        with trio.CancelScope(shield=True):
            await process.stdin.aclose()  # the end of its orders: it stops by itself
            if process.returncode is None:
                process.terminate()
                with trio.move_on_after(_GRACE):
                    await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _until_stop(process: trio.Process, stop: trio.Event, within: float) -> None:
    await stop.wait()
    process.terminate()
    await trio.sleep(within)
    process.kill()

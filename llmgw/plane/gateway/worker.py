"""One gateway process: relays, takes its routes from the plane, and tells its counts to its siblings.

Started by `process.run_gateway` with its orders on standard input, which stays open: its end means that the
parent is gone, and is a request to stop like SIGTERM.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import msgspec
import structlog
import trio
from msgspec import Struct

from llmgw import log as logs
from llmgw.cell import Cell
from llmgw.config import LogSettings
from llmgw.plane.gateway import counts, feed
from llmgw.plane.gateway.demand import Demand
from llmgw.plane.gateway.gateway import Gateway
from llmgw.plane.gateway.in_flight import InFlight
from llmgw.plane.gateway.metrics import Metrics
from llmgw.plane.gateway.publish import first_routes
from llmgw.plane.gateway.route import Routes, StaticEndpoint
from llmgw.plane.gateway.serve import serve
from llmgw.plane.gateway.settings import GatewaySettings
from llmgw.process import first_line, prepare

log = structlog.get_logger()


class Orders(Struct, frozen=True, kw_only=True):
    """What a worker is started with. `sockets` are descriptors that it inherits, already listening."""

    name: str
    directory: str
    settings: GatewaySettings
    endpoints: tuple[StaticEndpoint, ...]
    logging: LogSettings
    sockets: tuple[int, ...] = ()


async def work(orders: Orders, stop: trio.Event) -> None:
    """Serve until `stop` is set and the streams have ended."""
    directory = Path(orders.directory)
    routes: Cell[Routes] = Cell(feed.saved_routes(directory) or first_routes(orders.endpoints))
    in_flight, demand = InFlight(routes), Demand(routes)
    listeners = [
        trio.SocketListener(trio.socket.from_stdlib_socket(_inherited(descriptor))) for descriptor in orders.sockets
    ]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(feed.follow_routes, directory, routes, in_flight, demand)
        async with trio.open_nursery() as serving:
            gateway = await serving.start(
                partial(
                    serve,
                    listeners,
                    routes,
                    orders.settings,
                    in_flight=in_flight,
                    demand=demand,
                    stop=stop,
                    metrics=Metrics(worker=orders.name),
                )
            )
            siblings = Siblings(directory / "gateway", orders.name, gateway)
            gateway.siblings = siblings.others
            nursery.start_soon(siblings.run)
            log.info("gateway worker serves", worker=orders.name, pid=os.getpid())
        nursery.cancel_scope.cancel()


def _inherited(descriptor: int) -> socket.socket:
    sock = socket.socket(fileno=descriptor)
    sock.setblocking(False)
    return sock


class Siblings:
    """The counts of all workers of one port: a scrape reaches one of them, and that one asks the others."""

    def __init__(self, directory: Path, name: str, gateway: Gateway) -> None:
        self._directory = directory
        self._own = directory / f"counts-{name}.sock"
        self._gateway = gateway

    async def run(self) -> None:
        """Answer the siblings' questions until cancelled."""
        listener = await feed.listen(self._own)

        async def tell(stream: trio.SocketStream) -> None:
            async with stream:
                try:
                    with trio.move_on_after(2.0):
                        await stream.send_all(msgspec.msgpack.encode(self._gateway.counts()))
                except trio.BrokenResourceError:
                    pass  # it asked and left

        try:
            await trio.serve_listeners(tell, [listener])
        finally:
            self._own.unlink(missing_ok=True)

    async def others(self) -> Iterable[Metrics]:
        """What the siblings count; one that does not answer in time is left out."""
        return await counts.ask(path for path in counts.sockets(self._directory) if path != self._own)


async def main() -> None:
    """Read the orders, serve, stop when asked or when the parent is gone."""
    stdin = trio.lowlevel.FdStream(os.dup(sys.stdin.fileno()))
    if (line := await first_line(stdin)) is None:
        return
    orders = msgspec.json.decode(line, type=Orders)
    logs.set_up(orders.logging)
    prepare()
    stop = trio.Event()

    async def parent_gone() -> None:
        await stdin.receive_some()
        stop.set()

    async def asked() -> None:
        # Ctrl-C reaches the whole process group; the parent decides what it means.
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                if number == signal.SIGTERM:
                    stop.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(parent_gone)
        nursery.start_soon(asked)
        await work(orders, stop)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)

"""The gateway on its sockets: accepting, serving, and stopping without cutting what runs."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Sequence

import structlog
import trio

from llmgw.cell import Cell
from llmgw.plane.gateway.client import Client
from llmgw.plane.gateway.demand import Demand
from llmgw.plane.gateway.gateway import Gateway
from llmgw.plane.gateway.in_flight import InFlight
from llmgw.plane.gateway.link import Link, TlsLink
from llmgw.plane.gateway.metrics import Metrics
from llmgw.plane.gateway.refusal import Refusal, answer
from llmgw.plane.gateway.route import Routes
from llmgw.plane.gateway.settings import GatewaySettings

log = structlog.get_logger()

#: Connections taken from a listener in one go, before others get their turn.
_AT_ONCE = 64
#: What a lack of descriptors or memory looks like; waiting a little may help.
_SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


async def serve(
    listeners: Sequence[trio.SocketListener],
    routes: Cell[Routes],
    settings: GatewaySettings,
    *,
    in_flight: InFlight | None = None,
    demand: Demand | None = None,
    stop: trio.Event | None = None,
    tls: ssl.SSLContext | None = None,
    trust: ssl.SSLContext | None = None,
    metrics: Metrics | None = None,
    task_status: trio.TaskStatus[Gateway] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until `stop` is set, then finish what runs within `settings.stop_within` and return.

    `tls`: clients speak TLS. `trust`: what https endpoints are verified against; by default the system's store.
    Closes the listeners. Cancelled, it ends at once and cuts what runs.
    """
    gateway = Gateway(routes, settings, in_flight=in_flight, demand=demand, trust=trust, metrics=metrics)
    async with trio.open_nursery() as upkeep:
        upkeep.start_soon(gateway.run)
        async with trio.open_nursery() as connections:
            async with trio.open_nursery() as accepting:
                for listener in listeners:
                    accepting.start_soon(_accept, listener, gateway, tls, connections)
                task_status.started(gateway)
                await (trio.Event() if stop is None else stop).wait()
                accepting.cancel_scope.cancel()
            _finish(gateway, connections)
        upkeep.cancel_scope.cancel()


def _finish(gateway: Gateway, connections: trio.Nursery) -> None:
    """Let open requests end. Idle connections are closed, and so is each other one after its answer."""
    gateway.stopping = True
    gateway.bell.set(gateway.bell.value + 1)
    for client in gateway.clients:
        client.stop_if_idle()
    connections.cancel_scope.deadline = trio.current_time() + gateway.settings.stop_within


async def _accept(
    listener: trio.SocketListener, gateway: Gateway, tls: ssl.SSLContext | None, connections: trio.Nursery
) -> None:
    sock = socket.socket(fileno=listener.socket.fileno())

    def take() -> bool:
        """Take the connections that wait; False when the machine is short of something."""
        for _ in range(_AT_ONCE):
            try:
                conn, peer = sock.accept()
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno in _SHORT_OF:
                    log.error("no connection can be taken", why=error.strerror, open=len(gateway.clients))
                    return False
                continue  # the client left before we came to it
            connections.start_soon(_connection, gateway, conn, peer, tls)
        return True

    try:
        while True:
            await trio.lowlevel.wait_readable(sock)
            if not take():
                await trio.sleep(0.1)
    finally:
        take()  # who is connected already gets an answer; closing the listener would reset them
        sock.detach()  # the descriptor is the listener's
        listener.socket.close()


async def _connection(
    gateway: Gateway, sock: socket.socket, peer: tuple[str, int] | str, tls: ssl.SSLContext | None
) -> None:
    name = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "local"
    sock.setblocking(False)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls is None:
        link = Link(sock)
    else:
        try:
            with trio.move_on_after(gateway.settings.head_within) as scope:
                link = await TlsLink.shake_hands(sock, tls, server=True)
        except OSError:
            return  # it speaks no TLS, or does not trust us; its own log says so
        if scope.cancelled_caught:
            return
    client = Client(gateway, link, name)
    if len(gateway.clients) >= gateway.settings.most_connections:
        full = Refusal(503, "The gateway has as many connections as it may.", code="overloaded")
        link.write_now(answer(503, full.body(), headers=((b"retry-after", b"5"),), close=True))
        link.close()
        return
    gateway.clients.add(client)
    gateway.watch.add(link, client.left)
    try:
        await client.run()
    finally:
        gateway.clients.discard(client)
        gateway.watch.drop(link)
        link.close()

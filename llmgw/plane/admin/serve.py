"""The admin listener: HTTPS with the plane's certificate, one hypercorn connection each."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Sequence

import structlog
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState

from llmgw.plane.admin.app import Admin, app
from llmgw.plane.admin.connection import Caller, Plain, Secure
from llmgw.plane.admin.shim import Shim
from llmgw.tls import Peer, peer_of
from llmgw.tlsstream import TlsStream

log = structlog.get_logger("llmgw.admin")

#: Connections in TLS handshake at one time; further ones wait in the kernel's queue.
HANDSHAKES = 16
HANDSHAKE_WITHIN = 15.0
#: Connections at one time: operators, their scripts and open pages, never a fleet.
CONNECTIONS = 1024
#: Seconds an idle connection is kept; the page asks every two.
IDLE = 30.0


async def serve_admin(
    admin: Admin,
    listeners: Sequence[trio.SocketListener],
    context: Callable[[], ssl.SSLContext] | None,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve the admin API and page until cancelled.

    `context` gives the TLS context for the next connection, so that a renewed certificate counts at once;
    None is the insecure mode, which config allows on loopback alone (A1).
    """
    quart = app(admin)
    await quart.startup()
    wrapped = ASGIWrapper(Shim(quart))
    config = Config()
    config.keep_alive_timeout = IDLE
    config.errorlog = logging.getLogger("llmgw.admin.http")
    config.include_server_header = False
    connections = trio.CapacityLimiter(CONNECTIONS)
    handshakes = trio.CapacityLimiter(HANDSHAKES)

    async def connection(socket: trio.SocketStream) -> None:
        try:
            connections.acquire_nowait()
        except trio.WouldBlock:
            log.warning("admin connection refused: too many are open", most=CONNECTIONS)
            await trio.aclose_forcefully(socket)
            return
        try:
            await _serve(socket)
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError, OSError) as error:
            log.debug("admin connection ended early", error=str(error.__cause__ or error))
        except Exception:
            # The edge of one connection: its failure must not become the plane's.
            log.exception("admin connection failed")
        finally:
            connections.release()
            await trio.aclose_forcefully(socket)

    async def _serve(socket: trio.SocketStream) -> None:
        address = _address(socket)
        if context is None:
            await _converse(address, None, lambda scope: Plain(socket, scope))
            return
        secure = TlsStream(socket, context(), server_side=True)
        try:
            async with handshakes:
                with trio.fail_after(HANDSHAKE_WITHIN):
                    await _shake(secure)
            await _converse(address, peer_of(secure), lambda scope: Secure(secure, scope))
        finally:
            await trio.aclose_forcefully(secure)

    async def _converse(address: str, peer: Peer | None, stream: Callable[[trio.CancelScope], Plain]) -> None:
        with trio.CancelScope() as scope:
            state = ConnectionState({"caller": Caller(address, peer, scope.cancel)})
            served = TCPServer(wrapped, config, WorkerContext(None), state, stream(scope))  # type: ignore[arg-type]
            await served.run()

    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, connection, list(listeners))
        task_status.started()


async def _shake(secure: TlsStream) -> None:
    """Who is refused is told why: an expired certificate would else look like a closed connection."""
    try:
        await secure.do_handshake()
    except trio.BrokenResourceError:
        await secure.linger()
        raise


def _address(socket: trio.SocketStream) -> str:
    try:
        name = socket.socket.getpeername()
    except OSError:
        return ""
    return str(name[0]) if isinstance(name, tuple) else ""

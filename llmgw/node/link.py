"""Keeps the agent's stream to the plane: dial, carry, wait, again, for ever (C1).

An agent dials out; nothing ever connects to it (A1). Each try reads the certificate from disk anew, so a renewed one
is what the plane sees next (TL02). Addresses are tried in turn; the leader that a standby names comes first.
"""

from __future__ import annotations

import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

import attrs
import structlog
import trio
import trio_websocket as ws

from llmgw.backoff import Backoff
from llmgw.errors import BadInput, LlmgwError
from llmgw.tls import explain
from llmgw.wire.control import Goodbye
from llmgw.wire.stream import Frames, WebSocketFrames

log = structlog.get_logger("llmgw.link")

DIAL_WITHIN = 15.0
MESSAGE_BYTES = 1 << 20
#: Seconds: a plane that asks for more is wrong, and an agent that obeyed it would be lost.
MOST_RETRY_AFTER = 600.0


@attrs.frozen
class Address:
    """Where a plane listens for agents."""

    host: str
    port: int
    secure: bool

    @property
    def authority(self) -> str:
        """Host and port as an URL and a Host header have them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{'wss' if self.secure else 'ws'}://{self.authority}"


def address(url: str) -> Address:
    """A plane's address from its URL. Raises BadInput; ws:// is for loopback alone (A1)."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 7443
    except ValueError:
        host, port, parts = "", 0, urlsplit("")
    if parts.scheme not in ("wss", "ws") or not host:
        raise BadInput(f"{url!r} is no address of a plane", remedy="write it like wss://plane.example:7443")
    if parts.scheme == "ws" and host not in ("127.0.0.1", "::1", "localhost"):
        raise BadInput(f"{url!r} is not encrypted", remedy="ws:// works on loopback only; use wss://")
    return Address(host, port, parts.scheme == "wss")


class CannotDial(Exception):
    """No stream came about; the words say why."""


@asynccontextmanager
async def dial(to: Address, context: ssl.SSLContext | None, path: str = "/agent") -> AsyncIterator[Frames]:
    """An open WebSocket to a plane. Raises CannotDial; what is raised inside the block comes out bare."""
    inside: BaseException | None = None
    opened = False
    socket: trio.SocketStream | None = None
    try:
        async with trio.open_nursery() as nursery:
            with trio.fail_after(DIAL_WITHIN):
                socket = await trio.open_tcp_stream(to.host, to.port)
                stream: trio.SocketStream | trio.SSLStream[trio.SocketStream] = socket
                if context is not None:
                    stream = trio.SSLStream(socket, context, server_hostname=to.host, https_compatible=True)
                    await stream.do_handshake()
                watched = Watched(stream)
                nursery.start_soon(watched.fail)
                connection = await ws.wrap_client_stream(
                    nursery,
                    watched,  # type: ignore[arg-type] # any stream will do: only an endpoint's name wants more
                    to.authority,
                    path,
                    message_queue_size=16,
                    max_message_size=MESSAGE_BYTES,
                )
            opened = watched.opened = True
            try:
                yield WebSocketFrames(connection)
            except Exception as error:
                inside = error
            with trio.move_on_after(2, shield=True):
                await connection.aclose()
            nursery.cancel_scope.cancel()
    except* Exception as group:
        if not opened:
            raise CannotDial(why(group, to)) from None
    finally:
        if socket is not None:
            await trio.aclose_forcefully(socket)
    if inside is not None:
        raise inside


class Watched(trio.abc.Stream):
    """A stream that tells of its end while the WebSocket is being opened.

    trio-websocket waits for ever for the answer to its handshake when the connection breaks meanwhile, and forgets
    the reason. In TLS 1.3 that is the moment in which a refused certificate shows.
    """

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._over = trio.Event()
        self._error: BaseException | None = None
        self.opened = False

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        try:
            data = await self._stream.receive_some(max_bytes)
        except trio.BrokenResourceError as error:
            self._error = error
            self._over.set()
            raise
        if not data:
            self._over.set()
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        try:
            await self._stream.send_all(data)
        except trio.BrokenResourceError as error:
            if not self.opened:
                # The other side closed; what it said before lies unread, and is the reason.
                self._error = error
                with trio.move_on_after(0.5), suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    await self.receive_some()
                self._over.set()
            raise

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def fail(self) -> None:
        """Raise what ended the stream, if that was before it was opened."""
        await self._over.wait()
        # Whoever answered the handshake and then closed is heard first: its answer says more.
        await trio.sleep(0.05)
        if not self.opened:
            raise self._error or trio.BrokenResourceError("closed during the handshake")


def why(error: BaseException, to: Address) -> str:
    """The reason a dial failed, in words an operator can act on."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ssl.SSLError) or isinstance(error.__cause__, ssl.SSLError):
        return explain(error, str(to))
    match error:
        case trio.TooSlowError():
            return f"{to} did not answer within {DIAL_WITHIN:g} s"
        case ws.ConnectionRejected(status_code=status):
            return f"{to} answered {status} and opened no stream: is that the agents' port of a plane?"
        case ws.HandshakeError() | trio.BrokenResourceError() | trio.ClosedResourceError():
            return f"{to} closed the connection during its handshake"
        case OSError():
            return f"{to} cannot be reached: {error.strerror or error}"
    return f"{to}: {error}"


Carry = Callable[[Frames], Awaitable[Goodbye]]


async def keep(
    planes: Sequence[Address],
    context: Callable[[], ssl.SSLContext | None],
    carry: Carry,
    *,
    backoff: Backoff | None = None,
    roll: Callable[[], float] = random.random,
) -> None:
    """Keep a stream to one of `planes` for ever: `context` is asked before each try, `carry` runs a stream."""
    backoff = backoff or Backoff()
    attempt = -1
    turn = 0
    leader: Address | None = None
    # A whole fleet may have been started in this second: spread the first try too.
    await trio.sleep(backoff.delay(0, roll()))
    while True:
        to = leader or planes[turn % len(planes)]
        began = trio.current_time()
        goodbye = await _try(to, context, carry)
        held = trio.current_time() - began
        attempt = backoff.after(attempt, held)
        leader = _named(goodbye) if to is not leader else None
        if leader is None:
            turn += 1
        pause = backoff.delay(attempt, roll(), retry_after=min(goodbye.retry_after, MOST_RETRY_AFTER))
        log.warning(
            "no stream to the plane", plane=str(to), code=goodbye.code, reason=goodbye.reason, again_in=round(pause, 1)
        )
        await trio.sleep(pause)


async def _try(to: Address, context: Callable[[], ssl.SSLContext | None], carry: Carry) -> Goodbye:
    try:
        async with dial(to, context() if to.secure else None) as frames:
            return await carry(frames)
    except CannotDial as error:
        return Goodbye(code="unreachable", reason=str(error))
    except (OSError, ssl.SSLError, LlmgwError) as error:
        return Goodbye(code="unreachable", reason=f"this node's certificate cannot be used: {error}")


def _named(goodbye: Goodbye) -> Address | None:
    """The leader's address that a standby told, when it is one that can be dialled."""
    if not goodbye.leader:
        return None
    try:
        return address(goodbye.leader)
    except BadInput:
        return None

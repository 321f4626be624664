"""The plane's end of agents' WebSockets: wsproto on the stream, without a task or a queue in between.

Agents use trio-websocket, whose reader task and message queue cost a scheduler's round per frame. One plane hears
thousands of agents, and its only reader of a stream is the stream's own; so here the protocol (wsproto, the one that
trio-websocket uses too) is driven directly by whoever receives. See docs/decisions/0003-agents-stream.md.
"""

from __future__ import annotations

from contextlib import suppress

import trio
from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    Pong,
    RejectConnection,
    Request,
    TextMessage,
)
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from llmgw.wire.stream import REASON_BYTES, Closed

#: What is read from a connection at once: a heartbeat in one piece, a part in a few.
RECEIVE_BYTES = 32 << 10
#: RFC 6455, 7.4.1.
PROTOCOL_ERROR, UNSUPPORTED, TOO_BIG, ABNORMAL = 1002, 1003, 1009, 1006


class ServerFrames:
    """Frames on a WebSocket that an agent opened. One task receives; any may send, and one at a time does."""

    def __init__(self, stream: trio.abc.Stream, most_bytes: int) -> None:
        self._stream = stream
        self._most = most_bytes
        self._protocol = WSConnection(ConnectionType.SERVER)
        self._sending = trio.Lock()
        self._pieces: list[bytes] = []
        self._size = 0
        self._pongs: dict[bytes, trio.Event] = {}
        self._closed: Closed | None = None
        self._events = self._protocol.events()
        self.path = ""

    async def accept(self) -> None:
        """The opening handshake. Raises Closed for anything that is not one."""
        while True:
            event = await self._event()
            if isinstance(event, Request):
                self.path = event.target
                await self._send(AcceptConnection())
                return
            if isinstance(event, RejectConnection | CloseConnection):
                raise Closed(ABNORMAL, "no WebSocket handshake")

    async def send(self, data: bytes) -> None:
        await self._send(BytesMessage(data))

    async def receive(self) -> bytes:
        while True:
            event = await self._event()
            match event:
                case BytesMessage(data=data, message_finished=finished):
                    if finished and not self._pieces:
                        if len(data) > self._most:
                            await self._refuse(TOO_BIG, f"a message of more than {self._most} bytes")
                        return bytes(data)
                    self._pieces.append(bytes(data))
                    self._size += len(data)
                    if self._size > self._most:
                        await self._refuse(TOO_BIG, f"a message of more than {self._most} bytes")
                    if finished:
                        whole = b"".join(self._pieces)
                        self._pieces.clear()
                        self._size = 0
                        return whole
                case Ping():
                    await self._send(event.response())
                case Pong(payload=payload):
                    heard = self._pongs.pop(bytes(payload), None)
                    if heard is not None:
                        heard.set()
                case CloseConnection(code=code, reason=reason):
                    if self._protocol.state is ConnectionState.REMOTE_CLOSING:
                        await self._send(event.response())
                    raise self._end(Closed(int(code), reason or ""))
                case TextMessage():
                    await self._refuse(UNSUPPORTED, "a text message on a stream of binary frames")

    async def ping(self, payload: bytes) -> None:
        """The pong is heard by whoever receives meanwhile."""
        heard = self._pongs[payload] = trio.Event()
        try:
            await self._send(Ping(payload))
            await heard.wait()
        finally:
            self._pongs.pop(payload, None)

    async def aclose(self, code: int = 1000, reason: str = "") -> None:
        """Send the close frame and wait for the peer's, or for the caller's patience."""
        words = reason.encode()[:REASON_BYTES].decode(errors="ignore")
        try:
            if self._closed is None:
                await self._send(CloseConnection(code=code, reason=words))
                while True:
                    await self.receive()
        except Closed:
            return

    async def _event(self) -> Event:
        while True:
            if self._closed is not None:
                raise self._closed
            try:
                for event in self._events:
                    return event
            except RemoteProtocolError as error:
                raise self._end(Closed(PROTOCOL_ERROR, str(error))) from None
            try:
                data = await self._stream.receive_some(RECEIVE_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                raise self._end(Closed()) from None
            if not data:
                raise self._end(Closed())
            try:
                self._protocol.receive_data(bytes(data))
            except (RemoteProtocolError, LocalProtocolError) as error:
                raise self._end(Closed(PROTOCOL_ERROR, str(error))) from None
            self._events = self._protocol.events()

    async def _send(self, event: Event) -> None:
        if self._closed is not None:
            raise self._closed
        async with self._sending:
            try:
                data = self._protocol.send(event)
                await self._stream.send_all(data)
            except LocalProtocolError:
                raise self._end(Closed()) from None
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                raise self._end(Closed()) from None

    async def _refuse(self, code: int, reason: str) -> None:
        """Close because of what the peer sent. Raises Closed."""
        with trio.move_on_after(2):
            with suppress(Closed):
                await self._send(CloseConnection(code=code, reason=reason))
        raise self._end(Closed(code, reason))

    def _end(self, closed: Closed) -> Closed:
        if self._closed is None:
            self._closed = closed
        return self._closed

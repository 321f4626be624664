"""A stream of whole frames: the seam between the protocol and what carries it.

`WebSocketFrames` is the real one; tests use a pair in memory. Exactly one task sends and one receives: a
send that was cancelled half-way breaks a TLS stream for everyone, so senders are ended only together with the stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import trio
import trio_websocket as ws

from llmgw.wire.codec import MOST_BYTES, PART_BYTES, Broken, encode

#: The longest close reason that WebSocket allows, in bytes of UTF-8 (RFC 6455, 5.5).
REASON_BYTES = 123


#: Frames that may be on their way in parts at one time, and parts of one: empty ones cost memory, too.
MOST_SERIES, MOST_PIECES = 256, 65_536


class Closed(Exception):
    """The stream ended: by the peer with a code and a reason, or because the connection broke (code 1006)."""

    def __init__(self, code: int = 1006, reason: str = "") -> None:
        super().__init__(f"closed ({code}){': ' + reason if reason else ''}")
        self.code = code
        self.reason = reason


class Frames(Protocol):
    """Whole messages in both directions."""

    async def send(self, data: bytes) -> None:
        """Raises Closed."""
        ...

    async def receive(self) -> bytes:
        """The next message. Raises Closed when there is none any more."""
        ...

    async def ping(self, payload: bytes) -> None:
        """Ask the peer for a sign of life and wait for it (A14). Raises Closed; the caller owns the deadline."""
        ...

    async def aclose(self, code: int = 1000, reason: str = "") -> None:
        """Say why and close. Never raises for a stream that is closed already."""
        ...


class WebSocketFrames:
    """Frames as binary WebSocket messages."""

    def __init__(self, connection: ws.WebSocketConnection) -> None:
        self._connection = connection

    def _closed(self, error: ws.ConnectionClosed | ws.HandshakeError) -> Closed:
        reason = getattr(error, "reason", None)
        return Closed(reason.code, reason.reason or "") if reason is not None else Closed()

    async def send(self, data: bytes) -> None:
        try:
            await self._connection.send_message(data)
        except ws.ConnectionClosed as error:
            raise self._closed(error) from None
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise Closed from None

    async def receive(self) -> bytes:
        try:
            message = await self._connection.get_message()
        except ws.ConnectionClosed as error:
            raise self._closed(error) from None
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise Closed from None
        if isinstance(message, str):
            raise Closed(1003, "a text message on a stream of binary frames")
        return bytes(message)

    async def ping(self, payload: bytes) -> None:
        try:
            await self._connection.ping(payload)
        except ws.ConnectionClosed as error:
            raise self._closed(error) from None
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise Closed from None

    async def aclose(self, code: int = 1000, reason: str = "") -> None:
        words = reason.encode()[:REASON_BYTES].decode(errors="ignore")
        try:
            await self._connection.aclose(code, words)
        except (ws.ConnectionClosed, trio.BrokenResourceError, trio.ClosedResourceError):
            return


class Joiner:
    """Puts parts together again (A13)."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._open: dict[int, list[bytes]] = {}
        self._bytes = 0
        self._most = most_bytes

    def add(self, series: int, data: bytes, last: bool) -> bytes | None:
        """The whole frame once its last part is here. Raises Broken when all open parts together pass the limit."""
        pieces = self._open.setdefault(series, [])
        pieces.append(data)
        self._bytes += len(data)
        if self._bytes > self._most:
            raise Broken(f"frames in parts of more than {self._most >> 20} MiB")
        if len(self._open) > MOST_SERIES or len(pieces) > MOST_PIECES:
            raise Broken(f"more than {MOST_SERIES} frames in parts at a time, or more than {MOST_PIECES} parts of one")
        if not last:
            return None
        del self._open[series]
        self._bytes -= sum(map(len, pieces))
        return b"".join(pieces)


def parts(data: bytes, size: int = PART_BYTES) -> Iterator[tuple[bytes, bool]]:
    """A long frame's pieces, each with whether it is the last."""
    for at in range(0, len(data), size):
        yield data[at : at + size], at + size >= len(data)


__all__ = ["Broken", "Closed", "Frames", "Joiner", "WebSocketFrames", "encode", "parts"]

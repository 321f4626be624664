"""Frames in memory: both halves of a stream without sockets, under any clock."""

from __future__ import annotations

import trio

from llmgw.wire.stream import Closed


class MemoryFrames:
    """One half. It answers pings as a WebSocket library does: without its owner, unless `deaf`."""

    def __init__(self, send: trio.MemorySendChannel[bytes], receive: trio.MemoryReceiveChannel[bytes]) -> None:
        self._send = send
        self._receive = receive
        self.other: MemoryFrames | None = None
        self.deaf = False
        self.said: tuple[int, str] | None = None
        self.stalled = False

    async def send(self, data: bytes) -> None:
        if self.stalled:
            await trio.sleep_forever()
        try:
            await self._send.send(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise self._closed() from None

    async def receive(self) -> bytes:
        try:
            return await self._receive.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            raise self._closed() from None

    async def ping(self, payload: bytes) -> None:
        if self.other is None or self.other.deaf or self.stalled:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()

    async def aclose(self, code: int = 1000, reason: str = "") -> None:
        await trio.lowlevel.checkpoint()
        if self.said is None:
            self.said = (code, reason)
        self._send.close()
        self._receive.close()

    def _closed(self) -> Closed:
        said = self.other.said if self.other is not None else None
        return Closed(*said) if said is not None else Closed()


def pair(room: int = 100) -> tuple[MemoryFrames, MemoryFrames]:
    """Two halves of one stream; what one sends the other receives."""
    to_right, from_left = trio.open_memory_channel[bytes](room)
    to_left, from_right = trio.open_memory_channel[bytes](room)
    left, right = MemoryFrames(to_right, from_right), MemoryFrames(to_left, from_left)
    left.other, right.other = right, left
    return left, right

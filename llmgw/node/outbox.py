"""What an agent has to say, in the order in which it should leave (A13).

Short frames go first. Long ones are cut into parts that leave one by one, so that a heartbeat never waits behind
more than one part of a fabric map; several long ones share the way in turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count

import trio
from msgspec import Struct

from llmgw.wire.agent import Part
from llmgw.wire.codec import MOST_BYTES, PART_BYTES, encode
from llmgw.wire.stream import parts


class TooLong(Exception):
    """A frame that no plane would accept."""


class Outbox:
    """Frames of one stream, waiting for its one sender. It dies with the stream."""

    def __init__(self, part_bytes: int = PART_BYTES) -> None:
        self._short: deque[bytes] = deque()
        self._long: deque[Iterator[bytes]] = deque()
        self._series = count(1)
        self._part_bytes = part_bytes
        self._wake = trio.Event()

    def __len__(self) -> int:
        return len(self._short) + len(self._long)

    def put(self, frame: Struct) -> None:
        """Add a frame. Raises TooLong when it is past the limit that a plane takes in all."""
        data = encode(frame)
        if len(data) > MOST_BYTES:
            raise TooLong(f"a frame of {len(data) >> 20} MiB; at most {MOST_BYTES >> 20} MiB can be sent")
        if len(data) <= self._part_bytes:
            self._short.append(data)
        else:
            self._long.append(self._pieces(data))
        self._wake.set()

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        series = next(self._series)
        for piece, last in parts(data, self._part_bytes):
            yield encode(Part(series=series, data=piece, last=last))

    async def next(self) -> bytes:
        """The frame or part to send now; waits while there is nothing to say."""
        while True:
            if self._short:
                return self._short.popleft()
            if self._long:
                pieces = self._long.popleft()
                part = next(pieces, None)
                if part is None:
                    continue
                self._long.append(pieces)
                return part
            self._wake = trio.Event()
            await self._wake.wait()

"""What an agent has to say, in the order in which it should leave (A13).

Short frames go first. Long ones are cut into parts that leave one by one, so that a heartbeat never waits behind
more than one part of a fabric map; several long ones share the way in turn.

What a node says of itself (Register, heartbeats, shards) keeps its order all the same: each tells what has changed
since the one before. A status that overtook a long Register would be taken back by it, and a shard that has just been
started would pass for one that the node does not know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count

import trio
from msgspec import Struct

from llmgw.wire.agent import Heartbeat, Part, Register, ShardStatus
from llmgw.wire.codec import MOST_BYTES, PART_BYTES, encode
from llmgw.wire.stream import parts

#: What is true of the node, in the order in which it became true.
FACTS = (Register, Heartbeat, ShardStatus)


class TooLong(Exception):
    """A frame that no plane would accept."""


class Outbox:
    """Frames of one stream, waiting for its one sender. It dies with the stream."""

    def __init__(self, part_bytes: int = PART_BYTES) -> None:
        self._short: deque[bytes] = deque()
        self._long: deque[Iterator[bytes]] = deque()
        self._facts: deque[bytes] = deque()  # a long one, and those that came after it
        self._ordering = False  # the facts have their turn among the long ones
        self._series = count(1)
        self._part_bytes = part_bytes
        self._wake = trio.Event()

    def put(self, frame: Struct) -> None:
        """Add a frame. Raises TooLong when it is past the limit that a plane takes in all."""
        data = encode(frame)
        if len(data) > MOST_BYTES:
            raise TooLong(f"a frame of {len(data) >> 20} MiB; at most {MOST_BYTES >> 20} MiB can be sent")
        if isinstance(frame, FACTS) and (self._facts or len(data) > self._part_bytes):
            self._facts.append(data)
            if not self._ordering:
                self._ordering = True
                self._long.append(self._in_order())
        elif len(data) <= self._part_bytes:
            self._short.append(data)
        else:
            self._long.append(self._pieces(data))
        self._wake.set()

    def _in_order(self) -> Iterator[bytes]:
        """Facts as they wait, until none does; each is taken off once all of it has left."""
        while self._facts:
            data = self._facts[0]
            if len(data) <= self._part_bytes:
                self._facts.popleft()
                yield data
                continue
            yield from self._pieces(data)
            self._facts.popleft()
        self._ordering = False

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

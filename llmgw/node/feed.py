"""What happens, told to everyone who listens while it happens.

Unlike a `Cell` a feed skips nothing: each listener gets every item in order. Nobody listening is no loss here, since
whoever opens a stream first tells the whole state (A5) and only then what changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import trio

T = TypeVar("T")


class Feed(Generic[T]):
    """Items go to all open subscriptions."""

    def __init__(self) -> None:
        self._listeners: set[trio.MemorySendChannel[T]] = set()

    def put(self, item: T) -> None:
        """Tell everyone; never waits. A subscription holds what its reader has not taken yet."""
        for listener in self._listeners:
            listener.send_nowait(item)

    @contextmanager
    def subscribe(self) -> Iterator[trio.MemoryReceiveChannel[T]]:
        """Everything put while the block is open, as an async iterable."""
        # Without a bound: a shard has a dozen changes in its life, and a reader that hangs loses its stream anyway.
        send, receive = trio.open_memory_channel[T](float("inf"))
        self._listeners.add(send)
        try:
            with send, receive:
                yield receive
        finally:
            self._listeners.discard(send)

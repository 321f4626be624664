"""Replies that somebody waits for on one stream (A10).

A wait is a cancel scope in a `with` block. The reply, the node's error, the deadline, the stream's end and the
asker's own cancellation all end it the same way: the scope is cancelled, and the slot says which it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs
import trio

from llmgw.scopes import Scopes, Slot
from llmgw.wire.agent import Listening, Reply, RequestFailed, Working


@attrs.frozen
class StreamEnded:
    """The stream ended before a reply came."""

    reason: str


Outcome = Reply | RequestFailed | StreamEnded


@attrs.frozen
class Wait:
    """One open wait: its number on the stream, and its slot."""

    request_id: int
    slot: Slot[Outcome]

    async def ended(self) -> None:
        """Sleep until anything ends the wait; the scope around us absorbs the cancellation."""
        await trio.sleep_forever()


class Waits:
    """The open waits of one stream, by request number."""

    def __init__(self) -> None:
        self._scopes: Scopes[int, Outcome] = Scopes()
        self._listening: dict[int, Callable[[Listening], None]] = {}
        self._last = 0
        self._ended: StreamEnded | None = None

    def __len__(self) -> int:
        return len(self._scopes)

    @contextmanager
    def open(self, *, deadline: float, listening: Callable[[Listening], None] | None = None) -> Iterator[Wait]:
        """A new wait. On a stream that has ended already it ends at once."""
        self._last += 1
        request_id = self._last
        with self._scopes.open(request_id, deadline=deadline) as slot:
            if listening is not None:
                self._listening[request_id] = listening
            if self._ended is not None:
                self._scopes.end(request_id, self._ended)
            try:
                yield Wait(request_id, slot)
            finally:
                self._listening.pop(request_id, None)

    def settle(self, reply: Reply | RequestFailed) -> bool:
        # A reply that nobody waits for came after its deadline: not an error.
        return self._scopes.end(reply.request_id, reply)

    def extend(self, working: Working, now: float) -> bool:
        """The node goes on with it: wait at least `seconds` more from now."""
        return self._scopes.extend(working.request_id, now + max(0.0, working.seconds))

    def listens(self, message: Listening) -> None:
        """The node's server for this request has its socket open (E3)."""
        told = self._listening.get(message.request_id)
        if told is not None:
            told(message)

    def end_all(self, reason: str) -> None:
        """The stream is over: every wait, open now or opened later, ends with it."""
        self._ended = StreamEnded(reason)
        self._scopes.end_all(self._ended)

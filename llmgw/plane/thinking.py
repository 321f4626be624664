"""Answers that take longer to think of than the plane's loop may rest: one at a time, in a thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import attrs
import trio

T = TypeVar("T")

#: While one thinks, the loop gets the interpreter back after so many seconds at most: the five milliseconds that
#: Python allows are taken anew with every frame that is read or written.
_SWITCH = 0.0005


class _Yielding:
    """The interpreter goes from hand to hand in short turns while anybody is in here."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, 0.0

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(_SWITCH)

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                sys.setswitchinterval(self._before)


_yielding = _Yielding()


@attrs.define
class Thinking:
    """Frozen values go in and come out, so that nothing is shared. Others wait until it is their turn."""

    _turn: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(1))

    async def of(self, think: Callable[[], T]) -> T:
        """What `think()` gives. Whoever asked may go away; the thread then ends by itself."""

        def thought() -> T:
            with _yielding:
                return think()

        return await trio.to_thread.run_sync(thought, abandon_on_cancel=True, limiter=self._turn)

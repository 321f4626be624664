"""A value, and a way to wait for the next one.

One writer replaces the value between two awaits, so nobody needs a lock; any number of readers
see the newest value. A reader that is slow skips values in between, which is what a reader of
*state* wants (a reader of *events* wants a queue instead).
"""

from __future__ import annotations

from typing import Generic, TypeVar

import trio

T = TypeVar("T")


class Cell(Generic[T]):
    """The newest value of something, and its version: a count that grows with every `set`."""

    def __init__(self, value: T) -> None:
        self._value = value
        self._version = 0
        self._changed = trio.Event()

    @property
    def value(self) -> T:
        return self._value

    @property
    def version(self) -> int:
        return self._version

    def set(self, value: T) -> None:
        """Replace the value and wake every reader. Setting the identical object wakes nobody."""
        if value is self._value:
            return
        self._value = value
        self._version += 1
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    async def next(self, after: int) -> tuple[T, int]:
        """Wait until the version is above `after`; the value and its version then."""
        while self._version <= after:
            await self._changed.wait()
        return self._value, self._version

    def values(self) -> Values[T]:
        """The value now, then each newer one; values set while the reader was busy are skipped."""
        return Values(self)


class Values(Generic[T]):
    """An iterator that never ends and needs no closing, so that a reader may leave it at any moment."""

    def __init__(self, cell: Cell[T]) -> None:
        self._cell = cell
        self._version = -1

    def __aiter__(self) -> Values[T]:
        return self

    async def __anext__(self) -> T:
        value, self._version = await self._cell.next(self._version)
        return value

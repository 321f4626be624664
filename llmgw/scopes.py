"""Cancel scopes by key: a wait, a request or a shard that others can end by its name.

An entry exists exactly as long as its `with` block. Whoever ends it leaves a word in the slot, so
that the block knows which of reply, deadline, withdrawal or stream's end it was.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import trio

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Slot(Generic[V]):
    """One open scope; `value` is what it was ended with, None while nobody has ended it."""

    def __init__(self, scope: trio.CancelScope) -> None:
        self.scope = scope
        self.value: V | None = None


class Scopes(Generic[K, V]):
    """The scopes open now, by key."""

    def __init__(self) -> None:
        self._open: dict[K, Slot[V]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, key: K) -> bool:
        return key in self._open

    @contextmanager
    def open(self, key: K, *, deadline: float = float("inf")) -> Iterator[Slot[V]]:
        """A scope that others may end by `key`. Raises KeyError when the key is open already.

        Cancellation from outside passes through; only `end` and the deadline are absorbed here.
        """
        if key in self._open:
            raise KeyError(f"{key!r} is already open")
        with trio.CancelScope(deadline=deadline) as scope:
            slot: Slot[V] = Slot(scope)
            self._open[key] = slot
            try:
                yield slot
            finally:
                del self._open[key]

    def end(self, key: K, value: V) -> bool:
        """End one scope with a word for it. False when it is not open: it ended a moment ago."""
        slot = self._open.get(key)
        if slot is None or slot.value is not None:
            return False
        slot.value = value
        slot.scope.cancel()
        return True

    def extend(self, key: K, deadline: float) -> bool:
        """Move a scope's deadline; earlier ones are kept, so that nobody shortens a wait by accident."""
        slot = self._open.get(key)
        if slot is None:
            return False
        slot.scope.deadline = max(slot.scope.deadline, deadline)
        return True

    def end_all(self, value: V) -> None:
        for key in list(self._open):
            self.end(key, value)

"""What is usual among things of one kind: expected state is learned from peers, never from a list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeVar

import attrs

K = TypeVar("K")

_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def spelled(count: int) -> str:
    return _WORDS[count] if count < len(_WORDS) else str(count)


@attrs.frozen
class Usual:
    """The value that most peers have, and how many have it."""

    value: float
    count: int

    @property
    def others(self) -> str:
        return f"the other {spelled(self.count)}" if self.count > 1 else "the other one"


def usual(values: Iterable[float]) -> Usual | None:
    """The most common value, the higher of two equally common ones; None with fewer than two that agree."""
    counts = Counter(values)
    if not counts:
        return None
    value, count = max(counts.items(), key=lambda item: (item[1], item[0]))
    return Usual(value, count) if count >= 2 else None


def below(values: Mapping[K, float]) -> Iterable[tuple[K, float, Usual]]:
    """Who has less than is usual. Half of the peers having less is how they are built, and no fault."""
    common = usual(values.values())
    if common is None:
        return
    short = [(name, value) for name, value in values.items() if value < common.value]
    if len(short) < common.count:
        for name, value in short:
            yield name, value, common


def figure(value: float) -> str:
    return f"{value:g}"

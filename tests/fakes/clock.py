"""A wall clock that a test sets."""

from __future__ import annotations

#: 2026-01-01 00:00:00 UTC
NEW_YEAR = 1767225600.0


class Clock:
    """Stands still until somebody moves it."""

    def __init__(self, now: float = NEW_YEAR) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def forward(self, seconds: float) -> None:
        self.now += seconds

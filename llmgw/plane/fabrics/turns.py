"""Long work on the loop in short turns: a fleet of ten thousand nodes must not hold anybody up."""

from __future__ import annotations

import time

import trio

#: The length of a turn, in seconds.
TURN = 0.002


class Turns:
    """Ask `over` after each small piece; when it says so, `await next()`."""

    def __init__(self, turn: float = TURN) -> None:
        self._turn = turn
        self._ends = time.perf_counter() + turn

    def over(self) -> bool:
        return time.perf_counter() >= self._ends

    async def next(self) -> None:
        """Let others run; a new turn begins."""
        await trio.lowlevel.checkpoint()
        self._ends = time.perf_counter() + self._turn

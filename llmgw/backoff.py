"""Delays that grow and never march in step (C1, RC01-RC05).

Pure: randomness comes in as a number in [0, 1). Full jitter, so that a fleet that lost its plane in
one moment comes back spread over the whole delay and not at its end.
"""

from __future__ import annotations

import attrs


@attrs.frozen
class Backoff:
    """Seconds to wait before each try of something.

    `base` bounds the first delay, `cap` bounds all of them. `stable` is how long a try must have held
    for the count to begin again.
    """

    base: float = 1.0
    cap: float = 30.0
    stable: float = 120.0

    def delay(self, attempt: int, roll: float, *, retry_after: float = 0.0) -> float:
        """The delay before retry number `attempt` (the first is 0). `roll` is a random number in [0, 1).

        A `retry_after` that the other side gave is waited for in full, and jitter comes on top.
        """
        bound = min(self.cap, self.base * 2.0 ** min(attempt, 63))
        return max(0.0, retry_after) + roll * max(0.0, bound)

    def after(self, attempt: int, held: float) -> int:
        """The number of the next retry after a try that held for `held` seconds; start with -1."""
        return 0 if held >= self.stable else attempt + 1

"""Not faster than so many bytes a second."""

from __future__ import annotations

import trio


class Pace:
    """A limit that all who take from it share. None: no limit."""

    def __init__(self, bytes_per_second: int | None = None) -> None:
        self.rate = bytes_per_second
        self._free_at = 0.0

    async def take(self, count: int) -> None:
        """Wait until `count` bytes may pass. What was not used before is not made up for."""
        if not self.rate:
            return
        self._free_at = max(self._free_at, trio.current_time()) + count / self.rate
        await trio.sleep_until(self._free_at)

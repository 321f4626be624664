"""Counters become rates (B5): per second, None where nothing can be said, and zero only where nothing moved."""

from __future__ import annotations

from llmgw.plane.world import Reading
from llmgw.rdma.counters import rate


def rates(reading: Reading) -> dict[str, float | None]:
    """Every counter's rate between a port's last two readings, by name: bytes for the data counters, else events."""
    if reading.before is None:
        return dict.fromkeys(reading.counters)
    earlier, seconds = reading.before, reading.at - reading.before_at
    return {name: rate(name, earlier.get(name), value, seconds) for name, value in reading.counters.items()}

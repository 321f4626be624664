"""Counters become rates (B5): per second, None where nothing can be said, and zero only where nothing moved."""

from __future__ import annotations

from llmgw.plane.world import Reading

#: A reading older than this says nothing about a rate now, in seconds.
LONGEST_GAP = 120.0

#: InfiniBand's data counters count words of four bytes, whatever the driver (Linux ABI, sysfs-class-infiniband).
WORD_COUNTERS = frozenset({"port_xmit_data", "port_rcv_data"})
WORD_BYTES = 4

#: Counters that stop at their ceiling instead of wrapping (PortCounters, InfiniBand volume 1, 16.1.3.5):
#: a reading there may hide any number of further counts.
CEILINGS: dict[str, int] = {
    "symbol_error": 0xFFFF,
    "link_error_recovery": 0xFF,
    "link_downed": 0xFF,
    "port_rcv_errors": 0xFFFF,
    "port_rcv_remote_physical_errors": 0xFFFF,
    "port_rcv_switch_relay_errors": 0xFFFF,
    "port_xmit_discards": 0xFFFF,
    "port_xmit_constraint_errors": 0xFF,
    "port_rcv_constraint_errors": 0xFF,
    "local_link_integrity_errors": 0xF,
    "excessive_buffer_overrun_errors": 0xF,
    "VL15_dropped": 0xFFFF,
    "port_xmit_wait": 0xFFFF_FFFF,
    "port_xmit_data": 0xFFFF_FFFF,
    "port_rcv_data": 0xFFFF_FFFF,
    "port_xmit_packets": 0xFFFF_FFFF,
    "port_rcv_packets": 0xFFFF_FFFF,
}
_WIDEST = 0xFFFF_FFFF_FFFF_FFFF


def rate(name: str, before: int | None, after: int, seconds: float) -> float | None:
    """One counter's rate: bytes per second for the data counters, counts per second for all others.

    None without an earlier reading, after a reset, over too long a gap, and at the counter's ceiling: exactly
    there, since adapters with wider counters pass it.
    """
    if before is None or after < before or not 0.0 < seconds <= LONGEST_GAP:
        return None
    if after == CEILINGS.get(name) or after == _WIDEST:
        return None
    return (after - before) * (WORD_BYTES if name in WORD_COUNTERS else 1) / seconds


def rates(reading: Reading) -> dict[str, float | None]:
    """Every counter's rate between a port's last two readings, by name."""
    if reading.before is None:
        return dict.fromkeys(reading.counters)
    earlier, seconds = reading.before, reading.at - reading.before_at
    return {name: rate(name, earlier.get(name), value, seconds) for name, value in reading.counters.items()}

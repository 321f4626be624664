"""What a port's counters mean: units, ceilings, and what a difference of two readings says.

Names are sysfs's. The data counters of InfiniBand count words of four bytes; the counters of old kind stop at
their ceiling and then say nothing more until somebody resets them.
"""

from __future__ import annotations

#: Counters of 4-byte words (IBTA PortXmitData, PortRcvData).
WORDS = frozenset({"port_xmit_data", "port_rcv_data"})

#: Where counters of old kind stop (IBTA PortCounters). Wider ones exist, and simply pass these values.
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
    "port_xmit_wait": 0xFFFFFFFF,
    "port_xmit_data": 0xFFFFFFFF,
    "port_rcv_data": 0xFFFFFFFF,
    "port_xmit_packets": 0xFFFFFFFF,
    "port_rcv_packets": 0xFFFFFFFF,
}

#: Where the widest ones stop.
WIDEST = 0xFFFF_FFFF_FFFF_FFFF

#: Counters that are about congestion or bookkeeping: shown, and never a fault by themselves.
CONGESTION = frozenset({"port_xmit_wait", "np_cnp_sent", "rp_cnp_handled", "np_ecn_marked_roce_packets"})

#: A longer gap than this between two readings gives no rate (B5), in seconds.
MOST_GAP = 120.0


def saturated(name: str, value: int) -> bool:
    """Whether a counter stands at its ceiling, so that it no longer counts."""
    return value in (CEILINGS.get(name), WIDEST)


def delta(name: str, before: int | None, now: int) -> int | None:
    """How far a counter moved; None when it cannot be known: no earlier reading, a reset, or the ceiling."""
    if before is None or now < before or saturated(name, now):
        return None
    return now - before


def rate(name: str, before: int | None, now: int, seconds: float | None) -> float | None:
    """Per second; bytes for the data counters, else events. Zero is zero, and None is not known (B5)."""
    moved = delta(name, before, now)
    if moved is None or seconds is None or not 0 < seconds <= MOST_GAP:
        return None
    return moved * (4 if name in WORDS else 1) / seconds

"""GUIDs: 64-bit numbers that tools print padded or not, with 0x or not; here always integers."""

from __future__ import annotations


def guid(text: str) -> int:
    """The number in `0xc42a10300dcf8e2`, `c42a10300dcf8e2` or `0c42:a103:00dc:f8e2`; 0 stands for "none".

    Raises ValueError for what is not a GUID.
    """
    value = int(text.strip().replace(":", ""), 16)
    if not 0 <= value < 1 << 64:
        raise ValueError(f"{text!r} is not a GUID: more than 64 bits")
    return value


def written(value: int) -> str:
    """Sixteen hexadecimal digits without 0x, as `wire.facts` has them; "" for none."""
    return f"{value:016x}" if value else ""


def shown(value: int) -> str:
    """As people and tools write it: 0x and sixteen digits."""
    return f"0x{value:016x}"

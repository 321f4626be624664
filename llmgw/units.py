"""Bytes and durations as people write them: "512MiB", "1.5 GB", "30s", "1h30m"."""

from __future__ import annotations

import math
import re

#: kB, MB, ... count in thousands; KiB, MiB, ... and the bare letters that memory is bought in count in 1024.
_SIZES: dict[str, int] = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", 1)},
    **{f"{letter}iB".upper(): 1024**power for power, letter in enumerate("KMGTP", 1)},
    **{letter: 1024**power for power, letter in enumerate("KMGTP", 1)},
}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}

_size = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_part = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)\s*")


def parse_size(text: str) -> int:
    """Bytes: "512MiB" or "64k" or "1048576". Raises ValueError in words for an operator."""
    found = _size.fullmatch(text.strip())
    unit = _SIZES.get(found[2].upper()) if found else None
    if found is None or unit is None:
        raise ValueError(f"{text!r} is not a size: write bytes, or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB")
    whole, _, fraction = found[1].partition(".")
    return int(whole) * unit + (int(fraction) * unit // 10 ** len(fraction) if fraction else 0)


def parse_duration(text: str) -> float:
    """Seconds: "250ms", "30s", "5m", "1h30m", "2d" or "90". Raises ValueError in words for an operator."""
    bare = text.strip()
    if re.fullmatch(r"\d+(\.\d+)?", bare):
        return _finite(float(bare), text)
    total, end = 0.0, 0
    for part in _part.finditer(bare):
        if part.start() != end or part[2] not in _SECONDS:
            break
        total, end = total + float(part[1]) * _SECONDS[part[2]], part.end()
    if not bare or end != len(bare):
        raise ValueError(f"{text!r} is not a duration: write seconds, or numbers with ms, s, m, h or d (30s, 1h30m)")
    return _finite(total, text)


def _finite(seconds: float, text: str) -> float:
    if not math.isfinite(seconds):
        raise ValueError(f"{text!r} is longer than any duration that can be meant")
    return seconds


def format_duration(seconds: float) -> str:
    """A duration at a glance, in its two largest units: "29d 4h", "1h 30m", "4.2s"."""
    if not math.isfinite(seconds):
        return f"{seconds} seconds"
    if seconds < 0:
        return "-" + format_duration(-seconds)
    if seconds < 10:
        return f"{seconds:.1f}s"
    left, parts = round(seconds), list[str]()
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count}{unit}" if count else "")
        if len(parts) == 2:
            break
    return " ".join(part for part in parts if part)

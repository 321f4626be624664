"""Reads of small kernel files, any of which may be missing, refuse, or hold anything.

None stands for "cannot be read"; nothing here raises for what a file system may do. Reads may block
where a device is sick: callers that must not wait do this in a thread.
"""

from __future__ import annotations

import os
from pathlib import Path

#: More than any kernel file that is read whole (a 500-thread /proc/cpuinfo is near 1 MB).
MOST_BYTES = 8 << 20


def text(path: str | Path, most: int = MOST_BYTES) -> str | None:
    """A file's text without the blanks around it. Bytes that are not UTF-8 are replaced, NULs dropped."""
    try:
        with open(path, "rb", buffering=0) as file:
            pieces = []
            while most > 0 and (piece := file.read(min(most, 65536))):
                pieces.append(piece)
                most -= len(piece)
    except (OSError, ValueError):
        return None
    return b"".join(pieces).decode(errors="replace").replace("\0", "").strip()


def number(path: str | Path, base: int = 10) -> int | None:
    """A file that holds one whole number."""
    return integer(text(path, 256), base)


def integer(words: str | None, base: int = 10) -> int | None:
    try:
        return int(words, base) if words else None
    except ValueError:
        return None


def names(path: str | Path) -> tuple[str, ...]:
    """A folder's entries, sorted; none when it is missing."""
    try:
        return tuple(sorted(os.listdir(path)))
    except (OSError, ValueError):
        return ()


def real(path: str | Path) -> Path | None:
    """Where a link leads; None when it leads nowhere."""
    try:
        return Path(path).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        return None


def fields(words: str | None, separator: str = ":") -> dict[str, str]:
    """`name: value` lines; the first of a name counts."""
    found: dict[str, str] = {}
    for line in (words or "").splitlines():
        name, mark, value = line.partition(separator)
        if mark:
            found.setdefault(name.strip(), value.strip())
    return found


def kilobytes(words: str | None) -> int | None:
    """`12345 kB`, as /proc/meminfo has it, in bytes."""
    first = (words or "").split()
    count = integer(first[0]) if first else None
    return None if count is None else count * 1024

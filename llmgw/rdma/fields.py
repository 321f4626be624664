"""The dotted lists that `smpquery`, `perfquery` and `saquery` print: `Name:....value`, one a line.

Keys are the text up to the first dot or colon, as printed. Unknown keys are kept, so that a newer tool breaks
nothing. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_FIELD = re.compile(r"\s*(?P<key>[^.:]*[^.:\s]):?\.*(?<=[.:])\s*(?P<value>.*)$")
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]+|\d+")


def fields(lines: Iterable[str]) -> dict[str, str]:
    """The list's values by key, without comments, bare flags and empty lines; of a repeated key the first counts."""
    found: dict[str, str] = {}
    for line in lines:
        if line.startswith("#"):
            continue
        match = _FIELD.match(line.rstrip())
        if match:
            found.setdefault(match["key"].strip(), match["value"].strip())
    return found


def blocks(lines: Iterable[str], head: str) -> list[dict[str, str]]:
    """The lists that each begin with a line `head`, in order."""
    parts: list[list[str]] = []
    for line in lines:
        if line.strip() == head:
            parts.append([])
        elif parts:
            parts[-1].append(line)
    return [fields(part) for part in parts]


def number(text: str | None) -> int | None:
    """The number that a value begins with, decimal or 0x; None when it begins with none ("N/A", "<not displayed>")."""
    match = _NUMBER.match(text or "")
    return int(match[0], 0 if match[0].lower().startswith("0x") else 10) if match else None

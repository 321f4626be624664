"""Engines' output as lines that a person can read. Pure; every byte sequence has an answer.

Engines write colours, progress bars that overwrite themselves, bytes that are no text, and sometimes hundreds of
kilobytes without an end of line (LG01, LG02, LG04).
"""

from __future__ import annotations

import re

#: The longest line shown, in characters.
MOST_LINE = 4000

_ESCAPES = re.compile(
    rb"\x1b\[[0-?]{0,64}[ -/]{0,8}[@-~]?"  # CSI: colours, cursor
    rb"|\x1b\][^\x07\x1b\n]{0,2048}(?:\x07|\x1b\\)?"  # OSC: titles, links
    rb"|\x1b[PX^_][^\x1b\n]{0,2048}(?:\x1b\\)?"  # DCS, SOS, PM, APC
    rb"|\x1b[ -/]{0,8}[0-~]?"  # everything shorter
)
_UP = re.compile(rb"\x1b\[[0-9]{0,3}A")
_ROWS = re.compile(rb"(\n|\x1b\[[0-9]{0,3}A)")
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if code != 0x09}
# Line separators of Unicode would break a line once more wherever it is shown.
_CONTROLS |= dict.fromkeys((0x2028, 0x2029, 0xFEFF, *range(0x202A, 0x202F), *range(0x2066, 0x206A)))


def plain(data: bytes) -> str:
    """A tool's output as text to be matched: without colours and cursor movements."""
    return _ESCAPES.sub(b"", data).decode(errors="replace")


def settled(data: bytes) -> bytes:
    """Output without what was written over after going back up to it, as progress bars below one another do."""
    if _UP.search(data) is None:
        return data
    rows, at = [list[bytes]()], 0
    parts = _ROWS.split(data)
    for text, mark in zip(parts[::2], [*parts[1::2], b""], strict=True):
        if text.startswith((b"\r", b"\x1b[2K")) and text.strip(b"\r "):
            rows[at].clear()
        rows[at].append(text)
        if mark == b"\n":
            at += 1
            if at == len(rows):
                rows.append([])
        elif mark:
            at = max(0, at - int(mark[2:-1] or b"1"))
    return b"\n".join(map(b"".join, rows))


def clean_line(data: bytes) -> str:
    """One line without what a terminal would do with it. Of a progress bar the newest state is kept."""
    data = _ESCAPES.sub(b"", data)
    if b"\r" in data:
        states = [state for state in data.split(b"\r") if state.strip()]
        data = states[-1] if states else b""
    cut = data[: MOST_LINE * 4]
    text = cut.decode(errors="replace").translate(_CONTROLS).rstrip()
    if len(cut) == len(data) and len(text) <= MOST_LINE:
        return text
    shown = text[:MOST_LINE]
    return f"{shown} … ({len(data) - len(shown.encode())} more bytes)"


def clean(data: bytes) -> list[str]:
    """All lines of some output. What follows the last end of line counts as a line too."""
    lines = settled(data).split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    return [clean_line(line) for line in lines]


def last(data: bytes, most: int) -> tuple[str, ...]:
    """The last lines that say something."""
    found: list[str] = []
    for line in reversed(settled(data).split(b"\n")):
        if len(found) >= most:
            break
        if text := clean_line(line):
            found.append(text)
    return tuple(reversed(found))

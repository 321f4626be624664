"""Tables for people: plain columns in a pipe, colours and folding on a terminal, and never a hidden name."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import attrs
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmgw.units import format_duration
from llmgw.wire.replicaapi import ProgressView

#: As wide as prose needs to be to be read in several lines.
_PROSE = 24
#: How wide a line may become where nobody folds it: in a pipe or a file.
_ENDLESS = 100_000
_STYLES = {
    **dict.fromkeys(("ready", "live", "pass", "open", "complete", "installed", "active", "drained"), "green"),
    **dict.fromkeys(
        ("starting", "fetching", "draining", "stopping", "expected", "unreachable", "cordoned", "renewal-due", "warn"),
        "yellow",
    ),
    **dict.fromkeys(("failed", "lost", "unknown", "bad", "fail", "revoked", "expired", "down"), "red"),
    **dict.fromkeys(("used", "stopped", "skipped", "note"), "dim"),
}

Cell = str | Text


@attrs.frozen
class Column:
    """A column. Those with an `extra` number go, the highest first, when a terminal is too narrow for all.

    Sentences (`prose`) may take several lines and so never drive others out.
    """

    title: str
    right: bool = False
    extra: int = 0
    prose: bool = False


class _Console(Console):
    """A reader that goes away is for whoever runs the command to take: rich would end the program with status 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(*, error: bool = False) -> Console:
    """Where people read: the terminal's width there, no width at all in a pipe."""
    stream = sys.stderr if error else sys.stdout
    if stream.isatty():
        return _Console(file=stream, highlight=False)
    return _Console(file=stream, highlight=False, no_color=True, width=_ENDLESS)


def columns(heads: Sequence[Column], rows: Iterable[Sequence[Cell]], *, nothing: str, width: int) -> RenderableType:
    """Rows under heads, fitted into a width; `nothing` stands where there are no rows."""
    found = [list(row) for row in rows]
    if not found:
        return Text(nothing)
    kept = _fitting(heads, found, width)
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for at in kept:
        made.add_column(
            Text(heads[at].title), justify="right" if heads[at].right else "left", overflow="fold", no_wrap=False
        )
    for row in found:
        made.add_row(*(_text(row[at]) for at in kept))
    return made


def _fitting(heads: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int) -> list[int]:
    # A column in which nothing stands says nothing.
    kept = [at for at, head in enumerate(heads) if not head.extra or any(str(row[at]) for row in rows)]
    widths = [max(cell_len(heads[at].title), *(_longest(row[at]) for row in rows)) for at in range(len(heads))]
    widths = [min(wide, _PROSE) if head.prose else wide for wide, head in zip(widths, heads, strict=True)]
    for at in sorted((at for at in kept if heads[at].extra), key=lambda at: -heads[at].extra):
        if sum(widths[at] + 2 for at in kept) <= width:
            break
        kept.remove(at)
    return kept


def _longest(cell: Cell) -> int:
    return max((cell_len(part) for part in str(cell).splitlines()), default=0)


def _text(cell: Cell) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)


def word(state: str) -> Text:
    """A state in its colour."""
    return Text(state, style=_STYLES.get(state, ""))


def words(*parts: Cell) -> Text:
    """Words in a row, the empty ones left out."""
    return Text(" ").join(_text(part) for part in parts if str(part))


def fields(pairs: Iterable[tuple[str, Cell]]) -> RenderableType:
    """Names and values under each other; pairs without a value are left out."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in pairs:
        if str(value):
            made.add_row(name, _text(value))
    return made


def section(title: str, body: RenderableType) -> RenderableType:
    return Group(Text(""), Text(title, style="bold underline"), body)


def age(seconds: float | None) -> str:
    return format_duration(seconds) if seconds is not None else ""


def when(clock: float | None) -> str:
    """A moment on this machine's clock; the day only when it is another one."""
    if not clock:
        return ""
    moment = datetime.fromtimestamp(clock)
    today = datetime.fromtimestamp(time.time()).date()
    return moment.strftime("%H:%M:%S" if moment.date() == today else "%Y-%m-%d %H:%M:%S")


def size(count: float | None) -> str:
    """Bytes in the largest unit that leaves a whole number in front."""
    if count is None:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} PiB"


def rate(per_second: float | None) -> str:
    """Bytes per second as link rates are spoken of: in bits."""
    return "" if per_second is None else f"{per_second * 8 / 1e9:.2f} Gb/s"


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} %"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def of(part: str, whole: str) -> str:
    """A part and its whole, as far as they are known."""
    return f"{part or '?'} of {whole or '?'}" if part or whole else ""


def progress(now: ProgressView | None) -> str:
    """What is being done and how far; a transfer that has no byte yet says only what it is about."""
    if now is None:
        return ""
    return f"{clean(now.what)} {of(size(now.done), size(now.total))}" if now.done or now.total else clean(now.what)


def counted(counts: Mapping[str, int]) -> Text:
    """Counts by state: "2 ready, 1 failed"."""
    return Text(", ").join(Text.assemble(f"{count} ", word(state)) for state, count in counts.items())


def clean(line: str) -> str:
    """A line of somebody else's output without what would steer the terminal."""
    return "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in line)

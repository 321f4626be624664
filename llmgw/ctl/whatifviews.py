"""What would happen, as tables. Pure."""

from __future__ import annotations

from collections import Counter

from rich.console import Group, RenderableType
from rich.text import Text

from llmgw.ctl.show import Cell, Column, age, clean, columns, section
from llmgw.wire.whatifapi import FateView, GapView, MomentView, ShortView, WhatIfReply

_FATES = (
    Column("REPLICA"),
    Column("MODEL", extra=3),
    Column("WHAT"),
    Column("FROM"),
    Column("TO"),
    Column("AFTER", right=True, extra=1),
    Column("WHY", extra=2, prose=True),
)
_SHORT = (
    Column("MODEL"),
    Column("WANTED", right=True),
    Column("NOW", right=True),
    Column("THEN", right=True),
    Column("WHY", extra=1, prose=True),
    Column("SMALLEST CHANGE", prose=True),
)
_GAPS = (Column("MODEL"), Column("FROM", right=True), Column("UNTIL", prose=True))
_MOMENTS = (Column("AFTER", right=True), Column("WHAT", prose=True))
_WORDS = {
    "moves": "move",
    "replaced": "are replaced",
    "restarts": "restart",
    "starts": "start",
    "stops": "stop",
    "unplaced": "find no place",
    "stuck": "cannot leave",
    "stays": "stay",
}
_ONE = {
    "move": "moves",
    "are replaced": "is replaced",
    "find no place": "finds no place",
    "cannot leave": "cannot leave",
}
_WORD = {"unplaced": "no place", "stays": "cannot leave"}
_STYLES = {"unplaced": "red", "stays": "red", "stops": "yellow", "moves": "cyan", "replaced": "cyan", "starts": "green"}


def whatif(reply: WhatIfReply, width: int) -> RenderableType:
    """In short first, then what changes, who suffers, and the order in time."""
    parts: list[RenderableType] = [Text(f"If {reply.text}: {_counted(reply)}.")]
    if reply.restless:
        parts.append(Text("The fleet is on its way already, so some of this happens anyway.", style="yellow"))
    if not reply.complete:
        parts.append(Text("It goes on for longer than it was followed.", style="yellow"))
    changing = [fate for fate in reply.replicas if fate.what != "stays" or fate.why]
    if changing:
        parts.append(
            section("What becomes of replicas", columns(_FATES, map(_fate, changing), nothing="", width=width))
        )
    if reply.gaps:
        title = "Models without any ready replica meanwhile"
        parts.append(section(title, columns(_GAPS, map(_gap, reply.gaps), nothing="", width=width)))
    if reply.short:
        title = "Models that end up with less than is wanted"
        parts.append(section(title, columns(_SHORT, map(_short, reply.short), nothing="", width=width)))
    if reply.moments:
        rows = [_moment(moment) for moment in reply.moments]
        if reply.more_moments:
            rows.append(("", f"and {reply.more_moments} more"))
        parts.append(section("In this order, starts taking no time", columns(_MOMENTS, rows, nothing="", width=width)))
    return Group(*parts)


def _counted(reply: WhatIfReply) -> str:
    counts = Counter("stuck" if fate.what == "stays" and fate.why else fate.what for fate in reply.replicas)
    said = [_plural(counts[what], words) for what, words in _WORDS.items() if counts[what]]
    if not any(counts[what] for what in _WORDS if what != "stays"):
        return "nothing happens to any replica"
    return ", ".join(said)


def _plural(count: int, words: str) -> str:
    return f"{count} {words if count != 1 else _ONE.get(words, f'{words}s')}"


def _fate(fate: FateView) -> tuple[Cell, ...]:
    what = f"replaced by {fate.by}" if fate.by else _WORD.get(fate.what, fate.what)
    return (
        fate.replica,
        fate.model,
        Text(what, style=_STYLES.get(fate.what, "")),
        ", ".join(fate.before),
        ", ".join(fate.after) if fate.what != "stays" else "",
        _at(fate.at),
        clean(fate.why),
    )


def _gap(gap: GapView) -> tuple[Cell, ...]:
    if gap.end is None:
        return gap.model, _at(gap.begin), Text("it stays so", style="red")
    return gap.model, _at(gap.begin), f"{age(gap.end)}, and what its start takes"


def _short(short: ShortView) -> tuple[Cell, ...]:
    counts = Counter(reason.check for reason in short.reasons)
    why = short.reasons[0].text if len(short.reasons) == 1 and not short.more_reasons else ""
    if not why:
        why = ", ".join(f"{check} on {n} node{'s' if n > 1 else ''}" for check, n in counts.most_common())
        why += f", and {short.more_reasons} more" if short.more_reasons else ""
    return (
        short.model,
        str(short.wanted),
        str(short.before),
        Text(str(short.after), style="red" if not short.after else "yellow"),
        clean(why),
        clean(short.smallest_change),
    )


def _moment(moment: MomentView) -> tuple[Cell, ...]:
    return _at(moment.at), clean(moment.text)


def _at(seconds: float | None) -> str:
    return "at once" if seconds is not None and seconds < 0.05 else age(seconds)

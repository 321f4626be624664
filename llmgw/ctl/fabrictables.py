"""How bandwidth tests look: rails as they finish, the fleet as a heat map, suspects with their evidence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from llmgw.ctl.show import Cell, Column, clean, columns, console, section, when
from llmgw.rdma.results import (
    FleetResult,
    Line,
    Note,
    PairResult,
    Planned,
    Progress,
    RailResult,
    SuspectView,
    summary,
)
from llmgw.units import format_duration

_STYLE = {
    "good": "green",
    "measured": "cyan",
    "fair": "yellow",
    "suspicious": "magenta",
    "bad": "red",
    "failed": "bold red",
}
#: One letter per grade, for matrices without colours.
_LETTER = {"good": "g", "measured": "m", "fair": "f", "suspicious": "s", "bad": "B", "failed": "X"}

_RAILS = (
    Column("RAIL"),
    Column("CLIENT"),
    Column("SERVER"),
    Column("RESULT", right=True),
    Column("CEILING", right=True),
    Column("SHARE", right=True),
    Column("GRADE"),
    Column("WHY", prose=True),
)


def grade(word: str) -> Text:
    return Text(word, style=_STYLE.get(word, ""))


def rail_row(rail: RailResult) -> Sequence[Cell]:
    """One finished rail."""
    verdict = rail.verdict
    return (
        rail.rail,
        f"{rail.a.node} {rail.a.device}/{rail.a.number}",
        f"{rail.b.node} {rail.b.device}/{rail.b.number}",
        f"{rail.gbps:.4g} Gb/s" if rail.gbps is not None else f"{rail.latency_us:.4g} us" if rail.latency_us else "",
        f"{verdict.ceiling_gbps:.4g}" if verdict.ceiling_gbps is not None else "",
        f"{verdict.share:.1%}" if verdict.share is not None else "",
        grade(verdict.grade),
        clean("; ".join(verdict.why)),
    )


def failure(rail: RailResult) -> RenderableType:
    """Why a rail has no figure, with what to do and both sides' last lines (E7)."""
    found = rail.failure
    assert found is not None
    parts: list[RenderableType] = [Text(f"rail {rail.rail} failed: {clean(found.text)}", style="red")]
    if found.remedy:
        parts.append(Text(f"  {clean(found.remedy)}"))
    for end, role in ((rail.a, "client"), (rail.b, "server")):
        if end.lines:
            parts.append(Text(f"  last lines of the {role} on {end.node}:", style="dim"))
            parts += [Text(f"    {clean(line)}", style="dim") for line in end.lines[-6:]]
        elif end.error and end.error != found.error:
            parts.append(Text(f"  {role} on {end.node}: {clean(end.error)}", style="dim"))
    return Group(*parts)


def pair(result: PairResult) -> RenderableType:
    """What stands under the table when a pair is done."""
    parts: list[RenderableType] = [failure(rail) for rail in result.rails if rail.failure is not None]
    if result.total_gbps is not None:
        parts.append(Text(f"all rails together: {result.total_gbps:.4g} Gb/s"))
    if result.busy:
        parts.append(Text(f"running meanwhile: {', '.join(result.busy)}", style="yellow"))
    rules = [rail.verdict.rule for rail in result.rails if rail.gbps is not None]
    parts += [Text(rule, style="dim") for rule in dict.fromkeys(rules)]
    warnings = dict.fromkeys(words for rail in result.rails for words in rail.warnings)
    parts += [Text(f"note: {clean(words)}", style="yellow") for words in warnings]
    for node, names in result.nccl_ib_hca.items():
        parts.append(Text(f"NCCL on {node}: NCCL_IB_HCA='{names}'", style="dim"))
    return Group(*parts)


class _Shown(AbstractContextManager["_Shown"]):
    """A display that redraws on a terminal and prints line by line elsewhere; `quiet` shows nothing."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._out = console()
        self._stack = ExitStack()
        self._live: Live | None = None
        self._last: list[RenderableType] = []

    def __enter__(self) -> _Shown:
        if not self._quiet and self._out.is_terminal:
            self._live = self._stack.enter_context(Live(console=self._out, auto_refresh=False))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)
        for shown in self._last:
            self._print(shown)

    def _redraw(self, shown: RenderableType) -> None:
        if self._live is not None:
            self._live.update(shown, refresh=True)

    def _print(self, shown: RenderableType) -> None:
        if not self._quiet:
            self._out.print(shown, soft_wrap=not self._out.is_terminal)


class PairView(_Shown):
    """Two nodes' rails: those that are done, and the one that runs."""

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet)
        self._planned: Planned | None = None
        self._done: dict[str, RailResult] = {}

    def take(self, line: Line) -> None:
        match line:
            case Note(text=text):
                self._print(Text(clean(text), style="dim"))
            case Planned():
                self._planned = line
            case RailResult():
                self._done[line.rail] = line
            case PairResult():
                self._done = {rail.rail: rail for rail in line.rails}
                if self._live is None:
                    self._print(self.table())
                self._last.append(pair(line))
            case _:
                pass
        self._redraw(self.table())

    def table(self) -> RenderableType:
        rows: list[Sequence[Cell]] = []
        running = False
        names = self._planned.rails if self._planned else tuple(self._done)
        devices = self._planned.devices if self._planned else ()
        for at, name in enumerate(names):
            if name in self._done:
                rows.append(rail_row(self._done[name]))
            elif self._planned is not None:
                word = "waits" if running else "runs"
                running = True
                a, b = devices[at]
                ends = (f"{self._planned.a} {a}", f"{self._planned.b} {b}")
                rows.append((name, *ends, "", "", "", Text(word, style="dim"), ""))
        return columns(_RAILS, rows, nothing="no rail", width=self._out.width)


class FleetView(_Shown):
    """The fleet: progress, the heat map so far, and at the end the suspects."""

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet)
        self._results: list[PairResult] = []
        self._progress: Progress | None = None

    def take(self, line: Line) -> None:
        match line:
            case Note(text=text):
                self._print(Text(clean(text), style="dim"))
            case Progress():
                self._progress = line
                if self._live is None:
                    self._print(progress(line))
            case PairResult():
                self._results.append(line)
                if line.grade not in ("good", "measured"):
                    self._print(slow(line))
            case FleetResult():
                if self._live is None:
                    self._print(matrix(self._results, self._out.width))
                self._last.append(fleet(line))
            case _:
                pass
        parts = [matrix(self._results, self._out.width)]
        if self._progress is not None:
            parts.append(progress(self._progress))
        self._redraw(Group(*parts))


def progress(at: Progress) -> Text:
    """Where a test of the fleet stands, with the time left."""
    rounds = f"round {at.round} of {at.rounds}, " if at.rounds else f"round {at.round}, "
    left = f", {format_duration(at.seconds_left)} left" if at.seconds_left is not None else ""
    return Text(f"{rounds}{at.done} of {at.total} pairs{left}")


def slow(result: PairResult) -> Text:
    """A pair that is not good, in a line."""
    return Text.assemble(f"{result.a} > {result.b}  ", grade(result.grade), f"  {clean(summary(result))}")


def fleet(result: FleetResult) -> RenderableType:
    """How a test of the fleet ended."""
    took = format_duration(result.seconds)
    parts: list[RenderableType] = [
        Text(f"{result.tested} of {result.total} pairs of {len(result.nodes)} nodes in {result.rounds} rounds, {took}")
    ]
    if result.suspects:
        parts.append(section("Suspects", suspects(result.suspects)))
        if not result.settled:
            parts.append(Text("more tests could tell them apart: fabric-test --search", style="yellow"))
    elif result.tested:
        parts.append(Text("no part is suspect: every slow pair, if any, is within the noise", style="green"))
    return Group(*parts)


def suspects(found: Iterable[SuspectView]) -> RenderableType:
    rows = [(each.rail, Text("\n".join(each.parts), style="red"), each.evidence) for each in found]
    return columns((Column("RAIL"), Column("PART"), Column("EVIDENCE", prose=True)), rows, nothing="none", width=100)


def matrix(results: Iterable[PairResult], width: int) -> RenderableType:
    """Every pair's newest result, worst rail each: percent where there is room, else a coloured block or a letter."""
    newest: dict[tuple[str, str], PairResult] = {}
    for result in sorted(results, key=lambda each: each.clock):
        newest[result.a, result.b] = newest[result.b, result.a] = result
    nodes = sorted({name for key in newest for name in key})
    if not nodes:
        return Text("no pair has been tested")
    label = max(map(len, nodes))
    wide = label + 5 * len(nodes) <= min(width, 200)
    lines = []
    if wide:
        lines.append(Text(" " * label + "".join(f"{at:>5}" for at in range(1, len(nodes) + 1)), style="dim"))
    for at, a in enumerate(nodes, 1):
        row = Text(f"{a:<{label}}")
        for b in nodes:
            row.append_text(_square(newest.get((a, b)), a == b, wide, coloured=width < 10_000))
        row.append(f"  {at}", style="dim")
        lines.append(row)
    legend = Text("  ").join(Text.assemble(grade(word), f" {_LETTER[word]}") for word in _STYLE)
    return Group(*lines, legend)


def _square(result: PairResult | None, own: bool, wide: bool, *, coloured: bool) -> Text:
    if own or result is None:
        text = "-" if own else "."
        return Text(f"{text:>5}" if wide else text, style="dim")
    style = _STYLE.get(result.grade, "")
    if wide:
        share = result.share
        text = _LETTER[result.grade] if not share else f"{share:.0%}"
        return Text(f"{text:>5}", style=style)
    return Text("\N{FULL BLOCK}" if coloured else _LETTER[result.grade], style=style)


def history(results: Iterable[PairResult], width: int) -> RenderableType:
    """A pair's stored results, newest first."""
    rows: list[Sequence[Cell]] = []
    for result in results:
        chosen = result.parameters
        asked = f"{chosen.test} {chosen.seconds}s" + (" both ways" if chosen.bidirectional else "")
        for rail in result.rails:
            versions = dict.fromkeys(end.version for end in (rail.a, rail.b) if end.version)
            row = rail_row(rail)
            rows.append((when(result.clock), *row[:4], *row[5:], asked, "/".join(versions)))
        if result.error:
            rows.append((when(result.clock), "", result.a, result.b, "", "", grade("failed"), result.error, asked, ""))
    heads = (
        Column("WHEN"), *_RAILS[:4], *_RAILS[5:], Column("TEST", extra=1), Column("PERFTEST", extra=2),
    )  # fmt: skip
    return columns(heads, rows, nothing="no test is known", width=width)

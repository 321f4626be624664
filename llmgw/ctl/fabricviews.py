"""How fabrics look in a terminal: the list, one fabric, a scan, what changed. Pure."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from llmgw.ctl.client import Answer
from llmgw.ctl.show import Cell, Column, age, clean, columns, counted, fields, section, size, when, word, words
from llmgw.wire.fabricapi import (
    DiffReply,
    FabricReply,
    FabricRow,
    FabricsReply,
    FaultView,
    ManagerView,
    RouteReply,
    ScanReply,
    ScanView,
    SwitchView,
)

_FABRICS = (
    Column("FABRIC"),
    Column("NODES", right=True),
    Column("PORTS", right=True, extra=3),
    Column("SWITCHES", right=True, extra=4),
    Column("LINKS", right=True, extra=5),
    Column("MAP"),
    Column("FAULTS"),
    Column("MASTER SM"),
    Column("TROUBLE", prose=True),
)


def fabrics(answer: Answer, width: int) -> RenderableType:
    rows = map(_fabric, answer.read(FabricsReply).fabrics)
    nothing = "no InfiniBand fabric is known: no node has an active InfiniBand port (`llmgw ctl nodes`)"
    return columns(_FABRICS, rows, nothing=nothing, width=width)


def _fabric(row: FabricRow) -> tuple[Cell, ...]:
    scan = row.scan
    return (
        clean(row.name),
        str(row.nodes),
        str(row.ports),
        str(scan.counts.switches) if scan else "",
        str(scan.counts.links) if scan else "",
        _map(scan),
        counted(row.faults) if row.faults else "",
        _master(row),
        _trouble(row),
    )


def _map(scan: ScanView | None) -> Text:
    if scan is None:
        return Text("none yet", style="yellow")
    return words(Text(f"{age(scan.age)} old"), Text("" if scan.complete else "partial", style="yellow"))


def _master(row: FabricRow) -> Text:
    if not row.master:
        return Text("none known", style="yellow")
    others = f"+{row.managers - 1}" if row.managers > 1 else "no standby"
    return words(row.master, Text(others, style="dim"))


def _trouble(row: FabricRow) -> Text:
    said = [*row.troubles, *([row.error] if row.error else [])]
    return Text(clean("; ".join(said)), style="red") if said else Text("")


_MANAGERS = (
    Column("GUID"),
    Column("LID", right=True),
    Column("PRIORITY", right=True),
    Column("STATE"),
    Column("ACTIVITY", right=True, extra=1),
    Column("WHY", prose=True),
)
_FAULTS = (Column("GRADE"), Column("KIND"), Column("FAULT", prose=True), Column("REPLICAS", extra=1))
_SWITCHES = (
    Column("SWITCH"),
    Column("TIER", right=True),
    Column("RAIL"),
    Column("HOSTS", right=True),
    Column("LINKS", right=True),
    Column("FAULTS", right=True),
    Column("GUID", extra=1),
)
_SCANS = (
    Column("SCAN", right=True),
    Column("WHEN"),
    Column("FROM", extra=2),
    Column("TOOK", right=True, extra=3),
    Column("SWITCHES", right=True, extra=1),
    Column("HOSTS", right=True, extra=1),
    Column("LINKS", right=True, extra=1),
    Column("CHANGES", right=True),
    Column("RESULT", prose=True),
)


def fabric(answer: Answer, width: int) -> RenderableType:
    """One fabric; every switch only with `all_switches`, else leaves with something to say and the rest counted."""
    return _one(answer.read(FabricReply), width, everything=False)


def whole_fabric(answer: Answer, width: int) -> RenderableType:
    return _one(answer.read(FabricReply), width, everything=True)


def _one(reply: FabricReply, width: int, *, everything: bool) -> RenderableType:
    row, scan = reply.fabric, reply.fabric.scan
    counts = scan.counts if scan else None
    pairs: list[tuple[str, Cell]] = [
        ("fabric", clean(row.name) + (" (label)" if row.labelled else "")),
        ("ports", f"{row.ports} of {row.nodes} nodes"),
        ("map", words(_map(scan), f"seen from {scan.vantage}" if scan else "")),
        (
            "shows",
            f"{counts.switches} switches, {counts.hosts} hosts with {counts.adapters} adapters, {counts.links} links"
            if counts
            else "",
        ),
        ("next look", ", ".join(reply.vantages[:3]) or Text("nobody can look now", style="yellow")),
        ("trouble", _trouble(row)),
    ]
    parts: list[RenderableType] = [fields(pairs)]
    if scan and scan.holes:
        holes = Text("\n".join(clean(hole) for hole in scan.holes[:20]), style="yellow")
        parts.append(section("Holes in the map", holes))
    if reply.managers:
        shown = columns(_MANAGERS, map(_manager, reply.managers), nothing="", width=width)
        parts.append(section("Subnet managers", shown))
    if reply.faults:
        parts.append(section("Faults", columns(_FAULTS, map(_fault, reply.faults), nothing="", width=width)))
    if reply.switches:
        chosen = [one for one in reply.switches if everything or one.tier == 1 or one.faults]
        chosen = chosen if everything else chosen[:64]
        shown = columns(_SWITCHES, map(_switch, chosen), nothing="", width=width)
        left = len(reply.switches) - len(chosen)
        more = Text(f"and {left} more switches (--all)", style="dim") if left else Text("")
        parts.append(section("Switches", Group(shown, more)))
    if reply.scans:
        parts.append(section("Scans kept", columns(_SCANS, map(_scan, reply.scans), nothing="", width=width)))
    return Group(*parts)


def _manager(one: ManagerView) -> tuple[Cell, ...]:
    silent = f"silent for {age(one.silent_for)}" if one.silent_for is not None else ""
    return (
        one.guid,
        str(one.lid or ""),
        "" if one.priority is None else str(one.priority),
        word(one.state) if one.state else Text("no answer", style="yellow"),
        "" if one.activity is None else str(one.activity),
        clean("; ".join(filter(None, (silent, one.error)))),
    )


def _fault(one: FaultView) -> tuple[Cell, ...]:
    return word(one.grade), one.kind, clean(one.text), clean(", ".join(one.replicas))


def _switch(one: SwitchView) -> tuple[Cell, ...]:
    faults = Text(str(one.faults), style="red") if one.faults else Text("")
    return (
        clean(one.name), str(one.tier), one.rail, str(one.adapters or ""), str(one.links or ""), faults, one.guid,
    )  # fmt: skip


def _scan(one: ScanView) -> tuple[Cell, ...]:
    result = Text(clean(one.error), style="red") if one.error else Text("complete" if one.complete else "partial")
    counts = one.counts
    shown = (str(counts.switches), str(counts.hosts), str(counts.links)) if not one.error else ("", "", "")
    took = f"{one.seconds:.1f}s" if one.seconds else ""
    return (str(one.id), when(one.clock), clean(one.vantage), took, *shown, str(one.changes or ""), result)


def scanned(answer: Answer, width: int) -> RenderableType:
    reply = answer.read(ScanReply)
    one = reply.scan
    if one.error:
        return Text(f"fabric {clean(reply.fabric)} cannot be scanned: {clean(one.error)}", style="red")
    counts = one.counts
    state = "complete" if one.complete else "partial: " + "; ".join(one.holes[:3])
    pairs: list[tuple[str, Cell]] = [
        ("fabric", clean(reply.fabric)),
        ("scan", f"{one.id}, from {clean(one.vantage)}, in {one.seconds:.1f} s, {size(one.bytes)}"),
        ("map", Text(clean(state), style="" if one.complete else "yellow")),
        (
            "shows",
            f"{counts.switches} switches, {counts.hosts} hosts with {counts.adapters} adapters, {counts.links} links",
        ),
        ("changes", f"{one.changes} since the last complete map (`llmgw ctl fabric-diff`)" if one.changes else "none"),
        ("faults", str(one.faults) if one.faults else "none"),
    ]
    return fields(pairs)


_CHANGES = (Column("CHANGE"), Column("WHAT", prose=True), Column("NODES", extra=2), Column("REPLICAS", extra=1))


def difference(answer: Answer, width: int) -> RenderableType:
    reply = answer.read(DiffReply)
    head = Text(
        f"fabric {clean(reply.fabric)}: scan {reply.older.id} ({when(reply.older.clock)}) "
        f"to scan {reply.newer.id} ({when(reply.newer.clock)})"
    )
    rows = [
        (
            one.kind,
            clean(one.text),
            clean(_few(one.nodes)),
            clean(_few(one.replicas)) or ("all" if one.everyone else ""),
        )
        for one in reply.changes
    ]
    blind = [Text(clean(words_), style="yellow") for words_ in reply.blind]
    return Group(head, *blind, columns(_CHANGES, rows, nothing="nothing changed", width=width))


def route(answer: Answer, width: int) -> RenderableType:
    reply = answer.read(RouteReply)
    parts: list[RenderableType] = [Text(f"{at}. {clean(hop)}") for at, hop in enumerate(reply.hops, 1)]
    if reply.broken:
        parts.append(Text(f"it does not arrive: {clean(reply.broken)}", style="red"))
    parts += [Text(clean(hole), style="yellow") for hole in reply.holes]
    return Group(*parts) if parts else Text("no way is known")


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

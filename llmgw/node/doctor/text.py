"""An examination for people: what is wrong first and in full, what is well in a line each."""

from __future__ import annotations

from collections import Counter

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from llmgw.node.doctor.check import FAIL, PASS, SKIPPED, WARN
from llmgw.wire.control import DoctorReply, Finding

STYLES = {FAIL: "bold red", WARN: "yellow", PASS: "green", SKIPPED: "dim"}
ORDER = (FAIL, WARN, PASS, SKIPPED)


def rendered(reply: DoctorReply, *, everything: bool = True) -> RenderableType:
    """The findings as a table; `everything` also lists what is well and what was skipped."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("outcome", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("text", overflow="fold")
    for outcome in (FAIL, WARN, PASS) if everything else (FAIL, WARN):
        for finding in reply.findings:
            if finding.outcome == outcome:
                table.add_row(Text(outcome.upper(), STYLES[outcome]), Text(finding.check), _words(finding))
    if everything:
        # Many checks are skipped for one reason: told once, with the checks it keeps from looking.
        reasons: dict[str, list[str]] = {}
        for finding in reply.findings:
            if finding.outcome == SKIPPED:
                reasons.setdefault(finding.text, []).append(finding.check)
        for reason, checks in reasons.items():
            alone = len(checks) == 1
            group = checks[0] if alone else f"{checks[0].partition('.')[0]}, {len(checks)} checks"
            names = "" if alone else ": " + ", ".join(name.partition(".")[2] for name in checks)
            table.add_row(Text("SKIPPED", STYLES[SKIPPED]), Text(group), Text(reason + names, "dim"))
    counts = Counter(finding.outcome for finding in reply.findings)
    total = Text(", ".join(f"{counts[outcome]} {outcome}" for outcome in ORDER) + f" in {reply.seconds:.1f} s")
    return Group(table, Padding(total, (1, 0, 0, 0)))


def _words(finding: Finding) -> RenderableType:
    text = Text(finding.text)
    if finding.remedy and finding.outcome in (FAIL, WARN):
        text.append(f"\n→ {finding.remedy}", "cyan")
    return text


def show(reply: DoctorReply, *, everything: bool = True) -> None:
    Console(highlight=False).print(rendered(reply, everything=everything))

"""One replica on one screen, and what a model was. Pure."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from llmgw.ctl.client import Answer
from llmgw.ctl.show import (
    Cell,
    Column,
    age,
    clean,
    columns,
    fields,
    number,
    percent,
    progress,
    section,
    size,
    when,
    word,
    words,
)
from llmgw.wire.modelapi import HistoryReply
from llmgw.wire.replicaapi import AttemptView, EvidenceView, FailureView, MemberView, ReplicaReply, ShardView

#: Lines of a failure that are shown; the log has all of them.
_LINES = 15


def replica(answer: Answer, width: int) -> RenderableType:
    """Head, members, network, tests between them, failures, command lines: what there is of each."""
    reply = answer.read(ReplicaReply)
    parts: list[RenderableType] = [_head(reply)]
    parts.append(section("Members", columns(_MEMBERS, map(_member, reply.members), nothing="", width=width)))
    if any(member.rdma or member.shard.network or member.shard.warning for member in reply.members):
        rows = map(_network, reply.members)
        parts.append(section("What they reach each other by", columns(_NETWORK, rows, nothing="", width=width)))
    if variables := _variables(reply.members):
        title = "Environment that the plane wrote"
        parts.append(section(title, columns(_VARIABLES, variables, nothing="", width=width)))
    if reply.evidence:
        rows2 = map(_evidence, reply.evidence)
        parts.append(section("Bandwidth tests between them", columns(_EVIDENCE, rows2, nothing="", width=width)))
    parts.extend(_failures(reply))
    if commands := [_command(member.shard) for member in reply.members if member.shard.command]:
        parts.append(section("Command lines", Text("\n", no_wrap=True, overflow="ignore").join(commands)))
    return Group(*parts)


def _head(reply: ReplicaReply) -> RenderableType:
    view = reply.replica
    revision = Text(f"{view.revision}")
    if view.outdated:
        revision.append(f" (outdated: {reply.wanted_revision} is wanted)", style="yellow")
    elif reply.wanted_revision is None:
        revision.append(" (its model is wanted no more)", style="yellow")
    since = f"for {age(view.ready_age)}" if view.ready_age is not None else ""
    often = "once" if reply.restarts == 1 else f"{reply.restarts} times in a row"
    where = f"{view.address}:{view.port}" if view.port else ""
    pairs: list[tuple[str, Cell]] = [
        ("replica", Text(view.id, style="bold")),
        ("state", words(word(view.state), since, "" if reply.want == "run" else f"(to {reply.want})")),
        ("model", f"{view.model} ({reply.engine}, {reply.source})"),
        ("revision", revision),
        ("generation", str(view.generation)),
        ("nodes", "+".join(view.nodes)),
        ("answers at", where if view.state in ("ready", "draining") else ""),
        ("in flight", number(view.in_flight)),
        (
            "placed",
            words(f"{age(view.age)} ago" if view.age is not None else "", f"({reply.why})" if reply.why else ""),
        ),
        ("failed", often if reply.restarts else ""),
        ("waits for", Text("\n".join(map(clean, reply.waiting)), style="yellow")),
        ("warning", Text(clean(view.warning), style="red")),
    ]
    return fields(pairs)


_MEMBERS = (
    Column("RANK", right=True),
    Column("SHARD"),
    Column("NODE"),
    Column("STATE", prose=True),
    Column("FOR", right=True, extra=2),
    Column("ADDRESS", extra=3),
    Column("PORTS", extra=4),
    Column("PID", right=True, extra=5),
    Column("CPU", right=True, extra=7),
    Column("MEMORY", right=True, extra=6),
    Column("GPU MEMORY", right=True, extra=6),
    Column("FAILED", right=True, extra=3),
    Column("GPUS", extra=8),
    Column("DETAIL", extra=4, prose=True),
)


def _member(member: MemberView) -> tuple[Cell, ...]:
    shard = member.shard
    ports = {**({"http": shard.port} if shard.port else {}), **member.ports}
    return (
        str(shard.rank),
        shard.id,
        words(shard.node, "" if member.stage in ("ready", "") else word(member.stage)),
        words(
            word(shard.state),
            "" if shard.want == "run" else f"to {shard.want}",
            progress(shard.progress),
            f"again in {age(shard.retry_in)}" if shard.retry_in is not None else "",
            f"{age(shard.stop_in)} left" if shard.stop_in is not None else "",
        ),
        age(shard.state_age),
        shard.address,
        ", ".join(f"{purpose} {port}" for purpose, port in ports.items()),
        str(shard.pid or "") + (" adopted" if shard.adopted else ""),
        percent(shard.cpu_percent),
        size(shard.rss_bytes),
        size(shard.gpu_memory_bytes),
        str(shard.restarts) if shard.restarts else "",
        ", ".join(shard.gpus),
        clean(shard.detail),
    )


_NETWORK = (
    Column("RANK", right=True),
    Column("NODE"),
    Column("MEANT"),
    Column("ITS LOG SAYS", prose=True),
    Column("WARNING", extra=1, prose=True),
)


def _network(member: MemberView) -> tuple[Cell, ...]:
    shard = member.shard
    return (
        str(shard.rank),
        shard.node,
        ", ".join(member.rdma) or "sockets",
        clean(shard.network) or ("nothing of it" if shard.state == "ready" else "nothing yet"),
        Text(clean(shard.warning), style="red"),
    )


_VARIABLES = (Column("RANK", right=True), Column("NAME"), Column("VALUE"), Column("INSTEAD OF", extra=1))


def _variables(members: tuple[MemberView, ...]) -> list[tuple[Cell, ...]]:
    """Each variable once where all members have it alike, else by rank."""
    found: list[tuple[Cell, ...]] = []
    ranks: dict[tuple[str, str, str, str], list[int]] = {}
    for member in members:
        for one in member.environment:
            ranks.setdefault((one.name, one.value, one.by, one.instead), []).append(member.shard.rank)
    for (name, value, by, instead), those in sorted(ranks.items()):
        who = "all" if len(those) == len(members) else ",".join(map(str, those))
        found.append((who, name, value, f"{instead} (the profile says so)" if by == "profile" else ""))
    return found


_EVIDENCE = (
    Column("BETWEEN"),
    Column("TESTED"),
    Column("GOOD", extra=1),
    Column("BAD"),
    Column("IN WORDS", extra=2, prose=True),
)


def _evidence(found: EvidenceView) -> tuple[Cell, ...]:
    between = f"{found.a} - {found.b}"
    if found.age is None:
        return between, "never", "", "", f"`llmgw ctl fabric-test {found.a} {found.b}` tests them"
    tested = words(f"{age(found.age)} ago", Text("(too old to count)", style="yellow") if found.stale else "")
    bad = ", ".join(f"{rail} ({found.figures[rail]})" if rail in found.figures else rail for rail in found.bad)
    return between, tested, ", ".join(found.good), Text(bad, style="red"), clean(found.text)


def _failures(reply: ReplicaReply) -> list[RenderableType]:
    """The first failure of the loop, with its lines; the last one too where that is another."""
    first, last = reply.first, reply.last
    if first is None or last is None:
        return [_attempt("The last failure", one) for one in (first, last) if one is not None]
    if (first.shard, first.failure.generation) == (last.shard, last.failure.generation):
        return [_attempt("The failure" if reply.restarts <= 1 else "The first failure", first)]
    return [_attempt("The first failure", first), _attempt("The last failure", last)]


def _attempt(title: str, attempt: AttemptView) -> RenderableType:
    failure = attempt.failure
    pairs: list[tuple[str, Cell]] = [
        ("when", when(failure.clock)),
        ("where", f"{attempt.shard} on {attempt.node}, generation {failure.generation}"),
        ("cause", Text(clean(failure.cause) or "none known", style="red")),
        ("ended by", _ended(failure)),
        ("whole log", f"`{attempt.log}`"),
    ]
    parts: list[RenderableType] = [fields(pairs)]
    parts += [Text(f"  {clean(line)}", style="dim") for line in failure.lines[-_LINES:]]
    return section(title, Group(*parts))


def _ended(failure: FailureView) -> str:
    if failure.signal:
        return failure.signal
    return f"exit status {failure.exit_code}" if failure.exit_code is not None else ""


def _command(shard: ShardView) -> Text:
    from shlex import join

    return Text(f"{shard.id}: {clean(join(shard.command))}")


_HISTORY = (
    Column("REVISION"),
    Column("WANTED UNTIL"),
    Column("REPLICAS", right=True),
    Column("ENGINE", extra=2),
    Column("SOURCE", extra=3),
    Column("CHANGED", prose=True),
)


def history(answer: Answer, width: int) -> RenderableType:
    reply = answer.read(HistoryReply)
    oldest = "the oldest that is kept" if len(reply.revisions) > 1 else "the only one that is known"
    rows = (
        (
            Text(str(one.revision), style="bold" if one.current else ""),
            "now" if one.current else when(one.clock),
            str(one.replicas or ""),
            one.engine,
            one.source,
            "\n".join(one.changes) or oldest,
        )
        for one in reply.revisions
    )
    return columns(_HISTORY, rows, nothing="", width=width)

"""What `llmgw ctl` shows of the fleet: an answer of the plane as a table that fits a width. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from llmgw.ctl.client import Answer
from llmgw.ctl.replicatables import replica_table
from llmgw.ctl.show import (
    Cell,
    Column,
    age,
    clean,
    columns,
    counted,
    fields,
    of,
    percent,
    section,
    size,
    word,
    words,
)
from llmgw.wire.api import StatusReply
from llmgw.wire.apicommon import ProblemsReply, ProblemView
from llmgw.wire.facts import EngineInstall
from llmgw.wire.modelapi import ModelsReply, ModelView, WhyReply
from llmgw.wire.nodeapi import NodeRow, NodesReply


def _placed(now: StatusReply) -> Text:
    """The replicas that have a place, by state, and how many have none."""
    missing = max(0, now.replicas_wanted - sum(now.replicas.values()))
    if not now.replicas:
        return Text("none placed")
    return (
        Text.assemble(counted(now.replicas), (f", {missing} not placed", "yellow"))
        if missing
        else counted(now.replicas)
    )


def status(answer: Answer, width: int) -> RenderableType:
    now = answer.read(StatusReply)
    left = f", {age(now.waiting_for)} left" if now.waiting_for else ""
    pairs: list[tuple[str, Cell]] = [
        ("plane", f"{now.plane}, version {now.version}, up {age(now.uptime)}"),
        ("nodes", _counts(now.nodes, f"{now.nodes_connected} connected", now.nodes_cordoned, "cordoned or draining")),
        ("GPUs", str(now.gpus) if now.gpus else ""),
        ("models", f"{now.models_complete} of {now.models} complete"),
        ("replicas", words(f"{now.replicas_wanted} wanted:", _placed(now))),
        ("strays", f"{now.strays} processes that no placement claims" if now.strays else ""),
        ("problems", counted(now.problems) if now.problems else "none open"),
        ("gateways", _gateways(now.gateway)),
        ("waiting", Text(f"{now.waiting}{left}", style="yellow") if now.waiting else ""),
    ]
    return fields(pairs)


#: What gateways count, in the order and the words in which it is told; all but the first only when there is any.
_COUNTED = {
    "requests": "requests",
    "failed": "failed",
    "left": "left by their clients",
    "retries": "tried again",
    "in_flight": "in flight",
    "held": "waiting for a model",
    "prompt_tokens": "tokens in",
    "completion_tokens": "tokens out",
}


def _gateways(counts: Mapping[str, float | int | str | None]) -> Text:
    shown = [f"{counts[name]} {words}" for name, words in _COUNTED.items() if counts.get(name)]
    if counts.get("requests") == 1:
        shown[0] = "1 request"
    if "requests" in counts and not counts["requests"]:
        shown.insert(0, "no request yet")
    # A newer plane may count more.
    shown += [f"{name} {value}" for name, value in counts.items() if name not in _COUNTED and value]
    return Text(", ").join(Text(part, style="red" if part.endswith(" failed") else "") for part in shown)


def _counts(states: dict[str, int], connected: str, some: int, of_what: str) -> Text:
    shown = counted(states) if states else Text("none has joined")
    shown.append(f", {connected}")
    if some:
        shown.append(f", {some} {of_what}")
    return shown


_NODES = (
    Column("NODE"),
    Column("STAGE"),
    Column("HEARD", right=True, extra=3),
    Column("SHARDS", right=True),
    Column("CPU", right=True, extra=4),
    Column("MEMORY", right=True, extra=5),
    Column("GPUS", right=True, extra=2),
    Column("PORTS", right=True, extra=2),
    Column("PROBLEMS", extra=1),
    Column("ENGINES", extra=6),
    Column("ADDRESS", extra=7),
    Column("AGENT", extra=8),
    Column("LABELS", extra=9),
)


def nodes(answer: Answer, width: int) -> RenderableType:
    found = answer.read(NodesReply).nodes
    return columns(_NODES, map(_node, found), nothing="no node has joined (`llmgw ctl token create`)", width=width)


def _node(node: NodeRow) -> tuple[Cell, ...]:
    used = None
    if node.memory_bytes is not None and node.memory_available_bytes is not None:
        used = node.memory_bytes - node.memory_available_bytes
    return (
        node.id,
        stage(node),
        age(node.heard_age) if node.heard_age is not None else "never",
        f"{node.shards_ready}/{node.shards}",
        percent(node.cpu_percent),
        of(size(used), size(node.memory_bytes)),
        _gpus(node),
        f"{node.ports_active}/{node.ports}" if node.ports else "",
        counted(node.problems),
        engines(node.engines),
        node.address,
        node.version,
        ",".join(f"{key}={value}" for key, value in node.labels.items()),
    )


def _gpus(node: NodeRow) -> str:
    memory = of(size(node.gpu_memory_used_bytes), size(node.gpu_memory_bytes))
    return f"{node.gpus} ({memory})" if node.gpus and memory else str(node.gpus or "")


def stage(node: NodeRow) -> Text:
    """A node's stage, and what an operator has said of it."""
    steered = "drained" if node.drained else "draining" if node.draining else "cordoned" if node.cordoned else ""
    left = f"({node.shards} left)" if steered == "draining" and node.shards else ""
    return words(word(node.stage), word(steered), left, "" if node.connected else word("no stream"))


def engines(installs: tuple[EngineInstall, ...]) -> str:
    shown = []
    for found in installs:
        if found.state == "unsupported":
            continue  # `ctl engines` says why
        state = "" if found.state == "installed" else f"({found.state})"
        shown.append(" ".join(filter(None, (found.engine, found.version, state))))
    return ", ".join(shown)


_MODELS = (
    Column("MODEL"),
    Column("READY", right=True),
    Column("PLACED", right=True, extra=1),
    Column("WANTED", right=True),
    Column("ENGINE", extra=3),
    Column("NODES EACH", right=True, extra=5),
    Column("GPUS EACH", right=True, extra=4),
    Column("SOURCE", extra=6),
    Column("REQUESTS", right=True, extra=7),
    Column("HELD", right=True, extra=2),
    Column("SERVED ELSEWHERE BY", extra=3),
    Column("CHANGE", extra=1, prose=True),
    Column("WHY NOT ALL", extra=2, prose=True),
)


def models(answer: Answer, width: int) -> RenderableType:
    rows = (
        (
            model.name,
            Text(str(model.ready), style="green" if model.ready >= model.wanted else "yellow"),
            str(model.placed),
            words(str(model.wanted), f"of {model.replicas}, unloaded" if model.unloaded else ""),
            model.engine,
            str(model.nodes_each) if model.nodes_each > 1 else "",
            str(model.gpus_each) if model.gpus_each else "",
            model.source,
            words(str(model.requests), f"({model.failed} failed)" if model.failed else "") if model.requests else "",
            str(model.held) if model.held else "",
            ", ".join(model.elsewhere),
            _change(model),
            "; ".join(filter(None, (model.reason, model.smallest_change))),
        )
        for model in answer.read(ModelsReply).models
    )
    return columns(_MODELS, rows, nothing="no model is wanted (`llmgw ctl apply -f models.toml`)", width=width)


def _change(model: ModelView) -> Text:
    """How a change of its profile goes on, and what stops it."""
    if model.paused:
        return Text(f"paused: {clean(model.paused)}; {model.rollout}", style="red")
    return Text(model.rollout, style="yellow")


_REASONS = (
    Column("NODE"),
    Column("CHECK"),
    Column("HAS"),
    Column("NEEDED"),
    Column("SEEN", right=True, extra=1),
    Column("IN WORDS", extra=2, prose=True),
)


_STANDINGS = (
    Column("SHARD"),
    Column("STATE"),
    Column("NODE"),
    Column("GEN", right=True, extra=1),
    Column("WHY THERE, WHAT IS IN ITS WAY", prose=True),
)


def why(answer: Answer, width: int) -> RenderableType:
    reply = answer.read(WhyReply)
    head = Text(f"{reply.model}: {reply.wanted} wanted, {reply.placed} placed, {reply.ready} ready")
    complete = reply.ready >= reply.wanted == reply.placed
    parts: list[RenderableType] = [head, Text(reply.text, style="green" if complete else "yellow")]
    if reply.waiting and not complete and reply.waiting not in reply.text:
        parts.append(Text(reply.waiting, style="yellow"))
    if len(reply.changes) > 1:
        parts.append(Text("The smallest set of changes that would help:"))
        parts += [Text(f"  {number}. {clean(one.text)}") for number, one in enumerate(reply.changes, 1)]
    elif reply.smallest_change:
        parts.append(Text(f"The smallest change that would help: {reply.smallest_change}"))
    if reply.reasons:
        reasons = (
            (r.node, r.check, r.value, r.needed, f"{age(r.age)} ago" if r.age is not None else "", r.text)
            for r in reply.reasons
        )
        parts.append(section("Why not there", columns(_REASONS, reasons, nothing="", width=width)))
    if reply.replicas:
        parts.append(section("Replicas", replica_table(reply.replicas, width)))
    if reply.standings and not complete:
        rows = ((s.shard, word(s.state), s.node, str(s.generation), clean(s.text)) for s in reply.standings)
        parts.append(section("Shards", columns(_STANDINGS, rows, nothing="", width=width)))
    for replica in reply.replicas:
        for shard in replica.shards:
            if shard.state != "ready" and shard.last_failure is not None and shard.last_failure.lines:
                lines = Text("\n").join(Text(clean(line)) for line in shard.last_failure.lines[-10:])
                parts.append(section(f"Last lines of {shard.id} on {shard.node}", lines))
    return Group(*parts)


_PROBLEMS = (
    Column("GRADE"),
    Column("NODE"),
    Column("SUBJECT", prose=True),
    Column("CODE"),
    Column("FOR", right=True),
    Column("PROBLEM", prose=True),
    Column("REMEDY", extra=1, prose=True),
)


def problems(answer: Answer, width: int) -> RenderableType:
    return problem_table(answer.read(ProblemsReply).problems, width)


def problem_table(found: tuple[ProblemView, ...], width: int) -> RenderableType:
    rows = (
        (
            words(word(p.grade), f"(known, {age(p.acknowledged_for)})" if p.acknowledged_for is not None else ""),
            p.node,
            p.subject,
            p.code,
            age(p.age),
            clean(p.text),
            p.remedy,
        )
        for p in found
    )
    return columns(_PROBLEMS, rows, nothing="no problem is open", width=width)

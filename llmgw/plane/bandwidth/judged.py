"""A rail's result from what its sides said: the figure with its grade, or the failure with its words. Pure."""

from __future__ import annotations

import attrs
from msgspec.structs import replace

from llmgw.plane.bandwidth.plan import Plan, RailPlan
from llmgw.rdma.grade import Thresholds, Verdict, grade
from llmgw.rdma.link import End, Link, Refusal
from llmgw.rdma.outcome import Figure, Said
from llmgw.rdma.results import EndView, Failure, RailResult
from llmgw.wire.control import BandwidthReply
from llmgw.wire.facts import NodeId, Port


def refused(plan: Plan, made: RailPlan) -> RailResult:
    """A rail that was not started, because its link cannot work."""
    why = made.link if isinstance(made.link, Refusal) else Refusal("no-meeting", "the sides cannot meet")
    return RailResult(
        rail=made.rail.name,
        a=_bare(plan.a, made.rail.a),
        b=_bare(plan.b, made.rail.b),
        kind=made.rail.a.kind,
        paired_by=made.rail.by,
        verdict=Verdict(grade="failed", rule="not started", why=(why.reason,)),
        failure=Failure(side="", error=why.reason, code=why.code, remedy=why.remedy),
    )


def ended(
    plan: Plan,
    made: RailPlan,
    link: Link,
    client: Said,
    server: Said,
    said: Figure | Failure,
    seconds: float,
    thresholds: Thresholds,
) -> RailResult:
    """A rail that ran."""
    ends = _end(link.a, client), _end(link.b, server)
    warnings = list(link.warnings)
    if made.meeting is not None and made.meeting.over_rail:
        warnings.append("the two sides met over the rail under test: a cut link hangs the test instead of failing it")
    failure, gbps, latency = None, None, None
    counters = {f"{end.node} {end.device}/{end.number}": end.counters for end in ends if end.counters}
    if isinstance(said, Failure):
        failure = said
        why = [said.text]
        for name, found in counters.items():
            why += [f"{name}: {counter} grew by {by}" for counter, by in found.items()]
        verdict = Verdict(grade="failed", rule="no figure", why=tuple(why))
    elif said.gbps is None:
        latency = said.latency_us
        verdict = Verdict(grade="measured", rule="latency is measured, not graded")
    else:
        gbps = said.gbps
        verdict = grade(
            gbps,
            _sharing(plan, made, link),
            bidirectional=plan.parameters.bidirectional,
            gpu_a=made.gpus[0],
            gpu_b=made.gpus[1],
            counters=counters,
            size=plan.parameters.size,
            queue_pairs=plan.parameters.queue_pairs,
            thresholds=thresholds,
        )
    return RailResult(
        rail=made.rail.name,
        a=ends[0],
        b=ends[1],
        kind=link.kind,
        mtu=link.mtu,
        rate_gbps=link.rate_gbps,
        paired_by=made.rail.by,
        gbps=gbps,
        latency_us=latency,
        verdict=verdict,
        failure=failure,
        warnings=tuple(warnings),
        seconds=seconds,
    )


def _sharing(plan: Plan, made: RailPlan, link: Link) -> Link:
    """The link as its slots carry it: rails that are tested together may be functions of one adapter."""
    if not plan.parameters.at_once:
        return link
    tested = [each.rail for each in plan.rails if isinstance(each.link, Link)]
    a = sum(_slot(rail.a) == _slot(made.rail.a) for rail in tested)
    b = sum(_slot(rail.b) == _slot(made.rail.b) for rail in tested)
    return attrs.evolve(link, a=attrs.evolve(link.a, sharing=a), b=attrs.evolve(link.b, sharing=b))


def _slot(port: Port) -> str:
    """The adapter's place without its function; a port whose place is unknown shares it with nobody."""
    return port.pci.rpartition(".")[0] or f"{port.device}/{port.number}"


def _bare(node: NodeId, port: Port) -> EndView:
    return EndView(node=node, device=port.device, number=port.number)


def _end(end: End, said: Said) -> EndView:
    shown = EndView(node=end.node, device=end.device, number=end.number, gid_index=end.gid_index, address=end.address)
    if not isinstance(said, BandwidthReply):
        return replace(shown, error=said.error)
    return replace(
        shown,
        version=said.version,
        exit_code=said.exit_code,
        error=said.error,
        cause=said.cause,
        lines=said.lines,
        command=said.command,
        state_before=said.state_before,
        state_after=said.state_after,
        counters=said.counters,
        busy=said.busy,
    )

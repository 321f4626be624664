"""What bandwidth tests say of pairs of nodes, as far as placement is concerned (D6). Pure.

Bad is a rail that a test graded bad, or that failed in a way which blames the wires: packets that nobody acknowledged,
a link that died, data that stopped flowing. A tool that was missing, a process that was killed, a node that was busy
or a test of all rails at once says nothing of one rail; nor does a rail that was not tested because its port was down,
since the port itself tells that better, and sooner. Of each rail the newest test counts: one of another rail does not
clear it.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from immutables import Map

from llmgw.plane.world import Evidence, Settings, World
from llmgw.rdma.results import EndView, PairResult, RailResult, summary
from llmgw.rdma.tournament import key
from llmgw.wire.facts import NodeId

Pair = tuple[NodeId, NodeId]

#: Causes of a failed run that blame the way between two adapters: see `llmgw.rdma.causes` and `llmgw.rdma.outcome`.
WIRES = frozenset(
    {"completion", "link-died", "local-error", "no-answer", "no-path", "receiver-not-ready", "time-limit"}
)
#: Grades of a rail that works as it should.
WELL = ("good", "fair")


def pair_of(result: PairResult) -> Pair:
    first, second = key(result.a, result.b)
    return NodeId(first), NodeId(second)


def heard(before: Evidence | None, result: PairResult, now: float, clock: float) -> Evidence | None:
    """What is known of a pair after one more test; what was known before where it says nothing.

    `now` and `clock` are the plane's monotonic and wall clock at this moment, which tell when the test was.
    """
    bad, good, figures = _told(result)
    if not bad and not good:
        return before
    if before is not None and before.clock > result.clock:
        return before
    tested = {*bad, *good}
    old_bad = tuple(end for end in before.bad if end not in tested) if before is not None else ()
    old_good = tuple(end for end in before.good if end not in tested) if before is not None else ()
    since = {end: before.since.get(end, before.clock) for end in (*old_bad, *old_good)} if before is not None else {}
    kept = {end: words for end, words in before.figures.items() if end in old_bad} if before is not None else {}
    return Evidence(
        clock=result.clock,
        bad=(*bad, *old_bad),
        good=(*good, *old_good),
        text=summary(result),
        at=now + result.clock - clock,
        figures={**kept, **figures},
        since=since,
    )


def of_history(results: Iterable[PairResult], now: float, clock: float, settings: Settings) -> Map[Pair, Evidence]:
    """What stored tests say, as far as they are not too old to count."""
    found: dict[Pair, Evidence] = {}
    for result in sorted(results, key=lambda result: result.clock):
        if clock - result.clock <= settings.evidence:
            known = heard(found.get(pair_of(result)), result, now, clock)
            if known is not None:
                found[pair_of(result)] = known
    return Map(found)


def tested(world: World, result: PairResult, now: float, clock: float) -> World:
    """The world after a test; the same when it told nothing that placement asks for."""
    pair = pair_of(result)
    before = world.evidence.get(pair)
    known = heard(before, result, now, clock)
    if known is None or known is before:
        return world
    return attrs.evolve(world, evidence=world.evidence.set(pair, known), version=world.version + 1)


def aged(world: World, now: float, settings: Settings) -> World:
    """The world without tests that are too old to count, or of nodes that are no more."""
    old = [
        pair
        for pair, known in world.evidence.items()
        if (known.at is not None and now - known.at > settings.evidence)
        or pair[0] not in world.nodes
        or pair[1] not in world.nodes
    ]
    if not old:
        return world
    evidence = world.evidence
    for pair in old:
        evidence = evidence.delete(pair)
    return attrs.evolve(world, evidence=evidence, version=world.version + 1)


def _told(result: PairResult) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]:
    """The ends of bad rails, those of good ones, and what the bad ones showed."""
    bad: list[str] = []
    good: list[str] = []
    figures: dict[str, str] = {}
    for rail in result.rails:
        ends = [end(side) for side in (rail.a, rail.b)]
        busy = bool(result.busy or rail.a.busy or rail.b.busy)
        if _blames(rail, busy or result.parameters.at_once):
            bad += ends
            figures |= dict.fromkeys(ends, shown(rail))
        elif rail.failure is None and rail.verdict.grade in WELL:
            good += ends
    return tuple(bad), tuple(good), figures


def end(side: EndView) -> str:
    """One end of a rail by name: "gpu-07 mlx5_0/1"."""
    return f"{side.node} {side.device}/{side.number}"


def shown(rail: RailResult) -> str:
    """What a bad rail showed: "12 Gb/s of 400", or why it had no figure."""
    if rail.failure is not None:
        return rail.failure.cause or rail.failure.error
    of = f" of {rail.rate_gbps:g}" if rail.rate_gbps else ""
    return f"{rail.gbps:.4g} Gb/s{of}" if rail.gbps is not None else rail.verdict.grade


def _blames(rail: RailResult, shared: bool) -> bool:
    if rail.failure is not None:
        return rail.failure.code in WIRES
    return rail.verdict.grade == "bad" and not shared

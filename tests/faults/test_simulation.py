"""The crash matrix in small: some of its schedules, that it repeats itself, and that it sees what it is there for."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import attrs
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.crash.kernel import Kernel, Process
from benchmarks.crash.schedule import AGENT_STEPS, KINDS, PLANE_STEPS, Fault, Schedule, drawn, shrunk
from benchmarks.crash.simulation import Outcome, heeds_the_clock, simulate, wide_text
from llmgw.node import tend
from llmgw.node.engines.environment import GENERATION
from llmgw.plane import attempts, steps
from llmgw.plane.gang import Replica

#: n2 takes everything, is lost with all others while the plane is away, and comes back while a slow store writes
#: where its shards go.
RETURNS_WHILE_STORED = Schedule(
    2,
    ("n1", "n2", "n3", "n4"),
    (
        Fault(0.5, "apply", number=13852),
        Fault(26.73, "plane killed", seconds=53.0),
        Fault(31.8, "store slow", seconds=73.73),
        Fault(81.91, "plane frozen", seconds=68.53),
    ),
    lingers=80.0,
)

#: A failed attempt's successor is told, and the agent dies before it has written that down.
DIES_BEFORE_THE_RECORD = Schedule(
    9,
    ("n1",),
    (
        Fault(0.5, "apply", number=13852),
        Fault(12.0, "agent killed at", "n1", "record", number=1),
        Fault(12.0, "engine killed", "n1"),
    ),
)


@pytest.mark.parametrize("first", range(20_000, 20_048, 6))
def test_whatever_dies_there_are_never_two_nor_none_nor_one_that_nobody_knows(first: int) -> None:
    for seed in range(first, first + 6):
        outcome = simulate(drawn(seed))
        assert outcome.fine, f"{outcome}\n{drawn(seed)}"


def test_a_schedule_takes_the_same_course_twice() -> None:
    schedule = drawn(7)
    first, second = simulate(schedule), simulate(schedule)
    assert first.commands
    assert first == second


def test_a_jump_of_the_machines_clock_decides_nothing() -> None:
    jumps = tuple(Fault(float(at), "wall clock jumps", number=at) for at in range(1, 80, 3))
    for seed in (3, 5, 8):
        schedule = drawn(seed)
        schedule = attrs.evolve(schedule, faults=tuple(sorted((*schedule.faults, *jumps), key=lambda fault: fault.at)))
        assert not heeds_the_clock(schedule)


def test_every_kind_of_fault_can_be_done_alone() -> None:
    for kind in KINDS:
        faults = (Fault(0.5, "apply", number=13852), Fault(6.0, kind, "n1", "told", 5.0, 3))
        outcome = simulate(Schedule(1, ("n1", "n2"), faults))
        assert outcome.fine, f"{kind}: {outcome}"


@pytest.mark.parametrize("schedule", [RETURNS_WHILE_STORED, DIES_BEFORE_THE_RECORD])
def test_what_the_matrix_has_found_before_stays_mended(schedule: Schedule) -> None:
    outcome = simulate(schedule)
    assert outcome.fine, outcome


def test_it_sees_an_orphan_when_the_plane_forgets_what_a_node_may_still_run() -> None:
    with mock.patch.object(steps, "_left_behind", return_value={}):
        assert simulate(RETURNS_WHILE_STORED).orphans


def test_it_sees_a_lost_shard_when_the_plane_waits_for_an_attempt_that_no_node_runs() -> None:
    with mock.patch.object(attempts, "unmentioned", lambda world, *_: (world, ())):
        assert simulate(DIES_BEFORE_THE_RECORD).lost


#: One replica over both nodes, and nothing beside it.
WIDE = next(n for n in range(1000) if "alpha" not in wide_text(n, 2) and "replicas = 1" in wide_text(n, 2))


def wide(*faults: Fault) -> Schedule:
    return Schedule(3, ("n1", "n2"), (Fault(0.5, "apply wide", number=WIDE), *faults))


def begun(outcome: Outcome) -> list[str]:
    return [line for line in outcome.commands if line.startswith("began")]


@pytest.fixture
def untroubled() -> Iterator[None]:
    """Engines that fail of themselves do not: what dies was killed."""

    async def lasts(*_: object) -> None:
        await trio.lowlevel.checkpoint()

    with mock.patch.object(Kernel, "_fail", lasts):
        yield


@pytest.mark.parametrize("node", ["n1", "n2"])
@pytest.mark.usefixtures("untroubled")
def test_a_member_that_dies_takes_the_whole_replica_to_the_next_generation(node: str) -> None:
    outcome = simulate(wide(Fault(30.0, "engine killed", node)))
    assert outcome.fine, outcome
    assert outcome.gangs == 2
    assert {line[9:] for line in begun(outcome)} == {f"('wide-0-{rank}', {n})" for rank in (0, 1) for n in (1, 2)}


@pytest.mark.usefixtures("untroubled")
def test_an_agent_that_dies_leaves_the_members_of_a_replica_serving() -> None:
    kills = [Fault(30.0, "agent killed", "n1", seconds=2.0), Fault(31.0, "agent killed", "n2", seconds=5.0)]
    outcome = simulate(wide(*kills, Fault(33.0, "plane killed", seconds=3.0)))
    assert outcome.fine, outcome
    assert (outcome.gangs, len(begun(outcome))) == (1, 2)


@pytest.mark.parametrize("step", AGENT_STEPS)
@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_member_whose_agent_dies_at_any_step_makes_no_second_and_no_half_replica(node: str, step: str) -> None:
    for number in range(3):
        armed = Fault(0.4, "agent killed at", node, step, number=number)
        for again in (Fault(20.0, "engine killed", node), Fault(20.0, "apply wide", number=WIDE + 1)):
            outcome = simulate(wide(armed, attrs.evolve(armed, at=19.9), again))
            assert outcome.fine, f"{outcome}\n{step} {number} {again}"


@pytest.mark.parametrize("step", PLANE_STEPS)
def test_a_plane_that_dies_at_any_step_makes_no_second_and_no_half_replica(step: str) -> None:
    for number in range(4):
        armed = Fault(0.4, "plane killed at", step=step, number=number)
        for again in (Fault(20.0, "engine killed", "n2"), Fault(20.0, "apply", number=1)):
            outcome = simulate(wide(armed, attrs.evolve(armed, at=19.9), again))
            assert outcome.fine, f"{outcome}\n{step} {number} {again}"


@pytest.mark.usefixtures("untroubled")
def test_it_sees_a_replica_that_is_left_with_a_dead_member() -> None:
    with mock.patch.object(Replica, "broken", property(lambda replica: False)):
        assert simulate(wide(Fault(30.0, "engine killed", "n2"))).lost


@pytest.mark.usefixtures("untroubled")
def test_it_sees_a_leader_over_members_of_another_attempt() -> None:
    """As if a node took a follower's next attempt for the one that runs."""
    with mock.patch.object(Process, "generation", property(lambda p: int(p.env[GENERATION]) + p.shard.endswith("-1"))):
        outcome = simulate(wide())
    assert any("leads wide-0-1 generation 2" in wrong for wrong in outcome.wrongs)
    assert any("wide-0 is routed to and wide-0-1 runs at generation 2" in wrong for wrong in outcome.wrongs)


def test_it_sees_two_of_a_shard_when_the_node_ends_no_process() -> None:
    async def leave(*_: object, **__: object) -> tuple[None, None]:
        return None, None

    with mock.patch.object(tend, "clear", leave):
        outcomes = [simulate(drawn(seed)) for seed in range(20_007, 20_011)]
        assert any(outcome.duplicates or outcome.orphans for outcome in outcomes)


@given(st.integers(0, 1 << 30), st.sets(st.integers(0, 20), min_size=1, max_size=3))
@settings(max_examples=50)
def test_a_schedule_is_cut_down_to_the_faults_that_matter(seed: int, needed: set[int]) -> None:
    schedule = drawn(seed)
    matter = {schedule.faults[at % len(schedule.faults)] for at in needed}
    smallest = shrunk(schedule, lambda part: matter <= set(part.faults))
    assert set(smallest.faults) == matter

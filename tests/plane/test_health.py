"""Problems are a set with a history (B3)."""

from __future__ import annotations

from msgspec.structs import replace

from llmgw.plane import operate
from llmgw.plane.world import World
from llmgw.wire.agent import Heartbeat
from llmgw.wire.facts import Grade, NodeId, Problem
from tests.plane.worlds import CLOCK, fold_events, register, world

N = NodeId("n1")
XID = Problem(subject="gpu:GPU-n1-0", code="xid-79", grade=Grade.BAD, text="fell off the bus")


def told(before: World, *problems: Problem, now: float) -> tuple[World, list[str]]:
    after, events = fold_events(before, "n1", Heartbeat(problems=problems), now)
    return after, [event.text for event in events]


def test_a_problem_of_a_node_without_gpus_is_the_nodes_own() -> None:
    clock = Problem(subject="node", code="clock", grade=Grade.WARN, text="off by 3 s")
    after, said = told(world(register("n1")), clock, now=5.0)
    assert set(after.nodes[N].problems) == {("node", "clock")}
    assert said == ["n1: clock: off by 3 s"]


def test_a_problem_keeps_when_it_was_first_and_last_seen() -> None:
    after, said = told(world(register("n1", gpu=1)), XID, now=5.0)
    assert said == ["n1 gpu:GPU-n1-0: xid-79: fell off the bus"]
    after, said = told(after, XID, now=25.0)
    open_ = after.nodes[N].problems["gpu:GPU-n1-0", "xid-79"]
    assert (open_.first_at, open_.last_at, open_.first_clock, said) == (5.0, 25.0, CLOCK + 5.0, [])


def test_the_same_problem_told_twice_in_a_list_is_one() -> None:
    after, said = told(world(register("n1", gpu=1)), XID, XID, now=5.0)
    assert (len(after.nodes[N].problems), len(said)) == (1, 1)


def test_a_problem_that_is_gone_is_cleared_with_its_length() -> None:
    after, _ = told(world(register("n1", gpu=1)), XID, now=5.0)
    after, said = told(after, now=65.0)
    assert len(after.nodes[N].problems) == 0
    assert said == ["n1 gpu:GPU-n1-0: xid-79: cleared after 60 s: fell off the bus"]


def test_a_grade_that_changed_is_an_event_and_new_numbers_are_none() -> None:
    warn = Problem(subject="node", code="disk", grade=Grade.WARN, text="5 % free")
    after, _ = told(world(register("n1")), warn, now=5.0)
    after, said = told(after, Problem(subject="node", code="disk", grade=Grade.WARN, text="4 % free"), now=10.0)
    assert said == []
    assert after.nodes[N].problems["node", "disk"].problem.text == "4 % free"
    _, said = told(after, Problem(subject="node", code="disk", grade=Grade.BAD, text="0 % free"), now=15.0)
    assert said == ["n1: disk: warn -> bad: 0 % free"]


def test_a_problem_that_comes_back_within_its_acknowledgement_stays_acknowledged() -> None:
    after, _ = told(world(register("n1", gpu=1)), XID, now=5.0)
    after, _ = operate.acknowledge(after, N, XID.subject, XID.code, 100.0, 5.0, CLOCK)
    after, _ = told(after, now=10.0)
    after, _ = told(after, XID, now=20.0)
    assert after.nodes[N].problems[XID.subject, XID.code].acknowledged_until == 105.0


def test_a_register_tells_problems_as_well() -> None:
    after = world(replace(register("n1", gpu=1), problems=(XID,)))
    assert set(after.nodes[N].problems) == {(XID.subject, XID.code)}
    after, events = fold_events(after, "n1", register("n1", gpu=1), 9.0)
    assert [e.kind for e in events] == ["problem-cleared"]

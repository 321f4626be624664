"""Silence, and when the plane distrusts itself instead (D1, D2, D3, B1)."""

from __future__ import annotations

from collections.abc import Collection

import attrs
import pytest

from llmgw.plane import operate
from llmgw.plane.events import Event
from llmgw.plane.expiry import expire, heartbeat_for, silence_allowed, started
from llmgw.plane.world import DEFAULT, Frozen, Stage, World
from llmgw.wire.agent import Heartbeat
from llmgw.wire.facts import Grade, NodeId, Problem
from tests.plane.worlds import CLOCK, hear, register, world


def fleet(count: int) -> World:
    return world(*(register(f"n{n}") for n in range(count)))


def run(here: World, until: float, *, silent: Collection[str] = (), since: float = 0.0) -> tuple[World, list[Event]]:
    """The world second by second; who is not silent is heard every five."""
    events: list[Event] = []
    now = since
    while now < until:
        now += 1.0
        if now % 5 == 0:
            for id in here.nodes:
                if id not in silent:
                    here = hear(here, id, Heartbeat(), now)
        here, more = expire(here, now, CLOCK + now, DEFAULT)
        events += more
    return here, events


def stages(here: World) -> dict[str, str]:
    return {id: node.stage.value for id, node in sorted(here.nodes.items())}


@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_one_silent_node_is_unreachable_after_15_s_and_lost_after_90(count: int) -> None:
    here, events = run(fleet(count), 14.0, silent={"n0"})
    assert here.nodes[NodeId("n0")].stage is Stage.READY
    here, events = run(here, 15.0, silent={"n0"}, since=14.0)
    assert here.nodes[NodeId("n0")].stage is Stage.UNREACHABLE
    assert [e.kind for e in events] == ["node-unreachable"]
    here, events = run(here, 89.0, silent={"n0"}, since=15.0)
    assert (here.nodes[NodeId("n0")].stage, events) == (Stage.UNREACHABLE, [])
    here, events = run(here, 90.0, silent={"n0"}, since=89.0)
    assert here.nodes[NodeId("n0")].stage is Stage.LOST
    assert [(e.kind, e.data["node"], e.data["before"]) for e in events] == [("node-lost", "n0", "unreachable")]
    assert {s for id, s in stages(here).items() if id != "n0"} <= {"ready"}


def test_a_frame_takes_everything_back() -> None:
    here, _ = run(fleet(2), 20.0, silent={"n0"})
    here = hear(here, "n0", Heartbeat(), 20.5)
    assert stages(here) == {"n0": "ready", "n1": "ready"}


@pytest.mark.parametrize(("count", "silent"), [(3, 2), (6, 2), (9, 3), (30, 10), (2, 2)])
def test_losses_are_frozen_when_a_third_of_the_fleet_falls_silent_at_once(count: int, silent: int) -> None:
    quiet = {f"n{n}" for n in range(silent)}
    here, events = run(fleet(count), 200.0, silent=quiet)
    assert "lost" not in stages(here).values()
    assert [e.kind for e in events].count("losses-frozen") == 1
    assert here.frozen is not None
    assert here.frozen.reason == f"{silent} of {count} nodes fell silent together"


def test_a_common_silence_that_lasts_is_believed_after_a_quiet_period() -> None:
    here, events = run(fleet(6), 400.0, silent={"n0", "n1"})
    assert [e.kind for e in events if e.kind.startswith("losses")] == ["losses-frozen", "losses-resumed"]
    assert {id for id, s in stages(here).items() if s == "lost"} == {"n0", "n1"}
    assert here.frozen is None


def test_nodes_that_return_end_the_doubt_after_its_quiet_period() -> None:
    here, _ = run(fleet(6), 60.0, silent={"n0", "n1"})
    here, events = run(here, 400.0, since=60.0)
    assert [e.kind for e in events] == ["losses-resumed"]
    assert set(stages(here).values()) == {"ready"}


def test_when_most_have_returned_a_quiet_period_is_enough_for_whoever_has_not() -> None:
    here, _ = run(fleet(3), 60.0, silent={"n0", "n1"})
    back = 65.0
    here, _ = run(here, back + DEFAULT.quiet - 1, since=60.0, silent={"n0"})
    assert stages(here)["n0"] == "unreachable"
    here, events = run(here, back + DEFAULT.quiet, since=back + DEFAULT.quiet - 1, silent={"n0"})
    assert [e.kind for e in events] == ["losses-resumed", "node-lost"]
    assert stages(here) == {"n0": "lost", "n1": "ready", "n2": "ready"}


@pytest.mark.parametrize(("count", "silent"), [(10, 2), (11, 2), (100, 20)])
def test_a_fifth_of_the_fleet_is_not_yet_too_many(count: int, silent: int) -> None:
    here, events = run(fleet(count), 91.0, silent={f"n{n}" for n in range(silent)})
    assert list(stages(here).values()).count("lost") == silent
    assert "losses-frozen" not in [e.kind for e in events]


def test_nodes_that_fall_silent_one_after_the_other_are_each_lost() -> None:
    here, events = run(fleet(4), 60.0, silent={"n0"})
    here, more = run(here, 200.0, silent={"n0", "n1"}, since=60.0)
    assert "losses-frozen" not in [e.kind for e in events + more]
    assert stages(here) == {"n0": "lost", "n1": "lost", "n2": "ready", "n3": "ready"}


def test_a_late_loop_judges_nobody_in_that_round_and_loses_nobody_for_a_while() -> None:
    here = fleet(3)
    here, first = expire(here, 120.0, CLOCK, DEFAULT, late=119.0)
    assert stages(here) == {"n0": "ready", "n1": "ready", "n2": "ready"}
    assert [e.kind for e in first] == ["losses-frozen"]
    assert "the plane's own loop was 119.0 s late" in first[0].text
    for id in here.nodes:
        here = hear(here, id, Heartbeat(), 120.5)
    here, events = run(here, 120.0 + DEFAULT.quiet, since=121.0)
    assert [e.kind for e in events] == ["losses-resumed"]


def test_a_plane_that_has_just_started_waits_for_its_nodes() -> None:
    stored = attrs.evolve(
        fleet(3),
        nodes=fleet(3).nodes.set(NodeId("n0"), attrs.evolve(fleet(1).nodes[NodeId("n0")], stage=Stage.EXPECTED)),
    )
    here, first = started(stored, 0.0, CLOCK, DEFAULT)
    assert (here.settling_until, here.frozen) == (30.0, Frozen("the plane has just started", 0.0, 90.0))
    assert [e.kind for e in first] == ["plane-started"]
    here, events = run(here, 29.0, silent={"n0"})
    assert (here.settling_until, events) == (30.0, [])
    here, events = run(here, 30.0, silent={"n0"}, since=29.0)
    assert here.settling_until is None
    assert [(e.kind, e.text) for e in events] == [("settled", "placing begins; not returned: n0")]


def test_settling_ends_as_soon_as_all_have_returned() -> None:
    one = fleet(1)
    expected = attrs.evolve(one.nodes[NodeId("n0")], stage=Stage.EXPECTED, heard_at=None)
    here, _ = started(attrs.evolve(one, nodes=one.nodes.set(NodeId("n0"), expected)), 0.0, CLOCK, DEFAULT)
    here = hear(here, "n0", register("n0"), 1.0)
    here, events = expire(here, 1.0, CLOCK, DEFAULT)
    assert here.settling_until is None
    assert [e.kind for e in events] == ["settled"]


def test_an_expected_node_that_never_returns_is_lost() -> None:
    here = world(register("n0"), register("n1"))
    expected = attrs.evolve(here.nodes[NodeId("n0")], stage=Stage.EXPECTED, heard_at=None)
    here, _ = started(attrs.evolve(here, nodes=here.nodes.set(NodeId("n0"), expected)), 0.0, CLOCK, DEFAULT)
    here, _ = run(here, 89.0, silent={"n0"})
    assert stages(here)["n0"] == "expected"
    here, _ = run(here, 91.0, silent={"n0"}, since=89.0)
    assert stages(here)["n0"] == "lost"


def test_a_fleet_that_does_not_return_after_a_restart_is_not_taken_for_lost_at_once() -> None:
    here = fleet(4)
    nodes = here.nodes
    for id in nodes:
        nodes = nodes.set(id, attrs.evolve(nodes[id], stage=Stage.EXPECTED, heard_at=None))
    here, _ = started(attrs.evolve(here, nodes=nodes), 0.0, CLOCK, DEFAULT)
    here, _ = run(here, 300.0, silent=set(here.nodes))
    assert "lost" not in stages(here).values()
    here, _ = run(here, 400.0, silent=set(here.nodes), since=300.0)
    assert set(stages(here).values()) == {"lost"}


def test_a_plane_that_knows_no_node_waits_for_none() -> None:
    assert started(World(), 0.0, CLOCK, DEFAULT) == (World(), ())


def test_a_quiet_round_returns_the_very_same_world() -> None:
    here = fleet(3)
    after, events = expire(here, 1.0, CLOCK, DEFAULT)
    assert after is here
    assert events == ()


def test_an_acknowledgement_ends_by_itself() -> None:
    problem = Problem(subject="node", code="clock", grade=Grade.BAD, text="off by 9 s")
    here = hear(fleet(1), "n0", Heartbeat(problems=(problem,)), 1.0)
    here, _ = operate.acknowledge(here, NodeId("n0"), "node", "clock", 60.0, 1.0, CLOCK)
    here, events = run(here, 60.0, since=1.0)
    assert events == []
    here, events = run(here, 61.0, since=60.0)
    assert [e.kind for e in events] == ["acknowledgement-ended"]
    node = here.nodes[NodeId("n0")]
    assert (len(node.acks), node.problems["node", "clock"].acknowledged_until) == (0, None)


def test_two_heartbeats_fit_into_the_time_of_silence_up_to_five_thousand_nodes() -> None:
    for nodes in (1, 1_000, 1_001, 3_000, 5_000):
        assert 5.0 <= heartbeat_for(nodes) <= 7.5
        assert 2 * heartbeat_for(nodes) < silence_allowed(nodes, DEFAULT) == 15.0
    assert heartbeat_for(1000) == 5.0
    assert 2 * heartbeat_for(20_000) < silence_allowed(20_000, DEFAULT)


def test_the_period_never_shrinks_as_the_fleet_grows() -> None:
    periods = [heartbeat_for(nodes) for nodes in range(0, 12_000, 100)]
    assert periods == sorted(periods)

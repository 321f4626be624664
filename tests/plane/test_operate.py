"""What operators do to the world, and what they are told when it cannot be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from immutables import Map

from llmgw.errors import BadInput, Conflict, NotFound
from llmgw.plane import operate
from llmgw.plane.models import revised
from llmgw.plane.world import World
from llmgw.wire.agent import Heartbeat
from llmgw.wire.facts import Grade, ModelName, NodeId, Problem
from tests.plane.worlds import CLOCK, hear, model, profile, register, status, world

N = NodeId("n1")


def test_an_unknown_node_is_not_found_and_the_near_miss_named() -> None:
    here = world(register("gpu-07"))
    with pytest.raises(NotFound, match="there is no node 'gpu-7': did you mean 'gpu-07'"):
        operate.cordon(here, NodeId("gpu-7"), True, CLOCK)
    changes: tuple[Callable[[], object], ...] = (
        lambda: operate.drain(here, N, True, CLOCK),
        lambda: operate.label(here, N, {}, CLOCK),
        lambda: operate.forget(here, N, CLOCK),
        lambda: operate.acknowledge(here, N, "node", "x", 1.0, 0.0, CLOCK),
    )
    for change in changes:
        with pytest.raises(NotFound):
            change()


def test_uncordoning_ends_a_drain_as_well() -> None:
    here, events = operate.drain(world(register("n1")), N, True, CLOCK)
    assert [e.text for e in events] == [
        "n1 is draining: its replicas move elsewhere",
        "n1 is drained: nothing runs there any more",
    ]
    here, events = operate.cordon(here, N, True, CLOCK)
    assert (here.nodes[N].cordoned, here.nodes[N].draining) == (True, True)
    here, _ = operate.cordon(here, N, False, CLOCK)
    assert (here.nodes[N].cordoned, here.nodes[N].draining) == (False, False)


def test_what_is_so_already_is_no_event_and_no_new_version() -> None:
    here, _ = operate.cordon(world(register("n1")), N, True, CLOCK)
    assert operate.cordon(here, N, True, CLOCK) == (here, ())


def test_labels_are_set_and_taken_away_one_by_one() -> None:
    here, _ = operate.label(world(register("n1")), N, {"a": "1", "b": "2"}, CLOCK)
    here, events = operate.label(here, N, {"b": None, "c": "3", "never": None}, CLOCK)
    assert here.nodes[N].labels == Map({"a": "1", "c": "3"})
    assert [e.text for e in events] == ["n1: b removed, c=3, never removed"]


def test_an_acknowledgement_is_of_an_open_problem_and_can_be_taken_back() -> None:
    problem = Problem(subject="node", code="clock", grade=Grade.BAD, text="off")
    here = hear(world(register("n1")), "n1", Heartbeat(problems=(problem,)))
    with pytest.raises(NotFound, match="open problems there: clock of node"):
        operate.acknowledge(here, N, "node", "disk", 60.0, 5.0, CLOCK)
    here, _ = operate.acknowledge(here, N, "node", "clock", 60.0, 5.0, CLOCK)
    assert here.nodes[N].problems["node", "clock"].acknowledged_until == 65.0
    assert here.nodes[N].acks["node", "clock"].until_clock == CLOCK + 60.0
    here, _ = operate.acknowledge(here, N, "node", "clock", 0.0, 6.0, CLOCK)
    assert here.nodes[N].problems["node", "clock"].acknowledged_until is None
    assert len(here.nodes[N].acks) == 0


def test_forgetting_a_node_takes_its_strays_along() -> None:
    here = hear(world(register("n1"), register("n2")), "n1", status("x-0-0"))
    here, events = operate.forget(here, N, CLOCK)
    assert (set(here.nodes), len(here.strays), [e.kind for e in events]) == ({"n2"}, 0, ["node-forgotten"])


def test_draining_may_have_a_deadline_which_is_said_and_ends_with_the_drain() -> None:
    here, events = operate.drain(world(register("n1")), N, True, CLOCK, 600.0)
    assert here.nodes[N].drain_within == 600.0
    assert events[0].text == "n1 is draining: its replicas move elsewhere, and may finish requests for 10m"
    again, _ = operate.drain(here, N, True, CLOCK)
    assert again.nodes[N].drain_within is None
    for ended in (operate.drain(here, N, False, CLOCK), operate.cordon(here, N, False, CLOCK)):
        assert (ended[0].nodes[N].draining, ended[0].nodes[N].drain_within) == (False, None)


def test_a_node_on_which_something_runs_is_not_called_drained() -> None:
    here = hear(world(register("n1")), "n1", status("x-0-0"))  # a stray
    assert [e.kind for e in operate.drain(here, N, True, CLOCK)[1]] == ["node-draining"]


def test_scaling_sets_the_number_and_says_so_once() -> None:
    here = World(models=Map({m.name: m for m in (model("tiny"), model("other"))}))
    here, events = operate.scale(here, "tiny", 4, CLOCK)
    assert [e.text for e in events] == ["tiny: scaled from 1 to 4 replicas"]
    assert {m.name: (m.replicas, m.revision) for m in here.models.values()} == {"tiny": (4, 1), "other": (1, 1)}
    assert operate.scale(here, "tiny", 4, CLOCK) == (here, ())
    assert operate.scale(here, "tiny", 0, CLOCK)[0].models[ModelName("tiny")].replicas == 0


def test_scaling_refuses_what_cannot_be_meant() -> None:
    here = World(models=Map({ModelName("tiny"): model("tiny")}))
    with pytest.raises(NotFound, match="no model is called 'tinny': did you mean 'tiny'"):
        operate.scale(here, "tinny", 1, CLOCK)
    for count in (-1, 10_001):
        with pytest.raises(BadInput, match="cannot be meant: give 0 to 10000"):
            operate.scale(here, "tiny", count, CLOCK)


def test_applying_models_again_overrides_a_scale_and_another_revision_keeps_it_out() -> None:
    here, _ = operate.scale(World(models=Map({ModelName("a"): model("a")})), "a", 5, CLOCK)
    here, events = operate.want(here, revised(here.models, (model("a", 2),)), CLOCK)
    assert [e.text for e in events] == ["a: replicas 5 -> 2"]
    assert here.models[ModelName("a")].replicas == 2


def test_a_roll_back_brings_the_profile_before_and_says_what_that_changes() -> None:
    name = ModelName("a")
    here = World(models=revised(Map(), (model("a"),)))
    here, _ = operate.want(here, revised(here.models, (model("a", of=profile(threads=2)),), CLOCK), CLOCK)
    back, events = operate.rollback(here, "a", CLOCK)
    assert (back.models[name].profile, back.models[name].revision) == (profile(threads=1), 1)
    assert [e.text for e in events] == [
        "a: rolled back from revision 2 of its profile to 1 (resources cpu_threads 2 -> 1)"
    ]
    again, _ = operate.rollback(back, "a", CLOCK, 2)
    assert again.models[name].profile == profile(threads=2)
    with pytest.raises(NotFound, match="no revision 7 in its history"):
        operate.rollback(here, "a", CLOCK, 7)
    with pytest.raises(Conflict, match="never had another profile"):
        operate.rollback(World(models=revised(Map(), (model("a"),))), "a", CLOCK)
    with pytest.raises(NotFound, match="did you mean 'a'"):
        operate.rollback(here, "A", CLOCK)


def test_wanting_says_what_came_went_and_changed() -> None:
    here, events = operate.want(World(), Map({m.name: m for m in (model("a"), model("b"))}), CLOCK)
    assert [e.kind for e in events] == ["model-added", "model-added"]
    after = Map({m.name: m for m in (model("a", 3, 2, profile(threads=2)), model("c"))})
    here, events = operate.want(here, after, CLOCK)
    assert [e.text for e in events] == [
        "a: replicas 1 -> 3, profile revision 1 -> 2 (resources cpu_threads 1 -> 2)",
        "c: 1 replica is wanted",
        "b is wanted no more",
    ]
    assert operate.want(here, after, CLOCK) == (here, ())

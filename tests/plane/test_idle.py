"""When a model that is unloaded while nobody asks for it has its replicas, as pure values."""

from __future__ import annotations

import attrs
from hypothesis import given
from hypothesis import strategies as st
from immutables import Map
from msgspec.structs import replace

from llmgw.plane import idle
from llmgw.plane.world import Failure, Model, Shard, Want, World
from llmgw.wire.facts import ModelName, NodeId, ReplicaId, ShardId, ShardSpec, ShardState
from tests.plane.worlds import CLOCK, model, status

TINY = ModelName("tiny")


def sleeper(name: str = "tiny", replicas: int = 2, seconds: float = 60.0) -> Model:
    return replace(model(name, replicas), idle=seconds)


def sleeping(*models: Model) -> World:
    return World(models=Map({m.name: m for m in models or (sleeper(),)}))


def shard(state: ShardState, want: Want = Want.RUN, failed: bool = False) -> Shard:
    return Shard(
        id=ShardId("tiny-0-0"),
        replica=ReplicaId("tiny-0"),
        model=TINY,
        rank=0,
        node=NodeId("n1"),
        generation=1,
        spec=ShardSpec(engine="llamacpp", model=TINY, source="/m"),
        revision=1,
        want=want,
        status=status("tiny-0-0", 1, state),
        last_failure=Failure(1, CLOCK, 1, "", "it crashed") if failed else None,
        restarts=int(failed),
    )


def running(state: ShardState, want: Want = Want.RUN, failed: bool = False) -> World:
    one = shard(state, want, failed)
    return attrs.evolve(sleeping(), shards=Map({one.id: one}))


def wanted(world: World, now: float) -> int:
    return idle.wanted(world, world.models[TINY], now)


def asked(world: World, now: float, *names: str) -> World:
    return idle.asked(world, names or ("tiny",), now, CLOCK)[0]


def test_a_model_without_idle_always_has_its_replicas() -> None:
    assert idle.wanted(World(), model(replicas=3), 0.0) == 3


def test_a_model_has_no_replicas_until_it_is_asked_for_and_all_until_nobody_did_for_so_long() -> None:
    world = sleeping()
    assert wanted(world, 1000.0) == 0
    world = asked(world, 1000.0)
    assert [wanted(world, at) for at in (1000.0, 1059.9, 1060.0)] == [2, 2, 0]
    world = asked(world, 1050.0)
    assert [wanted(world, at) for at in (1109.9, 1110.0)] == [2, 0]


def test_only_a_mark_that_wakes_a_model_is_a_change_and_an_event() -> None:
    world, events = idle.asked(sleeping(), ["tiny"], 10.0, CLOCK)
    assert (world.version, [event.kind for event in events]) == (1, ["model-asked"])
    assert "a request waits for it, so it is loaded (2 replicas)" in events[0].text
    later, events = idle.asked(world, ["tiny"], 20.0, CLOCK)
    assert (later.version, events, later.asked[TINY]) == (1, (), 20.0)
    again, events = idle.asked(later, ["tiny"], 90.0, CLOCK)
    assert (again.version, len(events)) == (2, 1)


def test_models_that_nobody_knows_or_that_are_never_unloaded_leave_no_mark() -> None:
    world = sleeping(sleeper(), model("always"))
    after, events = idle.asked(world, ["always", "unknown"], 10.0, CLOCK)
    assert after is world
    assert events == ()


def test_a_model_that_is_scaled_to_zero_is_not_woken() -> None:
    world, events = idle.asked(sleeping(sleeper(replicas=0)), ["tiny"], 10.0, CLOCK)
    assert (world.version, events) == (0, ())


def test_a_model_that_runs_and_was_never_heard_of_counts_from_now_on() -> None:
    # So does one after the plane's start, or when its `idle` is new: it is not stopped under somebody's hands.
    world = idle.kept(running(ShardState.READY), 500.0)
    assert world.asked == Map({TINY: 500.0})
    assert idle.kept(world, 510.0) is world
    assert idle.kept(sleeping(), 500.0).asked == Map()


def test_what_is_on_its_way_out_wakes_nobody() -> None:
    for want in (Want.DRAIN, Want.STOP):
        assert not idle.kept(running(ShardState.READY, want), 500.0).asked


def test_the_time_runs_from_when_a_model_is_loaded_unless_it_fails() -> None:
    for state in (ShardState.STARTING, ShardState.FETCHING):
        world = attrs.evolve(running(state), asked=Map({TINY: 100.0}))
        assert idle.kept(world, 150.0).asked[TINY] == 150.0
        failing = attrs.evolve(running(state, failed=True), asked=Map({TINY: 100.0}))
        assert idle.kept(failing, 150.0) is failing


def test_marks_of_models_that_are_gone_or_never_unloaded_any_more_go() -> None:
    marks = Map({TINY: 5.0, ModelName("gone"): 5.0, ModelName("always"): 5.0})
    world = attrs.evolve(sleeping(sleeper(), model("always")), asked=marks)
    assert idle.kept(world, 6.0).asked == Map({TINY: 5.0})
    assert idle.kept(World(asked=marks), 6.0).asked == Map()


@given(st.lists(st.tuples(st.floats(0, 30), st.sampled_from(["ask", "keep", "look"])), max_size=30))
def test_a_model_runs_exactly_while_somebody_asked_for_it_within_its_time(steps: list[tuple[float, str]]) -> None:
    world, now, last = sleeping(sleeper(seconds=20.0)), 100.0, float("-inf")
    for wait, what in steps:
        now += wait
        before = world.version
        awake = now - last < 20.0
        if what == "ask":
            world, last = asked(world, now), now
            assert world.version == before + (not awake)
        elif what == "keep":
            world = idle.kept(world, now)
        assert wanted(world, now) == (2 if now < last + 20.0 else 0)

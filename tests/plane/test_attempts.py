"""What a node's word makes of a shard: transitions, failures, strays (C5, B7, D4)."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmgw.plane.attempts import HOPELESS, delay
from llmgw.plane.expiry import expire
from llmgw.plane.store.records import Stored, world_of
from llmgw.plane.world import DEFAULT, Model, Want, World
from llmgw.wire.agent import Heartbeat
from llmgw.wire.facts import NodeId, Progress, ShardId, ShardState
from tests.plane.test_gang import gang
from tests.plane.worlds import CLOCK, fold_events, hear, model, ready, register, settle, status, world

ID = ShardId("tiny-0-0")


def placed() -> World:
    return settle(world(register("n1"), register("n2"), models=[model()]))[0]


def test_each_transition_is_one_event_with_before_and_after() -> None:
    here, texts = placed(), []
    for now, state in enumerate((ShardState.STARTING, ShardState.FETCHING, ShardState.READY, ShardState.DRAINING), 1):
        before = here.version
        here, events = fold_events(here, "n1", status(ID, 1, state), float(now))
        texts += [event.text for event in events]
        assert here.version == before + 1
    assert texts == [
        "tiny-0-0 on n1: starting",
        "tiny-0-0 on n1: starting -> fetching",
        "tiny-0-0 on n1: fetching -> ready",
        "tiny-0-0 on n1: ready -> draining",
    ]


def test_progress_is_never_a_transition() -> None:
    here = hear(placed(), "n1", status(ID, 1, ShardState.FETCHING), 1.0)
    for done in range(5):
        said = status(ID, 1, ShardState.FETCHING, progress=Progress("weights", done, 10))
        after, events = fold_events(here, "n1", said, 2.0 + done)
        assert (events, after.version) == ((), here.version)
        here = after
    shard = here.shards[ID]
    assert shard.status is not None
    assert shard.status.progress == Progress("weights", 4, 10)
    assert shard.status_at == 1.0


def test_the_same_told_again_changes_nothing_at_all() -> None:
    here = hear(placed(), "n1", status(ID), 1.0)
    after, events = fold_events(here, "n1", status(ID), 9.0)
    assert (after.shards, after.version, events) == (here.shards, here.version, ())


def test_a_new_port_matters_to_routes_but_is_no_event() -> None:
    here = hear(placed(), "n1", status(ID), 1.0)
    after, events = fold_events(here, "n1", status(ID, port=9001), 2.0)
    assert (events, after.version) == ((), here.version + 1)


def test_a_failure_says_signal_or_exit_code_cause_and_last_line() -> None:
    here = hear(placed(), "n1", status(ID), 1.0)
    said = status(ID, 1, ShardState.FAILED, signal="SIGKILL", cause="out of memory", lines=("a", "killed"))
    after, (event,) = fold_events(here, "n1", said, 5.0)
    assert event.text == "tiny-0-0 on n1: ready -> failed (signal SIGKILL, out of memory)"
    assert event.data["last_line"] == "killed"
    shard = after.shards[ID]
    assert (shard.restarts, shard.not_before, shard.ready_at) == (1, 5.0, None)
    coded = status(ID, 1, ShardState.FAILED, exit_code=1)
    assert fold_events(here, "n1", coded, 5.0)[1][0].text.endswith("(exit code 1)")


def test_a_failure_that_is_told_again_after_a_reconnect_is_counted_once() -> None:
    said = status(ID, 1, ShardState.FAILED, exit_code=1)
    here = hear(placed(), "n1", said, 5.0)
    here = hear(here, "n1", register("n1", shards=[said]), 6.0)
    assert here.shards[ID].restarts == 1


def test_a_stop_that_was_asked_for_is_no_failure() -> None:
    here = hear(placed(), "n1", status(ID), 1.0)
    shard = attrs.evolve(here.shards[ID], want=Want.STOP)
    here = attrs.evolve(here, shards=here.shards.set(ID, shard))
    here = hear(here, "n1", status(ID, 1, ShardState.STOPPED), 2.0)
    assert (here.shards[ID].restarts, here.shards[ID].last_failure) == (0, None)


@pytest.mark.parametrize(
    ("node", "generation", "words"),
    [
        pytest.param("n1", 0, "generation 1 has replaced it", id="older"),
        pytest.param("n1", 2, "the newest generation known here is 1", id="newer"),
        pytest.param("n2", 1, "it is placed on n1 at generation 1", id="elsewhere"),
    ],
)
def test_what_is_told_of_another_generation_or_place_is_a_stray(node: str, generation: int, words: str) -> None:
    here = hear(placed(), "n1", status(ID), 1.0)
    after, (event,) = fold_events(here, node, status(ID, generation), 2.0)
    assert after.shards == here.shards
    assert event.kind == "shard-stray"
    assert words in event.text
    assert after.strays[node, ID].status.generation == generation  # type: ignore[index]
    gone, _ = fold_events(after, node, status(ID, generation, ShardState.STOPPED), 3.0)
    assert (len(gone.strays), gone.shards) == (0, here.shards)


def test_a_shard_that_nothing_placed_is_a_stray_told_once() -> None:
    here, (event,) = fold_events(world(register("n1")), "n1", status("x-0-0"), 1.0)
    assert "nothing placed it" in event.text
    after, events = fold_events(here, "n1", replace(status("x-0-0"), detail="still"), 2.0)
    assert (events, after.version) == ((), here.version)


def test_a_dead_shard_that_nothing_placed_is_no_stray() -> None:
    here = world(register("n1"))
    assert fold_events(here, "n1", status("x-0-0", 1, ShardState.FAILED), 1.0)[0].strays == here.strays


def test_an_empty_list_of_shards_clears_the_nodes_strays() -> None:
    here = hear(world(register("n1"), register("n2")), "n1", status("x-0-0"), 1.0)
    here = hear(here, "n2", status("y-0-0"), 1.0)
    here = hear(here, "n1", register("n1"), 2.0)
    assert list(here.strays) == [("n2", "y-0-0")]


def test_a_node_that_lists_an_older_attempt_does_not_run_the_newest_one() -> None:
    """Its agent took the start of generation 2 and died before it wrote that down."""
    here = hear(placed(), "n1", status(ID, 1, ShardState.FAILED), 1.0)
    here, _ = settle(here, 5.0)
    assert here.shards[ID].generation == 2
    here = hear(here, "n1", status(ID, 2, ShardState.STARTING), 6.0)
    here = hear(here, "n1", register("n1", shards=[status(ID, 1, ShardState.FAILED)]), 7.0)
    assert here.shards[ID].state is ShardState.STOPPED
    here, _ = settle(here, 8.0)
    assert here.shards[ID].generation == 3


@given(st.integers(1, 10_000), st.booleans(), st.sampled_from(["", *sorted(HOPELESS)]))
def test_delays_grow_and_stay_within_their_caps(failures: int, was_ready: bool, cause: str) -> None:
    now = delay(failures, was_ready=was_ready, cause_code=cause, settings=DEFAULT)
    following = delay(failures + 1, was_ready=was_ready, cause_code=cause, settings=DEFAULT)
    cap = DEFAULT.hopeless_cap if cause else DEFAULT.restart_cap
    assert 0.0 <= now <= following <= cap
    assert cause == "" or now >= DEFAULT.hopeless


# What has proved itself --------------------------------------------------------------------------------------


def crashed(here: World, generation: int, now: float, shard: str = ID) -> World:
    return hear(here, "n1", status(shard, generation, ShardState.FAILED, exit_code=1), now)


def later(here: World, now: float) -> World:
    """A moment in which every node is heard."""
    for node in here.nodes:
        here = hear(here, node, Heartbeat(), now)
    return expire(here, now, CLOCK + now, DEFAULT)[0]


def restarted(here: World, now: float) -> World:
    """The plane starts anew, and the nodes come back with what they run."""
    ran = {
        shard.node: [s.status for s in here.shards.values() if s.node == shard.node] for shard in here.shards.values()
    }
    after = world_of(Stored().difference(here)[0], now, CLOCK + now)
    for node in ("n1", "n2"):
        after = hear(after, node, register(node, shards=[one for one in ran.get(NodeId(node), ()) if one]), now)
    return after


@pytest.mark.parametrize("model", [model(), gang()], ids=["one node", "two nodes"])
def test_what_served_for_long_begins_its_count_anew_whatever_became_of_the_plane_meanwhile(model: Model) -> None:
    nodes = (register(name, engine_ports=(20_000, 20_999)) for name in ("n1", "n2"))
    here, now = ready(settle(world(*nodes, models=[model]))[0]), 10.0
    for generation in (1, 2):
        here = crashed(here, generation, now)
        now += 100.0
        here = settle(later(here, now), now)[0]
        for shard in here.shards.values():
            here = hear(here, shard.node, status(shard.id, shard.generation), now)
    assert {s.restarts for s in here.shards.values()} == {2}
    here = later(here, now + DEFAULT.stable - 1.0)
    assert {s.restarts for s in here.shards.values()} == {2}
    before, here = here, later(here, now + DEFAULT.stable)
    assert {(s.restarts, s.failed_here, s.first_failure) for s in here.shards.values()} == {(0, 0, None)}
    assert here.shards[ID].last_failure == before.shards[ID].last_failure
    assert here.version == before.version + 1
    here = crashed(restarted(here, now + 500.0), 3, now + 501.0)
    first = here.shards[ID].first_failure
    assert first is not None
    assert (here.shards[ID].restarts, here.shards[ID].not_before, first.generation) == (1, now + 501.0, 3)
    # One that had not proved itself counts on.
    here = crashed(restarted(before, now + 500.0), 3, now + 501.0)
    assert here.shards[ID].restarts == 3


def test_a_replica_whose_node_is_silent_proves_nothing() -> None:
    here = settle(crashed(ready(placed()), 1, 10.0), 10.0)[0]
    here = hear(here, "n1", status(ID, 2), 11.0)
    silent = expire(hear(here, "n2", Heartbeat(), 200.0), 200.0, CLOCK, DEFAULT)[0]
    assert silent.shards[ID].restarts == 1
    assert later(silent, 201.0).shards[ID].restarts == 0

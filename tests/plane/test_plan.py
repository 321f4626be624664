"""Plans by rule (D3-D7): each table is a world, what is planned in it, and that planning again finds nothing."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import pytest
from immutables import Map
from msgspec.structs import replace

from llmgw.plane import steps as steps_module
from llmgw.plane.plan import plan
from llmgw.plane.steps import Drain, GiveUp, Start, Step, Stop, enact
from llmgw.plane.store.records import Stored, world_of
from llmgw.plane.world import DEFAULT, Model, Node, Stage, Stray, Want, World
from llmgw.wire.agent import Heartbeat
from llmgw.wire.facts import ModelName, NodeId, ShardId, ShardState
from tests.plane.worlds import CLOCK, hear, model, profile, ready, register, settle, status, where, world

TINY = ModelName("tiny")


def words(steps: Iterable[Step]) -> list[str]:
    """Steps as an operator would say them."""
    said = []
    for step in steps:
        match step:
            case Start(shard=s):
                said.append(f"start {s.id} g{s.generation} on {s.node}")
            case Drain(shard=id):
                said.append(f"drain {id}")
            case Stop(shard=id):
                said.append(f"stop {id}")
            case GiveUp(shard=id):
                said.append(f"give up {id}")
    return said


def stage(before: World, node: str, to: Stage) -> World:
    known = before.nodes[NodeId(node)]
    return attrs.evolve(before, nodes=before.nodes.set(known.id, attrs.evolve(known, stage=to)))


def change(before: World, node: str, **fields: object) -> World:
    known: Node = before.nodes[NodeId(node)]
    return attrs.evolve(before, nodes=before.nodes.set(known.id, attrs.evolve(known, **fields)))  # type: ignore[arg-type]


def wanted(before: World, *models: Model) -> World:
    return attrs.evolve(before, models=Map({m.name: m for m in models}))


def served(*nodes: str, replicas: int = 1, threads: int = 1) -> World:
    """Nodes on which so many replicas are placed and ready."""
    tiny = model(replicas=replicas, of=profile(threads=threads))
    return ready(settle(world(*(register(n, threads=2) for n in nodes), models=[tiny]))[0])


def test_replicas_of_a_model_are_spread_over_nodes() -> None:
    after, steps = settle(world(register("n1"), register("n2"), models=[model(replicas=2)]))
    assert words(steps) == ["start tiny-0-0 g1 on n1", "start tiny-1-0 g1 on n2"]
    assert settle(after)[1] == ()
    assert after.shards[ShardId("tiny-0-0")].spec.engine == "llamacpp"
    assert after.shards[ShardId("tiny-0-0")].placed_clock == CLOCK


def test_nothing_is_placed_while_the_plane_settles() -> None:
    waiting = attrs.evolve(world(register("n1"), models=[model()]), settling_until=30.0)
    found = plan(waiting, 29.9)
    assert (found.steps, found.look_again) == ((), 30.0)
    assert words(plan(waiting, 30.0).steps) == ["start tiny-0-0 g1 on n1"]


def test_a_model_that_nobody_wants_is_drained_then_stopped_then_given_up() -> None:
    before = wanted(served("n1"))
    draining, steps = settle(before, 100.0)
    assert words(steps) == ["drain tiny-0-0"]
    assert plan(draining, 100.0).look_again == 100.0 + DEFAULT.drain
    stopping, steps = settle(draining, 100.0 + DEFAULT.drain)
    assert words(steps) == ["stop tiny-0-0"]
    assert settle(stopping, 140.0)[1] == ()
    stopped = hear(stopping, "n1", status("tiny-0-0", 1, ShardState.STOPPED), 141.0)
    gone, steps = settle(stopped, 141.0)
    assert words(steps) == ["give up tiny-0-0"]
    assert (len(gone.shards), gone.retired[ShardId("tiny-0-0")]) == (0, 1)


def test_a_shard_that_never_became_ready_is_stopped_without_a_drain() -> None:
    before, _ = settle(world(register("n1"), models=[model()]))
    assert words(settle(wanted(hear(before, "n1", status("tiny-0-0", 1, ShardState.FETCHING))))[1]) == ["stop tiny-0-0"]


def test_a_stop_that_no_status_ever_answers_is_given_up_after_a_while() -> None:
    before, _ = settle(world(register("n1"), models=[model()]))
    stopping, _ = settle(wanted(before), 10.0)
    assert stopping.shards[ShardId("tiny-0-0")].want is Want.STOP
    assert settle(stopping, 10.0 + 2 * DEFAULT.resend - 0.1)[1] == ()
    assert words(settle(stopping, 10.0 + 2 * DEFAULT.resend)[1]) == ["give up tiny-0-0"]


def test_an_id_that_comes_again_goes_on_with_its_generations() -> None:
    before = wanted(served("n1"))
    for now, state in ((0.0, ShardState.READY), (40.0, ShardState.STOPPED)):
        before = hear(settle(before, now)[0], "n1", status("tiny-0-0", 1, state), now)
        before, _ = settle(before, now)
    assert before.retired == Map({"tiny-0-0": 1})
    again, steps = settle(wanted(before, model()), 50.0)
    assert words(steps) == ["start tiny-0-0 g2 on n1"]
    assert again.retired == Map()


def test_generations_of_what_is_no_more_are_bounded_and_none_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "KEPT", 2)
    here, given = world(register("n1", threads=8)), set[tuple[str, int]]()
    for turn in range(12):
        here, steps = settle(wanted(here, model(f"m{turn % 4}", replicas=1 + turn % 2)), float(turn))
        for step in steps:
            if isinstance(step, Start):
                assert (step.shard.id, step.shard.generation) not in given
                given.add((step.shard.id, step.shard.generation))
        assert len(here.retired) <= 2
        here = world_of(Stored().difference(here)[0], float(turn), CLOCK)
        here = hear(here, "n1", register("n1", threads=8), float(turn))
        for shard in here.shards.values():
            here = hear(here, "n1", status(shard.id, shard.generation, ShardState.FAILED), float(turn))
    assert len(given) == 18
    assert here.floor


def test_scaling_down_stops_the_worst_first() -> None:
    before = served("n1", "n2", "n3", replicas=3)
    before = hear(before, "n2", status("tiny-1-0", 1, ShardState.FAILED), 10.0)
    fewer = wanted(before, model(replicas=2))
    assert words(settle(fewer, 10.0)[1]) == ["give up tiny-1-0"]
    fewer = wanted(served("n1", "n2", "n3", replicas=3), model(replicas=1))
    assert words(settle(fewer, 10.0)[1]) == ["drain tiny-2-0", "drain tiny-1-0"]


def test_scaling_down_prefers_what_is_on_a_silent_node() -> None:
    before = stage(served("n1", "n2", replicas=2), "n1", Stage.UNREACHABLE)
    assert words(settle(wanted(before, model(replicas=1)), 10.0)[1]) == ["drain tiny-0-0"]


def test_an_unreachable_node_keeps_its_shards() -> None:
    before = stage(served("n1", "n2"), "n1", Stage.UNREACHABLE)
    assert settle(before, 20.0)[1] == ()


def test_a_lost_nodes_shard_moves_at_the_next_generation_and_the_old_one_is_a_stray() -> None:
    before = served("n1", "n2")
    assert where(before) == {"tiny-0-0": "n1"}
    after, steps = settle(stage(before, "n1", Stage.LOST), 100.0)
    assert words(steps) == ["start tiny-0-0 g2 on n2"]
    assert "n1 is lost" in steps[0].why
    assert after.strays[NodeId("n1"), ShardId("tiny-0-0")].status.generation == 1
    assert settle(after, 100.0)[1] == ()


def test_a_lost_nodes_shard_without_another_place_stays_and_is_adopted_on_return() -> None:
    before = served("n1")
    lost = stage(before, "n1", Stage.LOST)
    found = plan(lost, 100.0)
    assert found.steps == ()
    assert found.unplaced[TINY].placed == 0
    assert [r.check for r in found.unplaced[TINY].reasons] == ["stage"]
    back = hear(lost, "n1", Heartbeat(), 101.0)
    assert plan(back, 101.0).steps == ()
    assert len(plan(back, 101.0).unplaced) == 0


def test_a_lost_nodes_shard_that_is_not_needed_is_given_up() -> None:
    before = stage(served("n1", "n2", replicas=2), "n1", Stage.LOST)
    assert words(settle(wanted(before, model(replicas=1)), 100.0)[1]) == ["give up tiny-0-0"]


def test_a_forgotten_nodes_shard_moves() -> None:
    before = served("n1", "n2")
    before = attrs.evolve(before, nodes=before.nodes.delete(NodeId("n1")))
    assert words(settle(before, 5.0)[1]) == ["start tiny-0-0 g2 on n2"]


def test_a_draining_nodes_replica_is_replaced_before_it_is_drained() -> None:
    before = change(served("n1", "n2"), "n1", draining=True)
    moving, steps = settle(before, 10.0)
    assert words(steps) == ["start tiny-1-0 g1 on n2"]
    assert settle(moving, 11.0)[1] == ()
    moved = ready(moving, 12.0)
    drained, steps = settle(moved, 12.0)
    assert words(steps) == ["drain tiny-0-0"]
    assert settle(drained, 12.0)[1] == ()


def test_a_draining_node_keeps_its_replica_while_no_other_has_room() -> None:
    before = change(served("n1"), "n1", draining=True)
    found = plan(before, 10.0)
    assert found.steps == ()
    assert [(r.node, r.check) for r in found.unplaced[TINY].reasons] == [("n1", "drain")]


def test_a_draining_node_loses_at_once_what_does_not_serve() -> None:
    before, _ = settle(world(register("n1"), register("n2"), models=[model()]))
    draining = change(before, "n1", draining=True)
    assert words(settle(draining, 1.0)[1]) == ["stop tiny-0-0", "start tiny-1-0 g1 on n2"]


def test_a_cordoned_node_takes_nothing_new_and_keeps_what_it_has() -> None:
    before = change(served("n1", "n2"), "n1", cordoned=True)
    assert settle(before, 10.0)[1] == ()
    assert words(settle(wanted(before, model(replicas=3)), 10.0)[1]) == [
        "start tiny-1-0 g1 on n2",
        "start tiny-2-0 g1 on n2",
    ]


def failed(before: World, node: str, shard: str, generation: int, now: float, **fields: object) -> World:
    return hear(before, node, status(shard, generation, ShardState.FAILED, exit_code=1, **fields), now)


def test_an_engine_that_died_after_serving_starts_again_at_once() -> None:
    after = failed(served("n1", "n2"), "n1", "tiny-0-0", 1, 50.0)
    again, steps = settle(after, 50.0)
    assert words(steps) == ["start tiny-0-0 g2 on n1"]
    assert again.shards[ShardId("tiny-0-0")].restarts == 1


def test_an_engine_that_never_came_up_is_given_time_that_doubles() -> None:
    here, _ = settle(world(register("n1"), models=[model()]))
    now, waits = 0.0, []
    for generation in range(1, 9):
        here = failed(here, "n1", "tiny-0-0", generation, now)
        due = plan(here, now).look_again
        assert due is not None
        waits.append(due - now)
        assert plan(here, due - 0.001).steps == ()
        now = due
        here, steps = settle(here, now)
        assert words(steps) == [f"start tiny-0-0 g{generation + 1} on n1"]
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    shard = here.shards[ShardId("tiny-0-0")]
    assert shard.first_failure is not None
    assert shard.last_failure is not None
    assert (shard.restarts, shard.first_failure.generation, shard.last_failure.generation) == (8, 1, 8)


def test_a_cause_that_no_restart_mends_is_tried_rarely_and_not_moved() -> None:
    here, _ = settle(world(register("n1"), register("n2"), models=[model()]))
    now, waits = 0.0, []
    for generation in range(1, 7):
        here = failed(here, "n1", "tiny-0-0", generation, now, cause_code="bad-argument", cause="a bad argument")
        due = plan(here, now).look_again
        assert due is not None
        waits.append(due - now)
        now = due
        here, steps = settle(here, now)
        assert words(steps) == [f"start tiny-0-0 g{generation + 1} on n1"]
        assert "a bad argument" in steps[0].why
    assert waits == [30.0, 60.0, 120.0, 240.0, 480.0, 600.0]


def test_a_shard_that_keeps_failing_on_one_node_is_tried_on_another() -> None:
    here, _ = settle(world(register("n1"), register("n2"), models=[model()]))
    now = 0.0
    for generation in range(1, 4):
        here = failed(here, "n1", "tiny-0-0", generation, now)
        now = here.shards[ShardId("tiny-0-0")].not_before or now
        here, steps = settle(here, now)
    assert words(steps) == ["start tiny-0-0 g4 on n2"]
    assert "3 times in a row on n1" in steps[0].why
    assert here.shards[ShardId("tiny-0-0")].failed_here == 0


def test_a_shard_that_was_stable_begins_its_count_again() -> None:
    here = failed(served("n1"), "n1", "tiny-0-0", 1, 10.0)
    here, _ = settle(here, 10.0)
    here = hear(here, "n1", status("tiny-0-0", 2), 11.0)
    here = failed(here, "n1", "tiny-0-0", 2, 11.0 + DEFAULT.stable)
    shard = here.shards[ShardId("tiny-0-0")]
    assert shard.first_failure is not None
    assert (shard.restarts, shard.first_failure.generation) == (1, 2)


def test_a_failed_shard_on_a_cordoned_node_starts_there_again() -> None:
    before = change(failed(served("n1", "n2"), "n1", "tiny-0-0", 1, 10.0), "n1", cordoned=True)
    assert words(settle(before, 10.0)[1]) == ["start tiny-0-0 g2 on n1"]


def test_a_failed_shard_whose_node_has_no_room_any_more_moves() -> None:
    before = failed(served("n1", "n2"), "n1", "tiny-0-0", 1, 10.0)
    before = hear(before, "n1", register("n1", engines=()), 11.0)
    assert words(settle(before, 11.0)[1])[-1:] == ["start tiny-0-0 g2 on n1"]  # it can be installed there
    vllm = model(of=profile(engine="vllm", threads=1))
    here = ready(settle(world(register("n1"), register("n2"), models=[vllm]))[0])
    here = failed(here, "n1", "tiny-0-0", 1, 10.0)
    here = hear(here, "n1", register("n1", engines=(), shards=[status("tiny-0-0", 1, ShardState.FAILED)]), 11.0)
    assert words(settle(here, 11.0)[1]) == ["start tiny-0-0 g2 on n2"]


def test_a_shard_that_its_node_forgot_starts_at_the_next_generation() -> None:
    before = hear(served("n1"), "n1", register("n1", threads=2), 60.0)
    shard = before.shards[ShardId("tiny-0-0")]
    assert (shard.state, shard.status and shard.status.cause_code) == (ShardState.STOPPED, "forgotten")
    assert words(settle(before, 60.0)[1]) == ["start tiny-0-0 g2 on n1"]


def test_a_shard_that_was_never_heard_of_keeps_its_generation() -> None:
    placed, _ = settle(world(register("n1"), models=[model()]))
    again = hear(placed, "n1", register("n1"), 5.0)
    assert settle(again, 5.0)[1] == ()
    assert again.shards[ShardId("tiny-0-0")].generation == 1


def test_a_node_that_runs_a_newer_generation_than_any_known_is_overtaken() -> None:
    before = hear(served("n1"), "n1", status("tiny-0-0", 7), 20.0)
    assert before.strays[NodeId("n1"), ShardId("tiny-0-0")].status.generation == 7
    assert words(settle(before, 20.0)[1]) == ["start tiny-0-0 g8 on n1"]


def test_a_fresh_id_starts_above_a_stray_of_that_name() -> None:
    before = hear(world(register("n1"), register("n2")), "n2", status("tiny-0-0", 5), 1.0)
    assert words(settle(wanted(before, model()), 2.0)[1]) == ["start tiny-0-0 g6 on n1"]


def changed_profile(before: World, replicas: int, **fields: object) -> World:
    return wanted(before, model(replicas=replicas, revision=2, of=profile(threads=1, args=("--new",), **fields)))  # type: ignore[arg-type]


def test_a_new_profile_goes_through_the_replicas_one_by_one_with_room_to_spare() -> None:
    here = changed_profile(served("n1", "n2", replicas=2), 2)
    seen: list[str] = []
    for now in range(0, 400, 10):
        here, steps = settle(here, float(now))
        seen += words(steps)
        serving = [s for s in here.shards.values() if s.want is Want.RUN and s.state is ShardState.READY]
        assert len(serving) >= 2
        for shard in list(here.shards.values()):
            if shard.want is Want.STOP:
                here = hear(here, shard.node, status(shard.id, shard.generation, ShardState.STOPPED), float(now))
        here = ready(here, float(now))
    assert seen == [
        "start tiny-2-0 g1 on n1",
        "drain tiny-0-0",
        "start tiny-3-0 g1 on n2",
        "drain tiny-1-0",
        "stop tiny-0-0",
        "give up tiny-0-0",
        "stop tiny-1-0",
        "give up tiny-1-0",
    ]
    assert {s.revision for s in here.shards.values()} == {2}


def test_a_new_profile_without_room_replaces_one_replica_after_the_other() -> None:
    here = changed_profile(served("n1", "n2", replicas=2, threads=2), 2)
    here = wanted(here, model(replicas=2, revision=2, of=profile(threads=2, args=("--new",))))
    seen: list[str] = []
    for now in range(0, 400, 10):
        here, steps = settle(here, float(now))
        seen += words(steps)
        assert sum(s.state is ShardState.READY and s.want is Want.RUN for s in here.shards.values()) >= 1
        for shard in list(here.shards.values()):
            if shard.want is Want.STOP:
                here = hear(here, shard.node, status(shard.id, shard.generation, ShardState.STOPPED), float(now))
        here = ready(here, float(now))
    assert [w for w in seen if w.startswith("start")] == ["start tiny-0-0 g2 on n1", "start tiny-1-0 g2 on n2"]
    assert {s.revision for s in here.shards.values()} == {2}
    assert len(here.shards) == 2


def test_a_new_profile_that_does_not_start_leaves_the_old_replicas_serving() -> None:
    here = changed_profile(served("n1", "n2", replicas=2), 2)
    here, steps = settle(here, 0.0)
    assert words(steps) == ["start tiny-2-0 g1 on n1"]
    for generation in range(1, 6):
        now = here.shards[ShardId("tiny-2-0")].not_before or 1.0
        here = failed(here, here.shards[ShardId("tiny-2-0")].node, "tiny-2-0", generation, now)
        now = here.shards[ShardId("tiny-2-0")].not_before or now
        here, steps = settle(here, now)
        assert [w.split()[:2] for w in words(steps)] == [["start", "tiny-2-0"]]
    assert sum(s.state is ShardState.READY for s in here.shards.values()) == 2


def test_a_new_profile_that_fits_nowhere_takes_no_replica_away() -> None:
    here = wanted(served("n1"), model(revision=2, of=profile(gpus=8)))
    found = plan(here, 0.0)
    assert found.steps == ()
    assert [r.check for r in found.unplaced[TINY].reasons] == ["gpus"]


def test_a_fleet_that_is_too_small_places_what_fits_and_says_what_is_missing() -> None:
    here, steps = settle(world(register("n1", threads=2), models=[model(replicas=5)]))
    assert len(steps) == 2
    found = plan(here, 1.0)
    entry = found.unplaced[TINY]
    assert (found.steps, entry.wanted, entry.placed) == ((), 5, 2)
    assert [(r.check, r.value, r.needed) for r in entry.reasons] == [("cpu-threads", "0 of 2 free", "1")]
    assert entry.smallest_change == "free CPU threads on n1: 0 of 2 free"
    assert found.look_again is not None


def test_models_get_their_places_in_the_order_of_their_names() -> None:
    here = world(register("n1", threads=1), models=[model("b"), model("a")])
    assert words(plan(here, 0.0).steps) == ["start a-0-0 g1 on n1"]


def test_names_with_a_slash_make_ids_without_one() -> None:
    assert words(plan(world(register("n1"), models=[model("org/m")]), 0.0).steps) == ["start org_m-0-0 g1 on n1"]


def test_steps_of_an_older_plan_keep_what_was_heard_meanwhile() -> None:
    before = served("n1", "n2")
    steps = plan(wanted(before), 10.0).steps
    newer = hear(wanted(before), "n1", status("tiny-0-0", 1, port=9001), 10.1)
    after = enact(newer, steps, 10.2, CLOCK)
    shard = after.shards[ShardId("tiny-0-0")]
    assert (shard.want, shard.status and shard.status.port) == (Want.DRAIN, 9001)


def test_strays_alone_are_nothing_to_plan() -> None:
    before = hear(world(register("n1")), "n1", status("x-0-0", 3), 1.0)
    assert dict(before.strays) == {(NodeId("n1"), ShardId("x-0-0")): Stray(NodeId("n1"), status("x-0-0", 3), 1.0)}
    assert settle(before, 1.0) == (before, ())


@pytest.mark.parametrize("state", [ShardState.READY, ShardState.STARTING, ShardState.UNKNOWN])
def test_a_shard_that_is_alive_is_never_started_again(state: ShardState) -> None:
    before, _ = settle(world(register("n1"), models=[model()]))
    steps = settle(hear(before, "n1", status("tiny-0-0", 1, state)), 1000.0)[1]
    assert not any(isinstance(step, Start) and step.shard.id == "tiny-0-0" for step in steps)


def test_a_lost_node_that_returns_while_its_replacement_is_stored_is_told_to_stop_what_it_runs() -> None:
    here, _ = settle(world(register("n1"), register("n2"), models=[model()]))
    here = stage(ready(here), "n1", Stage.LOST)
    steps = plan(here, 5.0).steps
    assert words(steps) == ["start tiny-0-0 g2 on n2"]
    returned = hear(here, "n1", register("n1", shards=[status("tiny-0-0")]), 6.0)
    after = enact(returned, steps, 6.0, CLOCK)
    assert after.shards[ShardId("tiny-0-0")].node == "n2"
    assert {key: stray.status.generation for key, stray in after.strays.items()} == {("n1", "tiny-0-0"): 1}


def test_a_placement_given_up_as_never_heard_of_is_stopped_when_it_is_heard_of_meanwhile() -> None:
    here, _ = settle(world(register("n1"), models=[model()]))
    steps = (GiveUp(ShardId("tiny-0-0"), "its node never heard of it"),)
    here = hear(here, "n1", status("tiny-0-0", 1, ShardState.STARTING), 6.0)
    assert list(enact(here, steps, 6.0, CLOCK).strays) == [("n1", "tiny-0-0")]


def test_a_model_that_is_unloaded_when_idle_has_replicas_only_while_it_is_asked_for() -> None:
    lazy = replace(model(replicas=2), idle=60.0)
    here = world(register("n1"), models=[lazy])
    assert plan(here, 0.0).steps == ()
    here = attrs.evolve(here, asked=Map({TINY: 10.0}))
    here, steps = settle(here, 10.0)
    assert words(steps) == ["start tiny-0-0 g1 on n1", "start tiny-1-0 g1 on n1"]
    here = ready(here, 20.0)
    assert plan(here, 20.0).look_again == 70.0
    _, steps = settle(here, 70.0)
    assert words(steps) == ["drain tiny-1-0", "drain tiny-0-0"]
    assert steps[0].why == "nobody asks for tiny"


def test_room_that_an_idle_model_gave_back_is_anothers() -> None:
    lazy = replace(model("lazy", of=profile(threads=2)), idle=60.0)
    here = world(register("n1", threads=2), models=[lazy, model("other", of=profile(threads=2))])
    assert words(plan(here, 0.0).steps) == ["start other-0-0 g1 on n1"]
    assert "lazy" not in plan(here, 0.0).unplaced

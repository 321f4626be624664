"""A changed profile goes through the replicas: revisions, surge, one by one, pause, roll back."""

from __future__ import annotations

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from immutables import Map
from msgspec.structs import replace

from llmgw.errors import Conflict, NotFound
from llmgw.plane import operate
from llmgw.plane.gateway.route import routes_of
from llmgw.plane.models import revised
from llmgw.plane.plan import plan
from llmgw.plane.rollout import KEPT, Rollout, Rollouts, after_change, of_revision, rolled_back, rollout_of
from llmgw.plane.store.records import Stored, world_of
from llmgw.plane.why import why
from llmgw.plane.world import DEFAULT, Model, Profile, Settings, Stage, Want, World
from llmgw.wire.agent import Heartbeat, Register
from llmgw.wire.control import ControlMessage, StartShard
from llmgw.wire.facts import EngineInstall, GpuLoad, GpuProcess, InstallState, ModelName, ShardId, ShardState
from tests.plane.planes import TINY as APPLIED
from tests.plane.planes import Agent, Plane, plane
from tests.plane.test_gang import gang, says
from tests.plane.test_plan import change, stage, wanted, words
from tests.plane.worlds import CLOCK, GIB, hear, model, profile, ready, register, settle, status, world

TINY = ModelName("tiny")


def of(args: str, threads: int = 1) -> Profile:
    return profile(threads=threads, args=(args,))


def tiny(replicas: int = 1, surge: int = 1, threads: int = 1) -> Model:
    return replace(model(replicas=replicas, of=of("--old", threads)), surge=surge)


def newer(here: World, args: str = "--new", **fields: object) -> World:
    known = here.models[TINY]
    changed = after_change(known, replace(known.profile, args=(args,)), CLOCK)
    return wanted(here, replace(changed, **fields))


def served(*nodes: str, of: Model, threads: int = 2) -> World:
    return ready(settle(world(*(register(n, threads=threads) for n in nodes), models=[of]))[0])


def in_service(here: World) -> int:
    return sum(s.rank == 0 and s.want is Want.RUN and s.state is ShardState.READY for s in here.shards.values())


def stops(here: World, now: float) -> World:
    """What was told to stop has stopped."""
    for shard in list(here.shards.values()):
        if shard.want is Want.STOP:
            here = hear(here, shard.node, status(shard.id, shard.generation, ShardState.STOPPED), now)
    return here


def rolled(here: World, until: int = 600) -> tuple[World, list[str], int, int]:
    """The rollout to its end, every engine well: the steps, the fewest that served, the most that were placed."""
    seen: list[str] = []
    fewest, most = in_service(here), 0
    for now in range(0, until, 10):
        here, steps = settle(here, float(now))
        seen += words(steps)
        fewest = min(fewest, in_service(here))
        most = max(most, len({s.replica for s in here.shards.values() if s.want is Want.RUN}))
        here = ready(stops(here, float(now)), float(now))
    return here, seen, fewest, most


# Revisions ------------------------------------------------------------------------------------------------


def test_a_new_profile_gets_a_new_number_and_the_old_one_goes_into_the_history() -> None:
    changed = after_change(tiny(), of("--new"), 100.0)
    assert (changed.revision, changed.profile.args) == (2, ("--new",))
    assert [(past.revision, past.profile.args, past.clock) for past in changed.history] == [(1, ("--old",), 100.0)]
    assert after_change(changed, of("--new"), 200.0) == changed


def test_a_profile_that_was_there_before_gets_its_number_back() -> None:
    there = after_change(tiny(), of("--new"), 100.0)
    back = after_change(there, of("--old"), 200.0)
    assert (back.revision, [past.revision for past in back.history]) == (1, [2])
    assert after_change(back, of("--third"), 300.0).revision == 3


def test_a_roll_back_takes_the_profile_before_this_one_and_again_the_one_after() -> None:
    there = after_change(tiny(), of("--new"), 100.0)
    back = rolled_back(there, 200.0)
    assert (back.revision, back.profile.args) == (1, ("--old",))
    assert rolled_back(back, 300.0).revision == 2


def test_a_roll_back_to_a_revision_by_number() -> None:
    here = tiny()
    for number in range(2, 5):
        here = after_change(here, of(f"--{number}"), float(number))
    assert rolled_back(here, 9.0, to=2).profile.args == ("--2",)
    with pytest.raises(Conflict, match="tiny has revision 4 of its profile already"):
        rolled_back(here, 9.0, to=4)
    with pytest.raises(NotFound, match="no revision 9 in its history: it can go back to 1, 2, 3"):
        rolled_back(here, 9.0, to=9)


def test_a_model_that_never_changed_has_nothing_to_go_back_to() -> None:
    with pytest.raises(Conflict, match="never had another profile"):
        rolled_back(tiny(), 1.0)


@given(st.lists(st.one_of(st.integers(0, 12), st.just(-1)), max_size=40))
def test_a_revision_always_names_one_profile(changes: list[int]) -> None:
    here, seen = tiny(), dict[int, tuple[str, ...]]({1: ("--old",)})
    for number in changes:
        if number >= 0:
            here = after_change(here, of(f"--{number}"), 0.0)
        elif here.history:
            here = rolled_back(here, 0.0)
        assert seen.setdefault(here.revision, here.profile.args) == here.profile.args
        assert len(here.history) <= KEPT
        assert here.revision not in {past.revision for past in here.history}


def test_a_model_that_comes_back_at_once_with_another_profile_does_not_keep_what_it_ran_before() -> None:
    here = served("n1", "n2", of=tiny(1))
    here, _ = operate.want(here, Map(), CLOCK)
    here, _ = operate.want(here, revised(here.models, (replace(tiny(1), profile=of("--other")),)), CLOCK)
    assert here.models[TINY].revision == 2
    here, *_ = rolled(here)
    assert [s.spec.args for s in here.shards.values()] == [("--other",)]


# Going on -------------------------------------------------------------------------------------------------


def test_one_at_a_time_beside_the_old_ones_where_there_is_room() -> None:
    here, _, fewest, most = rolled(newer(served("n1", "n2", "n3", of=tiny(3))))
    assert (fewest, most) == (3, 4)
    assert {s.revision for s in here.shards.values()} == {2}


def test_a_surge_of_more_replaces_so_many_at_once() -> None:
    here = newer(served("n1", "n2", "n3", "n4", of=tiny(4, surge=3)))
    _, steps = settle(here)
    assert len(words(steps)) == 3
    here, _, fewest, most = rolled(here)
    assert (fewest, most) == (4, 7)


def test_a_surge_starts_the_next_as_each_becomes_ready() -> None:
    here, _ = settle(newer(served("n1", "n2", "n3", "n4", of=tiny(4, surge=2))))
    assert settle(here, 1.0)[1] == ()
    here = says(here, "tiny-4-0", ShardState.READY, 2.0)
    assert words(settle(here, 2.0)[1]) == ["drain tiny-0-0", "start tiny-6-0 g1 on n3"]


def test_without_a_surge_one_goes_before_one_comes_though_there_is_room() -> None:
    here, steps = settle(newer(served("n1", "n2", "n3", of=tiny(3, surge=0))))
    assert words(steps)[0] == "drain tiny-0-0"
    here, _, fewest, most = rolled(here)
    assert (fewest, most) == (2, 3)


def test_where_there_is_no_room_one_goes_before_one_comes() -> None:
    here = newer(served("n1", "n2", of=tiny(2, threads=2)))
    here, seen, fewest, most = rolled(here)
    assert (fewest, most) == (1, 2)
    assert [word for word in seen if word.startswith("start")] == ["start tiny-0-0 g2 on n1", "start tiny-1-0 g2 on n2"]


def test_replicas_of_several_nodes_are_replaced_whole() -> None:
    nodes = [register(f"n{n}", threads=1, engine_ports=(20_000, 20_999)) for n in range(1, 7)]
    here = newer(ready(settle(world(*nodes, models=[gang(2, replicas=2)]))[0]))
    here, seen, fewest, most = rolled(here)
    assert (fewest, most) == (2, 3)
    started = [word.split()[1] for word in seen if word.startswith("start")]
    assert started == ["tiny-2-0", "tiny-2-1", "tiny-0-0", "tiny-0-1"]
    assert {s.revision for s in here.shards.values()} == {2}


def test_replicas_of_several_nodes_are_replaced_in_place_where_there_is_no_room() -> None:
    nodes = [register(f"n{n}", threads=1, engine_ports=(20_000, 20_999)) for n in range(1, 5)]
    here = newer(ready(settle(world(*nodes, models=[gang(2, replicas=2)]))[0]))
    here, _, fewest, most = rolled(here)
    assert (fewest, most) == (1, 2)
    assert {s.revision for s in here.shards.values()} == {2}


def test_a_replica_on_a_cordoned_node_goes_where_there_is_room_and_else_stays() -> None:
    for surge in (0, 1):
        here = change(newer(served("n1", "n2", of=tiny(1, surge, threads=2))), "n1", cordoned=True)
        here, *_ = rolled(here)
        assert [(s.node, s.revision) for s in here.shards.values()] == [("n2", 2)]
        here = change(newer(served("n1", of=tiny(1, surge, threads=2))), "n1", cordoned=True)
        found = plan(here, 1.0)
        assert found.steps == ()
        assert "`llmgw ctl uncordon n1`" in found.unplaced[TINY].smallest_change


def test_while_a_lost_nodes_replica_has_yet_to_come_back_no_other_one_goes() -> None:
    for surge in (0, 1):
        here = stage(newer(served("n1", "n2", "n3", of=tiny(2, surge), threads=1)), "n1", Stage.LOST)
        here, steps = settle(here, 100.0)
        assert words(steps) == ["start tiny-0-0 g2 on n3"]
        assert settle(here, 101.0)[1] == ()
        assert words(settle(ready(here, 110.0), 110.0)[1]) == ["drain tiny-1-0"]
    # Nor where it has no place at all.
    here = stage(newer(served("n1", "n2", of=tiny(2, 0), threads=1)), "n1", Stage.LOST)
    found = plan(here, 100.0)
    assert found.steps == ()
    here = attrs.evolve(here, unplaced=found.unplaced)
    assert why(here, TINY, 100.0).text == (
        "1 of 2 replicas are not placed: no node passes every check; a rollout goes on: 0 of 2 replicas have revision "
        "2, waiting for room"
    )
    # Until it is wanted no more.
    here = operate.scale(here, "tiny", 1, CLOCK)[0]
    assert words(settle(here, 101.0)[1]) == ["give up tiny-0-0", "drain tiny-1-0"]


def test_a_profile_that_asks_for_less_makes_room_for_what_has_none() -> None:
    for surge in (0, 1):
        short = operate.scale(served("n1", "n2", of=tiny(2, surge, threads=2)), "tiny", 4, CLOCK)[0]
        lost = stage(served("n1", "n2", "n3", "n4", of=tiny(4, surge, threads=2)), "n3", Stage.LOST)
        for here in (short, stage(lost, "n4", Stage.LOST)):
            assert rolled(newer(here, "--same"))[1] == []
            here, _, fewest, _ = rolled(newer(here, profile=of("--less")))
            assert (in_service(here), fewest) == (4, 1)
            assert {s.revision for s in here.shards.values()} == {2}


def test_a_lost_nodes_replica_that_has_no_place_keeps_no_change_from_its_end_where_enough_serve_without_it() -> None:
    here = settle(newer(served("n1", "n2", of=tiny(1, threads=2))))[0]
    assert here.shards[ShardId("tiny-1-0")].node == "n2"
    here = stage(says(here, "tiny-1-0", ShardState.STARTING, 1.0), "n2", Stage.LOST)
    here, steps = settle(here, 100.0)
    assert words(steps) == ["give up tiny-1-0", "drain tiny-0-0"]


# The engine of the new profile ----------------------------------------------------------------------------


def version(node: str, *known: tuple[str, InstallState, str], threads: int = 2) -> Register:
    """A node that can install llama.cpp and has these versions of it."""
    installs = tuple(
        EngineInstall(engine="llamacpp", version=at, state=state, detail=detail) for at, state, detail in known
    )
    made = register(node, threads=threads, engine_ports=(20_000, 20_999))
    return replace(made, installs=installs, installable=("llamacpp",))


OLD = ("1", InstallState.INSTALLED, "")


def upgraded(here: World, **fields: object) -> World:
    known = here.models[TINY]
    changed = after_change(known, replace(known.profile, engine_version="2"), CLOCK)
    return wanted(here, replace(changed, **fields))


def told(here: World, node: str, *known: tuple[str, InstallState, str]) -> World:
    return hear(here, node, Heartbeat(installs=version(node, *known).installs), 1.0)


def test_without_a_surge_nothing_goes_before_the_new_engine_is_installed() -> None:
    nodes = [version(name, OLD) for name in ("n1", "n2")]
    here = upgraded(ready(settle(world(*nodes, models=[tiny(2, surge=0)]))[0]))
    assert plan(here, 1.0).steps == ()
    assert not plan(here, 1.0).unplaced
    found = rollout_of(here, here.models[TINY])
    assert str(found) == "0 of 2 replicas have revision 2, waiting for llamacpp 2 to be installed on n1 and 1 more"
    here = told(here, "n1", OLD, ("2", InstallState.INSTALLING, "40 %"))
    assert plan(here, 2.0).steps == ()
    here = told(here, "n2", OLD, ("2", InstallState.INSTALLED, ""))
    assert words(plan(here, 3.0).steps)[:2] == ["drain tiny-0-0", "start tiny-2-0 g1 on n2"]
    here, *_ = rolled(told(here, "n1", OLD, ("2", InstallState.INSTALLED, "")))
    assert {s.spec.engine_version for s in here.shards.values()} == {"2"}


def test_where_there_is_no_room_nothing_goes_before_the_new_engine_is_installed() -> None:
    here = ready(settle(world(version("n1", OLD), models=[tiny(1, surge=1, threads=2)]))[0])
    here = upgraded(here)
    assert plan(here, 1.0).steps == ()
    here = told(here, "n1", OLD, ("2", InstallState.INSTALLED, ""))
    assert words(plan(here, 2.0).steps) == ["drain tiny-0-0"]


def test_an_engine_that_cannot_be_installed_pauses_the_rollout_and_says_why() -> None:
    said = Rollouts()
    here = ready(settle(world(version("n1", OLD), models=[tiny(1, surge=0)]))[0])
    said.judge(here, CLOCK)
    here = told(upgraded(here), "n1", OLD, ("2", InstallState.FAILED, "no space left on device"))
    found = plan(here, 2.0)
    assert found.steps == ()
    here = attrs.evolve(here, unplaced=found.unplaced)
    far = rollout_of(here, here.models[TINY])
    assert far is not None
    assert far.why == "llamacpp 2 cannot be had on n1: failed: no space left on device"
    assert [event.kind for event in said.judge(here, CLOCK)] == ["rollout-paused"]
    here = told(here, "n1", OLD, ("2", InstallState.INSTALLED, ""))
    assert words(plan(here, 3.0).steps)[0] == "drain tiny-0-0"


def test_a_replica_of_several_nodes_waits_until_the_engine_is_installed_on_all_of_them() -> None:
    nodes = [version(name, OLD, threads=1) for name in ("n1", "n2")]
    one = replace(gang(2), surge=0)
    here = upgraded(ready(settle(world(*nodes, models=[one]))[0]))
    assert plan(here, 1.0).steps == ()
    here = told(here, "n1", OLD, ("2", InstallState.INSTALLED, ""))
    assert plan(here, 2.0).steps == ()
    here = told(here, "n2", OLD, ("2", InstallState.INSTALLED, ""))
    assert words(plan(here, 3.0).steps) == ["drain tiny-0-0", "drain tiny-0-1"]


def test_without_a_surge_a_profile_that_fits_on_another_node_moves_there() -> None:
    nodes = [register("n1", threads=2), register("n2", threads=2, labels={"new": "yes"})]
    here = ready(settle(world(*nodes, models=[tiny(1, surge=0)]))[0])
    assert [s.node for s in here.shards.values()] == ["n1"]
    known = here.models[TINY]
    here = wanted(here, after_change(known, replace(known.profile, labels={"new": "yes"}), CLOCK))
    here, *_ = rolled(here)
    assert [(s.node, s.revision) for s in here.shards.values()] == [("n2", 2)]


# After a restart of the plane -----------------------------------------------------------------------------


def restarted(here: World) -> World:
    """As a plane that has just started has it, whose settling is over before a node has returned."""
    return world_of(Stored().difference(here)[0], 0.0, CLOCK)


def test_what_a_plane_that_has_just_started_has_not_heard_of_is_not_stopped_for_having_an_older_profile() -> None:
    before = newer(served("n1", "n2", of=tiny(2, threads=2)))
    here = restarted(before)
    assert plan(here, 1.0).steps == ()
    back = hear(here, "n1", register("n1", threads=2, shards=[status("tiny-0-0")]), 2.0)
    assert plan(back, 2.0).steps == ()  # n2 may yet return: one that serves goes only when all the others do
    back = hear(back, "n2", register("n2", threads=2, shards=[status("tiny-1-0")]), 3.0)
    assert words(plan(back, 3.0).steps)[0] == "drain tiny-0-0"


def test_what_was_not_heard_of_is_drained_when_enough_serve_without_it() -> None:
    here = restarted(newer(served("n1", "n2", of=tiny(1))))
    assert [s.node for s in here.shards.values()] == ["n1"]
    here = hear(here, "n2", register("n2", threads=2), 1.0)
    here, steps = settle(here, 1.0)
    assert words(steps) == ["start tiny-1-0 g1 on n2"]
    here, steps = settle(says(here, "tiny-1-0", ShardState.READY, 2.0), 2.0)
    assert words(steps) == ["drain tiny-0-0"]


def test_a_draining_node_that_has_yet_to_return_keeps_what_it_serves_until_it_is_replaced() -> None:
    here = restarted(change(served("n1", "n2", of=tiny(1)), "n1", draining=True))
    assert plan(here, 1.0).steps == ()
    here, steps = settle(hear(here, "n2", register("n2", threads=2), 1.0), 1.0)
    assert words(steps) == ["start tiny-1-0 g1 on n2"]


# Pausing --------------------------------------------------------------------------------------------------


def failing(here: World, shard: str, times: int) -> World:
    for _ in range(times):
        now = here.shards[ShardId(shard)].not_before or 0.0
        here = says(here, shard, ShardState.FAILED, now, cause="it does not know --new")
        now = here.shards[ShardId(shard)].not_before or now
        here, _ = settle(here, now)
    return here


def test_a_new_profile_that_keeps_failing_pauses_the_rollout_and_touches_nothing_more() -> None:
    here, _ = settle(newer(served("n1", "n2", "n3", "n4", of=tiny(4, surge=2))))
    here = says(here, "tiny-5-0", ShardState.READY, 0.5)
    here, _ = settle(here, 0.5)
    before = in_service(here)
    here = failing(here, "tiny-4-0", DEFAULT.pause_after)
    found = rollout_of(here, here.models[TINY])
    assert found is not None
    assert found.paused
    assert found.why == "replica tiny-4 of revision 2 failed 2 times in a row: it does not know --new"
    for now in range(100, 200, 10):
        here, steps = settle(here, float(now))
        assert [word.split()[0] for word in words(steps)] in ([], ["stop"], ["give", "up"])
        assert in_service(here) == before


def paused(*nodes: str, replicas: int = 2, surge: int = 1) -> World:
    here, _ = settle(newer(served(*nodes, of=tiny(replicas, surge))))
    return failing(here, f"tiny-{replicas}-0", DEFAULT.pause_after)


def test_it_goes_on_when_the_new_one_becomes_ready_after_all() -> None:
    here = paused("n1", "n2")
    here = ready(here, 50.0)
    found = rollout_of(here, here.models[TINY])
    assert found == Rollout(revision=2, updated=1, ready=1, total=2, outdated=2)
    assert words(settle(here, 50.0)[1])[0] == "drain tiny-0-0"


def test_it_goes_on_with_a_newer_revision() -> None:
    here = newer(paused("n1", "n2"), "--newest")
    found = rollout_of(here, here.models[TINY])
    assert found is not None
    assert (found.revision, found.paused) == (3, False)
    _, steps = settle(here, 60.0)
    assert words(steps) == ["stop tiny-2-0", "start tiny-3-0 g1 on n2"]


def test_a_roll_back_ends_it_and_what_still_runs_the_old_profile_stays() -> None:
    here = paused("n1", "n2")
    here = wanted(here, rolled_back(here.models[TINY], CLOCK))
    here, steps = settle(here, 60.0)
    assert words(steps) == ["stop tiny-2-0"]
    assert in_service(here) == 2
    here, steps = settle(stops(here, 61.0), 61.0)
    assert words(steps) == ["give up tiny-2-0"]
    assert rollout_of(here, here.models[TINY]) is None


def test_while_it_is_paused_an_older_replica_that_dies_starts_again_as_it_was() -> None:
    here = says(paused("n1", "n2"), "tiny-0-0", ShardState.FAILED, 50.0)
    here, steps = settle(here, 50.0)
    assert words(steps) == ["start tiny-0-0 g2 on n1"]
    again = here.shards[ShardId("tiny-0-0")]
    assert (again.revision, again.spec.args) == (1, ("--old",))


def test_while_it_is_paused_an_older_replica_of_a_lost_node_moves_as_it_was() -> None:
    here = stage(paused("n1", "n2", "n3"), "n1", Stage.LOST)
    moved = [w for w in words(settle(here, 50.0)[1]) if "tiny-0-0" in w]
    assert moved in (["start tiny-0-0 g2 on n2"], ["start tiny-0-0 g2 on n3"])
    after = settle(here, 50.0)[0].shards[ShardId("tiny-0-0")]
    assert (after.revision, after.spec.args) == (1, ("--old",))


def test_without_a_pause_a_lost_nodes_replica_comes_back_with_the_new_profile_and_a_fresh_count() -> None:
    here = failing(served("n1", "n2", of=tiny()), "tiny-0-0", 1)
    here = stage(newer(ready(here, 5.0)), "n1", Stage.LOST)
    after = settle(here, 50.0)[0].shards[ShardId("tiny-0-0")]
    assert (after.node, after.revision, after.restarts, after.first_failure) == ("n2", 2, 0, None)


def test_a_draining_nodes_replica_moves_as_it_was_though_the_rollout_is_paused() -> None:
    here = change(paused("n1", "n2", "n3"), "n1", draining=True)
    here, steps = settle(here, 50.0)
    assert words(steps) == ["start tiny-3-0 g1 on n2"]
    assert here.shards[ShardId("tiny-3-0")].revision == 1
    here, steps = settle(says(here, "tiny-3-0", ShardState.READY, 60.0), 60.0)
    assert words(steps) == ["drain tiny-0-0"]
    # Where it has no place it serves on, and it is said why.
    here = change(paused("n1", "n2"), "n2", draining=True)
    here = change(here, "n1", cordoned=True)
    found = plan(here, 50.0)
    assert not [word for word in words(found.steps) if word.startswith("drain")]
    assert {(r.node, r.check) for r in found.unplaced[TINY].reasons} >= {("n1", "cordon"), ("n2", "drain")}


def test_scaling_up_while_it_is_paused_brings_more_of_what_serves() -> None:
    here = operate.scale(paused("n1", "n2", "n3"), "tiny", 4, CLOCK)[0]
    here, steps = settle(here, 50.0)
    assert words(steps) == ["start tiny-3-0 g1 on n1"]
    assert here.shards[ShardId("tiny-3-0")].revision == 1
    assert settle(here, 51.0)[1] == ()
    # Once it goes on all of them are replaced.
    here, *_ = rolled(ready(here, 52.0))
    assert [s.revision for s in here.shards.values()] == [2] * 4


def test_what_finds_no_place_while_it_is_paused_is_asked_for_as_it_was() -> None:
    here = newer(served("n1", "n2", "n3", of=tiny(2, threads=2)), profile=of("--new"))
    here = failing(settle(here)[0], "tiny-2-0", DEFAULT.pause_after)
    here = operate.scale(here, "tiny", 4, CLOCK)[0]
    short = plan(here, 1000.0).unplaced
    assert "n3: has 1 of 2 free CPU threads, 2 needed" in [reason.text for reason in short[TINY].reasons]
    found = why(attrs.evolve(here, unplaced=short), TINY, 1000.0)
    assert found.reasons == short[TINY].reasons
    assert found.text == (
        "1 of 4 replicas are not placed, as revision 1 of its profile asks: no node passes every check; a rollout is "
        "paused: replica tiny-2 of revision 2 failed 2 times in a row: it does not know --new; 0 of 4 replicas have "
        "revision 2"
    )


def test_a_lost_node_ends_no_pause() -> None:
    here = says(paused("n1", "n2", "n3"), "tiny-0-0", ShardState.FAILED, 50.0)
    assert here.shards[ShardId("tiny-2-0")].node == "n3"
    _, steps = settle(stage(here, "n3", Stage.LOST), 50.0)
    assert "start tiny-0-0 g2 on n1" in words(steps)


def test_scaling_down_while_it_is_paused_takes_older_ones_too() -> None:
    here = paused("n1", "n2", "n3", replicas=3)
    fewer = wanted(here, replace(here.models[TINY], replicas=1))
    after, _ = settle(fewer, 50.0)
    assert in_service(after) == 1
    none = wanted(here, replace(here.models[TINY], replicas=0))
    assert in_service(settle(none, 50.0)[0]) == 0


def test_how_often_it_may_fail_is_a_setting() -> None:
    here, _ = settle(newer(served("n1", "n2", of=tiny(2))))
    here = failing(here, "tiny-2-0", 2)
    found = rollout_of(here, here.models[TINY], Settings(pause_after=3))
    assert found is not None
    assert not found.paused


def test_a_model_in_its_first_revision_never_pauses() -> None:
    here = failing(settle(world(register("n1"), models=[tiny(2)]))[0], "tiny-0-0", 5)
    assert rollout_of(here, here.models[TINY]) is None
    assert plan(here, 500.0).steps == ()


# Saying so ------------------------------------------------------------------------------------------------


def test_a_pause_and_its_end_and_the_end_of_a_rollout_are_said_once() -> None:
    said = Rollouts()

    def kinds(here: World) -> list[str]:
        return [event.kind for event in said.judge(here, CLOCK)]

    here = served("n1", "n2", of=tiny(2))
    assert kinds(here) == []
    here, _ = settle(newer(here))
    assert kinds(here) == []
    here = failing(here, "tiny-2-0", 1)
    assert kinds(here) == []
    here = failing(here, "tiny-2-0", 1)
    assert kinds(here) == ["rollout-paused"]
    here = failing(here, "tiny-2-0", 1)
    assert kinds(here) == []
    here = ready(here, 500.0)
    assert kinds(here) == ["rollout-resumed"]
    here, *_ = rolled(here)
    assert kinds(here) == ["rollout-done"]
    assert kinds(here) == []


def test_a_change_in_place_is_done_when_the_last_new_replica_is_ready_and_pauses_until_then() -> None:
    said = Rollouts()
    here = newer(served("n1", of=tiny(threads=2)))
    assert said.judge(here, CLOCK) == ()
    for now in (0.0, 40.0, 41.0):
        here, _ = settle(here, now)
        here = stops(here, now)
        assert said.judge(here, CLOCK) == ()
    assert {s.revision for s in here.shards.values()} == {2}
    here = failing(here, "tiny-0-0", DEFAULT.pause_after)
    (event,) = said.judge(here, CLOCK)
    assert (event.kind, event.text) == (
        "rollout-paused",
        "tiny: the rollout of revision 2 is paused: replica tiny-0 of revision 2 failed 2 times in a row: "
        "it does not know --new",
    )
    events = said.judge(ready(here, 500.0), CLOCK)
    assert [event.text for event in events] == ["tiny: every replica has revision 2 of its profile"]


def test_a_model_that_is_unloaded_in_the_midst_of_a_rollout_is_done_with_it() -> None:
    said = Rollouts()
    here = wanted(here := served("n1", "n2", of=tiny(2)), replace(here.models[TINY], idle=60.0))
    here = newer(attrs.evolve(here, asked=Map({TINY: 0.0})))
    assert said.judge(here, CLOCK) == ()
    here, _ = settle(here, 100.0)
    assert in_service(here) == 0
    assert [event.kind for event in said.judge(here, CLOCK)] == ["rollout-done"]


def test_a_plane_that_has_just_started_says_nothing_that_was_said_before() -> None:
    here = paused("n1", "n2")
    back = world_of(Stored().difference(here)[0], 0.0, CLOCK)
    said = Rollouts()
    assert said.judge(back, CLOCK) == ()
    assert said.judge(back, CLOCK) == ()


def test_a_rollout_in_words() -> None:
    assert str(Rollout(2, 1, 1, 4, 3)) == "1 of 4 replicas have revision 2"
    assert str(Rollout(2, 1, 0, 4, 4, "it fails")) == "paused: it fails; 0 of 4 replicas have revision 2"


def test_an_older_revision_is_known_while_it_is_in_the_history() -> None:
    here = after_change(tiny(), of("--new"), 1.0)
    old, new = of_revision(here, 1), of_revision(here, 2)
    assert (old and old.profile.args, new and new.profile.args) == (("--old",), ("--new",))
    assert of_revision(here, 7) is None


class Picky(Agent):
    """A node on which no engine knows --new."""

    def obey(self, command: ControlMessage) -> None:
        Agent.obey(self, command)
        if isinstance(command, StartShard) and "--new" in command.spec.args:
            self.report(command.shard, ShardState.FAILED, cause="it does not know --new")


async def test_a_fleet_whose_new_profile_fails_serves_on_says_so_once_and_rolls_back(
    autojump_clock: trio.testing.MockClock,
) -> None:
    def serving(p: Plane) -> list[str]:
        return [endpoint.replica for endpoint in routes_of(p.fleet.world.value).models["tiny"].endpoints]

    async with plane() as p:
        for number, name in enumerate(("n1", "n2", "n3"), 1):
            agent = p.hub.agents[name] = Picky(p.fleet, name)
            agent.connect(number)
            p.nursery.start_soon(agent.beat)
        await p.fleet.apply(APPLIED)
        await trio.sleep(2)
        assert serving(p) == ["tiny-0", "tiny-1"]
        await p.fleet.apply(APPLIED + 'args = ["--new"]\n')
        await trio.sleep(300)
        assert serving(p) == ["tiny-0", "tiny-1"]
        assert p.kinds().count("rollout-paused") == 1
        placed = [event.text for event in p.fleet.events.after(0) if event.kind == "shard-placed"]
        assert not [text for text in placed if "tiny-3" in text]
        await p.fleet.apply(APPLIED)
        await trio.sleep(60)
        assert serving(p) == ["tiny-0", "tiny-1"]
        assert p.where() == {"tiny-0-0": ("n1", 1), "tiny-1-0": ("n2", 1)}
        assert {shard.revision for shard in p.fleet.world.value.shards.values()} == {1}
        assert "rollout-done" in p.kinds()


# Others that wait for room ---------------------------------------------------------------------------------


def test_what_makes_room_for_its_successor_makes_it_for_nobody_else() -> None:
    for surge in (0, 1):
        first = model("another", of=profile(threads=2, args=("--a",)))
        here = served("n1", of=tiny(1, surge, threads=2))
        here = wanted(here, here.models[TINY], first)
        here = attrs.evolve(newer(here), models=newer(here).models.set(first.name, first))
        here, *_ = rolled(here)
        assert [(s.id, s.revision) for s in here.shards.values()] == [("tiny-0-0", 2)]


def test_a_replica_of_several_nodes_makes_room_as_a_whole() -> None:
    first = model("another", of=profile(threads=1, args=("--a",)))
    nodes = [register(name, threads=1, engine_ports=(20_000, 20_999)) for name in ("n1", "n2")]
    here = ready(settle(world(*nodes, models=[replace(gang(2), surge=0)]))[0])
    here = newer(here)
    here = attrs.evolve(here, models=here.models.set(first.name, first))
    for now in (0.0, 40.0):
        here, _ = settle(here, now)
    here = says(here, "tiny-0-0", ShardState.STOPPED, 41.0)
    assert settle(here, 41.0)[1] == ()  # one of its nodes alone is of no use to its successor
    here, steps = settle(says(here, "tiny-0-1", ShardState.STOPPED, 42.0), 42.0)
    assert words(steps)[-2:] == ["start tiny-0-0 g2 on n1", "start tiny-0-1 g2 on n2"]


def test_what_a_node_measured_of_an_engine_before_it_ended_keeps_no_successor_away() -> None:
    first = model("another", of=profile(engine="vllm", gpus=1))
    mine = replace(model(of=profile(engine="vllm", gpus=1, args=("--old",))), surge=0)
    here = ready(settle(world(register("n1", gpu=1), models=[mine]))[0])
    here = newer(here)
    here = attrs.evolve(here, models=here.models.set(first.name, first))
    held = (GpuProcess("GPU-n1-0", 100, "vllm", 70 * GIB, ShardId("tiny-0-0")),)
    here = hear(here, "n1", Heartbeat(gpus=(GpuLoad("GPU-n1-0", 70 * GIB),), gpu_processes=held), 1.0)
    for now in (1.0, 40.0):
        here, _ = settle(here, now)
    here, steps = settle(says(here, "tiny-0-0", ShardState.STOPPED, 41.0), 41.0)
    assert words(steps) == ["give up tiny-0-0", "start tiny-0-0 g2 on n1"]

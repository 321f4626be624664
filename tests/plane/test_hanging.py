"""A process that cannot be ended: its place is lost, and its replica is not."""

from __future__ import annotations

from msgspec.structs import replace

from llmgw.plane import operate
from llmgw.plane.gang import HANGS
from llmgw.plane.rollout import after_change
from llmgw.plane.whatif import DrainNode, what_if
from llmgw.plane.why import why
from llmgw.plane.world import Model, Stage, Want, World
from llmgw.wire.facts import ModelName, NodeId, ShardId, ShardState
from tests.plane.test_gang import gang, says, serving
from tests.plane.test_plan import stage, wanted, words
from tests.plane.worlds import CLOCK, hear, model, profile, ready, register, settle, status, where, world

TINY = ModelName("tiny")
#: The grace of a profile, and then it is plain.
DUE = 30.0 + HANGS
STOPPING = ShardState.STOPPING


def hangs(here: World, shard: str = "tiny-0-0", now: float = 0.0) -> World:
    of = here.shards[ShardId(shard)]
    return hear(here, of.node, status(shard, of.generation, STOPPING, detail="4711 does not end"), now)


def alone(*nodes: str, of: Model | None = None) -> World:
    return ready(settle(world(*(register(n, threads=1) for n in nodes), models=[of or model()]))[0])


def test_another_replica_takes_the_place_of_one_that_hangs_which_keeps_what_it_holds() -> None:
    gpu = model(of=profile(engine="vllm", gpus=1))
    nodes = (register("n1", gpu=1), register("n2", gpu=1))
    here = hangs(ready(settle(world(*nodes, models=[gpu]))[0]))
    assert settle(here, DUE - 1.0)[1] == ()
    here, steps = settle(here, DUE)
    assert words(steps) == ["stop tiny-0-0", "start tiny-1-0 g1 on n2"]
    assert steps[0].why == "what runs of tiny-0-0 on n1 does not end, so another replica takes its place"
    # Its GPU is nobody else's.
    here = ready(wanted(here, replace(gpu, replicas=2)), DUE)
    here, steps = settle(here, DUE + 1000.0)
    assert steps == ()
    assert why(here, TINY, DUE + 1000.0).smallest_change == "reboot n1, where tiny-0-0 does not end"
    # After that it has ended, and the place is free.
    here = hear(here, "n1", register("n1", gpu=1), DUE + 2000.0)
    assert words(settle(here, DUE + 2000.0)[1]) == ["give up tiny-0-0", "start tiny-0-0 g2 on n1"]


def test_a_node_that_is_silent_is_judged_by_its_silence() -> None:
    here = stage(hangs(alone("n1", "n2")), "n1", Stage.UNREACHABLE)
    assert settle(here, DUE + 50.0)[1] == ()


def test_a_replica_that_ends_in_time_starts_again_where_it_was() -> None:
    here = hear(hangs(alone("n1", "n2")), "n1", status("tiny-0-0", 1, ShardState.FAILED), 80.0)
    assert words(settle(here, 100.0)[1]) == ["start tiny-0-0 g2 on n1"]


def test_without_another_place_it_is_said_what_is_missing() -> None:
    here, steps = settle(hangs(alone("n1")), DUE)
    assert words(steps) == ["stop tiny-0-0"]
    assert why(here, TINY, DUE).smallest_change == "reboot n1, where tiny-0-0 does not end"
    assert "4711 does not end" in why(here, TINY, DUE).standings[0].text


def test_a_rollout_does_not_wait_for_what_hangs() -> None:
    old = replace(model(replicas=2, of=profile(threads=1, args=("--old",))), surge=1)
    here = alone("n1", "n2", "n3", of=old)
    here, _ = settle(wanted(here, after_change(old, profile(threads=1, args=("--new",)), CLOCK)), 1.0)
    here, steps = settle(ready(here, 2.0), 2.0)
    assert words(steps) == ["drain tiny-0-0"]
    here = hangs(settle(here, 50.0)[0], now=50.0)
    assert settle(here, 50.0 + DUE - 1.0)[1] == ()
    assert words(settle(here, 50.0 + DUE)[1]) == ["drain tiny-1-0"]


def test_while_a_rollout_is_paused_an_older_replica_takes_an_older_ones_place() -> None:
    old = replace(model(replicas=2, of=profile(threads=1, args=("--old",))), surge=1)
    here = alone("n1", "n2", "n3", "n4", of=old)
    here, _ = settle(wanted(here, after_change(old, profile(threads=1, args=("--new",)), CLOCK)), 1.0)
    at = 1.0
    for generation in (1, 2):
        failed = status("tiny-2-0", generation, ShardState.FAILED, cause="bad luck")
        here = hear(here, where(here)["tiny-2-0"], failed, at)
        at += 40.0
        here, _ = settle(here, at)
    here, steps = settle(hangs(here, now=at), at + DUE)
    (started,) = (step for step in steps if words([step])[0].startswith("start tiny-3"))
    assert started.shard.revision == 1  # type: ignore[union-attr]


def test_members_leave_with_the_one_that_hangs_and_their_replica_comes_again_elsewhere() -> None:
    here = hangs(serving("n1", "n2", "n3", "n4"), "tiny-0-1")
    here, steps = settle(here, DUE)
    assert words(steps) == ["stop tiny-0-0", "stop tiny-0-1", "start tiny-1-0 g1 on n3", "start tiny-1-1 g1 on n4"]
    here, steps = settle(says(here, "tiny-0-0", ShardState.STOPPED, DUE), DUE + 1.0)
    assert words(steps) == ["give up tiny-0-0"]
    assert where(here)["tiny-0-1"] == "n2"


def test_an_old_leader_that_hangs_does_not_hold_its_replica_up() -> None:
    here, _ = settle(says(serving("n1", "n2", "n3", "n4"), "tiny-0-1", ShardState.FAILED, 10.0), 10.0)
    here = hear(here, "n1", status("tiny-0-0", 1, STOPPING), 11.0)
    assert settle(here, 11.0 + DUE - 1.0)[1] == ()
    here, steps = settle(here, 11.0 + DUE)
    assert words(steps) == ["stop tiny-0-0", "stop tiny-0-1", "start tiny-1-0 g1 on n3", "start tiny-1-1 g1 on n4"]
    # What was never told to start has nothing to stop; and the id is not given again while the old leader has it.
    here, _ = settle(says(here, "tiny-0-1", ShardState.STOPPED, 200.0), 200.0)
    for shard in ("tiny-1-0", "tiny-1-1"):
        here = says(here, shard, ShardState.READY, 210.0)
    here, _ = settle(here, 400.0)
    assert sorted(where(here)) == ["tiny-1-0", "tiny-1-1"]
    here, steps = settle(wanted(here, replace(gang(), replicas=2)), 401.0)
    assert words(steps) == ["start tiny-2-0 g1 on n1", "start tiny-2-1 g1 on n2"]


def test_a_newer_generation_that_hangs_does_not_hold_the_next_up() -> None:
    here = hear(alone("n1", "n2"), "n1", status("tiny-0-0", 5), 10.0)
    here, _ = settle(here, 10.0)
    assert here.shards[ShardId("tiny-0-0")].generation == 6
    here = hear(here, "n1", status("tiny-0-0", 5, STOPPING), 11.0)
    assert words(settle(here, 11.0 + DUE)[1]) == ["stop tiny-0-0", "start tiny-1-0 g1 on n2"]


def test_what_if_says_that_a_node_on_which_something_hangs_is_not_emptied() -> None:
    here, _ = settle(hangs(alone("n1", "n2")), DUE)
    here = ready(here, DUE)
    foreseen = what_if(here, DrainNode(NodeId("n1")), DUE + 10.0)
    assert where(foreseen.after)["tiny-0-0"] == "n1"
    assert here.shards[ShardId("tiny-0-0")].want is Want.STOP
    assert operate.drain(here, NodeId("n1"), True, CLOCK)[1][-1].kind == "node-draining"

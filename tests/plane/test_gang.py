"""Replicas of several nodes: started together, failed together, moved together (D4, D6)."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import pytest
import trio
import trio.testing
from immutables import Map
from msgspec.structs import replace

from llmgw.plane.converge import FETCH_AGAIN, Told, commands
from llmgw.plane.expiry import expire
from llmgw.plane.gang import MARGIN, Replica, replicas
from llmgw.plane.gateway.route import routes_of
from llmgw.plane.plan import plan
from llmgw.plane.steps import Start, Stop
from llmgw.plane.store.records import Stored, world_of
from llmgw.plane.world import DEFAULT, Model, Stage, Want, World
from llmgw.wire.agent import Heartbeat, Register
from llmgw.wire.control import ControlMessage, DrainShard, FetchWeights, StartShard, StopShard
from llmgw.wire.facts import EngineInstall, GpuLoad, GpuProcess, InstallState, NodeId, ShardId, ShardState, Weights
from tests.plane.planes import Agent, plane
from tests.plane.test_plan import change, stage, wanted, words
from tests.plane.worlds import CLOCK, GIB, hear, model, profile, ready, register, settle, status, where, world

Clock = trio.testing.MockClock

NODES = ("n1", "n2", "n3", "n4")


def gang(nodes: int = 2, replicas: int = 1, revision: int = 1, threads: int = 1, **fields: object) -> Model:
    made = replace(profile(threads=threads, nodes=nodes), network="tcp", **fields)
    return model(replicas=replicas, revision=revision, of=made)


def empty(*names: str, of: Model | None = None, threads: int = 1) -> World:
    nodes = (register(name, threads=threads, engine_ports=(20_000, 20_999)) for name in names)
    return world(*nodes, models=[of or gang()])


def placed(*names: str, of: Model | None = None, threads: int = 1) -> World:
    return settle(empty(*(names or ("n1", "n2", "n3")), of=of, threads=threads))[0]


def serving(*names: str, of: Model | None = None, threads: int = 1, now: float = 0.0) -> World:
    return ready(placed(*names, of=of, threads=threads), now)


def told(here: World) -> list[str]:
    """What nodes are told, as an operator would say it."""
    said = []
    for (node, _), command in sorted(commands(here).items(), key=lambda item: item[0]):
        match command:
            case StartShard(shard=shard, generation=generation):
                said.append(f"{node} start {shard} g{generation}")
            case StopShard(shard=shard, generation=generation):
                said.append(f"{node} stop {shard} g{generation}")
            case DrainShard(shard=shard):
                said.append(f"{node} drain {shard}")
            case FetchWeights(source=source):
                said.append(f"{node} fetch {source}")
    return said


def one(here: World) -> Replica:
    (found,) = replicas(here.shards.values())
    return found


def says(here: World, shard: str, state: ShardState, now: float = 0.0, **fields: object) -> World:
    known = here.shards[ShardId(shard)]
    return hear(here, known.node, status(shard, known.generation, state, **fields), now)


def test_all_members_are_placed_in_one_plan_at_one_generation_and_know_one_another() -> None:
    after, steps = settle(empty("n1", "n2", "n3", of=gang(3)))
    assert words(steps) == ["start tiny-0-0 g1 on n1", "start tiny-0-1 g1 on n2", "start tiny-0-2 g1 on n3"]
    specs = [member.spec for member in one(after).members]
    assert [spec.rank for spec in specs] == [0, 1, 2]
    assert {spec.peers for spec in specs} == {("n1.example", "n2.example", "n3.example")}
    assert [list(spec.ports) for spec in specs] == [[], ["rpc"], ["rpc"]]
    assert all(spec.peer_ports == tuple(other.ports for other in specs) for spec in specs)
    assert {spec.engine_version for spec in specs} == {"1"}
    assert settle(after)[1] == ()


def test_a_replica_is_placed_whole_or_not_at_all() -> None:
    found = plan(empty("n1", "n2", of=gang(3)), 0.0)
    assert (found.steps, found.unplaced["tiny"].placed) == ((), 0)  # type: ignore[index]


def test_one_nodes_replica_has_no_peers() -> None:
    spec = one(placed("n1", of=gang(1))).leader.spec
    assert (spec.peers, spec.ports, spec.peer_ports, spec.network) == ((), {}, (), {})


def test_followers_are_told_first_and_the_leader_when_all_of_them_are_ready() -> None:
    here = placed("n1", "n2", "n3", of=gang(3))
    assert told(here) == ["n2 start tiny-0-1 g1", "n3 start tiny-0-2 g1"]
    here = says(here, "tiny-0-1", ShardState.READY)
    here = says(here, "tiny-0-2", ShardState.STARTING)
    assert told(here) == []
    here = says(here, "tiny-0-2", ShardState.READY)
    assert told(here) == ["n1 start tiny-0-0 g1"]
    assert told(says(here, "tiny-0-0", ShardState.STARTING)) == []


def test_the_leaders_weights_are_fetched_while_the_followers_start() -> None:
    here = placed("n1", "n2", of=gang(source="hf://org/model"))
    assert told(here) == ["n1 fetch hf://org/model", "n2 start tiny-0-1 g1"]
    for weights in (
        Weights(source="hf://org/model", fetching=True),
        Weights(source="hf://org/model", complete=True),
        Weights(source="hf://org/model", error="the hub says no"),
    ):
        assert told(hear(here, "n1", Heartbeat(weights=(weights,)))) == ["n2 start tiny-0-1 g1"]


def test_weights_and_shards_are_told_apart_when_they_are_told_again() -> None:
    here, book = placed("n1", "n2", of=gang(source="hf://org/model")), Told(10.0)
    for node, command in book.due(commands(here), here, 0.0):
        book.sent(node, command, here.nodes[node].stream, 0.0)
    assert book.due(commands(here), here, 9.0) == ()
    assert len(book.due(commands(here), here, 10.0)) == 1
    assert len(book.due(commands(here), here, FETCH_AGAIN)) == 2


def test_it_is_routed_to_its_leader_when_every_member_is_ready() -> None:
    here = says(placed("n1", "n2"), "tiny-0-0", ShardState.READY, port=9001)
    assert routes_of(here).models["tiny"].endpoints == ()
    here = says(here, "tiny-0-1", ShardState.READY)
    (endpoint,) = routes_of(here).models["tiny"].endpoints
    assert (endpoint.replica, endpoint.host, endpoint.port) == ("tiny-0", "n1.example", 9001)
    assert routes_of(says(here, "tiny-0-1", ShardState.FAILED)).models["tiny"].endpoints == ()


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_silent_node_keeps_the_traffic_of_a_replica_and_a_lost_one_does_not(node: str) -> None:
    here = serving("n1", "n2")
    assert len(routes_of(stage(here, node, Stage.UNREACHABLE)).models["tiny"].endpoints) == 1
    assert settle(stage(here, node, Stage.UNREACHABLE), 5.0)[1] == ()
    assert routes_of(stage(here, node, Stage.LOST)).models["tiny"].endpoints == ()


def test_a_leader_that_serves_keeps_its_traffic_while_a_new_plane_waits_for_the_others_nodes() -> None:
    here = world_of(Stored().difference(serving("n1", "n2"))[0], 50.0, CLOCK)
    here = hear(here, "n1", register("n1", shards=[status("tiny-0-0")]), 51.0)
    assert len(routes_of(here).models["tiny"].endpoints) == 1
    assert routes_of(stage(here, "n2", Stage.LOST)).models["tiny"].endpoints == ()
    here = hear(here, "n2", register("n2"), 52.0)  # it came back and says nothing of its part
    assert routes_of(here).models["tiny"].endpoints == ()


def test_a_client_is_told_for_which_part_a_replica_waits() -> None:
    here = says(placed("n1", "n2"), "tiny-0-1", ShardState.STARTING)
    assert routes_of(here).models["tiny"].reason == "replica tiny-0 waits for its part on n2, which is starting"


@pytest.mark.parametrize(("dies", "on"), [("tiny-0-0", "n1"), ("tiny-0-1", "n2")])
def test_any_member_that_ends_restarts_the_whole_replica_on_its_nodes(dies: str, on: str) -> None:
    here = says(serving("n1", "n2", "n3"), dies, ShardState.FAILED, 10.0, cause="it crashed")
    here, steps = settle(here, 10.0)
    assert words(steps) == ["start tiny-0-0 g2 on n1", "start tiny-0-1 g2 on n2"]
    assert steps[0].why == f"{dies} on {on} has failed: it crashed"
    assert {member.restarts for member in one(here).members} == {1}


def test_an_old_leader_ends_before_the_new_followers_start() -> None:
    here = says(serving("n1", "n2"), "tiny-0-1", ShardState.FAILED, 10.0)
    here, _ = settle(here, 10.0)
    assert told(here) == ["n1 stop tiny-0-0 g1"]
    here = hear(here, "n1", status("tiny-0-0", 1, ShardState.STOPPED), 11.0)
    assert told(here) == ["n2 start tiny-0-1 g2"]
    here = hear(here, "n2", status("tiny-0-1", 2, ShardState.READY), 12.0)
    assert told(here) == ["n1 start tiny-0-0 g2"]


def test_a_leader_that_died_leaves_nothing_to_wait_for() -> None:
    here, _ = settle(says(serving("n1", "n2"), "tiny-0-0", ShardState.FAILED, 10.0), 10.0)
    assert told(here) == ["n2 start tiny-0-1 g2"]


def test_what_is_left_of_a_failed_attempt_is_stopped_while_the_next_waits_leader_first() -> None:
    here = placed("n1", "n2", "n3", of=gang(3))
    for shard in ("tiny-0-1", "tiny-0-2", "tiny-0-0"):
        here = says(here, shard, ShardState.READY if shard[-1] != "0" else ShardState.STARTING)
    here = says(here, "tiny-0-1", ShardState.FAILED, 5.0)
    assert settle(here, 5.0)[1] == ()
    assert told(here) == ["n1 stop tiny-0-0 g1"]
    here = says(here, "tiny-0-0", ShardState.STOPPED, 5.5)
    assert told(here) == ["n3 stop tiny-0-2 g1"]
    here = says(here, "tiny-0-2", ShardState.STOPPED, 5.6)
    assert told(here) == []
    assert {member.restarts for member in one(here).members} == {1}


def test_however_many_members_die_it_is_one_failure_and_the_first_is_the_cause() -> None:
    here = placed("n1", "n2", "n3", of=gang(3))
    here = says(here, "tiny-0-1", ShardState.FAILED, 1.0, cause="out of memory", lines=("CUDA out of memory",))
    here = says(here, "tiny-0-0", ShardState.FAILED, 1.2, cause="a peer went away")
    here = says(here, "tiny-0-2", ShardState.STOPPED, 1.3)
    members = one(here).members
    assert {member.restarts for member in members} == {1}
    assert {member.not_before for member in members} == {1.0 + DEFAULT.restart}
    assert one(here).blamed.id == "tiny-0-1"
    assert [member.last_failure and member.last_failure.cause for member in members] == [
        "a peer went away",
        "out of memory",
        None,
    ]
    assert plan(here, 1.3).look_again == 1.0 + DEFAULT.restart
    again, steps = settle(here, 2.0)
    assert {step.why for step in steps} == {"tiny-0-1 on n2 has failed: out of memory"}
    first = again.shards[ShardId("tiny-0-1")].first_failure
    assert first is not None
    assert first.lines == ("CUDA out of memory",)


def fails(here: World, shard: str, times: int, **fields: object) -> tuple[World, list[str]]:
    """A member fails so many times in a row; the last steps."""
    said: list[str] = []
    for _ in range(times):
        now = here.shards[ShardId(shard)].not_before or 0.0
        here = says(here, shard, ShardState.FAILED, now, **fields)
        now = here.shards[ShardId(shard)].not_before or now
        here, steps = settle(here, now)
        said = words(steps)
    return here, said


def test_a_replica_that_keeps_failing_is_tried_on_other_nodes_altogether() -> None:
    here, said = fails(placed(*NODES), "tiny-0-1", DEFAULT.move_after)
    assert said == ["start tiny-0-0 g4 on n3", "start tiny-0-1 g4 on n4"]
    assert {member.failed_here for member in one(here).members} == {0}
    assert {member.restarts for member in one(here).members} == {3}


def test_where_there_are_no_others_the_node_of_the_member_that_failed_is_left_out() -> None:
    here, said = fails(placed("n1", "n2", "n3"), "tiny-0-1", DEFAULT.move_after)
    assert said == ["start tiny-0-0 g4 on n1", "start tiny-0-1 g4 on n3"]
    assert "3 times in a row on n1 and n2" in one(here).leader.why


def test_where_there_is_no_other_place_it_stays() -> None:
    here, said = fails(placed("n1", "n2"), "tiny-0-0", 5)
    assert said == ["start tiny-0-0 g6 on n1", "start tiny-0-1 g6 on n2"]
    first = one(here).leader.first_failure
    assert first is not None
    assert first.generation == 1


def test_a_cause_that_every_node_meets_moves_nothing() -> None:
    _, said = fails(placed(*NODES), "tiny-0-1", 5, cause_code="bad-argument")
    assert said == ["start tiny-0-0 g6 on n1", "start tiny-0-1 g6 on n2"]


def test_a_replica_that_was_stable_begins_its_count_again() -> None:
    here, _ = fails(serving("n1", "n2"), "tiny-0-1", 2)
    here = ready(here, 20.0)
    here = says(here, "tiny-0-0", ShardState.FAILED, 20.0 + DEFAULT.stable, cause="another")
    assert {member.restarts for member in one(here).members} == {1}
    firsts = [member.first_failure and member.first_failure.cause for member in one(here).members]
    assert firsts == ["another", None]


def test_a_lost_nodes_replica_moves_as_a_whole_and_keeps_the_nodes_that_are_left() -> None:
    here, steps = settle(stage(serving("n1", "n2", "n3"), "n2", Stage.LOST), 100.0)
    assert words(steps) == ["start tiny-0-0 g2 on n1", "start tiny-0-1 g2 on n3"]
    assert "n2 is lost" in steps[0].why
    assert told(here) == ["n1 stop tiny-0-0 g1"]
    here = hear(here, "n1", status("tiny-0-0", 1, ShardState.STOPPED), 101.0)
    assert told(here) == ["n3 start tiny-0-1 g2"]
    back = hear(here, "n2", register("n2", shards=[status("tiny-0-1", 1)]), 102.0)
    assert told(back) == ["n2 stop tiny-0-1 g1", "n3 start tiny-0-1 g2"]


def taken_back(here: World, node: str) -> World:
    """The node's agent is an older one now, which knows of no replicas of several nodes."""
    return hear(here, node, replace(register(node, threads=1), features=()), 1.0)


def test_an_agent_that_was_taken_back_is_not_told_of_a_part_and_the_replica_moves() -> None:
    here = taken_back(placed("n1", "n2", "n3"), "n2")
    assert told(here) == []
    moved, steps = settle(here, 2.0)
    assert words(steps) == ["start tiny-0-0 g2 on n1", "start tiny-0-1 g2 on n3"]
    assert "the agent of n2 is too old for replicas of several nodes" in steps[0].why
    assert told(moved) == ["n3 start tiny-0-1 g2"]


def test_where_there_is_no_other_place_a_replica_waits_for_the_agent_that_was_taken_back() -> None:
    here = taken_back(placed("n1", "n2"), "n2")
    stays = plan(here, 2.0)
    assert stays.steps == ()
    assert "agent" in [reason.check for reason in stays.unplaced[one(here).model].reasons if reason.node == "n2"]
    there = hear(here, "n2", register("n2", threads=1), 3.0)
    assert plan(there, 3.0).steps == ()
    assert told(there) == ["n2 start tiny-0-1 g1"]


def test_what_runs_stays_when_its_nodes_agent_is_taken_back() -> None:
    here = serving("n1", "n2", "n3")
    older = replace(register("n2", threads=1, shards=[status("tiny-0-1")]), features=())
    assert plan(hear(here, "n2", older, 1.0), 2.0).steps == ()


def test_what_a_replica_itself_holds_of_a_gpu_does_not_keep_it_away_when_it_moves() -> None:
    here = replace(profile(gpus=1, nodes=2), network="tcp", engine="vllm")
    nodes = [register(name, gpu=1, engine_ports=(20_000, 20_999)) for name in ("n1", "n2", "n3")]
    before = ready(settle(world(*nodes, models=[model(of=here)]))[0])
    assert where(before) == {"tiny-0-0": "n1", "tiny-0-1": "n2"}
    used = GpuLoad("GPU-n1-0", 70 * GIB)
    process = GpuProcess("GPU-n1-0", 42, "vllm", 70 * GIB, "tiny-0-0")
    before = hear(before, "n1", Heartbeat(gpus=(used,), gpu_processes=(process,)), 1.0)
    after, _ = settle(stage(before, "n2", Stage.LOST), 100.0)
    assert where(after) == {"tiny-0-0": "n1", "tiny-0-1": "n3"}
    foreign = hear(before, "n1", Heartbeat(gpu_processes=(replace(process, shard=""),)), 1.0)
    assert settle(stage(foreign, "n2", Stage.LOST), 100.0)[1] == ()


def test_a_member_waits_for_another_of_its_replica_that_still_ends_on_its_node() -> None:
    here = serving("n1", "n2", "n3", "n4", of=gang(3))
    here, _ = settle(stage(here, "n2", Stage.LOST), 100.0)
    assert where(here) == {"tiny-0-0": "n1", "tiny-0-1": "n3", "tiny-0-2": "n4"}
    here = hear(here, "n1", status("tiny-0-0", 1, ShardState.STOPPED), 101.0)
    assert told(here) == ["n3 stop tiny-0-2 g1", "n4 start tiny-0-2 g2"]
    here = hear(here, "n3", status("tiny-0-2", 1, ShardState.STOPPED), 102.0)
    assert told(here) == ["n3 start tiny-0-1 g2", "n4 start tiny-0-2 g2"]


def test_a_lost_nodes_replica_without_another_place_waits_for_the_node() -> None:
    here = stage(serving("n1", "n2"), "n2", Stage.LOST)
    assert settle(here, 100.0)[1] == ()
    assert told(here) == []
    back = hear(here, "n2", Heartbeat(), 101.0)
    assert settle(back, 101.0)[1] == ()
    assert len(routes_of(back).models["tiny"].endpoints) == 1


def test_an_old_leader_that_comes_back_holds_new_followers_up_until_it_has_ended() -> None:
    here, _ = settle(stage(serving("n1", "n2", "n3"), "n1", Stage.LOST), 100.0)
    assert where(here) == {"tiny-0-0": "n2", "tiny-0-1": "n3"}
    assert told(here) == ["n2 stop tiny-0-1 g1", "n3 start tiny-0-1 g2"]
    back = hear(here, "n1", register("n1", shards=[status("tiny-0-0", 1)]), 101.0)
    assert told(back) == ["n1 stop tiny-0-0 g1", "n2 stop tiny-0-1 g1"]
    back = hear(back, "n1", status("tiny-0-0", 1, ShardState.STOPPED), 102.0)
    assert told(back) == ["n2 stop tiny-0-1 g1", "n3 start tiny-0-1 g2"]


def test_a_member_whose_node_runs_a_newer_generation_takes_all_above_it() -> None:
    here = hear(serving("n1", "n2"), "n2", status("tiny-0-1", 7), 20.0)
    here, steps = settle(here, 20.0)
    assert words(steps) == ["start tiny-0-0 g8 on n1", "start tiny-0-1 g8 on n2"]
    assert told(here) == ["n1 stop tiny-0-0 g1", "n2 stop tiny-0-1 g7"]


def test_a_fresh_replica_starts_above_every_generation_that_any_member_ever_had() -> None:
    here = hear(empty("n1", "n2"), "n2", status("tiny-0-1", 5), 1.0)
    here = attrs.evolve(here, retired=Map({ShardId("tiny-0-3"): 8}))
    assert {s.generation for s in settle(here, 2.0)[0].shards.values()} == {9}


def test_a_draining_nodes_replica_is_replaced_before_all_of_it_is_drained() -> None:
    here = change(serving(*NODES), "n2", draining=True)
    here, steps = settle(here, 10.0)
    assert words(steps) == ["start tiny-1-0 g1 on n3", "start tiny-1-1 g1 on n4"]
    here, steps = settle(ready(here, 12.0), 12.0)
    assert words(steps) == ["drain tiny-0-0", "drain tiny-0-1"]
    assert told(here) == ["n1 drain tiny-0-0"]
    assert {endpoint.replica for endpoint in routes_of(here).models["tiny"].endpoints} == {"tiny-1"}


def test_it_is_drained_at_the_gateway_then_rank_0_stops_then_the_others() -> None:
    here, _ = settle(wanted(serving("n1", "n2")), 10.0)
    assert {shard.want for shard in here.shards.values()} == {Want.DRAIN}
    here = says(here, "tiny-0-0", ShardState.DRAINING, 10.1)
    here, steps = settle(here, 10.0 + DEFAULT.drain)
    assert words(steps) == ["stop tiny-0-0", "stop tiny-0-1"]
    assert told(here) == ["n1 stop tiny-0-0 g1"]
    here = says(here, "tiny-0-0", ShardState.STOPPING, 41.0)
    assert told(here) == []
    here, steps = settle(says(here, "tiny-0-0", ShardState.STOPPED, 42.0), 42.0)
    assert words(steps) == ["give up tiny-0-0"]
    assert told(here) == ["n2 stop tiny-0-1 g1"]
    # Its id is not free before the last of it is gone.
    again, steps = settle(wanted(here, gang(1)), 43.0)
    assert words(steps) == ["start tiny-1-0 g1 on n1"]
    here, steps = settle(says(again, "tiny-0-1", ShardState.STOPPED, 44.0), 44.0)
    assert words(steps) == ["give up tiny-0-1"]


def test_followers_do_not_wait_for_a_leader_that_cannot_be_told() -> None:
    here, _ = settle(wanted(placed("n1", "n2")), 10.0)
    assert told(here) == ["n1 stop tiny-0-0 g1", "n2 stop tiny-0-1 g1"]
    here, _ = settle(wanted(serving("n1", "n2")), 10.0)
    here, _ = settle(here, 10.0 + DEFAULT.drain)
    assert told(change(here, "n1", connected=False)) == ["n2 stop tiny-0-1 g1"]


def test_a_member_that_dies_while_all_drain_ends_the_drain() -> None:
    here, _ = settle(wanted(serving("n1", "n2")), 10.0)
    _, steps = settle(says(here, "tiny-0-1", ShardState.FAILED, 11.0), 11.0)
    assert words(steps) == ["give up tiny-0-1", "stop tiny-0-0"]


def test_another_number_of_nodes_is_another_revision() -> None:
    here = wanted(serving("n1", "n2", "n3", "n4"), gang(3, revision=2))
    here, steps = settle(here, 10.0)
    assert words(steps) == ["drain tiny-0-0", "drain tiny-0-1"]
    for now in (50.0, 51.0, 52.0):
        here, steps = settle(here, now)
        for shard in list(here.shards.values()):
            if shard.want is Want.STOP:
                here = says(here, shard.id, ShardState.STOPPED, now)
    here, _ = settle(here, 53.0)
    assert len(one(here).members) == 3
    assert {member.generation for member in one(here).members} == {2}


def broken(here: World, how: str) -> World:
    """A world as no plane of this version would have written it."""
    leader, follower = here.shards[ShardId("tiny-0-0")], here.shards[ShardId("tiny-0-1")]
    shards = here.shards
    match how:
        case "a member is missing":
            shards = shards.delete(follower.id)
        case "the leader is missing":
            shards = shards.delete(leader.id)
        case "one too many":
            extra = attrs.evolve(follower, id=ShardId("tiny-0-2"), rank=2, node=NodeId("n3"))
            shards = shards.set(extra.id, extra)
        case "two generations":
            shards = shards.set(follower.id, attrs.evolve(follower, generation=9, status=None))
        case "a rank twice":
            shards = shards.set(follower.id, attrs.evolve(follower, rank=0))
        case "no peers":
            for shard in (leader, follower):
                shards = shards.set(shard.id, attrs.evolve(shard, spec=replace(shard.spec, peers=())))
        case "half of it stops":
            shards = shards.set(follower.id, attrs.evolve(follower, want=Want.STOP))
    return attrs.evolve(here, shards=shards)


@pytest.mark.parametrize(
    "how",
    [
        "a member is missing",
        "the leader is missing",
        "one too many",
        "two generations",
        "a rank twice",
        "no peers",
        "half of it stops",
    ],
)
def test_members_that_make_no_replica_are_stopped_and_it_is_placed_anew(how: str) -> None:
    here = broken(serving("n1", "n2", "n3"), how)
    if "missing" in how or how in ("two generations", "half of it stops"):
        assert routes_of(here).models["tiny"].endpoints == ()
    started: set[ShardId] = set()
    for now in range(10, 200, 5):
        here, steps = settle(here, float(now))
        started |= {step.shard.id for step in steps if isinstance(step, Start)}
        for (node, _), command in commands(here).items():
            if isinstance(command, StopShard):
                word = status(command.shard, command.generation, ShardState.STOPPED)
                here = hear(here, node, word, float(now))
            elif isinstance(command, StartShard):
                here = hear(here, node, status(command.shard, command.generation), float(now))
    assert one(here).sound
    assert one(here).ready
    assert len(started) == 2


def overdue(here: World, now: float) -> World:
    return expire(here, now, CLOCK + now, DEFAULT)[0]


def heard(here: World, now: float, names: Iterable[str] = NODES) -> World:
    for name in names:
        if NodeId(name) in here.nodes:
            here = hear(here, name, Heartbeat(), now)
    return here


def test_a_follower_that_never_comes_is_named_and_the_replica_starts_again() -> None:
    here = says(placed("n1", "n2"), "tiny-0-1", ShardState.STARTING, 5.0, detail="loads its libraries")
    limit = 5.0 + 900.0 + MARGIN
    assert not one(overdue(heard(here, limit - 0.1), limit - 0.1)).broken
    late, events = expire(heard(here, limit), limit, CLOCK, DEFAULT)
    assert [event.kind for event in events] == ["replica-overdue"]
    assert "tiny-0-1 on n2 is starting (loads its libraries)" in events[0].text
    assert {member.restarts for member in one(late).members} == {1}
    assert overdue(late, limit + 1) is late
    assert told(late) == ["n1 stop tiny-0-0 g1", "n2 stop tiny-0-1 g1"]
    again, steps = settle(late, limit + 10.0)
    assert words(steps) == ["start tiny-0-0 g2 on n1", "start tiny-0-1 g2 on n2"]
    assert steps[0].why.startswith("tiny-0-1 on n2 kept the others waiting: not all of it was ready within 900 s")
    assert one(again).generation == 2


def test_the_time_of_all_begins_when_the_last_of_them_does() -> None:
    here = says(placed("n1", "n2"), "tiny-0-1", ShardState.READY, 800.0)
    here = says(here, "tiny-0-0", ShardState.STARTING, 850.0)
    at = 850.0 + 900.0 + MARGIN
    assert not one(overdue(heard(here, at - 1.0), at - 1.0)).broken
    late = overdue(heard(here, at), at)
    assert one(late).broken
    assert one(late).blamed.id == "tiny-0-0"


def test_a_follower_that_no_word_ever_came_of_is_the_one_to_blame() -> None:
    here = placed("n1", "n2")
    late, events = expire(heard(here, 931.0), 931.0, CLOCK, DEFAULT)
    assert "tiny-0-1 on n2 is not heard of since it was told to start" in events[0].text
    assert one(late).blamed.id == "tiny-0-1"


def test_an_older_leader_that_does_not_end_is_named() -> None:
    here, _ = settle(says(serving("n1", "n2"), "tiny-0-1", ShardState.FAILED, 10.0), 10.0)
    here = hear(here, "n1", status("tiny-0-0", 1, ShardState.STOPPING), 11.0)
    _, events = expire(heard(here, 950.0), 950.0, CLOCK, DEFAULT)
    words = "tiny-0-1 on n2 is not told to start while tiny-0-0 of generation 1 still runs on n1 (stopping)"
    assert words in events[0].text


def test_fetching_weights_takes_no_time_of_the_others() -> None:
    here = says(placed("n1", "n2"), "tiny-0-1", ShardState.FETCHING, 5.0)
    assert not one(overdue(heard(here, 9000.0), 9000.0)).broken
    here = says(here, "tiny-0-1", ShardState.STARTING, 9000.0)
    assert not one(overdue(heard(here, 9900.0), 9900.0)).broken


def test_waiting_for_an_engine_that_is_being_installed_takes_no_time_of_the_others() -> None:
    here = says(placed("n1", "n2"), "tiny-0-1", ShardState.STARTING, 5.0, detail="waits for llamacpp 2 to be installed")
    installs = (EngineInstall(engine="llamacpp", version="2", state=InstallState.INSTALLING),)
    for now in (5.0, 9000.0):
        here = hear(heard(here, now), "n2", Heartbeat(installs=installs), now)
        assert not one(overdue(here, now)).broken
    here = says(here, "tiny-0-1", ShardState.STARTING, 9001.0)
    there = hear(here, "n2", Heartbeat(installs=(replace(installs[0], state=InstallState.INSTALLED),)), 9001.0)
    assert not one(overdue(heard(there, 9900.0), 9900.0)).broken
    assert one(overdue(heard(there, 9940.0), 9940.0)).broken


def test_a_silent_node_is_not_judged_by_the_deadline() -> None:
    here = says(placed("n1", "n2"), "tiny-0-1", ShardState.STARTING, 5.0)
    assert not one(overdue(heard(here, 999.0, ["n1"]), 999.0)).broken
    assert not one(overdue(change(heard(here, 999.0), "n2", connected=False), 999.0)).broken


def test_a_ready_replica_is_never_overdue() -> None:
    here = serving("n1", "n2")
    assert not one(overdue(heard(here, 99_999.0), 99_999.0)).broken


def test_a_failure_that_was_counted_is_known_after_the_plane_has_started_anew() -> None:
    here = says(placed("n1", "n2"), "tiny-0-1", ShardState.FAILED, 1.0, cause="out of memory")
    here = says(here, "tiny-0-0", ShardState.STOPPED, 1.5)
    back = world_of(Stored().difference(here)[0], 50.0, CLOCK + 50.0)
    for name in ("n1", "n2"):
        back = hear(back, name, register(name, threads=1, engine_ports=(20_000, 20_999)), 51.0)
    assert one(back).broken
    back, steps = settle(back, 51.0)
    assert words(steps) == ["start tiny-0-0 g2 on n1", "start tiny-0-1 g2 on n2"]
    assert {member.restarts for member in one(back).members} == {1}


def test_a_member_that_its_node_forgot_is_no_failure_and_restarts_all() -> None:
    here = hear(serving("n1", "n2"), "n2", register("n2", threads=1, engine_ports=(20_000, 20_999)), 60.0)
    here, steps = settle(here, 60.0)
    assert words(steps) == ["start tiny-0-0 g2 on n1", "start tiny-0-1 g2 on n2"]
    assert {member.restarts for member in one(here).members} == {0}


def test_an_unsound_replicas_stop_is_told_to_every_member() -> None:
    here = broken(serving("n1", "n2", "n3"), "two generations")
    here, steps = settle(here, 5.0)
    assert all(isinstance(step, Stop) for step in steps)
    assert told(here) == ["n1 stop tiny-0-0 g1"]  # and then the others


class Member(Agent):
    """A node that may run members of replicas of several nodes."""

    def register(self) -> Register:
        return replace(super().register(), engine_ports=(20_000, 20_999))


SEVERAL = """
[[models]]
name = "tiny"
engine = "llamacpp"
source = "/models/tiny.gguf"
nodes = 3
network = "tcp"
resources = { cpu_threads = 1 }
"""


async def test_a_fleet_starts_restarts_moves_and_stops_a_replica_as_one(autojump_clock: Clock) -> None:
    async with plane() as p:
        order: list[str] = []

        def note(node: NodeId, command: ControlMessage) -> None:
            if isinstance(command, StartShard | StopShard):
                order.append(f"{type(command).__name__} {command.shard} {command.generation}")

        p.hub.before = note
        agents: dict[str, Member] = {}
        for number, name in enumerate(NODES, 1):
            agents[name] = p.hub.agents[name] = Member(p.fleet, name)
            agents[name].connect(number)
            p.nursery.start_soon(agents[name].beat)
        await p.fleet.apply(SEVERAL)
        await trio.sleep(2)
        assert p.where() == {"tiny-0-0": ("n1", 1), "tiny-0-1": ("n2", 1), "tiny-0-2": ("n3", 1)}
        assert order == ["StartShard tiny-0-1 1", "StartShard tiny-0-2 1", "StartShard tiny-0-0 1"]

        order.clear()
        agents["n3"].report("tiny-0-2", ShardState.FAILED, cause="killed")
        await trio.sleep(2)
        assert [said for said in order if "-0 " in said] == ["StopShard tiny-0-0 1", "StartShard tiny-0-0 2"]
        assert order[0] == "StopShard tiny-0-0 1"
        assert order[-1] == "StartShard tiny-0-0 2"

        agents["n2"].silent = True
        await trio.sleep(200)
        assert p.where() == {"tiny-0-0": ("n1", 3), "tiny-0-1": ("n3", 3), "tiny-0-2": ("n4", 3)}
        for command in agents["n2"].connect(9):
            agents["n2"].obey(command)
        await trio.sleep(2)
        assert agents["n2"].runs == {"tiny-0-1": (2, ShardState.STOPPED)}
        assert len(routes_of(p.fleet.world.value).models["tiny"].endpoints) == 1

        order.clear()
        await p.fleet.apply("")
        await trio.sleep(60)
        assert order == ["StopShard tiny-0-0 3", "StopShard tiny-0-1 3", "StopShard tiny-0-2 3"]
        assert len(p.fleet.world.value.shards) == 0

"""The API's answers as JSON, pinned: a change of a file in golden/ is a change for every program that reads it.

`LLMGW_GOLDEN=write pytest tests/plane/admin/test_views.py` writes them anew; review the difference.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from immutables import Map

from llmgw.errors import BadInput, NotFound
from llmgw.plane.admin import views
from llmgw.plane.admin.seams import Traffic
from llmgw.plane.admin.shardview import least_advanced
from llmgw.plane.events import Event
from llmgw.plane.world import Failure, Frozen, Stage, Unplaced, Want, World
from llmgw.wire import api, apicommon, modelapi, nodeapi, replicaapi
from llmgw.wire.facts import ModelName, NodeId, ReplicaId, ShardId, ShardState
from tests.plane.admin.sample import NOW, WALL, draining_world, gang_world, world

GOLDEN = Path(__file__).parent / "golden"
TRAFFIC = Traffic({"tiny-0": 3}, {"requests": 12})
BUSY = Traffic({"org_large-0": 2})
FLAPPED = Event(kind="port-changed", subject="node:gpu-01", text="gpu-01 mlx5_0/1: ACTIVE -> DOWN", clock=WALL, id=6)
HAPPENED = Event(kind="node-lost", subject="node:node-b", text="node-b is lost", clock=WALL, id=7)


def status(w: World) -> api.StatusReply:
    """Without the version of this release, which is not promised."""
    said = views.status(w, NOW, WALL, plane="p", since=NOW - 60, traffic=TRAFFIC, latest=7)
    return msgspec.structs.replace(said, version="1.2.3")


ANSWERS: dict[str, Callable[[World], msgspec.Struct]] = {
    "status": lambda w: status(w),
    "nodes": lambda w: views.nodes(w, NOW),
    "node-gpu": lambda w: views.node(w, NOW, "gpu-01", [FLAPPED]),
    "node-cpu": lambda w: views.node(w, NOW, "node-a"),
    "node-lost": lambda w: views.node(w, NOW, "node-b"),
    "models": lambda w: views.models(w, NOW, WALL),
    "replicas": lambda w: views.replicas(w, NOW, WALL, TRAFFIC),
    "problems": lambda w: views.problems(w, NOW),
    "replica-one": lambda w: views.replica(w, NOW, WALL, "tiny-0", TRAFFIC),
    "replica-waits": lambda w: views.replica(gang_world() if w.nodes else w, NOW, WALL, "org/large", TRAFFIC),
    "replica-warned": lambda w: views.replica(
        gang_world(ready=True) if w.nodes else w, NOW, WALL, "org_large-0-1", TRAFFIC
    ),
    "node-draining": lambda w: views.node(draining_world() if w.nodes else w, NOW, "node-a", (), BUSY),
    "history": lambda w: views.history(gang_world() if w.nodes else w, "org/large"),
    "why": lambda w: views.why(w, NOW, WALL, "big"),
    "overview": lambda w: msgspec.structs.replace(
        views.overview(w, NOW, WALL, plane="p", since=NOW - 60, traffic=TRAFFIC, latest=7, events=[HAPPENED]),
        status=status(w),
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_answer_is_as_it_was_promised(name: str) -> None:
    found = msgspec.json.format(msgspec.json.encode(ANSWERS[name](world())), indent=2) + b"\n"
    path = GOLDEN / f"{name}.json"
    if os.environ.get("LLMGW_GOLDEN") == "write":
        path.write_bytes(found)
    assert found.decode() == path.read_text()


@pytest.mark.parametrize("name", ANSWERS)
def test_what_the_plane_says_the_client_reads(name: str) -> None:
    said = ANSWERS[name](world())
    assert msgspec.json.decode(msgspec.json.encode(said), type=type(said)) == said


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for part in (apicommon, replicaapi, modelapi, nodeapi, api)
        for kind in vars(part).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == part.__name__
    ],
)
def test_a_client_reads_an_answer_of_an_older_and_of_a_newer_plane(kind: type[msgspec.Struct]) -> None:
    # Everything has a default, so keys may be missing; unknown keys are ignored.
    assert msgspec.json.decode(b"{}", type=kind) == msgspec.json.decode(b'{"from_the_future": [1]}', type=kind)


def test_an_empty_world_has_every_answer() -> None:
    for name, answer in ANSWERS.items():
        if name.startswith(("node-", "replica-")) or name in ("why", "history"):
            with pytest.raises(NotFound):
                answer(World())
        else:
            assert msgspec.json.encode(answer(World()))


def test_an_unknown_name_is_answered_with_the_near_one() -> None:
    with pytest.raises(NotFound, match="did you mean 'node-a'"):
        views.node(world(), NOW, "node_a")
    with pytest.raises(NotFound, match="did you mean 'tiny'"):
        views.why(world(), NOW, WALL, "tinny")


def test_a_frozen_plane_says_why_and_for_how_long() -> None:
    frozen = attrs.evolve(world(), frozen=Frozen("a third of the fleet fell silent together", NOW - 5, NOW + 85))
    status = views.status(frozen, NOW, WALL, plane="p", since=NOW, traffic=TRAFFIC, latest=0)
    assert (status.waiting, status.waiting_for) == (
        "no node is taken for lost: a third of the fleet fell silent together",
        85.0,
    )


def test_a_settling_plane_says_so() -> None:
    settling = attrs.evolve(world(), settling_until=NOW + 20)
    status = views.status(settling, NOW, WALL, plane="p", since=NOW, traffic=TRAFFIC, latest=0)
    assert status.waiting_for == 20.0
    assert "come back" in status.waiting


def test_models_that_are_served_elsewhere_are_shown_and_explained() -> None:
    traffic = Traffic(elsewhere={"far": ("https://far.example/v1",), "tiny": ("http://10.0.0.9:8000",)})
    shown = {model.name: model for model in views.models(world(), NOW, WALL, traffic).models}
    assert (shown["far"].elsewhere, shown["far"].wanted, shown["far"].reason) == (("https://far.example/v1",), 0, "")
    assert (shown["tiny"].elsewhere, shown["tiny"].wanted) == (("http://10.0.0.9:8000",), 1)
    assert "https://far.example/v1" in views.why(world(), NOW, WALL, "far", traffic).text


def test_a_model_that_is_no_longer_wanted_is_shown_until_its_replicas_are_gone() -> None:
    ended = attrs.evolve(world(), models=world().models.delete(ModelName("tiny")))
    shown = {model.name: model for model in views.models(ended, NOW, WALL).models}
    assert (shown["tiny"].wanted, shown["tiny"].placed) == (0, 1)
    assert "no longer wanted" in shown["tiny"].reason
    assert views.why(ended, NOW, WALL, "tiny").replicas


def test_ages_are_counted_from_now_and_never_negative() -> None:
    for row in views.nodes(world(), NOW - 10_000).nodes:
        assert row.stage_age >= 0
        assert row.heard_age is None or row.heard_age >= 0


@given(st.lists(st.sampled_from(list(ShardState)), min_size=1))
def test_a_replica_is_ready_only_when_every_shard_is(states: list[ShardState]) -> None:
    state = least_advanced(states)
    assert state in states
    assert (state is ShardState.READY) == all(one is ShardState.READY for one in states)


def test_a_view_of_nothing_is_unknown() -> None:
    assert least_advanced([]) is ShardState.UNKNOWN


@pytest.mark.parametrize("name", ["tiny-0", "tiny-0-0", "tiny", "tin"])
def test_a_replica_is_found_by_its_id_a_shard_its_model_or_a_beginning(name: str) -> None:
    assert views.replica(world(), NOW, WALL, name, TRAFFIC).replica.id == "tiny-0"


def two() -> World:
    here = world()
    other = attrs.evolve(here.shards[ShardId("tiny-0-0")], id=ShardId("tiny-10-0"), replica=ReplicaId("tiny-10"))
    return attrs.evolve(here, shards=here.shards.set(other.id, other))


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("tiny", BadInput, "there are 2 replicas of it: say which: tiny-0, tiny-10"),
        ("tin", BadInput, "there are 2 replicas that begin so: say which: tiny-0, tiny-10"),
        ("tiny-2", NotFound, "no replica is called 'tiny-2': did you mean 'tiny-0'"),
        ("", NotFound, "no replica is called ''"),
        ("zzz", NotFound, "`llmgw ctl replicas` lists all"),
    ],
)
def test_a_name_that_is_not_one_replica_is_answered_with_those_that_could_be_meant(
    name: str, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        views.replica(two(), NOW, WALL, name, TRAFFIC)


def test_an_exact_id_wins_over_longer_ones_that_begin_with_it() -> None:
    here = two()
    assert views.replica(here, NOW, WALL, "tiny-1", TRAFFIC).replica.id == "tiny-10"
    first = attrs.evolve(here.shards[ShardId("tiny-0-0")], id=ShardId("tiny-1-0"), replica=ReplicaId("tiny-1"))
    here = attrs.evolve(here, shards=here.shards.set(first.id, first))
    assert views.replica(here, NOW, WALL, "tiny-1", TRAFFIC).replica.id == "tiny-1"


def test_a_leader_that_is_not_told_yet_waits_for_its_followers() -> None:
    reply = views.replica(gang_world(), NOW, WALL, "org/large", TRAFFIC)
    assert reply.waiting == ("org_large-0-0: its followers: org_large-0-1 on node-a (fetching, 75 %)",)
    assert (reply.replica.state, reply.replica.nodes) == ("starting", ("gpu-01", "node-a"))
    assert (reply.replica.revision, reply.wanted_revision, reply.replica.outdated) == (1, 2, True)


def member(here: World, rank: int, **fields: Any) -> World:
    shard = here.shards[ShardId(f"org_large-0-{rank}")]
    return attrs.evolve(here, shards=here.shards.set(shard.id, attrs.evolve(shard, **fields)))


def waiting(here: World) -> tuple[str, ...]:
    return views.replica(here, NOW, WALL, "org/large", TRAFFIC).waiting


def test_an_attempt_that_is_over_waits_for_the_next_one_by_the_member_that_ended_it() -> None:
    failure = Failure(3, WALL, None, "", "not all of it was ready within 900 s")
    here = member(member(gang_world(), 0, not_before=NOW + 30), 1, not_before=NOW + 30, last_failure=failure)
    assert waiting(here) == ("org_large-0-1: the next attempt, in 30s",)
    here = member(member(here, 0, not_before=NOW - 1), 1, not_before=NOW - 1)
    assert waiting(here) == ()
    full = attrs.evolve(here, unplaced=Map({ModelName("org/large"): Unplaced(ModelName("org/large"), 1, 0)}))
    assert waiting(full) == ("org_large-0-1: room for its next attempt",)


def test_a_member_waits_for_its_node() -> None:
    here = gang_world()
    node = here.nodes[NodeId("node-a")]

    def with_node(**fields: Any) -> World:
        return attrs.evolve(here, nodes=here.nodes.set(node.id, attrs.evolve(node, **fields)))

    assert waiting(with_node(stage=Stage.LOST))[1] == "org_large-0-1: node-a is lost"
    assert waiting(with_node(connected=False))[1] == "org_large-0-1: node-a has no stream: its agent is awaited"
    assert waiting(member(here, 1, status=None, status_at=None))[1:] == (
        "org_large-0-1: node-a to take up generation 3",
    )
    gone = attrs.evolve(here, nodes=here.nodes.delete(node.id))
    assert waiting(gone)[1] == "org_large-0-1: node-a is not known"


def test_what_a_node_says_of_a_start_or_an_end_that_takes_long_is_what_it_waits_for() -> None:
    here = gang_world()
    status = here.shards[ShardId("org_large-0-1")].status
    assert status is not None

    def with_word(state: ShardState, detail: str, **fields: Any) -> str:
        said = msgspec.structs.replace(status, state=state, detail=detail, progress=None)
        return waiting(member(here, 1, status=said, **fields))[-1]

    installs = with_word(ShardState.STARTING, "waits for vllm 0.32.0 to be installed")
    assert installs == "org_large-0-1: vllm 0.32.0 to be installed"
    stays = "these processes do not end even by SIGKILL: 77 (python, state D)"
    assert with_word(ShardState.STOPPING, stays, want=Want.STOP) == f"org_large-0-1: its end: {stays}"


def test_a_replica_that_serves_or_ends_waits_for_nothing() -> None:
    here = gang_world(ready=True)
    assert waiting(here) == ()
    node = here.nodes[NodeId("node-a")]
    # Its agent starts anew, or is silent for a while: traffic goes on (D1).
    for quiet in (attrs.evolve(node, connected=False), attrs.evolve(node, connected=False, stage=Stage.UNREACHABLE)):
        assert waiting(attrs.evolve(here, nodes=here.nodes.set(node.id, quiet))) == ()
    assert waiting(member(member(here, 0, want=Want.STOP), 1, want=Want.STOP)) == ()


def test_the_first_failure_is_the_one_that_came_first_whichever_member_had_it() -> None:
    reply = views.replica(gang_world(), NOW, WALL, "org/large", TRAFFIC)
    assert reply.first is not None
    assert reply.last is not None
    assert (reply.first.shard, reply.first.failure.generation) == ("org_large-0-1", 1)
    assert (reply.last.shard, reply.last.failure.generation) == ("org_large-0-0", 2)
    assert reply.first.log == "llmgw ctl logs node-a org_large-0-1 --run 1"


def test_of_the_newest_attempt_the_member_that_failed_first_is_the_cause_and_the_node_is_where_it_was() -> None:
    here = gang_world()
    for rank, cause, after in ((0, "a peer has closed the connection", 2.0), (1, "out of memory", 1.0)):
        shard = here.shards[ShardId(f"org_large-0-{rank}")]
        failure = Failure(3, WALL + after, 1, "", cause, node="gpu-77")
        here = attrs.evolve(here, shards=here.shards.set(shard.id, attrs.evolve(shard, last_failure=failure)))
    reply = views.replica(here, NOW, WALL, "org/large", TRAFFIC)
    assert reply.last is not None
    assert (reply.last.shard, reply.last.failure.cause) == ("org_large-0-1", "out of memory")
    assert reply.last.log == "llmgw ctl logs gpu-77 org_large-0-1 --run 3"
    assert reply.replica.cause == "out of memory"


def test_what_the_profile_says_wins_over_what_the_plane_wrote_and_both_are_shown() -> None:
    member = views.replica(gang_world(), NOW, WALL, "org/large", TRAFFIC).members[0]
    shown = {one.name: (one.value, one.by, one.instead) for one in member.environment}
    assert shown["NCCL_SOCKET_IFNAME"] == ("eth9", "profile", "eth0")
    assert shown["NCCL_IB_HCA"] == ("=mlx5_0:1", "plane", "")
    assert "NCCL_DEBUG" not in shown


def test_a_test_that_is_too_old_is_stale_and_one_that_never_was_is_shown() -> None:
    here = gang_world()
    (tested,) = views.replica(here, NOW, WALL, "org/large", TRAFFIC).evidence
    assert (tested.age, tested.stale, tested.bad) == (7200.0, False, ("gpu-01 mlx5_0/1",))
    (tested,) = views.replica(here, NOW, WALL + 8 * 86400, "org/large", TRAFFIC).evidence
    assert tested.stale
    (never,) = views.replica(attrs.evolve(here, evidence=Map()), NOW, WALL, "org/large", TRAFFIC).evidence
    assert (never.a, never.b, never.age) == ("gpu-01", "node-a", None)


def test_what_a_draining_node_still_has_says_what_it_waits_for() -> None:
    reply = views.node(draining_world(), NOW, "node-a", (), BUSY)
    assert {one.shard: (one.in_flight, one.stop_in, one.text) for one in reply.leaving} == {
        "tiny-0-0": (None, None, "serves until its replacement is ready"),
        "org_large-0-1": (2, 500.0, "gets no new requests; finishes 2 requests, for 8m 20s more at most"),
        "old-0-0": (None, None, "being stopped"),
    }
    assert (reply.node.draining, reply.node.drained, reply.node.drain_within) == (True, False, 600.0)


def test_a_node_is_drained_when_neither_shards_nor_strays_are_left() -> None:
    here = draining_world()
    nodes = {row.id: row.drained for row in views.nodes(attrs.evolve(here, shards=Map()), NOW).nodes}
    assert nodes["node-a"] is False  # a stray runs
    nodes = {row.id: row.drained for row in views.nodes(attrs.evolve(here, shards=Map(), strays=Map()), NOW).nodes}
    assert nodes == {"node-a": True, "gpu-01": False, "node-b": False}


def test_a_change_of_a_model_says_how_far_it_is_and_what_pauses_it() -> None:
    here = gang_world(ready=True)
    model = {one.name: one for one in views.models(here, NOW, WALL).models}["org/large"]
    assert (model.rollout, model.paused, model.updated) == ("0 of 1 replicas have revision 2", "", 0)
    new = attrs.evolve(
        here.shards[ShardId("tiny-0-0")],
        id=ShardId("org_large-1-0"),
        replica=ReplicaId("org_large-1"),
        model=ModelName("org/large"),
        revision=2,
        restarts=2,
        status=None,
        last_failure=Failure(2, WALL, 1, "", "out of memory"),
    )
    here = attrs.evolve(here, shards=here.shards.set(new.id, new))
    model = {one.name: one for one in views.models(here, NOW, WALL).models}["org/large"]
    assert model.paused == "replica org_large-1 of revision 2 failed 2 times in a row: out of memory"
    assert (model.rollout, model.updated) == ("0 of 1 replicas have revision 2, 1 on the way", 1)


def test_a_model_that_is_unloaded_wants_nothing_and_says_what_loads_it() -> None:
    here = world()
    name = ModelName("tiny")
    idle = msgspec.structs.replace(here.models[name], idle=600.0)
    here = attrs.evolve(here, models=here.models.set(name, idle), shards=Map())
    shown = {one.name: one for one in views.models(here, NOW, WALL).models}["tiny"]
    assert (shown.wanted, shown.replicas, shown.unloaded, shown.idle_in) == (0, 1, True, None)
    assert shown.reason == "unloaded: nobody has asked for it since the plane started; a request loads it"
    here = attrs.evolve(here, asked=Map({name: NOW - 100}))
    shown = {one.name: one for one in views.models(here, NOW, WALL).models}["tiny"]
    assert (shown.wanted, shown.unloaded, shown.idle_in) == (1, False, 500.0)
    long = {one.name: one for one in views.models(here, NOW + 5000, WALL).models}["tiny"]
    assert long.reason == "unloaded: nobody has asked for it for 10m; a request loads it"

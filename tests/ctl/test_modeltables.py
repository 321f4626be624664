"""One replica on one screen, and a model's past: everything that is known is there, whatever the width."""

from __future__ import annotations

import io
from collections.abc import Callable

import msgspec
import pytest
from rich.console import Console, RenderableType

from llmgw.ctl import modeltables, nodetables, replicatables, tables
from llmgw.ctl.client import Answer
from llmgw.plane.admin import views
from llmgw.plane.admin.seams import Traffic
from llmgw.plane.world import World
from llmgw.wire.api import StatusReply
from llmgw.wire.replicaapi import (
    AttemptView,
    FailureView,
    MemberView,
    ProgressView,
    ReplicaReply,
    ReplicasReply,
    ReplicaView,
    ShardView,
)
from tests.plane.admin.sample import NOW, WALL, draining_world, gang_world, world

Table = Callable[[Answer, int], RenderableType]


def drawn(value: msgspec.Struct, table: Table, width: int = 200) -> str:
    out = Console(file=io.StringIO(), width=width, color_system=None)
    out.print(table(Answer(msgspec.json.encode(value)), width), crop=False)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def one(world: World, name: str) -> ReplicaReply:
    return views.replica(world, NOW, WALL, name, Traffic({"org_large-0": 4}))


@pytest.mark.parametrize(
    "words",
    [
        "gpu-01+node-a",
        "1 (outdated: 2 is wanted)",
        "2 times in a row",
        "org_large-0-0: its followers: org_large-0-1 on node-a (fetching, 75 %)",
        "fetching weights 3.0 GiB of 4.0 GiB",
        "master 21000",
        "mlx5_0:1",
        "nothing yet",
        "NCCL_SOCKET_IFNAME  eth9       eth0 (the profile says so)",
        "gpu-01 mlx5_0/1 (12 Gb/s of 400)",
        "2h ago",
        "NCCL WARN Call to ibv_reg_mr failed",
        "`llmgw ctl logs node-a org_large-0-1 --run 1`",
        "`llmgw ctl logs gpu-01 org_large-0-0 --run 2`",
        "org_large-0-1: vllm serve --node-rank 1",
    ],
)
def test_a_replica_of_two_nodes_shows_what_it_is_and_what_it_waits_for(words: str) -> None:
    assert words in drawn(one(gang_world(), "org/large"), modeltables.replica)


def test_a_command_line_stands_in_one_line_on_the_narrowest_terminal_so_that_it_can_be_copied() -> None:
    shown = drawn(one(gang_world(), "org/large"), modeltables.replica, width=30)
    assert "org_large-0-1: vllm serve --node-rank 1" in shown.splitlines()


@pytest.mark.parametrize(
    "words", ["ready for 10s", "10.0.0.1:20002", "in flight   4", "NET/Socket", "sockets are used where RDMA was meant"]
)
def test_a_fall_back_to_sockets_is_shown_beside_what_was_meant(words: str) -> None:
    assert words in drawn(one(gang_world(ready=True), "org/large"), modeltables.replica)


def test_a_variable_that_all_members_have_alike_stands_once() -> None:
    shown = drawn(one(gang_world(), "org/large"), modeltables.replica)
    assert shown.count("VLLM_HOST_IP") == 1
    assert shown.count("NCCL_IB_HCA") == 2


def test_a_replica_of_one_node_says_nothing_of_a_network() -> None:
    shown = drawn(one(world(), "tiny-0"), modeltables.replica)
    assert "tiny-0-0: llama-server --port 20001" in shown
    for title in ("What they reach", "Environment", "Bandwidth"):
        assert title not in shown


def test_one_failure_is_shown_once_and_as_what_it_is() -> None:
    attempt = AttemptView(
        shard="a-0-0", node="n", failure=FailureView(generation=3, exit_code=7, lines=("bad\x1b[31m",))
    )
    member = MemberView(shard=ShardView(id="a-0-0", node="n"))
    shown = drawn(ReplicaReply(members=(member,), restarts=1, first=attempt, last=attempt), modeltables.replica)
    assert shown.count("generation 3") == 1
    assert "exit status 7" in shown
    assert "none known" in shown
    assert "\x1b" not in shown


def test_a_replica_whose_model_is_gone_says_so() -> None:
    reply = msgspec.structs.replace(one(gang_world(), "org/large"), wanted_revision=None)
    reply = msgspec.structs.replace(reply, replica=msgspec.structs.replace(reply.replica, outdated=False))
    assert "(its model is wanted no more)" in drawn(reply, modeltables.replica)


def test_an_answer_of_an_older_plane_is_drawn() -> None:
    assert "state" in drawn(ReplicaReply(), modeltables.replica)


@pytest.mark.parametrize("width", [60, 100])
def test_names_stay_whole_in_a_narrow_terminal(width: int) -> None:
    shown = "".join(drawn(one(gang_world(), "org/large"), modeltables.replica, width).split())
    assert "org_large-0-1" in shown
    assert "NCCL_IB_HCA" in shown


def test_a_models_past_is_told_by_what_changed() -> None:
    shown = drawn(views.history(gang_world(), "org/large"), modeltables.history)
    for words in ("engine_version 0.9.0 -> 0.9.1", "context none -> 4096", "the oldest that is kept", "now"):
        assert words in shown


def test_a_model_that_never_changed_has_one_profile() -> None:
    assert "the only one that is known" in drawn(views.history(world(), "tiny"), modeltables.history)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({}, ""),
        ({"requests": 0, "failed": 0, "in_flight": 0}, "gateways  no request yet"),
        ({"requests": 0, "held": 2}, "gateways  no request yet, 2 waiting for a model"),
        (
            {"requests": 12, "failed": 1, "left": 0, "in_flight": 3, "prompt_tokens": 9, "sparks": 4},
            "gateways  12 requests, 1 failed, 3 in flight, 9 tokens in, sparks 4",
        ),
    ],
)
def test_what_gateways_count_is_told_in_a_line(counts: dict[str, int], words: str) -> None:
    said = views.status(world(), NOW, WALL, plane="p", since=NOW, traffic=Traffic(totals=counts), latest=0)
    shown = drawn(said, tables.status)
    assert words in shown
    assert ("gateways" in shown) == bool(words)


def test_replicas_are_a_line_each_and_their_members_on_request() -> None:
    reply = views.replicas(gang_world(), NOW, WALL, Traffic())
    assert len(drawn(reply, replicatables.replicas, 400).splitlines()) == 4
    assert "gpu-01+node-a" in drawn(reply, replicatables.replicas)
    assert [line.split()[0] for line in drawn(reply, replicatables.members).splitlines()] == [
        "SHARD",
        "big-0-0",
        "org_large-0-0",
        "org_large-0-1",
        "tiny-0-0",
    ]


def test_a_paused_change_says_why_beside_its_model() -> None:
    reply = views.models(gang_world(), NOW, WALL)
    paused = msgspec.structs.replace(reply.models[1], paused="replica x failed twice", unloaded=True, wanted=0)
    shown = drawn(msgspec.structs.replace(reply, models=(paused,)), tables.models)
    assert "paused: replica x failed twice; 0 of 1 replicas have revision 2" in shown
    assert "0 of 1, unloaded" in shown


def test_a_draining_node_shows_what_is_left_and_an_empty_one_is_drained() -> None:
    here = draining_world()
    assert "draining (2 left)" in drawn(views.nodes(here, NOW), tables.nodes)
    shown = drawn(views.node(here, NOW, "node-a"), nodetables.node)
    assert "Still to leave" in shown
    assert "what leaves may finish requests for 10m" in shown
    nodes = views.nodes(here, NOW).nodes
    empty = msgspec.structs.replace(nodes[1], shards=0, drained=True)
    assert "ready drained" in drawn(msgspec.structs.replace(views.nodes(here, NOW), nodes=(empty,)), tables.nodes)


def test_status_counts_the_replicas_that_have_no_place() -> None:
    reply = StatusReply(plane="p", replicas_wanted=7, replicas={"ready": 2, "failed": 2})
    assert "7 wanted: 2 ready, 2 failed, 3 not placed" in drawn(reply, tables.status)


def test_a_long_word_on_a_transfer_leaves_room_for_what_has_failed() -> None:
    why = "weights (https://hub.example cannot be asked: the name or the service is not known)"
    coming = ShardView(id="a-0-0", state="fetching", node="gpu-01", progress=ProgressView(what=why))
    failed = ShardView(id="big-model-1-0", state="failed", node="gpu-02", retry_in=30.0, restarts=2)
    reply = ReplicasReply(
        replicas=(
            ReplicaView(id="a-0", state="fetching", nodes=("gpu-01",), shards=(coming,)),
            ReplicaView(
                id="big-model-1", state="failed", nodes=("gpu-02",), shards=(failed,), restarts=2, cause="out of memory"
            ),
        )
    )
    lines = drawn(reply, replicatables.replicas, 80).splitlines()
    assert lines[0].split() == ["REPLICA", "STATE", "NODE", "RESTARTS", "LAST", "FAILURE"]
    assert any(line.split() == "big-model-1 failed again in 30s gpu-02 2 out of memory".split() for line in lines)
    assert "of ?" not in "".join(lines)


@pytest.mark.parametrize(("count", "words"), [(1, "1 request\n"), (2, "2 requests\n")])
def test_one_request_is_one(count: int, words: str) -> None:
    shown = drawn(StatusReply(plane="p", gateway={"requests": count}), tables.status)
    assert words in "".join(f"{line.rstrip()}\n" for line in shown.splitlines())

"""Replicas of several nodes: which of those that reach one another are chosen, and with what (D6)."""

from __future__ import annotations

import attrs
import pytest
from msgspec.structs import replace

from llmgw.plane import operate
from llmgw.plane.checks import Need
from llmgw.plane.place import Choice, Rooms
from llmgw.plane.world import Model, Shard, World
from llmgw.wire.agent import Heartbeat
from llmgw.wire.facts import (
    Disk,
    EngineInstall,
    Grade,
    NodeId,
    Problem,
    Weights,
)
from tests.plane.fabrics_of import (
    addressed,
    after_test,
    choose,
    chosen,
    labelled,
    nodes,
    placed,
    refused,
    told,
    wanted,
)
from tests.plane.worlds import CLOCK, GIB, hear, model, profile, register, settle, world


def rehearsed(here: World, shards: tuple[Shard, ...], of: object, now: float = 10.0) -> Choice | None:
    rooms = Rooms(here, now)
    return rooms.here(shards, Need.of(of))  # type: ignore[arg-type]


# --- versions --------------------------------------------------------------------------------------------


def having(name: str, *versions: str, installable: tuple[str, ...] = ()) -> object:
    installs = tuple(EngineInstall(engine="vllm", version=version) for version in versions)
    return replace(labelled(name), installs=installs, installable=installable)


def test_all_members_have_one_version_of_the_engine() -> None:
    here = world(having("n1", "0.31"), having("n2", "0.32"), having("n3", "0.31", "0.32"))  # type: ignore[arg-type]
    choice = chosen(here, wanted(2))
    assert (choice.nodes, choice.version) == (("n2", "n3"), "0.32")
    assert nodes(here, wanted(2), avoid=["n2"]) == ("n1", "n3")
    rows = {row[0]: row for row in told(here, wanted(3))}
    assert rows["n2"] == ("n2", "engine-match", "0.32", "vllm 0.31")
    assert rows["n1"][1] == "engine-match"


def test_builds_of_one_version_are_one_version() -> None:
    # A node that installed 0.32.0 by itself, and one where an operator did: of packages' metadata.
    here = world(having("n1", "0.32.0"), having("n2", "0.32.0+cpu"), having("n3", "0.31"))  # type: ignore[arg-type]
    choice = chosen(here, wanted(2))
    assert (choice.nodes, choice.version) == (("n1", "n2"), "0.32.0")
    assert nodes(here, wanted(2, engine_version="0.32.0")) == ("n1", "n2")
    assert nodes(here, wanted(2, engine_version="0.32.0+cpu")) == ()


def test_of_two_versions_that_all_have_the_newer_is_taken() -> None:
    here, of = world(having("n1", "0.9", "0.10"), having("n2", "0.9", "0.10")), wanted(2)  # type: ignore[arg-type]
    choice = chosen(here, of)
    assert choice.version == "0.10"
    here, shards = placed(here, of, choice)
    again = rehearsed(here, shards, of)
    assert again is not None
    assert again.version == "0.10"


def test_members_may_install_the_version_that_is_asked_for() -> None:
    here = world(having("n1", "0.32"), having("n2", "0.31", installable=("vllm",)), having("n3", "0.31"))  # type: ignore[arg-type]
    of = wanted(2, engine_version="0.32")
    choice = chosen(here, of)
    assert (choice.nodes, choice.version) == (("n1", "n2"), "0.32")
    assert [row[:2] for row in told(here, wanted(3, engine_version="0.32")) if row[0] == "n3"] == [("n3", "engine")]


# --- preferences -----------------------------------------------------------------------------------------


def test_nodes_that_have_the_weights_are_preferred_to_pairs_that_were_tested() -> None:
    here = world(
        labelled("n1"),
        labelled("n2"),
        *(replace(labelled(name), weights=(Weights(source="hf://org/big", complete=True),)) for name in ("n3", "n4")),
    )
    choice = chosen(after_test(here, "n1", "n2", good=["mlx5_0"]), wanted(2))
    assert choice.nodes == ("n3", "n4")
    assert "the weights are there on all" in choice.why


def test_the_tightest_fit_is_preferred() -> None:
    here = world(*(labelled(name, gpu=count) for name, count in (("n1", 8), ("n2", 4), ("n3", 8), ("n4", 4))))
    assert nodes(here, wanted(2, gpus=4)) == ("n2", "n4")


def test_llama_cpp_is_led_by_a_node_that_has_the_weights() -> None:
    here = world(register("n1"), replace(register("n2"), weights=(Weights(source="hf://org/big", complete=True),)))
    assert chosen(here, wanted(2, engine="llamacpp", gpus=0)).nodes == ("n2", "n1")


def lent(disk: int = 100 * GIB) -> Model:
    """llama.cpp over two nodes, whose leader needs so much disk for weights."""
    of = wanted(2, engine="llamacpp", gpus=0)
    resources = replace(of.profile.resources, disk_bytes=disk, cpu_threads=2)
    return replace(of, profile=replace(of.profile, resources=resources))


def test_only_the_leader_of_llama_cpp_needs_disk_for_the_weights() -> None:
    here = world(register("n1", disk=GIB), register("n2", disk=200 * GIB), register("n3", disk=GIB))
    assert chosen(here, lent()).nodes == ("n2", "n1")
    none = world(register("n1", disk=GIB), register("n2", disk=2 * GIB))
    assert [(r.node, r.check, r.value) for r in refused(none, lent())] == [
        ("n1", "disk", "1.0 GiB"),
        ("n2", "disk", "2.0 GiB"),
    ]


def test_followers_of_llama_cpp_are_the_tightest_fit_and_only_its_leader_is_where_the_weights_are() -> None:
    big = (Weights(source="hf://org/big", complete=True),)
    nodes_ = [replace(register(name, threads=8), weights=big) for name in ("n1", "n2")]
    here = world(*nodes_, register("n3", threads=2, disk=0), register("n4", threads=3, disk=0))
    choice = chosen(here, lent())
    assert choice.nodes == ("n1", "n3")
    assert "the weights are there on the leader" in choice.why


def test_a_disk_that_is_full_keeps_away_a_leader_that_must_fetch_and_no_follower() -> None:
    full = Problem(subject="node", code="disk-full-weights", grade=Grade.BAD, text="3 MiB left")
    here = world(replace(register("n1"), problems=(full,)), register("n2"))
    assert chosen(here, lent(0)).nodes == ("n2", "n1")
    there = world(*(replace(register(name), problems=(full,)) for name in ("n1", "n2")))
    assert {r.check for r in refused(there, lent(0))} == {"node-health"}


def test_disk_is_held_for_the_leader_of_llama_cpp_alone() -> None:
    here = world(register("n1", disk=150 * GIB), register("n2", disk=150 * GIB), models=[lent()])
    here, _ = settle(here)
    rooms = Rooms(here, 1.0)
    left = {name: rooms.room(NodeId(name)) for name in ("n1", "n2")}
    assert {name: at.disk_free for name, at in left.items() if at is not None} == {"n1": 50 * GIB, "n2": 150 * GIB}
    shards = [here.shards[shard] for shard in sorted(here.shards)]
    assert rooms.here(shards, Need.of(lent())) is not None
    short = hear(here, "n1", Heartbeat(disks=(Disk(purpose="weights", path="/w", free_bytes=GIB, total_bytes=GIB),)))
    assert Rooms(short, 1.0).here(shards, Need.of(lent())) is None


def test_members_are_ranked_by_name_as_people_count() -> None:
    here = world(labelled("gpu-10"), labelled("gpu-9"), labelled("gpu-1"))
    assert nodes(here, wanted(3)) == ("gpu-1", "gpu-9", "gpu-10")


# --- one after another -----------------------------------------------------------------------------------


def test_what_is_held_is_gone_and_what_is_released_is_back() -> None:
    here = world(*(labelled(f"n{n}") for n in range(1, 6)))
    of = wanted(2)
    rooms, need = Rooms(here, 10.0), Need.of(of)
    first = rooms.choose(need, of.name)
    assert first is not None
    _, shards = placed(here, of, first)
    for one in shards:
        rooms.hold(one)
    second = rooms.choose(need, of.name)
    assert second is not None
    assert not set(first.nodes) & set(second.nodes)
    _, more = placed(here, of, second, "big-1")
    for one in more:
        rooms.hold(one)
    assert rooms.choose(need, of.name) is None
    assert [reason.check for reason in rooms.refused(need)] == ["gpus-free"] * 4 + ["nodes"]
    for one in shards:
        rooms.release(one)
    third = rooms.choose(need, of.name)
    assert third is not None
    assert third.nodes == first.nodes


def test_a_replica_starts_again_where_it_is_with_other_port_numbers() -> None:
    here, of = world(labelled("n1"), labelled("n2")), wanted(2)
    first = chosen(here, of)
    assert first.members[0].ports == {"master": 29999}
    here, shards = placed(here, of, first)
    again = rehearsed(here, shards, of)
    assert again is not None
    assert again.nodes == first.nodes
    assert [member.gpus for member in again.members] == [member.gpus for member in first.members]
    assert again.members[0].ports == {"master": 29998}
    here = operate.cordon(here, NodeId("n1"), True, CLOCK)[0]
    assert rehearsed(here, shards, of) is not None


def test_a_replica_does_not_start_again_where_its_nodes_reach_one_another_no_more() -> None:
    here, of = world(labelled("n1"), labelled("n2")), wanted(2)
    here, shards = placed(here, of, chosen(here, of))
    assert rehearsed(after_test(here, "n1", "n2", bad=["mlx5_0"]), shards, of) is None
    node = here.nodes[NodeId("n2")]
    assert node.facts is not None
    ports = (replace(node.facts.ports[0], state="DOWN"), *node.facts.ports[1:])
    down = attrs.evolve(node, facts=replace(node.facts, ports=ports))
    assert rehearsed(attrs.evolve(here, nodes=here.nodes.set(node.id, down)), shards, of) is None
    assert rehearsed(here, shards, of) is not None
    assert rehearsed(here, shards[:1], of) is None


# --- ports -----------------------------------------------------------------------------------------------


def test_agents_on_one_machine_share_its_numbers() -> None:
    nodes_ = [
        addressed(replace(register(f"n{n}", threads=64), engine_ports=(21000, 21004)), "127.0.0.1", boot="b")
        for n in range(1, 5)
    ]
    here, of = world(*nodes_), wanted(4, engine="llamacpp", gpus=0)
    choice = chosen(here, of)
    assert [dict(member.ports) for member in choice.members] == [{}, {"rpc": 21004}, {"rpc": 21003}, {"rpc": 21002}]
    here, _ = placed(here, of, choice)
    other = wanted(3, name="other", engine="llamacpp", gpus=0)
    more = chosen(here, other)
    assert [dict(member.ports) for member in more.members] == [{}, {"rpc": 21001}, {"rpc": 21000}]


def test_a_node_without_a_free_number_is_passed_over_and_says_so() -> None:
    small = replace(
        labelled("n1"), engine_ports=(21000, 21003), installs=(EngineInstall(engine="sglang", version="1"),)
    )
    others = [replace(small, node=NodeId(name), engine_ports=None) for name in ("n2", "n3")]
    of = wanted(2, engine="sglang", gpus=0, network="rdma")
    choice = chosen(world(small, *others), of)
    assert choice.nodes == ("n2", "n3")
    assert choice.members[0].ports == {"dist+": 29984}
    here = world(small, replace(small, node=NodeId("n2")))
    assert told(here, of) == [
        ("n1", "ports", "none free", "21000 to 21003"),
        ("n2", "ports", "none free", "21000 to 21003"),
    ]


# --- apart and spread ------------------------------------------------------------------------------------


def test_models_that_are_apart_share_no_node_whichever_names_the_other() -> None:
    loner = model("loner", of=replace(profile(threads=1), apart=("other",)))
    other = model("other", of=profile(threads=1))
    here = world(register("n1"), register("n2"), models=[loner, other])
    here, _ = placed(here, other, choose(here, other) or pytest.fail("nowhere"), "other-0")
    assert nodes(here, loner) == ("n2",)
    here, _ = placed(here, loner, chosen(here, loner), "loner-0")
    assert nodes(here, other) == ("n1",)
    here = world(register("n1"), models=[loner, other])
    here, _ = placed(here, loner, chosen(here, loner), "loner-0")
    assert told(here, other) == [("n1", "apart", "loner", "without loner")]


def test_a_model_that_is_apart_from_itself_has_one_replica_a_node() -> None:
    of = model("m", of=replace(profile(threads=1), apart=("m",)))
    here = world(register("n1"), models=[of])
    here, shards = placed(here, of, chosen(here, of), "m-0")
    assert [row[:2] for row in told(here, of)] == [("n1", "apart")]
    assert rehearsed(here, shards, of) is not None


def test_replicas_are_spread_over_the_values_of_a_label_first() -> None:
    racks = {"n1": "a", "n2": "a", "n3": "b"}
    here = world(*(register(name, labels={"rack": rack}) for name, rack in racks.items()))
    plain, of = wanted(1, gpus=0), wanted(1, gpus=0, spread="rack")
    here, _ = placed(here, of, chosen(here, of), "big-0")
    assert nodes(here, plain) == ("n2",)
    choice = chosen(here, of)
    assert choice.nodes == ("n3",)
    assert "no other replicas in rack=b" in choice.why
    here, _ = placed(here, of, choice, "big-1")
    assert nodes(here, of) == ("n2",)


def test_replicas_of_several_nodes_are_spread_as_well() -> None:
    racks = {"n1": "a", "n2": "a", "n3": "b", "n4": "b", "n5": "a", "n6": "a"}
    here = world(*(register(name, labels={"rack": rack}) for name, rack in racks.items()))
    of = wanted(2, gpus=0, threads=8, spread="rack")
    here, _ = placed(here, of, chosen(here, of), "big-0")
    choice = chosen(here, of)
    assert choice.nodes == ("n3", "n4")
    here, _ = placed(here, of, choice, "big-1")
    assert nodes(here, of) == ("n5", "n6")

"""Replicas of several nodes: on nodes that pass, reach one another, and were not found bad together (D6)."""

from __future__ import annotations

from itertools import combinations

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from immutables import Map
from msgspec.structs import replace

from llmgw.plane import operate
from llmgw.plane.checks import Need
from llmgw.plane.place import Choice, Rooms
from llmgw.plane.world import DEFAULT, Model, Shard, World
from llmgw.wire.agent import Heartbeat
from llmgw.wire.facts import (
    Disk,
    EngineInstall,
    GpuFabric,
    Grade,
    HostLimits,
    Imex,
    NodeId,
    Port,
    Problem,
    Weights,
)
from tests.plane.fabrics_of import (
    CLUSTER,
    addressed,
    after_test,
    choose,
    chosen,
    ib,
    labelled,
    linked,
    managed,
    nodes,
    placed,
    railed,
    refused,
    roce,
    told,
    wanted,
)
from tests.plane.worlds import CLOCK, GIB, gpus, hear, model, profile, register, settle, world


def rehearsed(here: World, shards: tuple[Shard, ...], of: object, now: float = 10.0) -> Choice | None:
    rooms = Rooms(here, now)
    return rooms.here(shards, Need.of(of))  # type: ignore[arg-type]


# --- one fabric ------------------------------------------------------------------------------------------


def test_all_members_are_on_one_labelled_fabric() -> None:
    here = world(labelled("a1"), labelled("b1", fabric="blue"), labelled("b2", fabric="blue"))
    choice = chosen(here, wanted(2))
    assert choice.nodes == ("b1", "b2")
    assert choice.members[0].rdma == ("mlx5_0:1", "mlx5_1:1", "mlx5_2:1", "mlx5_3:1")
    assert "all 2 reach one another over 4 InfiniBand rails" in choice.why
    assert nodes(here, wanted(3)) == ()
    assert {(reason.node, reason.check) for reason in refused(here, wanted(3))} == {
        ("a1", "fabric"),
        ("b1", "fabric"),
        ("b2", "fabric"),
    }


def test_unlabelled_infiniband_is_grouped_by_the_canonical_manager() -> None:
    """A failover under way: the nodes name different masters, and know of each other's as a standby (C10)."""
    here = world(
        railed("n1", ib(0), managers=[managed(0, "0b", "0a")]),
        railed("n2", ib(0), managers=[managed(0, "0a", "0b")]),
        railed("n3", ib(0), managers=[managed(0, "0c")]),
    )
    assert nodes(here, wanted(2)) == ("n1", "n2")
    assert nodes(here, wanted(2), avoid=["n1"]) == ()


def test_a_port_whose_managers_do_not_answer_is_where_its_last_master_was() -> None:
    here = world(railed("n1", ib(0), managers=[managed(0, "0a")]), railed("n2", ib(0), managers=[managed(0, "0a")]))
    node = here.nodes[NodeId("n2")]
    assert node.facts is not None
    silent = attrs.evolve(node, facts=replace(node.facts, managers=()))
    assert silent.masters
    here = attrs.evolve(here, nodes=here.nodes.set(node.id, silent))
    assert nodes(here, wanted(2)) == ("n1", "n2")


def test_infiniband_of_which_nothing_tells_the_fabric_is_refused() -> None:
    here = world(labelled("n1"), railed("n2", ib(0)))
    assert [row for row in told(here, wanted(2)) if row[0] == "n2"] == [
        ("n2", "rails", "mlx5_0: on an unknown fabric: no subnet manager answered, and no label", "up at full rate")
    ]


def test_roce_ports_are_grouped_by_the_subnet_of_usable_gids() -> None:
    here = world(
        railed("n1", roce(0, "10.1.0.1")),
        railed("n2", roce(0, "10.1.0.2")),
        railed("n3", roce(0, "10.2.0.3")),
        railed("n4", roce(0, "fe80::4")),
    )
    assert nodes(here, wanted(2)) == ("n1", "n2")
    assert nodes(here, wanted(3)) == ()
    reasons = {str(reason.node): reason for reason in refused(here, wanted(3))}
    assert (reasons["n4"].check, reasons["n4"].value) == ("rails", "mlx5_0: no GID to use")


def test_roce_over_ipv6_alone_is_a_way_of_its_own() -> None:
    here = world(railed("n1", roce(0, "fd00::1", "10.1.0.1")), railed("n2", roce(0, "fd00::2")))
    choice = chosen(here, wanted(2))
    assert choice.nodes == ("n1", "n2")
    assert choice.members[1].network["NCCL_IB_ADDR_FAMILY"] == "AF_INET6"


def test_infiniband_does_not_reach_roce() -> None:
    here = world(labelled("n1", 1), railed("n2", roce(0, "10.1.0.1", fabric="red")))
    assert nodes(here, wanted(2)) == ()


def test_storage_and_management_ports_and_virtual_functions_are_no_rails() -> None:
    others = (ib(5, role="storage"), ib(6, role="management"), ib(7, vf=True, role="vf"))
    here = world(railed("n1", ib(0, fabric="red"), *others), railed("n2", ib(0, fabric="red")), railed("n3", *others))
    choice = chosen(here, wanted(2))
    assert [member.rdma for member in choice.members] == [("mlx5_0:1",), ("mlx5_0:1",)]
    assert [row[:3] for row in told(here, wanted(3)) if row[0] == "n3"] == [("n3", "fabric", "no rail")]


# --- rails -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("port", "value"),
    [
        (ib(2, fabric="red", state="DOWN", physical_state="Polling"), "mlx5_2: down"),
        (ib(2, fabric="red", state="DOWN", physical_state="Disabled"), "mlx5_2: down (disabled)"),
        (ib(2, fabric="red", state="INIT"), "mlx5_2: init"),
        (ib(2, fabric="red", rate_gbps=200.0), "mlx5_2: 200 of 400 Gb/s"),
        (ib(2, fabric="red", lid=None, sm_lid=None), "mlx5_2: no subnet manager configured it"),
    ],
)
def test_a_needed_rail_that_is_down_or_slow_keeps_the_node_out(port: Port, value: str) -> None:
    broken = railed("n2", *(ib(n, fabric="red") for n in (0, 1)), port, ib(3, fabric="red"))
    here = world(labelled("n1"), broken, labelled("n3"))
    assert nodes(here, wanted(2)) == ("n1", "n3")
    (found,) = [reason for reason in refused(here, wanted(3)) if reason.node == "n2"]
    assert (found.check, found.value, found.needed, found.age) == ("rails", value, "up at full rate", 10.0)
    assert {reason.check for reason in refused(here, wanted(3)) if reason.node != "n2"} == {"nodes"}


def test_rails_are_narrowed_to_those_in_common_where_so_many_do() -> None:
    """One adapter cannot be used on one node: refused, or narrowed and said; never a silent hang (RA06)."""
    broken = railed("n2", ib(0, fabric="red"), ib(1, fabric="red"), ib(2, fabric="red", state="DOWN"))
    here = world(labelled("n1", 3), broken)
    assert nodes(here, wanted(2)) == ()
    choice = chosen(here, wanted(2, rails=2))
    assert [member.rdma for member in choice.members] == [("mlx5_0:1", "mlx5_1:1")] * 2
    assert choice.members[0].network["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1:1"
    assert "narrowed to the rails that all have, without n1 mlx5_2, n2 mlx5_2: down" in choice.why
    assert nodes(here, wanted(2, rails=3)) == ()
    assert [row for row in told(here, wanted(2, rails=3)) if row[0] == "n2"] == [
        ("n2", "rails", "mlx5_2: down", "up at full rate")
    ]


def test_adapters_that_no_process_may_open_are_no_rails() -> None:
    """In a container without /dev/infiniband the adapters are seen and cannot be used (RA06)."""
    shut = labelled("n2", 2)
    shut = replace(shut, host=replace(shut.host, limits=HostLimits(uverbs=False)))
    here = world(labelled("n1", 2), shut)
    assert [row for row in told(here, wanted(2, rails=1)) if row[0] == "n2"] == [
        ("n2", "rails", f"mlx5_{n}: no /dev/infiniband/uverbs* to open it by", "up at full rate") for n in range(2)
    ]


def test_an_adapter_that_cannot_be_opened_is_left_out_or_refused() -> None:
    """One of two adapters was given to the container (RA06): the other is seen and hangs whoever counts on it."""
    shut = railed(
        "n2", ib(0, fabric="red"), ib(1, fabric="red", shut="/dev/infiniband/uverbs1: Operation not permitted")
    )
    here = world(labelled("n1", 2), shut)
    words = "mlx5_1: cannot be opened: /dev/infiniband/uverbs1: Operation not permitted"
    assert [row for row in told(here, wanted(2)) if row[0] == "n2"] == [("n2", "rails", words, "up at full rate")]
    choice = chosen(here, wanted(2, rails=1))
    assert [member.rdma for member in choice.members] == [("mlx5_0:1",)] * 2
    assert "cannot be opened" in choice.why


def test_more_rails_than_a_node_has_are_too_few() -> None:
    here = world(labelled("n1", 2), labelled("n2", 2))
    assert told(here, wanted(2, rails=4)) == [
        ("n1", "rails", "2 rails", "4 rails"),
        ("n2", "rails", "2 rails", "4 rails"),
    ]


def test_a_second_adapter_next_to_a_gpu_of_one_node_is_not_guessed_to_be_the_rail() -> None:
    """A storage adapter that nobody declared, on the same fabric, before the rail in PCI order (RA01)."""
    cards = {
        name: tuple(replace(gpu, uuid=f"{name}-{gpu.index}") for gpu in gpus(2, node=name)) for name in ("n1", "n2")
    }
    extra = ib(9, fabric="red", pci="0000:01:00.0", nearest_gpus=("n2-1",))
    here = world(
        *(
            railed(
                name,
                *(ib(n, fabric="red", nearest_gpus=(f"{name}-{n}",)) for n in range(2)),
                *([extra] if name == "n2" else []),
                gpu=cards[name],  # type: ignore[arg-type]
            )
            for name in ("n1", "n2")
        )
    )
    assert nodes(here, wanted(2, gpus=2)) == ()
    assert any(
        "in the nodes' configuration which are the same" in reason.text for reason in refused(here, wanted(2, gpus=2))
    )
    assert [member.rdma for member in chosen(here, wanted(2, gpus=2, rails=1)).members] == [("mlx5_0:1",)] * 2


def test_rails_are_the_same_by_gpu_and_pci_order_never_by_name() -> None:
    """An extra adapter called mlx5_3 shifts the names on one node (RA01)."""
    near = gpus(4, node="n")

    def node(name: str, devices: tuple[str, ...], storage: str = "") -> object:
        mine = tuple(replace(gpu, uuid=f"{name}-{n}", pci=f"0000:{n + 1:02x}:00.0") for n, gpu in enumerate(near))
        ports = [ib(n, device=device, fabric="red", nearest_gpus=(f"{name}-{n}",)) for n, device in enumerate(devices)]
        extra = [ib(9, device=storage, fabric="red")] if storage else []
        return railed(name, *ports, *extra, gpu=mine)  # type: ignore[arg-type]

    names = ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3")
    here = world(node("n1", names), node("n2", ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_4"), "mlx5_3"))  # type: ignore[arg-type]
    choice = chosen(here, wanted(2, gpus=4))  # the extra adapter is next to no GPU: no rail
    assert choice.members[1].network["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_4:1"


def test_rails_that_are_isolated_by_subnet_are_paired_by_it_and_never_crossed() -> None:
    here = world(
        railed("n1", roce(0, "10.0.0.1"), roce(1, "10.0.1.1")), railed("n2", roce(0, "10.0.1.2"), roce(1, "10.0.0.2"))
    )
    choice = chosen(here, wanted(2))
    assert [member.rdma for member in choice.members] == [("mlx5_0:1", "mlx5_1:1"), ("mlx5_1:1", "mlx5_0:1")]
    assert choice.members[0].network["NCCL_CROSS_NIC"] == "0"


def test_nodes_of_one_fabric_with_other_numbers_of_rails_are_told_so() -> None:
    here = world(labelled("n1", 4), labelled("n2", 2))
    assert told(here, wanted(2)) == [
        ("n1", "rails", "4 rails", "2 rails as on n2"),
        ("n2", "rails", "2 rails", "4 rails as on n1"),
    ]


def test_on_a_labelled_fabric_every_port_may_have_a_subnet_of_its_own() -> None:
    here = world(
        railed("n1", roce(0, "10.0.0.1", fabric="red"), roce(1, "10.0.1.1", fabric="red")),
        railed("n2", roce(0, "10.0.2.1", fabric="red"), roce(1, "10.0.3.1", fabric="red")),
    )
    assert nodes(here, wanted(2)) == ("n1", "n2")


# --- NVLink ----------------------------------------------------------------------------------------------


def test_all_gpus_of_all_members_are_in_one_nvlink_domain() -> None:
    """The domain is uuid.clique, and both must be the same (FA06)."""
    here = world(linked("n1", 1), linked("n2", 32766), linked("n3", 1), linked("n4", 32766, CLUSTER[::-1]))
    choice = chosen(here, wanted(2, gpus=4))
    assert choice.nodes == ("n1", "n3")
    assert choice.members[0].rdma == ()
    assert choice.members[0].network["NCCL_MNNVL_ENABLE"] == "1"
    assert choice.why.startswith(f"all 2 are in NVLink domain {CLUSTER}.1")
    assert {row[1] for row in told(here, wanted(3, gpus=4))} == {"nvlink"}


def test_imex_alone_is_no_nvlink_domain() -> None:
    """IMEX is up on machines whose GPUs have no cluster (FA09)."""
    here = world(*(replace(linked(name, cluster=""), imex=Imex(state="UP")) for name in ("n1", "n2")))
    assert told(here, wanted(2, gpus=4, network="nvlink")) == [
        ("n1", "nvlink", "no NVLink domain", "4 GPUs in one domain"),
        ("n2", "nvlink", "no NVLink domain", "4 GPUs in one domain"),
    ]


def test_an_imex_that_says_no_more_than_that_it_runs_is_no_obstacle() -> None:
    mute = [replace(linked(name), imex=Imex(state="runs, cannot be asked: no answer")) for name in ("n1", "n2")]
    assert nodes(world(*mute), wanted(2, gpus=4, network="nvlink")) == ("n1", "n2")
    dead = [
        replace(linked(name), imex=Imex(state="cannot be asked: the daemon is not running")) for name in ("n1", "n2")
    ]
    assert nodes(world(*dead), wanted(2, gpus=4, network="nvlink")) == ()


def test_a_domain_without_imex_reaches_nobody() -> None:
    here = world(replace(linked("n1"), imex=Imex(state="DOWN")), replace(linked("n2"), imex=Imex(state="UP")))
    rows = told(here, wanted(2, gpus=4, network="nvlink"))
    assert rows[0] == ("n1", "nvlink", "IMEX is DOWN", "4 GPUs in one domain")
    assert rows[1][:2] == ("n2", "nodes")


def test_gpus_whose_fabric_is_not_ready_say_so() -> None:
    here = world(linked("n1", state="in-progress"), linked("n2"))
    rows = told(here, wanted(2, gpus=1, network="nvlink"))
    assert rows[0] == ("n1", "nvlink", "its fabric is not ready (In Progress)", "a GPU in one domain")


def test_only_gpus_of_the_domain_are_taken() -> None:
    mixed = [
        replace(gpu, fabric=GpuFabric(state="completed", cluster_uuid=CLUSTER, clique=1 if n % 2 else 2))
        for n, gpu in enumerate(gpus(4, node="n2"))
    ]
    here = world(linked("n1", 1, count=2), register("n2", gpu=tuple(mixed)))
    choice = chosen(here, wanted(2, gpus=2, network="nvlink"))
    assert choice.members[1].gpus == ("GPU-n2-1", "GPU-n2-3")
    assert nodes(here, wanted(2, gpus=3, network="nvlink")) == ()


def test_nvlink_is_preferred_to_rdma_and_can_be_told_not_to_be() -> None:
    both = [replace(linked(name, 1), ports=(ib(0, fabric="red"),)) for name in ("n2", "n3")]
    here = world(labelled("n1", 1), *both)
    assert chosen(here, wanted(2, gpus=4)).members[0].rdma == ()
    forced = chosen(here, wanted(3, gpus=4, network="rdma"))
    assert forced.nodes == ("n1", "n2", "n3")
    assert nodes(here, wanted(3, gpus=4, network="nvlink")) == ()


# --- TCP -------------------------------------------------------------------------------------------------


def test_shards_without_gpus_and_llama_cpp_meet_over_tcp() -> None:
    here = world(register("n1", gpu=2), register("n2", gpu=2))
    for of in (wanted(2, gpus=0), wanted(2, gpus=2, engine="llamacpp"), wanted(2, gpus=2, network="tcp")):
        assert chosen(here, of).nodes == ("n1", "n2")
    assert told(here, wanted(2, gpus=2)) == [
        ("n1", "fabric", "no rail", "a rail"),
        ("n2", "fabric", "no rail", "a rail"),
    ]


def test_agents_that_are_reached_by_loopback_reach_only_those_of_their_machine() -> None:
    here = world(
        addressed(register("n1"), "127.0.0.1", boot="b"),
        addressed(register("n2"), "127.0.0.1", boot="b"),
        addressed(register("n3"), "10.0.0.3"),
        addressed(register("n4"), "127.0.0.1", boot="c"),
    )
    choice = chosen(here, wanted(2, engine="llamacpp", gpus=0))
    assert choice.nodes == ("n1", "n2")
    assert {row[:3] for row in told(here, wanted(3, gpus=0)) if row[0] in ("n3", "n4")} == {
        ("n3", "fabric", "TCP"),
        ("n4", "fabric", "loopback of c"),
    }


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


# --- tests of bandwidth ----------------------------------------------------------------------------------


def test_a_pair_that_a_test_found_bad_on_a_needed_rail_is_never_chosen() -> None:
    here = after_test(world(labelled("n1"), labelled("n2"), labelled("n3")), "n1", "n2", bad=["mlx5_3"])
    assert nodes(here, wanted(2)) == ("n1", "n3")
    assert nodes(here, wanted(3)) == ()
    found, other, third = refused(here, wanted(3), now=7200.0)
    assert [(reason.node, reason.check) for reason in (found, other, third)] == [
        ("n1", "evidence"),
        ("n2", "evidence"),
        ("n3", "nodes"),
    ]
    assert (found.value, found.age) == ("12 Gb/s of 400, tested 2 h ago", 7200.0)
    assert found.text == "n1: was tested bad with n2: rail 0 bad"


def test_a_rail_that_is_not_needed_may_be_bad() -> None:
    here = after_test(world(labelled("n1"), labelled("n2")), "n1", "n2", bad=["mlx5_9"])
    assert nodes(here, wanted(2)) == ("n1", "n2")
    here = after_test(world(labelled("n1"), labelled("n2")), "n1", "n2", bad=["mlx5_3"])
    assert nodes(here, wanted(2)) == ()
    assert nodes(here, wanted(2, network="tcp")) == ("n1", "n2")


def test_with_rails_to_spare_a_bad_one_is_left_out() -> None:
    here = after_test(world(labelled("n1"), labelled("n2")), "n1", "n2", bad=["mlx5_2"])
    choice = chosen(here, wanted(2, rails=3))
    assert choice.members[0].rdma == ("mlx5_0:1", "mlx5_1:1", "mlx5_3:1")
    assert nodes(here, wanted(2, rails=4)) == ()
    three = world(*(labelled(name) for name in ("n1", "n2", "n3")))
    assert len(chosen(after_test(three, "n1", "n2", bad=["mlx5_2"]), wanted(2, rails=3)).members[0].rdma) == 4


def test_an_old_test_keeps_nobody_away() -> None:
    here = after_test(world(labelled("n1"), labelled("n2")), "n1", "n2", bad=["mlx5_3"])
    assert nodes(here, wanted(2), now=DEFAULT.evidence) == ()
    assert nodes(here, wanted(2), now=DEFAULT.evidence + 1) == ("n1", "n2")


def test_pairs_that_were_tested_good_are_preferred() -> None:
    here = after_test(world(*(labelled(f"n{n}") for n in range(1, 6))), "n3", "n5", good=["mlx5_0"])
    choice = chosen(here, wanted(2))
    assert choice.nodes == ("n3", "n5")
    assert "1 of 1 pairs tested good" in choice.why
    assert nodes(here, wanted(3)) == ("n1", "n3", "n5")


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
    assert choice.members[0].ports == {"dist+": 29992}
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


# --- exactly when there is one ---------------------------------------------------------------------------


#: A node's fabric and which of its three rails are up.
NODES = st.tuples(st.sampled_from(["red", "red", "blue"]), st.tuples(*[st.booleans()] * 3))
#: By pair of nodes: the rail that a test found bad.
BAD = st.dictionaries(st.sampled_from(list(combinations(range(6), 2))), st.sampled_from(["mlx5_0", "mlx5_2"]))


def fleet(made: list[tuple[str, tuple[bool, ...]]], bad: dict[tuple[int, int], str]) -> World:
    here = world(
        *(
            railed(f"n{n}", *(ib(at, fabric=fabric, state="ACTIVE" if ok else "DOWN") for at, ok in enumerate(up)))
            for n, (fabric, up) in enumerate(made)
        )
    )
    for (a, b), device in bad.items():
        if b < len(made):
            here = after_test(here, f"n{a}", f"n{b}", bad=[device])
    return here


def reach_one_another(here: World, some: tuple[NodeId, ...], rails: int) -> bool:
    """By the words of the rule, pair by pair."""
    up = []
    for name in some:
        facts = here.nodes[name].facts
        assert facts is not None
        up.append({(port.device, port.fabric) for port in facts.ports if port.state == "ACTIVE"})
    shared = set.intersection(*up)
    if not rails and (len(shared) < 3 or any(len(mine) < 3 for mine in up)):
        return False
    needed = rails or 3
    # Narrowed to any set of rails that all have, as long as no pair is known to be bad on one of them.
    for count in range(needed, len(shared) + 1):
        for used in combinations(sorted(shared), count):
            devices = {device for device, _ in used}
            bad = {
                end.rpartition(" ")[2].partition("/")[0]
                for pair in combinations(sorted(some), 2)
                if (test := here.evidence.get(pair)) is not None
                for end in test.bad
            }
            if not devices & bad:
                return True
    return False


@settings(max_examples=200)
@given(made=st.lists(NODES, min_size=1, max_size=6), bad=BAD, count=st.integers(2, 4), rails=st.integers(0, 3))
def test_a_replica_finds_nodes_exactly_when_some_reach_one_another(
    made: list[tuple[str, tuple[bool, ...]]], bad: dict[tuple[int, int], str], count: int, rails: int
) -> None:
    here, of = fleet(made, bad), wanted(count, rails=rails)
    found = choose(here, of)
    exists = any(reach_one_another(here, some, rails) for some in combinations(sorted(here.nodes), count))
    assert (found is not None) == exists
    if found is None:
        assert {reason.node for reason in refused(here, of)} == set(here.nodes)
    else:
        assert reach_one_another(here, found.nodes, rails)
        assert len({member.rdma for member in found.members}) == 1
        assert choose(here, of) == found


#: Place one more replica of so many nodes, or take one away again.
MOVES = st.lists(st.one_of(st.sampled_from(["one", "two", "three"]), st.integers(0, 9)), min_size=1, max_size=12)


@settings(max_examples=60)
@given(moves=MOVES, spread=st.booleans())
def test_rooms_that_are_kept_choose_as_fresh_ones_do(moves: list[str | int], spread: bool) -> None:
    """Whatever was held and released: the first of several plans and the last look at the same fleet."""
    made = [replace(labelled(f"n{n}", 2), labels={"rack": f"r{n % 3}"}) for n in range(5)]
    made.append(replace(labelled("n5", 2, "blue"), weights=(Weights(source="hf://org/big", complete=True),)))
    here = after_test(after_test(world(*made), "n0", "n1", bad=["mlx5_0"]), "n2", "n3", good=["mlx5_0"])
    of = {
        word: wanted(count, name=word, gpus=3, spread="rack" if spread else "")
        for count, word in enumerate(("one", "two", "three"), 1)
    }
    rooms, standing = Rooms(here, 10.0), dict[str, tuple[Shard, ...]]()
    for turn, move in enumerate(moves):
        if isinstance(move, int):
            if len(standing) > move:
                for shard in standing.pop(list(standing)[move]):
                    rooms.release(shard)
            continue
        model = of[move]
        choice = rooms.choose(Need.of(model), model.name)
        now = attrs.evolve(here, shards=Map({one.id: one for shards in standing.values() for one in shards}))
        fresh = Rooms(now, 10.0).choose(Need.of(model), model.name)
        assert choice == fresh
        if choice is not None:
            _, standing[f"{turn}"] = placed(here, model, choice, f"{move}-{turn}")
            for shard in standing[f"{turn}"]:
                rooms.hold(shard)


@given(cliques=st.lists(st.integers(1, 2), min_size=1, max_size=5), count=st.integers(2, 4))
def test_a_replica_over_nvlink_finds_nodes_exactly_when_a_domain_has_so_many(cliques: list[int], count: int) -> None:
    here = world(*(linked(f"n{n}", clique) for n, clique in enumerate(cliques)))
    found = choose(here, wanted(count, gpus=4, network="nvlink"))
    assert (found is not None) == any(cliques.count(clique) >= count for clique in cliques)
    assert here.shards == Map()

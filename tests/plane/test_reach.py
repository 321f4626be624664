"""Who reaches whom: one fabric, one NVLink domain, TCP (D6, C10)."""

from __future__ import annotations

import attrs
from msgspec.structs import replace

from llmgw.wire.facts import (
    GpuFabric,
    Imex,
    NodeId,
)
from tests.plane.fabrics_of import (
    CLUSTER,
    addressed,
    chosen,
    ib,
    labelled,
    linked,
    managed,
    nodes,
    railed,
    refused,
    roce,
    told,
    wanted,
)
from tests.plane.worlds import gpus, register, world

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

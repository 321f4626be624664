"""Where the members of a replica meet, and the environment of the wires between them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from llmgw.plane.groups import Way
from llmgw.plane.network import End, ends, environment, site
from llmgw.plane.wires import Rail
from llmgw.plane.world import Node
from llmgw.wire.agent import Register
from llmgw.wire.facts import Interface
from tests.plane.fabrics_of import addressed, chosen, ib, labelled, linked, railed, roce, wanted
from tests.plane.worlds import register, world


def known(*made: Register) -> list[Node]:
    here = world(*made)
    return [here.nodes[node.node] for node in made]


def met(*made: Register) -> list[tuple[str, str]]:
    return [(end.address, end.interface) for end in ends(known(*made))]


def test_members_meet_in_the_subnet_of_the_addresses_that_they_are_reached_at() -> None:
    assert met(
        addressed(register("n1"), "10.0.0.1", ("eth1", "10.1.0.1/24"), ("eth0", "10.0.0.1/24")),
        addressed(register("n2"), "10.0.0.2", ("ens9", "10.1.0.2/24"), ("ens3", "10.0.0.2/24")),
    ) == [("10.0.0.1", "eth0"), ("10.0.0.2", "ens3")]


def test_an_ipv6_address_may_be_written_in_several_ways() -> None:
    assert met(
        addressed(register("n1"), "fd00:0::1", ("eth0", "fd00::1/64")),
        addressed(register("n2"), "[fd00::2]", ("eth0", "fd00::0:2/64")),
    ) == [("fd00:0::1", "eth0"), ("fd00::2", "eth0")]


def test_else_in_another_subnet_that_all_are_in_ipv4_first_and_rails_last() -> None:
    made = [
        addressed(
            register(f"n{n}"),
            f"10.{n}.0.1",
            ("eth0", f"10.{n}.0.1/24"),
            ("ib0", f"10.8.0.{n}/24"),
            ("eth6", f"fd00::{n}/64"),
            ("eth9", f"10.9.0.{n}/24"),
            ("docker0", "172.17.0.1/16"),
        )
        for n in (1, 2)
    ]
    made = [replace(node, ports=(ib(0, netdev="ib0"),)) for node in made]
    assert met(*made) == [("10.9.0.1", "eth9"), ("10.9.0.2", "eth9")]
    bare = [
        replace(node, host=replace(node.host, interfaces=tuple(i for i in node.host.interfaces if i.name != "eth9")))
        for node in made
    ]
    assert met(*bare) == [("10.8.0.1", "ib0"), ("10.8.0.2", "ib0")]
    six = [
        replace(node, host=replace(node.host, interfaces=tuple(i for i in node.host.interfaces if i.name != "ib0")))
        for node in bare
    ]
    assert met(*six) == [("fd00::1", "eth6"), ("fd00::2", "eth6")]


def test_else_at_their_addresses_and_on_no_interface() -> None:
    """Routed networks, and names that only a resolver knows; a container's bridge has one address everywhere."""
    assert met(
        addressed(register("n1"), "10.1.0.1", ("eth0", "10.1.0.1/24"), ("docker0", "172.17.0.1/16")),
        addressed(register("n2"), "10.2.0.1", ("eth0", "10.2.0.1/24"), ("docker0", "172.17.0.1/16")),
    ) == [("10.1.0.1", ""), ("10.2.0.1", "")]
    assert met(register("n1"), register("n2")) == [("n1.example", ""), ("n2.example", "")]


def test_an_interface_that_is_down_or_has_no_address_of_its_own_leads_nowhere() -> None:
    first = addressed(register("n1"), "10.1.0.1", ("eth0", "10.1.0.1/24"))
    second = addressed(register("n2"), "10.1.0.2")
    down = (Interface(name="eth0", addresses=("10.1.0.2/24",), up=False), Interface(name="x", addresses=("rubbish",)))
    second = replace(second, host=replace(second.host, interfaces=down))
    assert met(first, second) == [("10.1.0.1", ""), ("10.1.0.2", "")]


def test_llama_cpp_meets_over_ipv4_where_there_is_any() -> None:
    made = [
        addressed(register(f"n{n}"), f"fd00::{n}", ("eth0", f"fd00::{n}/64"), ("eth1", f"10.0.0.{n}/24"))
        for n in (1, 2)
    ]
    assert met(*made) == [("fd00::1", "eth0"), ("fd00::2", "eth0")]
    choice = chosen(world(*made), wanted(2, engine="llamacpp", gpus=0))
    assert [member.address for member in choice.members] == ["10.0.0.1", "10.0.0.2"]


def test_agents_on_one_machine_meet_over_loopback() -> None:
    made = [addressed(register(f"n{n}"), "127.0.0.1", boot="b") for n in (1, 2)]
    assert met(*made) == [("127.0.0.1", "lo")] * 2
    assert {site(node) for node in known(*made)} == {"loopback of b"}
    assert site(known(register("n1"))[0]) == ""


def test_agents_on_one_machine_may_share_its_address() -> None:
    made = [addressed(register(f"n{n}"), "10.0.0.1", ("eth0", "10.0.0.1/24"), boot="b") for n in (1, 2)]
    assert met(*made) == [("10.0.0.1", "eth0")] * 2


RAILS = [Rail(("pci of 2", n, 0), ib(n)) for n in (1, 10)]
ONE = frozenset({(("pci of 2", 1, 0), "SM 0a"), (("pci of 2", 10, 0), "SM 0a")})
APART = frozenset({(("pci of 2", 1, 0), "subnet 10.0.0.0/24"), (("pci of 2", 10, 0), "subnet 10.0.1.0/24")})
TALK = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
MEET = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0", "VLLM_HOST_IP": "10.0.0.1"}


@pytest.mark.parametrize(
    ("way", "rails", "expected"),
    [
        (Way("tcp"), [], {"NCCL_IB_DISABLE": "1"}),
        (Way("nvlink", "u.1"), [], {"NCCL_MNNVL_ENABLE": "1", "NCCL_CUMEM_ENABLE": "1"}),
        (Way("rdma", "ib", ONE), RAILS, {"NCCL_IB_DISABLE": "0", "NCCL_IB_HCA": "=mlx5_1:1,mlx5_10:1"}),
        (
            Way("rdma", "roce4", ONE),
            RAILS,
            {
                "NCCL_IB_DISABLE": "0",
                "NCCL_IB_HCA": "=mlx5_1:1,mlx5_10:1",
                "NCCL_IB_ROCE_VERSION_NUM": "2",
                "NCCL_IB_ADDR_FAMILY": "AF_INET",
            },
        ),
        (
            Way("rdma", "roce6", APART),
            RAILS,
            {
                "NCCL_IB_DISABLE": "0",
                "NCCL_IB_HCA": "=mlx5_1:1,mlx5_10:1",
                "NCCL_IB_ROCE_VERSION_NUM": "2",
                "NCCL_IB_ADDR_FAMILY": "AF_INET6",
                "NCCL_CROSS_NIC": "0",
            },
        ),
    ],
)
def test_nccl_is_told_the_exact_rails_and_never_a_gid_index(
    way: Way, rails: list[Rail], expected: dict[str, str]
) -> None:
    made = environment("vllm", 8, way, End("10.0.0.1", "eth0"), rails)
    assert made == {**MEET, **TALK, **expected}
    assert "NCCL_IB_GID_INDEX" not in made


def test_each_engine_announces_itself_by_its_own_variable() -> None:
    end = End("10.0.0.1", "eth0")
    assert environment("sglang", 0, Way("tcp"), end, []) == {
        "GLOO_SOCKET_IFNAME": "eth0",
        "SGLANG_HOST_IP": "10.0.0.1",
    }
    assert environment("llamacpp", 8, Way("tcp"), end, []) == {}


def test_without_a_common_subnet_no_interface_is_named_and_a_name_is_no_address() -> None:
    made = environment("vllm", 1, Way("tcp"), End("n1.example"), [])
    assert made == {"NCCL_IB_DISABLE": "1", **TALK}


def test_members_get_the_environment_of_the_way_that_was_chosen() -> None:
    made = [
        addressed(railed(f"n{n}", roce(0, f"10.9.0.{n}"), gpu=8), f"10.0.0.{n}", ("eth1", f"10.0.0.{n}/16"))
        for n in (1, 2)
    ]
    first, second = chosen(world(*made), wanted(2)).members
    assert (first.address, second.address) == ("10.0.0.1", "10.0.0.2")
    assert second.network == {
        "GLOO_SOCKET_IFNAME": "eth1",
        "VLLM_HOST_IP": "10.0.0.2",
        "NCCL_SOCKET_IFNAME": "=eth1",
        "NCCL_IB_DISABLE": "0",
        "NCCL_IB_HCA": "=mlx5_0:1",
        "NCCL_IB_ROCE_VERSION_NUM": "2",
        "NCCL_IB_ADDR_FAMILY": "AF_INET",
        **TALK,
    }
    assert chosen(world(labelled("n1"), labelled("n2")), wanted(2, network="tcp")).members[0].rdma == ()
    assert "NCCL_MNNVL_ENABLE" in chosen(world(linked("n1"), linked("n2")), wanted(2, gpus=4)).members[0].network

from __future__ import annotations

import pytest
from msgspec.structs import replace

from llmgw.rdma.link import Link, Refusal, Side, agree
from llmgw.wire.facts import Interface, Port
from tests.rdma.ports import V1, V2, gid, ib, roce


def agreed(a: Port, b: Port, **more: bool) -> Link:
    found = agree(Side("a", a), Side("b", b), **more)
    assert isinstance(found, Link), found
    return found


def refused(a: Port, b: Port) -> Refusal:
    found = agree(Side("a", a), Side("b", b))
    assert isinstance(found, Refusal), found
    return found


def test_each_side_gets_its_own_index() -> None:
    """GI09: the same subnet stands at different places in the two tables."""
    a = roce("r0", "10.0.0.1")
    b = roce("r0", "172.16.0.9", "192.168.7.7", "10.0.0.2")
    found = agreed(a, b)
    assert (found.a.gid_index, found.b.gid_index) == (3, 7)
    assert (found.a.address, found.b.address) == ("10.0.0.1", "10.0.0.2")


def test_infiniband_gets_no_gid_index() -> None:
    found = agreed(ib(), ib("mlx5_3"))
    assert (found.a.gid_index, found.b.gid_index, found.kind) == (None, None, "ib")


def test_the_smaller_mtu_and_the_slower_rate_hold() -> None:
    found = agreed(roce("r0", mtu=4096), roce("r0", "10.0.0.2", mtu=1024, rate_gbps=25.0))
    assert (found.mtu, found.rate_gbps) == (1024, 25.0)
    assert any("the smaller is used" in words for words in found.warnings)


def test_the_interfaces_speed_counts_where_soft_roce_rounds_up() -> None:
    """A 1 Gb/s interface shows as 2.5 Gb/sec (1X SDR)."""
    slow = roce("rxe0", rate_gbps=2.0, netdev_speed_mbps=1000)
    assert agreed(slow, roce("rxe0", "10.0.0.2")).rate_gbps == 1.0


@pytest.mark.parametrize(
    ("port", "code", "words"),
    [
        (roce(state="DOWN", physical_state="Disabled"), "port-disabled", "ip link set eth_mlx5_0 up"),
        (roce(state="DOWN", physical_state="Polling"), "port-polling", "cable"),
        (ib(state="DOWN", physical_state="Polling"), "port-polling", "cable"),
        (ib(state="1: DOWN", physical_state="3: Disabled"), "port-disabled", "enable the port"),
        (ib(state="INIT", lid=None), "no-sm", "opensm"),
        (ib(shut="/dev/infiniband/uverbs1: Operation not permitted"), "shut", "container"),
        (ib(state="Initializing", lid=None), "no-sm", "opensm"),
        (ib(lid=None, sm_lid=None), "no-sm", "opensm"),
        (roce(kind="efa"), "efa", "fi_rma_bw"),
        (roce(kind="other"), "kind", ""),
        (roce(gids=()), "no-gid", "ip addr add"),
        (roce(gids=(gid(0, "10.0.0.1", V1),)), "no-gid", "RoCE v2"),
    ],
)
def test_a_port_that_cannot_carry_a_test_is_refused_with_its_reason(port: Port, code: str, words: str) -> None:
    for found in (refused(port, port), refused(ib() if port.kind == "ib" else roce(), port)):
        assert found.code == code
        assert words in found.remedy
        assert "mlx5_0/1" in found.reason


def test_a_lid_that_could_not_be_read_is_no_missing_subnet_manager() -> None:
    blind = ib(lid=None, sm_lid=None, unreadable=("ports/1/lid: Permission denied",))
    assert agreed(blind, ib()).kind == "ib"


def test_the_node_whose_port_is_down_is_named() -> None:
    assert refused(roce(), roce("r9", state="DOWN", physical_state="Polling")).reason.startswith("b r9/1")


def test_ports_without_a_common_subnet_are_refused_unless_the_fabric_routes() -> None:
    """RA05: on rail-isolated networks another rail cannot be reached, and that is said."""
    a, b = roce("r0", "10.0.0.1"), roce("r0", "10.0.1.1")
    found = refused(a, b)
    assert found.code == "no-common-subnet"
    assert "different rails" in found.reason
    assert "--routed" in found.remedy
    assert agreed(a, b, routed=True).a.gid_index == 3


def test_the_interfaces_own_prefix_length_decides_what_a_subnet_is() -> None:
    a, b = roce("r0", "10.0.0.1"), roce("r0", "10.0.1.1")
    found = agree(
        Side("a", a, (Interface(name="eth_r0", addresses=("10.0.0.1/16",)),)),
        Side("b", b, (Interface(name="eth_r0", addresses=("10.0.1.1/16",)),)),
    )
    assert isinstance(found, Link)


def test_a_vlans_gid_is_used_where_only_it_is_common_and_is_said() -> None:
    a = replace(
        roce("r0", "10.0.0.1"), gids=(gid(1, "192.168.0.1", V2, "eth_r0"), gid(4, "10.9.0.1", V2, "eth_r0.100"))
    )
    b = replace(roce("r0", "10.0.0.2"), gids=(gid(2, "10.9.0.2", V2, "eth_r0.100"),))
    found = agreed(a, b)
    assert (found.a.gid_index, found.b.gid_index, found.vlan) == (4, 2, True)


def test_link_local_is_the_last_resort_with_a_warning() -> None:
    only = (gid(0, "fe80::a", V2),)
    found = agreed(roce(gids=only), roce(gids=(gid(0, "fe80::b", V2),)))
    assert any("link-local" in words for words in found.warnings)


def test_different_kinds_and_different_fabric_labels_are_refused() -> None:
    assert refused(roce(), ib()).code == "kinds"
    assert refused(ib(fabric="north"), ib(fabric="south")).code == "fabrics"

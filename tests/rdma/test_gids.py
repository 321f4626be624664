"""Which GIDs two ends choose."""

from __future__ import annotations

import ipaddress

from hypothesis import given
from hypothesis import strategies as st

from llmgw.rdma.gids import Pair, Refusal, choose, choose_pair
from llmgw.wire.facts import Gid, Interface, Port

LINK_LOCAL = "fe80:0000:0000:0000:5054:00ff:fe01:000b"
ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"


def v4(index: int, address: str, kind: str = "RoCE v2", netdev: str = "eth1") -> Gid:
    return Gid(index, ipaddress.IPv6Address(f"::ffff:{address}").exploded, kind, netdev)


def row(index: int, gid: str, kind: str = "RoCE v2", netdev: str = "eth1") -> Gid:
    return Gid(index, ipaddress.IPv6Address(gid).exploded, kind, netdev)


def roce(*gids: Gid, device: str = "mlx5_0", netdev: str = "eth1", state: str = "ACTIVE", bond: str = "") -> Port:
    return Port(device=device, kind="roce", link_layer="Ethernet", state=state, gids=gids, netdev=netdev, bond=bond)


def chosen(a: Port, b: Port) -> tuple[int, int]:
    pair = choose_pair(a, b)
    assert isinstance(pair, Pair), pair
    assert pair.a is not None
    assert pair.b is not None
    return pair.a.index, pair.b.index


def test_a_bond_is_used_through_the_ipv4_row_of_roce_v2() -> None:
    bond = roce(
        row(0, LINK_LOCAL, "IB/RoCE v1", "bond0"),
        row(1, LINK_LOCAL, "RoCE v2", "bond0"),
        v4(2, "200.0.209.6", "IB/RoCE v1", "bond0"),
        v4(3, "200.0.209.6", "RoCE v2", "bond0"),
        device="mlx5_bond_0",
        netdev="bond0",
    )
    assert chosen(bond, bond) == (3, 3)
    gid, reason = choose(bond)
    assert gid is not None
    assert gid.index == 3
    assert "200.0.209.6" in reason


def test_a_row_whose_type_cannot_be_read_is_skipped_and_the_search_goes_on() -> None:
    pod = roce(v4(0, "10.0.0.1", ""), v4(1, "10.0.0.1", ""), v4(2, "10.0.0.2", "IB/RoCE v1"), v4(3, "10.0.0.2"))
    gid, _ = choose(pod)
    assert gid is not None
    assert gid.index == 3


def test_a_table_of_zeros_is_refused_with_the_netdev_that_has_no_address() -> None:
    empty = roce(Gid(0, ZERO, "RoCE v2", ""), netdev="net1")
    refused = choose_pair(empty, roce(v4(3, "10.0.0.2")))
    assert isinstance(refused, Refusal)
    assert "no usable GID" in refused.reason
    assert "no IP on net1 in this namespace" in refused.reason
    assert "ip addr add" in refused.remedy
    assert choose(empty) == (None, refused.reason)


def test_a_table_of_v1_rows_only_says_so() -> None:
    refused = choose_pair(roce(v4(2, "10.0.0.1", "IB/RoCE v1")), roce(v4(3, "10.0.0.2")))
    assert isinstance(refused, Refusal)
    assert "only RoCE v1" in refused.reason


def test_a_pinned_link_local_row_is_overridden_with_a_warning() -> None:
    port = roce(row(1, LINK_LOCAL), v4(3, "10.0.0.1"))
    pair = choose_pair(port, roce(row(1, "fe80::2"), v4(5, "10.0.0.2")), pinned_a=1, pinned_b=1)
    assert isinstance(pair, Pair)
    assert pair.a is not None
    assert pair.b is not None
    assert (pair.a.index, pair.b.index) == (3, 5)
    assert any("link-local" in words for words in pair.warnings)


def test_a_pinned_row_that_works_is_kept() -> None:
    port = roce(v4(3, "10.0.0.1"), v4(4, "10.0.0.101"))
    pair = choose_pair(port, roce(v4(5, "10.0.0.2")), pinned_a=4)
    assert isinstance(pair, Pair)
    assert pair.a is not None
    assert pair.a.index == 4
    assert pair.warnings == ()


def test_a_pinned_row_that_cannot_work_is_named() -> None:
    pair = choose_pair(roce(v4(3, "10.0.0.1")), roce(v4(5, "10.0.0.2")), pinned_a=9)
    assert isinstance(pair, Pair)
    assert any("index 9 of mlx5_0/1" in words for words in pair.warnings)


def test_each_end_gets_its_own_index() -> None:
    assert chosen(roce(v4(7, "10.1.2.3")), roce(row(1, LINK_LOCAL), v4(11, "10.1.2.4"))) == (7, 11)


def test_the_subnet_both_share_wins_over_the_first_address() -> None:
    a = roce(v4(3, "10.0.0.1"), v4(5, "192.168.7.1"))
    b = roce(v4(3, "172.16.0.2"), v4(9, "192.168.7.2"))
    assert chosen(a, b) == (5, 9)


def test_the_interfaces_true_prefix_decides_what_one_subnet_is() -> None:
    a = roce(v4(3, "10.0.0.1"), v4(4, "10.0.9.1"))
    b = roce(v4(3, "10.0.7.1"))
    wide = Interface(name="eth1", addresses=("10.0.0.1/21",))
    pair = choose_pair(a, b, interfaces_a=(wide,), interfaces_b=(Interface(name="eth1", addresses=("10.0.7.1/21",)),))
    assert isinstance(pair, Pair)
    assert pair.warnings == ()
    assert "10.0.0.0/21" in pair.reason


def test_routable_ipv6_comes_before_link_local_and_after_ipv4() -> None:
    a = roce(row(0, LINK_LOCAL), row(2, "fd00::1"), v4(3, "10.0.0.1"))
    b = roce(row(0, "fe80::b"), row(4, "fd00::2"))
    assert chosen(a, b) == (2, 4)
    assert chosen(a, roce(row(4, "fd00::2"), v4(6, "10.0.0.2"))) == (3, 6)


def test_link_local_is_used_when_there_is_nothing_else_and_warned_about() -> None:
    pair = choose_pair(roce(row(1, LINK_LOCAL)), roce(row(1, "fe80::b")))
    assert isinstance(pair, Pair)
    assert any("link-local" in words for words in pair.warnings)
    linked = choose_pair(roce(v4(1, "169.254.3.1")), roce(v4(1, "169.254.3.2")))
    assert isinstance(linked, Pair)
    assert any("link-local" in words for words in linked.warnings)


def test_link_local_on_one_end_and_ipv4_on_the_other_is_refused() -> None:
    refused = choose_pair(roce(row(1, LINK_LOCAL)), roce(v4(1, "10.0.0.2")))
    assert isinstance(refused, Refusal)
    assert "no common address family" in refused.reason


def test_rows_of_a_vlan_come_after_the_ports_own() -> None:
    a = roce(v4(1, "10.0.0.1"), v4(3, "10.0.0.3", netdev="eth1.100"))
    assert chosen(a, roce(v4(1, "10.0.0.2"))) == (1, 1)
    only_vlan = choose_pair(roce(v4(3, "10.0.5.3", netdev="eth1.100")), roce(v4(1, "10.0.5.2")))
    assert isinstance(only_vlan, Pair)
    assert any("eth1.100" in words for words in only_vlan.warnings)


def test_different_subnets_are_a_warning_since_rails_may_be_routed() -> None:
    pair = choose_pair(roce(v4(1, "10.0.0.1")), roce(v4(1, "10.9.0.1")))
    assert isinstance(pair, Pair)
    assert any("different subnets" in words for words in pair.warnings)


def test_an_address_that_both_ends_have_is_the_last_choice_of_its_subnets_and_warned_about() -> None:
    shared = v4(1, "172.17.0.1")
    assert chosen(roce(shared, v4(3, "10.0.0.1")), roce(shared, v4(5, "10.0.0.2"))) == (3, 5)
    pair = choose_pair(roce(shared), roce(shared))
    assert isinstance(pair, Pair)
    assert any("both ends have the address 172.17.0.1" in words for words in pair.warnings)


def test_an_address_of_this_machine_only_is_none() -> None:
    assert isinstance(choose_pair(roce(v4(0, "127.0.0.1"), row(1, "::1")), roce(v4(0, "10.0.0.1"))), Refusal)


def test_infiniband_gets_no_gid_and_does_not_mix_with_roce() -> None:
    ib = Port(device="mlx5_1", kind="ib", link_layer="InfiniBand", state="ACTIVE")
    assert choose_pair(ib, ib) == Pair(None, None, "InfiniBand: the tools choose the GID themselves")
    refused = choose_pair(ib, roce(v4(1, "10.0.0.2")))
    assert isinstance(refused, Refusal)
    assert "different fabrics" in refused.reason


def test_efa_is_refused_with_its_reason() -> None:
    efa = Port(device="rdmap86s0", kind="efa", state="ACTIVE")
    refused = choose_pair(efa, efa)
    assert isinstance(refused, Refusal)
    assert "EFA" in refused.reason


def test_a_port_that_is_down_is_refused_by_its_state() -> None:
    refused = choose_pair(
        roce(v4(1, "10.0.0.1")), Port(device="mlx5_3", kind="roce", state="DOWN", physical_state="Polling")
    )
    assert isinstance(refused, Refusal)
    assert "mlx5_3/1 is DOWN, Polling" in refused.reason


addresses = st.one_of(
    st.ip_addresses(v=4).map(lambda a: f"::ffff:{a}"), st.ip_addresses(v=6).map(str), st.just(ZERO), st.text()
)
tables = st.lists(
    st.builds(
        Gid,
        st.integers(0, 255),
        addresses,
        st.sampled_from(["RoCE v2", "IB/RoCE v1", "", "junk"]),
        st.sampled_from(["eth1", "eth1.7", ""]),
    ),
    max_size=6,
)


@given(tables, tables)
def test_whatever_the_tables_hold_the_choice_is_of_v2_rows_of_one_family_or_a_refusal(
    a: list[Gid], b: list[Gid]
) -> None:
    pair = choose_pair(roce(*a), roce(*b))
    if isinstance(pair, Refusal):
        assert pair.reason
        return
    assert pair.a in a
    assert pair.b in b
    assert pair.a is not None
    assert pair.b is not None
    assert pair.a.type == pair.b.type == "RoCE v2"
    first, second = (ipaddress.IPv6Address(end.gid.strip()) for end in (pair.a, pair.b))
    assert (first.ipv4_mapped is None) == (second.ipv4_mapped is None)

"""Ports from what sysfs held."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.rdma.link import Side, unfit
from llmgw.rdma.roles import assigned
from llmgw.rdma.sysfs import Tree, Unread, gbps, guid, kind_of, lid, loads, ports, rate_of, roce_mtu
from llmgw.wire.facts import Port

RECORDED = Path(__file__).parent.parent / "recorded" / "sysfs"
EINVAL = Unread("EINVAL")


def infiniband(**more: str | Unread) -> dict[str, str | Unread]:
    tree: dict[str, str | Unread] = {
        "node_guid": "946d:ae03:0000:0001\n",
        "sys_image_guid": "946d:ae03:0000:0001\n",
        "node_type": "1: CA\n",
        "fw_ver": "28.39.1002\n",
        "hca_type": "MT4129\n",
        "@pci": "0000:18:00.0",
        "@driver": "mlx5_core",
        "ports/1/state": "4: ACTIVE\n",
        "ports/1/phys_state": "5: LinkUp\n",
        "ports/1/rate": "400 Gb/sec (4X NDR)\n",
        "ports/1/link_layer": "InfiniBand\n",
        "ports/1/lid": "0x5\n",
        "ports/1/sm_lid": "0x1\n",
        "ports/1/gids/0": "fe80:0000:0000:0000:946d:ae03:0000:0001\n",
        "ports/1/counters/port_xmit_data": "1000\n",
        "ports/1/counters/VL15_dropped": "0\n",
    }
    return {**tree, **{path.replace("__", "/"): value for path, value in more.items()}}


def port(tree: Tree, device: str = "mlx5_0") -> Port:
    (only,) = ports(device, tree)
    return only


def test_an_infiniband_port_is_read_whole() -> None:
    mine = port(infiniband())
    assert (mine.kind, mine.driver, mine.state, mine.physical_state) == ("ib", "mlx5", "ACTIVE", "LinkUp")
    assert (mine.rate_gbps, mine.lid, mine.sm_lid) == (400.0, 5, 1)
    assert (mine.node_guid, mine.port_guid, mine.prefix) == (
        "946dae0300000001",
        "946dae0300000001",
        "fe80000000000000",
    )
    assert mine.unreadable == ()


def test_a_counter_that_refuses_costs_only_itself() -> None:
    tree = infiniband(ports__1__counters__VL15_dropped=EINVAL)
    mine = port(tree)
    assert mine.state == "ACTIVE"
    assert mine.unreadable == ("counters/VL15_dropped: EINVAL",)
    (load,) = loads([mine], tree)
    assert load.counters == {"port_xmit_data": 1000}


def test_a_counter_without_a_number_is_left_out() -> None:
    tree = infiniband(ports__1__counters__symbol_error="N/A (no PMA)\n")
    assert "symbol_error" not in loads(ports("mlx5_0", tree), tree)[0].counters


def test_a_port_that_is_down_has_neither_rate_nor_lids_since_both_are_stale() -> None:
    tree = infiniband(
        ports__1__state="1: DOWN",
        ports__1__phys_state="2: Polling",
        ports__1__rate="10 Gb/sec (4X SDR)",
        ports__1__lid="0x364",
        ports__1__sm_lid="0x14e",
    )
    mine = port(tree)
    assert (mine.state, mine.physical_state) == ("DOWN", "Polling")
    assert (mine.rate_gbps, mine.lid, mine.sm_lid) == (None, None, None)
    assert mine.rate_text == "10 Gb/sec (4X SDR)"
    (load,) = loads([mine], tree)
    assert (load.rate_gbps, load.sm_lid) == (None, None)


def test_disabled_is_told_apart_from_polling() -> None:
    assert port(infiniband(ports__1__state="1: DOWN", ports__1__phys_state="3: Disabled")).physical_state == "Disabled"


@pytest.mark.parametrize(
    ("words", "data"),
    [
        ("400 Gb/sec (4X NDR)", 400.0),
        ("200 Gb/sec (2X NDR)", 200.0),
        ("800 Gb/sec (4X XDR)", 800.0),
        ("100 Gb/sec (4X EDR)", 100.0),
        ("56 Gb/sec (4X FDR)", 54.545),
        ("40 Gb/sec (4X FDR10)", 40.0),
        ("40 Gb/sec (4X QDR)", 32.0),
        ("2.5 Gb/sec (1X SDR)", 2.0),
        ("25 Gb/sec (1X EDR)", 25.0),
        ("0 Gb/sec (4X NDR)", None),
        ("", None),
        ("fast", None),
        ("1.2.3 Gb/sec", None),
    ],
)
def test_the_rate_is_what_the_link_carries_as_data(words: str, data: float | None) -> None:
    assert gbps(words) == data


def test_on_ethernet_nothing_is_taken_off_and_the_netdevs_speed_is_the_truth() -> None:
    tree = {"ports/1/rate": "2.5 Gb/sec (1X SDR)"}
    assert rate_of(tree, "1", "roce", 1000, False) == 1.0
    assert rate_of({"ports/1/rate": "100 Gb/sec (4X EDR)"}, "1", "roce", 400000, False) == 400.0
    assert rate_of({"ports/1/rate": "40 Gb/sec (4X QDR)"}, "1", "roce", None, False) == 40.0
    assert rate_of({"ports/1/rate": "100 Gb/sec (4X EDR)"}, "1", "roce", 200000, True) == 100.0
    assert rate_of({}, "1", "roce", None, False) is None


def test_an_ethernet_port_has_no_lids_and_a_zero_guid_is_no_identity() -> None:
    mine = port(
        infiniband(
            ports__1__link_layer="Ethernet",
            ports__1__lid="0x0",
            ports__1__sm_lid="0x0",
            node_guid="0000:0000:0000:0000",
        )
    )
    assert mine.kind == "roce"
    assert (mine.lid, mine.sm_lid, mine.node_guid, mine.port_guid, mine.prefix) == (None, None, "", "", "")


def test_a_lid_of_65535_is_unset() -> None:
    assert lid("0xffff") is None
    assert lid("65535") is None
    assert lid("0") is None
    assert lid("0xbfff") == 0xBFFF


def test_efa_is_a_kind_of_its_own_and_keeps_both_its_names() -> None:
    efa = {
        "node_guid": "0000:0000:0000:0000",
        "node_type": "7: unspecified",
        "@driver": "efa",
        "device/vendor": "0x1d0f",
        "ports/1/state": "4: ACTIVE",
        "ports/1/phys_state": "5: LinkUp",
        "ports/1/link_layer": "Unspecified",
        "ports/1/rate": "100 Gb/sec (4X EDR)",
    }
    mine = port(efa, "rdmap86s0")
    assert (mine.kind, mine.device, mine.libfabric) == ("efa", "rdmap86s0", "rdmap86s0-rdm")
    assert kind_of({"ports/1/link_layer": "Unknown", "node_type": "7: unspecified"}, "efa_0", "1", "") == "efa"
    assert assigned([mine])[0].rail is None
    shut = {**efa, "@net/eth5/own": "1", "@net/eth5/operstate": "down"}
    assert port(shut, "rdmap86s0").state == "DOWN"
    assert loads(ports("rdmap86s0", shut), shut)[0].state == "DOWN"


def test_omni_path_borrows_infinibands_words_and_is_no_rail() -> None:
    tree = {"@driver": "hfi1", "ports/1/link_layer": "InfiniBand", "ports/1/state": "4: ACTIVE"}
    mine = port(tree, "hfi1_0")
    assert mine.kind == "opa"
    assert mine.hca_type == ""
    assert assigned([mine])[0].rail is None


@pytest.mark.parametrize(("device", "driver"), [("ibp216s0", "hfi1"), ("opap1s0", ""), ("hfi2_0", "hfi2")])
def test_omni_path_is_known_by_driver_or_by_name(device: str, driver: str) -> None:
    assert port(infiniband(**{"@driver": driver}), device).kind == "opa"


def test_a_lid_that_nobody_could_read_is_not_one_that_nobody_gave() -> None:
    """SY09: a copy of sysfs may hold neither LID."""
    tree = infiniband()
    del tree["ports/1/lid"], tree["ports/1/sm_lid"]
    blind = port(tree)
    assert (blind.lid, blind.unreadable) == (None, ("lid: ENOENT",))
    assert unfit(Side("a", blind)) is None
    unset = port(infiniband(ports__1__lid="0x0", ports__1__sm_lid="0x0"))
    refused = unfit(Side("a", unset))
    assert refused is not None
    assert refused.code == "no-sm"


def test_iwarp_is_neither_infiniband_nor_roce() -> None:
    assert kind_of({"node_type": "4: RNIC", "ports/1/link_layer": "Ethernet"}, "irdma0", "1", "irdma") == "other"
    assert kind_of({"node_type": "1: CA", "ports/1/link_layer": "Ethernet"}, "irdma0", "1", "irdma") == "roce"


def test_without_a_word_on_the_link_layer_the_traces_of_each_kind_count() -> None:
    assert kind_of({"ports/1/lid": "0x5"}, "mthca0", "1", "") == "ib"
    assert kind_of({"ports/1/lid": "0x0", "ports/1/gid_attrs/types/1": "RoCE v2"}, "mlx5_0", "1", "") == "roce"
    assert kind_of({"ports/1/link_layer": EINVAL}, "mlx5_0", "1", "") == "other"


def test_rows_whose_type_is_not_readable_stay_without_a_type() -> None:
    mine = port(
        infiniband(
            ports__1__link_layer="Ethernet",
            ports__1__gids__1="0000:0000:0000:0000:0000:0000:0000:0000",
            ports__1__gids__3="0000:0000:0000:0000:0000:ffff:0a00:0001",
            ports__1__gid_attrs__types__0=EINVAL,
            ports__1__gid_attrs__types__3="RoCE v2",
            ports__1__gid_attrs__ndevs__3="eth1",
        )
    )
    assert [(row.index, row.type, row.netdev) for row in mine.gids] == [(0, "", ""), (3, "RoCE v2", "eth1")]
    assert mine.unreadable == ()


def test_the_rdma_mtu_is_what_fits_into_the_netdevs() -> None:
    assert [roce_mtu(mtu) for mtu in (1500, 4200, 9000, 300, None)] == [1024, 4096, 4096, None, None]


def test_guids_are_sixteen_digits_without_prefix_or_colons() -> None:
    assert guid("0x946dae03") == "00000000946dae03"
    assert guid("junk") == ""


def recorded(device: str) -> dict[str, str | Unread]:
    tree: dict[str, str | Unread] = {}
    for line in (RECORDED / "rxe-vlan-and-ipv6.txt").read_text().splitlines():
        found = re.fullmatch(rf"/sys/class/infiniband/{device}/(\S+) = (.*)", line)
        if found and found[2] != "(absent)":
            tree[found[1]] = found[2]
    return tree


def test_a_recorded_soft_port_finds_its_interface_by_its_parent() -> None:
    tree = {**recorded("rxe0"), "@net/eth1/speed": "25000", "@net/eth1/mtu": "4300"}
    mine = port(tree, "rxe0")
    assert (mine.kind, mine.driver, mine.netdev, mine.mtu, mine.rate_gbps) == ("roce", "rxe", "eth1", 4096, 25.0)
    assert [row.index for row in mine.gids] == [0, 1, 2, 3, 4, 5]
    assert mine.gids[3].netdev == "eth1.100"
    (load,) = loads([mine], tree)
    assert load.counters["completer_retry_err"] == 453
    assert "lifespan" not in load.counters


names = st.sampled_from(
    [
        "node_guid", "node_type", "parent", "@pci", "@driver", "@physfn", "device/numa_node", "device/vendor",
        "device/current_link_speed", "device/max_link_width", "ports/1/state", "ports/1/phys_state", "ports/1/rate",
        "ports/1/link_layer", "ports/1/lid", "ports/1/sm_lid", "ports/1/gids/0", "ports/1/gids/7", "ports/x/state",
        "ports/1/gid_attrs/types/0", "ports/1/gid_attrs/ndevs/7", "ports/1/counters/link_downed", "ports/2/state",
        "ports/1/hw_counters/out_of_buffer", "@net/eth0/own", "@net/eth0/speed", "@net/eth0/mtu", "@net/eth0/dev_port",
        "@net/eth0/master", "@net/eth1/own", "@net/eth0/bonding", "@net/eth0/slave", "ports/99999999/state",
        "ports/²/state", "ports/1/gids/²", "ports/1/gids/9999999999",
    ]
)  # fmt: skip
contents = st.one_of(
    st.text(),
    st.binary().map(lambda data: data.decode(errors="replace")),
    st.sampled_from(
        ["4: ACTIVE", "1: DOWN", "InfiniBand", "Ethernet", "0x", "0xffff", "-1", "400 Gb/sec (4X NDR)", "1e999 Gb/sec",
         "9" * 5000, "0x" + "f" * 4000, "fe80::1", "::", "eth0", "eth1"]
    ),
    st.sampled_from(["EINVAL", "EIO", "EACCES", "EOPNOTSUPP"]).map(Unread),
)  # fmt: skip
devices = st.sampled_from(["mlx5_0", "efa_0", "rdmap86s0", "hfi1_0", "rxe0", "", "irdma0", "mlx5_bond_0"])


@given(st.dictionaries(st.one_of(names, st.text()), contents, max_size=30), devices)
def test_any_tree_of_files_gives_ports_and_never_an_exception(tree: dict[str, str | Unread], device: str) -> None:
    found = assigned(ports(device, tree))
    for load in loads(found, tree):
        assert load.rate_gbps is None or load.rate_gbps > 0
    for each in found:
        assert each.lid is None or 0 < each.lid < 0xFFFF
        assert each.rate_gbps is None or each.rate_gbps > 0

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmgw.rdma.fabric import Map
from llmgw.rdma.leaves import Owner, berths, rails
from tests.rdma import captures
from tests.rdma.trees import guid_of, link, swapped, tree
from tests.rigs.ib.net import host_guid


def test_every_host_port_is_on_its_leaf_and_every_leaf_on_its_rail() -> None:
    found = rails([tree(128, 8, 32)])
    assert len(found.berths) == 1024
    assert len(found.rails) == 64
    assert set(found.rails.values()) == {f"mlx5_{rail}" for rail in range(8)}
    assert found.misplaced == ()


def test_recorded_fabrics_have_nothing_out_of_place() -> None:
    for name in (
        "healthy/ibnetdiscover",
        "faults/ibnetdiscover",
        "big/h128x8.ibnetdiscover",
        "big/h1024plane0.ibnetdiscover",
    ):
        assert rails([captures.fabric(name)]).misplaced == ()


def test_two_adapters_of_one_host_in_each_others_leaves_are_found_from_the_map_alone() -> None:
    one = tree(64, 8, 32)
    found = rails([swapped(one, link(one, host_guid(31, 3), 1), link(one, host_guid(31, 4), 1))])
    assert [wrong.text for wrong in found.misplaced] == [
        "gpu-00031 mlx5_3 is on the leaf of rail mlx5_4 (MF0;leaf-su001-r4:MQM9700/U1): swapped with mlx5_4",
        "gpu-00031 mlx5_4 is on the leaf of rail mlx5_3 (MF0;leaf-su001-r3:MQM9700/U1): swapped with mlx5_3",
    ]
    assert found.misplaced[0].should == guid_of(one, "MF0;leaf-su001-r3")


def test_two_hosts_of_two_groups_with_one_rail_exchanged_are_found() -> None:
    one = tree(64, 8, 32)
    found = rails([swapped(one, link(one, host_guid(3, 5), 1), link(one, host_guid(40, 5), 1))])
    assert [wrong.text for wrong in found.misplaced] == [
        "gpu-00003 mlx5_5 is on MF0;leaf-su002-r5:MQM9700/U1, its other adapters' leaves belong to "
        "MF0;leaf-su000-r5:MQM9700/U1: swapped with gpu-00040 mlx5_5",
        "gpu-00040 mlx5_5 is on MF0;leaf-su000-r5:MQM9700/U1, its other adapters' leaves belong to "
        "MF0;leaf-su002-r5:MQM9700/U1: swapped with gpu-00003 mlx5_5",
    ]


def test_an_adapter_in_another_plane_is_found_from_the_planes_together() -> None:
    """Each rail is a fabric of its own, and two cables of host 7 went to each other's."""
    planes = [tree(32, 4, 16, plane=rail) for rail in range(4)]
    a, b = host_guid(7, 1), host_guid(7, 2)

    def exchanged(one: Map, mine: int, theirs: int, device: str) -> Map:
        nodes = tuple(
            replace(node, guid=theirs, name=f"gpu-00007 {device}", ends=(replace(node.ends[0], guid=theirs + 1),))
            if node.guid == mine else node
            for node in one.nodes
        )  # fmt: skip
        links = tuple(
            replace(each, a=theirs if each.a == mine else each.a, b=theirs if each.b == mine else each.b)
            for each in one.links
        )
        return replace(one, nodes=nodes, links=links)

    planes[1], planes[2] = exchanged(planes[1], a, b, "mlx5_2"), exchanged(planes[2], b, a, "mlx5_1")
    found = rails(planes)
    assert [(wrong.berth.owner, wrong.belongs) for wrong in found.misplaced] == [
        (Owner("gpu-00007", "mlx5_1"), "mlx5_2"),
        (Owner("gpu-00007", "mlx5_2"), "mlx5_1"),
    ]
    assert all(wrong.swapped_with for wrong in found.misplaced)


def test_a_fabric_whose_leaves_are_mixed_by_design_has_no_rails_and_nobody_is_misplaced() -> None:
    one = tree(16, 2, 8)
    nodes = tuple(
        replace(node, name=f"host-{node.guid >> 8:x} mlx5_{node.guid >> 8 & 3}") for node in one.nodes if node
    )
    nodes = tuple(
        replace(node, name=before.name if before.switch else node.name)
        for node, before in zip(nodes, one.nodes, strict=True)
    )
    found = rails([replace(one, nodes=nodes)])
    assert found.misplaced == ()


def test_what_a_node_says_of_itself_counts_before_a_description() -> None:
    one = tree(16, 2, 8)
    blank = replace(
        one, nodes=tuple(node if node.switch else replace(node, name="localhost HCA-1") for node in one.nodes)
    )
    assert rails([blank]).rails == {}
    owners = {host_guid(h, r) + 1: Owner(f"node-{h}", f"mlx5_{r}", r) for h in range(16) for r in range(2)}
    wrong = swapped(blank, link(blank, host_guid(5, 0), 1), link(blank, host_guid(5, 1), 1))
    found = rails([wrong], owners)
    assert [one.text.split(" is on")[0] for one in found.misplaced] == ["node-5 mlx5_0", "node-5 mlx5_1"]


def test_duplicate_descriptions_name_nobody() -> None:
    one = tree(16, 2, 8)
    nodes = tuple(replace(node, name="same mlx5_0") if node.kind == "host" else node for node in one.nodes)
    assert all(berth.owner is None for berth in berths(replace(one, nodes=nodes)))


@given(st.permutations(range(16)), st.integers(0, 15))
def test_any_cabling_is_judged_without_an_exception(order: list[int], count: int) -> None:
    one = tree(16, 2, 8)
    for first, second in zip(order[:count:2], order[1:count:2], strict=False):
        one = swapped(one, link(one, host_guid(first, 0), 1), link(one, host_guid(second, 1), 1))
    found = rails([one])
    assert len(found.berths) == 32
    assert all(wrong.text for wrong in found.misplaced)

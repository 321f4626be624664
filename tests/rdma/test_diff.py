from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmgw.rdma.diff import compare
from llmgw.rdma.fabric import End, Map
from tests.rdma import captures
from tests.rdma.trees import guid_of, link, paced, swapped, tree, with_link, without
from tests.rigs.ib.net import host_guid


def kinds(old: Map, new: Map) -> list[str]:
    return [change.kind for change in compare(old, new).changes]


def test_two_maps_of_one_fabric_from_two_ports_do_not_differ() -> None:
    assert (
        kinds(captures.fabric("healthy/ibnetdiscover"), captures.fabric("healthy-from-other-rail/ibnetdiscover")) == []
    )


def test_lids_that_a_manager_gave_or_took_are_no_change_of_the_fabric() -> None:
    assert kinds(captures.fabric("no-sm/ibnetdiscover"), captures.fabric("healthy/ibnetdiscover")) == []


def test_the_injected_faults_are_found_and_nothing_else() -> None:
    """A spine cable cut, a host cut off, a link at 1x, one at EDR (see the recording's INJECTED)."""
    diff = compare(captures.fabric("healthy/ibnetdiscover"), captures.fabric("faults/ibnetdiscover"))
    assert sorted(change.kind for change in diff.changes) == ["host-gone", "link-gone", "link-slower", "link-slower"]
    by_kind = {change.kind: change.text for change in diff.changes}
    assert "port 6 of MF0;leaf-su000-r0" in by_kind["link-gone"]
    assert by_kind["host-gone"].startswith("gpu-00002 mlx5_0 is gone (it was at port 3 of MF0;leaf-su000-r0")
    assert {change.after for change in diff.of("link-slower")} == {"1xHDR", "4xEDR"}


def test_what_was_cut_and_came_back_is_no_difference_but_what_stayed_slow() -> None:
    assert set(kinds(captures.fabric("healthy/ibnetdiscover"), captures.fabric("after-relink/ibnetdiscover"))) <= {
        "link-slower"
    }


def test_a_dead_leaf_is_one_change_with_the_hosts_that_hang_on_it() -> None:
    diff = compare(captures.fabric("after-relink/ibnetdiscover"), captures.fabric("leaf3-dead/ibnetdiscover"))
    assert [change.kind for change in diff.changes] == ["switch-gone"]
    (gone,) = diff.changes
    assert "leaf-su001-r1" in gone.text
    assert "gpu-00004 mlx5_1" in gone.text
    back = compare(captures.fabric("leaf3-dead/ibnetdiscover"), captures.fabric("after-relink/ibnetdiscover"))
    assert [change.kind for change in back.changes] == ["switch-new"]


def test_a_partial_map_never_says_that_anything_is_gone() -> None:
    healthy = captures.fabric("after-relink/ibnetdiscover")
    for name in ("spine0-silent", "spine0-lossy30", "own-port-down"):
        diff = compare(healthy, captures.fabric(f"{name}/ibnetdiscover"))
        assert not [change for change in diff.changes if "gone" in change.kind], name
        assert not diff.of("link-slower", "renamed", "cable-moved"), name
        assert diff.blind


def test_against_a_partial_map_nothing_is_new() -> None:
    diff = compare(captures.fabric("spine0-silent/ibnetdiscover"), captures.fabric("healthy/ibnetdiscover"))
    assert not [change for change in diff.changes if "new" in change.kind]


def test_a_cable_between_switches_that_was_cut_is_one_change() -> None:
    one = tree()
    cut = link(one, guid_of(one, "MF0;leaf-su000-r0"), 5)
    assert kinds(one, without(one, cut)) == ["link-gone"]
    assert kinds(without(one, cut), one) == ["link-new"]


def test_a_host_whose_cable_is_cut_is_one_change() -> None:
    one = tree()
    assert kinds(one, without(one, link(one, host_guid(3, 1), 1))) == ["host-gone"]


def test_two_swapped_host_cables_are_one_change_that_names_both() -> None:
    one = tree()
    diff = compare(one, swapped(one, link(one, host_guid(3, 0), 1), link(one, host_guid(3, 1), 1)))
    assert [change.kind for change in diff.changes] == ["cables-swapped"]
    assert "gpu-00003 mlx5_0" in diff.changes[0].text
    assert "gpu-00003 mlx5_1" in diff.changes[0].text
    assert len(diff.changes[0].ports) == 4


def test_two_swapped_cables_between_switches_are_one_change() -> None:
    one = tree()
    first = link(one, guid_of(one, "MF0;leaf-su000-r0"), 5)
    second = link(one, guid_of(one, "MF0;leaf-su001-r1"), 7)
    assert kinds(one, swapped(one, first, second)) == ["cables-swapped"]


def test_a_cable_moved_to_another_port_is_one_change() -> None:
    one = tree(15, 2, 8)
    leaf = guid_of(one, "MF0;leaf-su003-r0")
    host = host_guid(12, 0)
    moved = with_link(without(one, link(one, host, 1)), (leaf, 4), (host, 1))
    moved = replace(moved, nodes=one.nodes)
    diff = compare(one, moved)
    assert [change.kind for change in diff.changes] == ["cable-moved"]
    assert "from port 1 of MF0;leaf-su003-r0:MQM9700/U1 to port 4 of" in diff.changes[0].text


def test_a_replaced_adapter_is_one_change_with_both_guids() -> None:
    one = tree()
    old = host_guid(3, 1)
    new = 0x1070FD0300AA0000

    def renamed(guid: int) -> int:
        return new if guid == old else guid

    nodes = [replace(node, guid=new, ends=(End(1, new + 1),)) if node.guid == old else node for node in one.nodes]
    links = [replace(each, a=renamed(each.a), b=renamed(each.b)) for each in one.links]
    after = replace(
        one, nodes=tuple(sorted(nodes, key=lambda node: node.guid)),
        links=tuple(type(each)(*sorted(each.ends)[0], *sorted(each.ends)[1], each.width, each.speed) for each in links),
    )  # fmt: skip
    diff = compare(one, after)
    assert [change.kind for change in diff.changes] == ["adapter-replaced"]
    assert (diff.changes[0].before, diff.changes[0].after) == (f"0x{old:016x}", f"0x{new:016x}")


def test_width_speed_and_names_are_changes_and_a_lost_name_is_none() -> None:
    one = tree()
    which = link(one, host_guid(2, 0), 1)
    assert kinds(one, paced(one, which, 1, "HDR")) == ["link-slower"]
    assert kinds(paced(one, which, 1, "HDR"), one) == ["link-faster"]
    assert kinds(one, paced(one, which, 0, "")) == []
    for name, expected in (("gpu-x mlx5_0", ["renamed"]), ("", [])):
        nodes = tuple(replace(node, name=name) if node.guid == host_guid(2, 0) else node for node in one.nodes)
        assert kinds(one, replace(one, nodes=nodes)) == expected


def test_a_half_that_split_off_is_one_change() -> None:
    one = tree()
    half = {node.guid for node in one.nodes if "su002" in node.name or "su003" in node.name}
    half |= {host_guid(host, rail) for host in range(8, 16) for rail in (0, 1)}
    (leaves_and_hosts,) = [without(one, nodes=tuple(half))]
    diff = compare(one, leaves_and_hosts)
    assert Counter(change.kind for change in diff.changes) == Counter({"switch-gone": 4}), "leaves do not hang together"
    spine = guid_of(one, "MF0;spine-0003")
    diff = compare(one, without(one, nodes=(*half, spine)))
    assert [change.kind for change in diff.changes] == ["part-gone"]
    assert "5 switches and 16 hosts' adapters" in diff.changes[0].text


@st.composite
def damaged(draw: st.DrawFn) -> Map:
    one = tree()
    for _ in range(draw(st.integers(0, 3))):
        which = draw(st.sampled_from(one.links))
        match draw(st.sampled_from(["cut", "slow", "swap", "kill"])):
            case "cut":
                one = without(one, which)
            case "slow":
                one = paced(one, which, 1, "EDR")
            case "swap":
                other = draw(st.sampled_from(one.links))
                if not {which.a, which.b} & {other.a, other.b}:
                    one = swapped(one, which, other)
            case "kill":
                one = without(one, nodes=(draw(st.sampled_from(one.nodes)).guid,))
        if not one.links:
            break
    return one


@given(damaged(), damaged(), st.booleans(), st.booleans())
def test_any_two_maps_compare_and_every_link_that_went_is_in_some_change(
    old: Map, new: Map, old_whole: bool, new_whole: bool
) -> None:
    old, new = replace(old, complete=old_whole), replace(new, complete=new_whole)
    diff = compare(old, new)
    assert all(change.text for change in diff.changes)
    if not new_whole:
        assert not [change for change in diff.changes if change.kind.endswith("gone")]
    else:
        told = {end for change in diff.changes for end in change.ports}
        now = {each.ends for each in new.links}
        for each in old.links:
            if each.ends not in now and old_whole:
                assert set(each.ends) & told, each
    assert compare(old, old).changes == ()

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmgw.rdma.degraded import faults, suspects
from llmgw.rdma.fabric import Link, Map, PortState
from tests.rdma import captures
from tests.rdma.trees import guid_of, link, paced, tree
from tests.rigs.ib.net import host_guid

ABLE = {
    "widths": (1, 2, 4),
    "speeds": ("SDR", "EDR", "HDR"),
    "enabled_widths": (1, 4),
    "enabled_speeds": ("EDR", "HDR"),
}


def state(guid: int, port: int, width: int = 1, speed: str = "HDR", **more: tuple[object, ...]) -> PortState:
    return PortState(guid, port, width, speed, **(ABLE | more))  # type: ignore[arg-type]


def slow_host(width: int = 1, speed: str = "HDR") -> tuple[Map, Link]:
    one = tree()
    found = paced(one, link(one, host_guid(2, 0), 1), width, speed)
    return found, link(found, host_guid(2, 0), 1)


def test_a_healthy_fabric_has_no_slow_links() -> None:
    for name in ("healthy/ibnetdiscover", "no-sm/ibnetdiscover", "big/h1024x8.ibnetdiscover"):
        assert suspects(captures.fabric(name)) == ()


def test_the_injected_links_at_1x_and_at_edr_are_suspects_and_no_other() -> None:
    found = suspects(captures.fabric("faults/ibnetdiscover"))
    assert sorted((one.link.pace, one.cause, one.confirmed) for one in found) == [
        ("1xHDR", "width", None),
        ("4xEDR", "speed", None),
    ]


def test_a_link_is_a_fault_once_both_ends_confirm_that_they_could_do_more() -> None:
    fabric, slow = slow_host()
    confirmed = suspects(replace(fabric, states=tuple(state(*end) for end in slow.ends)))
    assert [(one.confirmed, one.cause) for one in confirmed] == [(True, "width")]
    assert faults(confirmed) == confirmed
    assert "both ends support more" in confirmed[0].text
    one_end = suspects(replace(fabric, states=(state(*slow.ends[0]),)))
    assert [one.confirmed for one in one_end] == [None]


def test_an_end_that_can_do_no_more_makes_it_no_fault() -> None:
    fabric, slow = slow_host()
    states = (state(*slow.ends[0], widths=(1,)), state(*slow.ends[1]))
    assert [one.confirmed for one in suspects(replace(fabric, states=states))] == [False]


def test_a_link_that_an_administrator_limited_says_so() -> None:
    fabric, slow = slow_host()
    states = (state(*slow.ends[0], enabled_widths=(1,)), state(*slow.ends[1]))
    (found,) = suspects(replace(fabric, states=states))
    assert (found.confirmed, found.cause) == (True, "limited")


def test_a_link_that_recovered_before_it_was_asked_is_no_fault() -> None:
    fabric, slow = slow_host()
    states = tuple(state(*end, width=4) for end in slow.ends)
    assert [one.confirmed for one in suspects(replace(fabric, states=states))] == [False]


def test_a_speed_unknown_to_the_tool_is_never_judged() -> None:
    fabric, _ = slow_host(4, "")
    assert suspects(fabric) == ()
    everything = replace(tree(), links=tuple(replace(each, speed="") for each in tree().links))
    assert suspects(everything) == ()


def test_half_the_lanes_may_be_a_split_port_and_counts_only_when_the_ends_say_otherwise() -> None:
    fabric, slow = slow_host(2, "HDR")
    assert suspects(fabric) == ()
    split = tuple(state(*end, width=2, widths=(1, 2), enabled_widths=(1, 2)) for end in slow.ends)
    assert [one.confirmed for one in suspects(replace(fabric, states=split))] == [False]
    broken = tuple(state(*end, width=2) for end in slow.ends)
    assert [one.confirmed for one in suspects(replace(fabric, states=broken))] == [True]


def test_one_lane_of_xdr_is_a_plane_and_not_three_lost_lanes() -> None:
    one = tree()
    planes = replace(one, links=tuple(replace(each, width=1, speed="XDR") for each in one.links))
    assert suspects(planes) == ()
    mixed = paced(replace(one, links=tuple(replace(each, speed="XDR") for each in one.links)), one.links[0], 4, "XDR")
    assert suspects(paced(mixed, mixed.links[3], 1, "XDR")) == ()


def test_links_of_aggregation_nodes_and_routers_are_not_judged() -> None:
    one = tree(16, 2, 8, aggregation=True)
    node = next(node for node in one.nodes if node.kind == "aggregation")
    assert suspects(paced(one, link(one, node.guid, 1), 1, "SDR")) == ()


def test_links_of_two_generations_are_compared_with_their_own_kind_only() -> None:
    """Older adapters at half the speed on the same switches are as fast as they can be."""
    one = tree()
    old = {host_guid(host, 0) for host in range(8)}
    nodes = tuple(replace(node, device=0x101B) if node.guid in old else node for node in one.nodes)
    links = tuple(replace(each, speed="EDR") if each.a in old or each.b in old else each for each in one.links)
    assert suspects(replace(one, nodes=nodes, links=links)) == ()


def test_without_a_majority_nobody_is_slow() -> None:
    one = tree()
    links = tuple(replace(each, width=1) if number % 2 else each for number, each in enumerate(one.links))
    assert suspects(replace(one, links=links)) == ()


def test_links_between_switches_are_judged_too() -> None:
    one = tree()
    uplink = link(one, guid_of(one, "MF0;leaf-su000-r0"), 5)
    (found,) = suspects(paced(one, uplink, 4, "EDR"))
    assert (found.link.ends, found.cause) == (uplink.ends, "speed")


paces = st.tuples(
    st.sampled_from([0, 1, 2, 4, 8, 12]), st.sampled_from(["", "SDR", "EDR", "HDR", "NDR", "XDR", "WARP"])
)


@given(st.lists(st.tuples(st.integers(0, 60), paces), max_size=40))
def test_whatever_the_rates_are_a_suspect_is_slower_than_its_kind(changes: list[tuple[int, tuple[int, str]]]) -> None:
    one = tree()
    links = list(one.links)
    for index, (width, speed) in changes:
        at = index % len(links)
        links[at] = replace(links[at], width=width, speed=speed)
    for slow in suspects(replace(one, links=tuple(links))):
        assert slow.link.rate is not None
        assert slow.confirmed is None
        assert slow.text

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.rdma.fabric import Link, Map, Node, Unreadable, components, directed, pack, unpack, walk
from tests.rdma import captures


def test_a_packed_map_is_small_and_comes_back_equal() -> None:
    found = captures.fabric("big/h1024x8.ibnetdiscover")
    packed = pack(found)
    assert unpack(packed) == found
    assert len(packed) < 30 * len(found.nodes)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_map_are_refused_in_words(data: bytes) -> None:
    with pytest.raises(Unreadable):
        unpack(data)


def test_a_map_that_was_cut_off_is_refused() -> None:
    packed = pack(captures.fabric("healthy/ibnetdiscover"))
    with pytest.raises(Unreadable, match=r"cut off|not a packed map"):
        unpack(packed[: len(packed) // 2])


def test_directed_routes_lead_from_the_port_that_looked_to_every_node() -> None:
    found = captures.fabric("healthy/ibnetdiscover")
    ways = directed(found)
    assert set(ways) == set(found.by_guid())
    assert ways[found.origin] == (0,)
    for guid, way in ways.items():
        if guid != found.origin:
            here, port = walk(found, way) or (0, 0)
            link = found.by_end()[here, port]
            assert link.other(here, port)[0] == guid


def test_directed_routes_do_not_pass_through_adapters() -> None:
    """A host with two ports in two fabrics does not join them."""
    nodes = (Node(1, "switch", 2), Node(2, "host", 2), Node(3, "switch", 2), Node(4, "host", 1))
    links = (Link(1, 1, 2, 1), Link(1, 2, 4, 1), Link(2, 2, 3, 1))
    assert set(directed(Map(origin=4, origin_port=0, nodes=nodes, links=links))) == {4}, (
        "its own port is not on the map"
    )
    assert set(directed(Map(origin=1, nodes=nodes, links=links))) == {1, 2, 4}


def test_factory_and_empty_names_are_shown_with_the_guid() -> None:
    """TO01."""
    assert Node(0xAB, "host", 1, "MT4129 ConnectX7   Mellanox Technologies").label == (
        "MT4129 ConnectX7 Mellanox Technologies 0x00000000000000ab"
    )
    assert Node(0xAB, "switch", 1, "Quantum Mellanox Technologies").label.endswith("0x00000000000000ab")
    assert Node(0xAB, "switch", 1, "").label == "unnamed 0x00000000000000ab"
    assert Node(0xAB, "host", 1, "node-1 mlx5_0").label == "node-1 mlx5_0"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("node-001 mlx5_0", ("node-001", "mlx5_0")),
        ("node HCA-1", ("node", "HCA-1")),
        ("RMD701091901003 ibp11s0f0", ("RMD701091901003", "ibp11s0f0")),
        ("localhost HCA-1", None),
        ("ubuntu mlx5_1", None),
        ("host  with   blanks mlx5_0", None),
        ("MT4129 ConnectX7   Mellanox Technologies", None),
    ],
)
def test_a_description_is_a_hint_of_host_and_device_only_by_the_convention(
    name: str, hint: tuple[str, str] | None
) -> None:
    assert Node(1, "host", 1, name).host_and_device == hint


def test_components_are_what_hangs_together_largest_first() -> None:
    links = [Link(1, 1, 2, 1), Link(2, 2, 3, 1), Link(4, 1, 5, 1)]
    assert list(components({1, 2, 3, 4, 5, 6}, links)) == [(1, 2, 3), (4, 5), (6,)]
    assert list(components({1, 3}, links)) == [(1,), (3,)], "what joins them is not asked about"

from __future__ import annotations

from collections import Counter

from llmgw.rdma.fabric import Link, Map, Node
from llmgw.rdma.tiers import tiers
from tests.rdma import captures
from tests.rdma.trees import tree


def test_leaves_are_the_first_tier_and_cores_the_last() -> None:
    one = tree(256, 1, 16)
    names = one.by_guid()
    found = tiers(one)
    assert {names[guid].name[4:8] for guid, tier in found.items() if tier == 1} == {"leaf"}
    assert {names[guid].name[4:8] for guid, tier in found.items() if tier == 2} == {"spin"}
    assert {names[guid].name[4:8] for guid, tier in found.items() if tier == 3} == {"core"}


def test_aggregation_nodes_make_no_switch_a_leaf() -> None:
    found = tiers(captures.fabric("healthy/ibnetdiscover"))
    assert Counter(found.values()) == {1: 4, 2: 2}


def test_switches_without_a_way_to_a_host_come_last() -> None:
    nodes = (Node(1, "switch", 2), Node(2, "host", 1), Node(3, "switch", 2))
    assert tiers(Map(nodes=nodes, links=(Link(1, 1, 2, 1),))) == {1: 1, 3: 2}
    assert tiers(Map(nodes=nodes[::2])) == {1: 1, 3: 1}

from __future__ import annotations

from llmgw.rdma.diff import compare
from llmgw.rdma.fabric import Map
from llmgw.rdma.leaves import Owner
from llmgw.rdma.touches import Touched, touched
from tests.rdma.trees import guid_of, link, swapped, tree, without
from tests.rigs.ib.net import host_guid

OWNERS = {host_guid(h, r) + 1: Owner(f"node-{h}", f"mlx5_{r}", r) for h in range(16) for r in range(2)}
REPLICAS = {"node-3": ["llama-0"], "node-9": ["llama-1"], "node-10": ["llama-1"]}


def of(old: Map, new: Map) -> Touched:
    (change,) = compare(old, new).changes
    return touched(change, (old, new), OWNERS, REPLICAS)


def test_a_hosts_cable_touches_that_host_its_rail_and_its_replica() -> None:
    one = tree()
    assert of(one, without(one, link(one, host_guid(3, 1), 1))) == Touched(
        nodes=("node-3",), rails=("1",), replicas=("llama-0",)
    )


def test_a_dead_leaf_touches_its_hosts_and_the_replicas_on_them() -> None:
    one = tree()
    found = of(one, without(one, nodes=(guid_of(one, "MF0;leaf-su002-r0"), *(host_guid(h, 0) for h in range(8, 12)))))
    assert found == Touched(nodes=("node-10", "node-11", "node-8", "node-9"), rails=("0",), replicas=("llama-1",))


def test_an_uplink_touches_the_hosts_of_its_leaf() -> None:
    one = tree()
    found = of(one, without(one, link(one, guid_of(one, "MF0;leaf-su000-r1"), 5)))
    assert found.nodes == ("node-0", "node-1", "node-2", "node-3")
    assert found.rails == ("1",)
    assert found.replicas == ("llama-0",)


def test_swapped_cables_touch_both_hosts() -> None:
    one = tree()
    found = of(one, swapped(one, link(one, host_guid(3, 0), 1), link(one, host_guid(9, 0), 1)))
    assert found.nodes == ("node-3", "node-9")
    assert found.replicas == ("llama-0", "llama-1")


def test_a_link_above_the_leaves_may_touch_everyone() -> None:
    one = tree(256, 1, 16)
    core = guid_of(one, "MF0;core")
    found = of(one, without(one, link(one, core, 1)))
    assert found.everyone
    assert found.nodes == ()

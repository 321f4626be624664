"""Fabrics on paper as maps, and the faults that happen to them, without any process."""

from __future__ import annotations

from functools import cache

from msgspec.structs import replace

from llmgw.rdma.fabric import Link, Map
from llmgw.rdma.netdiscover import scan
from llmgw.rdma.ran import Ran
from tests.rigs.ib.net import Box, fat_tree


@cache
def tree(
    hosts: int = 16, rails: int = 2, radix: int = 8, *, plane: int | None = None, aggregation: bool = False
) -> Map:
    """The map of a whole fat tree, seen from the first host."""
    net = fat_tree(hosts, rails, radix=radix, plane=plane, aggregation=aggregation)
    first = net.hosts[0]
    head = f"# Initiated from node {first.guid:x} port {first.guid + 1:x}\n\n"
    found = scan(Ran("ibnetdiscover", 0, head + net.text()))
    assert isinstance(found, Map)
    assert found.complete
    return found


def link(one: Map, guid: int, port: int) -> Link:
    return one.by_end()[guid, port]


def without(one: Map, *links: Link, nodes: tuple[int, ...] = ()) -> Map:
    """The map after cables were pulled and nodes died; hosts without a cable vanish, as they do from a scan."""
    left = [each for each in one.links if each not in links and each.a not in nodes and each.b not in nodes]
    ends = {guid for each in left for guid in (each.a, each.b)}
    return replace(one, links=tuple(left), nodes=tuple(node for node in one.nodes if node.guid in ends))


def with_link(one: Map, a: tuple[int, int], b: tuple[int, int], pace: tuple[int, str] = (4, "HDR")) -> Map:
    ends = sorted((a, b))
    return replace(one, links=tuple(sorted((*one.links, Link(*ends[0], *ends[1], *pace)), key=lambda each: each.ends)))


def swapped(one: Map, first: Link, second: Link) -> Map:
    """The far ends of two cables exchanged: what each was plugged into at `a`."""
    kept = [each for each in one.links if each not in (first, second)]
    new = [
        Link(*sorted(((first.a, first.a_port), (second.b, second.b_port)))[0],
             *sorted(((first.a, first.a_port), (second.b, second.b_port)))[1], first.width, first.speed),
        Link(*sorted(((second.a, second.a_port), (first.b, first.b_port)))[0],
             *sorted(((second.a, second.a_port), (first.b, first.b_port)))[1], second.width, second.speed),
    ]  # fmt: skip
    return replace(one, links=tuple(sorted((*kept, *new), key=lambda each: each.ends)))


def paced(one: Map, which: Link, width: int, speed: str) -> Map:
    """The map with one link at another rate."""
    slow = Link(which.a, which.a_port, which.b, which.b_port, width, speed)
    return replace(one, links=tuple(slow if each == which else each for each in one.links))


def guid_of(one: Map, name: str) -> int:
    return next(node.guid for node in one.nodes if node.name.startswith(name))


__all__ = ["Box", "guid_of", "link", "paced", "swapped", "tree", "with_link", "without"]

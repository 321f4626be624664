from __future__ import annotations

import random
from itertools import permutations

from llmgw.rdma.fabric import Map
from llmgw.rdma.locate import Result, locate, next_round
from llmgw.rdma.routes import Tables, parse, way
from llmgw.rdma.ways import Ways
from tests.rdma import captures


def recorded() -> tuple[Map, Tables, list[int]]:
    """A fabric of 16 hosts that opensm routed, and the ports of its adapters."""
    fabric = captures.fabric("healthy/ibnetdiscover")
    tables = parse(captures.text("healthy/dump_fts.out").splitlines())
    return fabric, tables, [end.guid for node in fabric.hosts for end in node.ends if end.guid]


def test_every_way_is_the_one_that_the_tables_give() -> None:
    fabric, tables, ports = recorded()
    ways = Ways(fabric, tables)
    for start, end in permutations(ports, 2):
        found = ways.between(start, end)
        assert found is not None
        assert len(found) == len(way(fabric, tables, start, end).links)


def test_a_hosts_own_cable_stands_for_its_adapter_and_leaf_port_too() -> None:
    fabric, tables, ports = recorded()
    parts = Ways(fabric, tables).between(ports[0], ports[-1])
    assert parts is not None
    assert parts[0].endswith("(adapter, cable or leaf port)")
    assert parts[-1].endswith("(adapter, cable or leaf port)")
    assert all(" - port " in part and "adapter" not in part for part in parts[1:-1])


def test_a_way_that_is_not_known_whole_is_none() -> None:
    fabric, tables, ports = recorded()
    assert Ways(fabric, Tables({})).between(ports[0], ports[-1]) is None
    assert Ways(fabric, tables).between(ports[0], 0x99) is None
    assert not Ways(fabric, tables).knows(0x99)


def test_any_bad_cable_between_switches_of_a_routed_fabric_is_found_by_name() -> None:
    fabric, tables, ports = recorded()
    ways = Ways(fabric, tables)
    names = {f"{guid:x}": guid for guid in ports}
    parts = {part for a, b in permutations(ports, 2) for part in ways.between(a, b) or ()}
    trunks = sorted(part for part in parts if "adapter" not in part)
    assert len(trunks) >= 8

    def path(a: str, b: str) -> tuple[str, ...]:
        return ways.between(names[a], names[b]) or ()

    for bad in trunks:
        dice = random.Random(bad)
        results: list[Result] = []
        for turn in range(11):
            pairs = next_round(list(names), results, path, parts=parts, seed=turn)
            if not pairs:
                break
            results += [Result(a, b, (0.4 if bad in path(a, b) else 1.0) * dice.gauss(1, 0.02)) for a, b in pairs]
        named = [suspect.parts for suspect in locate(results, path).suspects]
        assert named == [(bad,)], (bad, named)

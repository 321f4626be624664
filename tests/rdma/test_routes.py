from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.rdma.fabric import Unreadable
from llmgw.rdma.routes import Tables, pack, parse, traced, unpack, way
from tests.rdma import captures

FILES = [
    name for pattern in ("dump_fts*.out", "ibroute*.out") for name in captures.every(pattern) if "no-umad" not in name
]


@pytest.mark.parametrize("name", FILES)
def test_every_recorded_line_is_understood(name: str) -> None:
    lines = captures.text(name).splitlines()
    strange = [line for line in parse(lines).strange if "iberror" not in line]
    assert strange == []


def test_the_tables_of_all_switches_are_whole() -> None:
    tables = parse(captures.text("healthy/dump_fts.out").splitlines())
    assert len(tables.switches) == 6
    assert {len(ports) for ports in tables.switches.values()} == {28}
    assert unpack(pack(tables)).switches == tables.switches


def test_the_way_of_a_pair_agrees_with_what_ibtracert_found() -> None:
    found = way(
        captures.fabric("healthy/ibnetdiscover"), parse(captures.text("healthy/dump_fts.out").splitlines()),
        0x946DAE0300000001, 0x946DAE0300001001,
    )  # fmt: skip
    hops = traced(captures.text("healthy/ibtracert-1-9.out").splitlines())
    assert found.broken == ""
    assert len(found.links) == len(hops) == 2
    assert (0xB0CF0E0010000000, hops[0].port) in found.links[0].ends
    assert hops[1].guid == 0x946DAE0300001001


def test_every_pair_of_a_healthy_fabric_arrives() -> None:
    fabric, tables = captures.fabric("healthy/ibnetdiscover"), parse(captures.text("healthy/dump_fts.out").splitlines())
    ports = [end.guid for node in fabric.hosts for end in node.ends]
    for start in ports:
        for end in ports:
            if start != end:
                found = way(fabric, tables, start, end)
                assert found.broken == "", (hex(start), hex(end))
                assert 2 <= len(found.links) <= 4
    one, back = way(fabric, tables, ports[0], ports[-1]), way(fabric, tables, ports[-1], ports[0])
    assert one.links[0] == back.links[-1]


def test_a_way_that_does_not_arrive_says_where_it_ends() -> None:
    fabric, tables = captures.fabric("healthy/ibnetdiscover"), parse(captures.text("healthy/dump_fts.out").splitlines())
    a, b = 0x946DAE0300000001, 0x946DAE0300007001
    assert "not on the map" in way(fabric, tables, a, 0x99).broken
    spines_gone = {guid: ports for guid, ports in tables.switches.items() if guid < 0xB0CF0E0020000000}
    assert "forwarding table of MF0;spine" in way(fabric, Tables(spines_gone), a, b).broken
    assert "has no LID" in way(captures.fabric("no-sm/ibnetdiscover"), tables, a, b).broken


def test_the_simple_form_without_destinations_is_read_too() -> None:
    text = (
        "Unicast lids [0x0-0x5] of switch Lid 2 guid 0x00000000000000aa (MF0;x (1):QM/U1):\n"
        "  Lid  Out   Destination\n       Port     Info \n0x0001 005 :\n0x0002 255\n2 lids dumped \n"
    )
    assert dict(parse(text.splitlines()).switches[0xAA]) == {1: 5, 2: 255}


@given(st.binary(max_size=100))
def test_bytes_that_are_no_tables_are_refused(data: bytes) -> None:
    with pytest.raises(Unreadable):
        unpack(data)


@given(
    st.dictionaries(
        st.integers(1, 2**64 - 1), st.dictionaries(st.integers(1, 60), st.integers(0, 254), max_size=9), max_size=4
    )
)
def test_tables_come_back_as_they_were(switches: dict[int, dict[int, int]]) -> None:
    assert unpack(pack(Tables(switches))).switches == switches


@given(
    st.lists(st.one_of(st.sampled_from(captures.text("healthy/ibroute-1.out").splitlines()), st.text()), max_size=12)
)
def test_any_text_is_read_without_an_exception(lines: list[str]) -> None:
    found = parse(lines)
    assert unpack(pack(found))

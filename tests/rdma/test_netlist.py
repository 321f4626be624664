from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.rdma.netlist import nodes, ports
from tests.rdma import captures

PORTS = captures.every("*ibnetdiscover-p.out")
NODES = [
    name
    for pattern in ("*ibnetdiscover-l.out", "*ibnetdiscover-R.out", "ibhosts.out", "ibswitches.out", "ibnodes.out")
    for name in captures.every(pattern)
    if not name.startswith("no-umad")
]


@pytest.mark.parametrize("name", PORTS)
def test_every_recorded_port_line_is_understood(name: str) -> None:
    found, strange = ports(captures.text(name).splitlines())
    assert strange == ()
    assert found


@pytest.mark.parametrize("name", NODES)
def test_every_recorded_node_line_is_understood(name: str) -> None:
    found, strange = nodes(captures.text(name).splitlines())
    assert strange == ()
    assert bool(found) == bool(captures.text(name).strip())


def test_a_port_without_a_peer_has_no_speed() -> None:
    found, _ = ports(captures.text("odd/ibnetdiscover-p.out").splitlines())
    lone = [one for one in found if one.peer_guid is None]
    assert lone
    assert {(one.width, one.speed) for one in lone} == {(0, "")}


def test_lists_tell_switches_adapters_and_routers_apart() -> None:
    found, _ = nodes(captures.text("odd/ibnetdiscover-R.out").splitlines())
    assert [(one.kind, one.guid, one.ports) for one in found] == [("router", 0x946DAE0000000400, 2)]
    switches, _ = nodes(captures.text("healthy/ibswitches.out").splitlines())
    assert {one.kind for one in switches} == {"switch"}
    assert all(one.lid for one in switches)


@given(st.lists(st.text(), max_size=5))
def test_any_text_is_read_without_an_exception(lines: list[str]) -> None:
    for read in (ports, nodes):
        found, strange = read(lines)
        assert len(found) + len(strange) <= len(lines)

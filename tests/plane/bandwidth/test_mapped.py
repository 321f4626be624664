from __future__ import annotations

import attrs
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from llmgw.cell import Cell
from llmgw.errors import Unavailable
from llmgw.plane.bandwidth.desk import Desk
from llmgw.plane.bandwidth.fleet import Order
from llmgw.plane.bandwidth.mapped import Mapped, mapped
from llmgw.plane.store.memory import MemoryStore
from llmgw.plane.world import World
from llmgw.rdma import fabric, routes
from llmgw.rdma.results import FleetResult, Line, Note, Parameters
from llmgw.rdma.ways import Ways
from llmgw.wire.control import RoutesReply
from llmgw.wire.facts import NodeId
from tests.plane.bandwidth.lab import Lab, node, world
from tests.rdma import captures
from tests.rdma.ports import ib

MAP = captures.fabric("healthy/ibnetdiscover")
TABLES = routes.parse(captures.text("healthy/dump_fts.out").splitlines())
PORTS = [end.guid for host in MAP.hosts for end in host.ends if end.guid]


def fleet() -> World:
    """A node for each adapter of the recorded fabric."""
    return world(
        *(
            node(f"n{at:02d}", at + 1, ports=(ib("mlx5_0", port_guid=f"{guid:016x}", lid=at + 1),))
            for at, guid in enumerate(PORTS)
        )
    )


@attrs.frozen
class Standing:
    newest: bytes


@attrs.define
class Maps:
    """One fabric, as the plane keeps it."""

    fails: bool = False
    names: tuple[str, ...] = ("north",)

    def standing(self, name: str) -> Standing:
        return Standing(fabric.pack(MAP))

    async def tables(self, name: str) -> RoutesReply:
        if self.fails:
            raise Unavailable("no node can look")
        return RoutesReply(tables=routes.pack(TABLES))


async def test_a_fabrics_map_turns_nodes_into_cables() -> None:
    said: list[Line] = []
    found = await mapped(Maps(), fleet(), said.append)
    parts = found("n00", f"n{len(PORTS) - 1:02d}", "0")
    assert len(parts) >= 2
    assert all(" - " in part for part in parts)
    assert said == []


async def test_without_tables_suspects_are_nodes_and_that_is_said() -> None:
    said: list[Line] = []
    found = await mapped(Maps(fails=True), fleet(), said.append)
    assert "n00" in found("n00", "n01", "0")[0]
    assert isinstance(said[0], Note)
    assert "no node can look" in said[0].text


async def test_a_search_over_a_mapped_fabric_names_the_bad_spine_cable(autojump_clock: MockClock) -> None:
    made = fleet()
    way = Mapped(made, [Ways(MAP, TABLES)])
    names = sorted(str(name) for name in made.nodes)
    bad = next(part for part in way(names[0], names[-1], "0") if "adapter" not in part)
    lab = Lab(speed=lambda a, b, device: 150.0 if bad in way(a, b, "0") else 395.0)
    desk = Desk(lab, MemoryStore(), Cell(made), maps=Maps(), wall=trio.current_time)
    said: list[Line] = []
    await desk.fleet(Order(Parameters(seconds=5), search=True))(said.append)
    result = said[-1]
    assert isinstance(result, FleetResult)
    assert [suspect.parts for suspect in result.suspects] == [(bad,)]
    assert result.rounds <= 11


def test_a_port_that_no_map_shows_is_known_by_its_node() -> None:
    made = fleet()
    facts = made.nodes[NodeId("n00")].facts
    assert facts is not None
    strange = replace(facts, ports=(replace(facts.ports[0], port_guid="00000000000000ff"),))
    lone = attrs.evolve(
        made, nodes=made.nodes.set(NodeId("n00"), attrs.evolve(made.nodes[NodeId("n00")], facts=strange))
    )
    assert "n00" in Mapped(lone, [Ways(MAP, TABLES)])("n00", "n01", "0")[0]

"""How a fleet's traffic goes, by its InfiniBand fabrics' maps, so that suspects are cables and not only nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import trio

from llmgw.errors import LlmgwError
from llmgw.plane.bandwidth.fleet import Routes, own_ends
from llmgw.plane.bandwidth.pair import Say
from llmgw.plane.world import World
from llmgw.rdma import fabric, rails, routes
from llmgw.rdma.results import Note
from llmgw.rdma.ways import Ways
from llmgw.wire.control import RoutesReply
from llmgw.wire.facts import NodeId


class Standing(Protocol):
    """What is known of one fabric: its newest map as packed, empty while there is none."""

    @property
    def newest(self) -> bytes: ...


class Maps(Protocol):
    """The fabrics of the fleet."""

    @property
    def names(self) -> tuple[str, ...]: ...
    def standing(self, name: str) -> Standing: ...
    async def tables(self, name: str) -> RoutesReply: ...


async def mapped(maps: Maps, world: World, say: Say) -> Routes:
    """How traffic goes, for every fabric with a map whose forwarding tables can be had now; else by the ends alone."""
    known: list[Ways] = []
    for name in maps.names:
        packed = maps.standing(name).newest
        if not packed:
            continue
        try:
            reply = await maps.tables(name)
            known.append(await trio.to_thread.run_sync(_ways, packed, reply.tables))
        except (LlmgwError, fabric.Unreadable) as error:
            say(Note(text=f"the routes of fabric {name} are not known ({error}): its suspects are nodes, not cables"))
    return Mapped(world, known) if known else own_ends


def _ways(packed: bytes, tables: bytes) -> Ways:
    return Ways(fabric.unpack(packed), routes.unpack(tables))


class Mapped:
    """Routes by node names and rail, as the search asks for them."""

    def __init__(self, world: World, known: Sequence[Ways]) -> None:
        self._world = world
        self._known = known
        self._rails: dict[tuple[str, str], dict[str, tuple[int, int]]] = {}

    def __call__(self, a: str, b: str, rail: str) -> Sequence[str]:
        ports = self._ports(a, b).get(rail)
        if ports is None and not rail:
            # Before the first result no rail has a name yet: any of them shows which parts there are.
            ports = next(iter(self._ports(a, b).values()), None)
        if ports is not None:
            for ways in self._known:
                if ways.knows(ports[0]) and (found := ways.between(*ports)) is not None:
                    return found
        return own_ends(a, b, rail)

    def _ports(self, a: str, b: str) -> dict[str, tuple[int, int]]:
        """The GUIDs of both ports of each rail between two nodes."""
        if (a, b) not in self._rails:
            sides = []
            for name in (a, b):
                facts = self._world.nodes[NodeId(name)].facts
                sides.append(rails.Side(name, facts.ports if facts else (), facts.gpus if facts else ()))
            self._rails[a, b] = {
                rail.name: (int(rail.a.port_guid, 16), int(rail.b.port_guid, 16))
                for rail in rails.pair(*sides).rails
                if rail.a.port_guid and rail.b.port_guid
            }
        return self._rails[a, b]

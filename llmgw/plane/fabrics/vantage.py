"""From where a fabric is looked at: the first node by name that is ready and has an active port on it (D8)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from llmgw.plane.fabrics.turns import Turns
from llmgw.plane.world import Node, Stage, World
from llmgw.rdma.managers import Managers, PortKey
from llmgw.wire.control import ScanRequest
from llmgw.wire.facts import NodeId, Port


@attrs.frozen(order=True)
class Vantage:
    """A port that a fabric can be looked at from."""

    node: NodeId
    device: str
    number: int = 1

    def __str__(self) -> str:
        return f"{self.node} {self.device}/{self.number}"


def active(node: Node, port: Port) -> bool:
    """Whether the port carries traffic, by the newest word of its node."""
    reading = node.ports.get(port.device, port.number)
    state = (reading.load.state if reading is not None and reading.load.state else port.state).upper()
    return state.split(":")[-1].strip() == "ACTIVE"


def infiniband(node: Node) -> Iterator[Port]:
    """The ports of a node that an InfiniBand fabric can be seen from. Never RoCE, never a virtual function."""
    for port in node.facts.ports if node.facts is not None else ():
        if port.kind == "ib" and not port.vf and active(node, port):
            yield port


def can_look(node: Node) -> bool:
    """Ready, reachable, and its agent answers scans."""
    return (
        node.stage is Stage.READY
        and node.connected
        and node.facts is not None
        and ScanRequest.feature in node.facts.features
    )


def provisional(node: NodeId, port: Port) -> str:
    """The name of a fabric of which no manager is known, from the port that is on it."""
    return port.fabric or f"{node}:{port.device}/{port.number}"


async def vantages(world: World, managers: Managers, shown: Mapping[str, str]) -> dict[str, list[Vantage]]:
    """Where each fabric can be looked at from, best first: one port a node, by the node's name.

    `shown` gives the fabric on whose map a port GUID stands: the only other proof that two ports are on one.
    """
    found: dict[str, list[Vantage]] = {}
    turns = Turns()
    for name in sorted(world.nodes):
        if turns.over():
            await turns.next()
        node = world.nodes[name]
        if not can_look(node):
            continue
        for port in sorted(infiniband(node), key=lambda port: (port.device, port.number)):
            on = fabric_of(managers, shown, name, port)
            looks = found.setdefault(on, [])
            looks.append(Vantage(name, port.device, port.number))
    ranked: dict[str, list[Vantage]] = {}
    for on, looks in sorted(found.items()):
        ranked[on] = _one_a_node(looks)
        await turns.next()
    return ranked


def fabric_of(managers: Managers, shown: Mapping[str, str], node: NodeId, port: Port) -> str:
    """The fabric of a port: by its label or managers, by the maps, or one of its own until more is known."""
    known = managers.at.get(PortKey(node, port.device, port.number))
    return known or port.fabric or shown.get(port.port_guid) or provisional(node, port)


def _one_a_node(looks: list[Vantage]) -> list[Vantage]:
    """Each node's first port first, then the second ports: a second look should be another node's."""
    turns: dict[NodeId, int] = {}
    ranked: list[tuple[int, Vantage]] = []
    for look in looks:
        turn = turns.get(look.node, 0)
        turns[look.node] = turn + 1
        ranked.append((turn, look))
    # They come in order, and sorting keeps it: comparing thousands of vantages would take long.
    return [look for _, look in sorted(ranked, key=lambda one: one[0])]

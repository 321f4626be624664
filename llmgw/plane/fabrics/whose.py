"""Whose the ports on a map are, and what runs over them, from what nodes registered."""

from __future__ import annotations

import msgspec

from llmgw.plane.fabrics.turns import Turns
from llmgw.plane.fabrics.vantage import fabric_of, infiniband
from llmgw.plane.fabrics.verdict import Named
from llmgw.plane.world import World
from llmgw.rdma.managers import Managers, PortKey

#: Names that are encoded in one go: a millisecond's work.
PART = 512


async def names(world: World) -> list[bytes]:
    """Whose each InfiniBand port is, in encoded parts; between them others run, since fleets are large."""
    parts: list[bytes] = []
    some: list[Named] = []
    turns = Turns()
    for id_, node in world.nodes.items():
        some += [
            Named(int(port.port_guid, 16), id_, port.device, port.rail)
            for port in (node.facts.ports if node.facts else ())
            if port.kind == "ib" and port.port_guid
        ]
        if len(some) >= PART:
            parts.append(msgspec.msgpack.encode(some))
            some = []
        if turns.over():
            await turns.next()
    return [*parts, msgspec.msgpack.encode(some)]


async def replicas(world: World) -> dict[str, tuple[str, ...]]:
    """The replicas of several nodes, by node: the ones whose traffic is on a fabric."""
    nodes: dict[str, set[str]] = {}
    turns = Turns()
    for shard in world.shards.values():
        nodes.setdefault(shard.replica, set()).add(shard.node)
        if turns.over():
            await turns.next()
    found: dict[str, list[str]] = {}
    for replica, there in sorted(nodes.items()):
        for node in there if len(there) > 1 else ():
            found.setdefault(node, []).append(replica)
        if turns.over():
            await turns.next()
    return {node: tuple(over) for node, over in found.items()}


async def strangers(world: World, managers: Managers) -> dict[int, tuple[str, str]]:
    """Ports of which neither label nor manager tells the fabric: GUID as written, and the name it has meanwhile."""
    found: dict[int, tuple[str, str]] = {}
    turns = Turns()
    for id_, node in world.nodes.items():
        for port in infiniband(node):
            key = PortKey(id_, port.device, port.number)
            if port.port_guid and not port.fabric and key not in managers.at:
                found[int(port.port_guid, 16)] = (port.port_guid, fabric_of(managers, {}, id_, port))
        if turns.over():
            await turns.next()
    return found

"""Tells nodes whose certificates are honoured no more, for they give each other weights.

The plane itself refuses them when they connect. A node hears of them over each new stream and when there is one more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import trio

from llmgw.errors import Unavailable
from llmgw.plane.world import World
from llmgw.wire.agent import REFRESH
from llmgw.wire.control import ControlMessage, Revoked
from llmgw.wire.facts import NodeId

#: Seconds between two looks: one pass over the nodes and their certificates.
EVERY = 1.0

#: What each node was told last, and over which stream.
Told = Mapping[NodeId, tuple[int, tuple[str, ...]]]


class Orders(Protocol):
    def tell(self, node: NodeId, command: ControlMessage) -> None: ...


def due(world: World, serials: tuple[str, ...], told: Told) -> tuple[NodeId, ...]:
    """The nodes that have yet to hear of these. An agent that would not understand is told nothing (A12)."""
    return tuple(
        node.id
        for node in world.nodes.values()
        if node.connected
        and node.facts is not None
        and REFRESH in node.facts.features
        and (serials or node.id in told)
        and told.get(node.id) != (node.stream, serials)
    )


async def tell_revoked(serials: Callable[[], tuple[str, ...]], world: Callable[[], World], hub: Orders) -> None:
    """Keep every node told, until cancelled."""
    told: dict[NodeId, tuple[int, tuple[str, ...]]] = {}
    while True:
        now, known = world(), serials()
        for node in due(now, known, told):
            try:
                hub.tell(node, Revoked(serials=known))
            except Unavailable:
                continue  # in a moment again
            told[node] = (now.nodes[node].stream, known)
        for gone in [node for node in told if node not in now.nodes]:
            del told[gone]
        await trio.sleep(EVERY)

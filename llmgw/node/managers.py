"""Keeps asking who manages the subnets of this node's ports, for its heartbeats (B1, B6).

The cheap question (`sminfo`: one packet) is asked every few seconds for each port. The full one, with the master's
memory and each manager asked for itself, is asked when the cheap one's answer changed or failed, and once in a
while; in between its other managers are repeated.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import attrs
import trio
from msgspec.structs import replace

from llmgw.cell import Cell
from llmgw.node.fabric import Scanner
from llmgw.rdma.ran import Trouble
from llmgw.wire.facts import Port, PortManagers

#: Seconds between two questions at one port, and how many of them are cheap before a full one.
EVERY, CHEAP = 15.0, 3


@attrs.frozen
class Known:
    """The last answer at one port, and how many cheap questions have confirmed it since."""

    managers: PortManagers
    confirmed: int = 0


class ManagerWatch:
    """`latest` is what was found, sorted by port; a new tuple after each round of questions."""

    def __init__(self, scanner: Scanner, *, every: float = EVERY) -> None:
        self._scanner = scanner
        self._every = every
        self._known: dict[tuple[str, int], Known] = {}
        self.latest: Cell[tuple[PortManagers, ...]] = Cell(())

    async def run(self) -> None:
        """Ask for ever, until cancelled. Rounds of many nodes drift apart: no manager is asked by all at once."""
        while True:
            await self.round()
            await trio.sleep(self._every * random.uniform(0.9, 1.1))

    async def round(self) -> None:
        """Ask at every InfiniBand port once."""
        ports = self._scanner.infiniband()
        found: dict[tuple[str, int], Known] = {}

        async def ask(port: Port) -> None:
            key = (port.device, port.number)
            found[key] = await self._ask(port, self._known.get(key))

        async with trio.open_nursery() as nursery:
            for port in ports:
                nursery.start_soon(ask, port)
        self._known = found
        self._publish(found)

    async def _ask(self, port: Port, before: Known | None) -> Known:
        if before is None or before.managers.master is None or before.confirmed >= CHEAP:
            return Known(await self._scanner.port_managers(port.device, port.number))
        answer = await self._scanner.master(port.device, port.number)
        if isinstance(answer, Trouble) or answer.state != "master" or answer.guid != before.managers.master.guid:
            return Known(await self._scanner.port_managers(port.device, port.number))
        return Known(replace(before.managers, master=answer, error="", code=""), before.confirmed + 1)

    def _publish(self, found: Mapping[tuple[str, int], Known]) -> None:
        latest = tuple(found[key].managers for key in sorted(found))
        if latest != self.latest.value:
            self.latest.set(latest)

"""A plane and real agents' eyes over one real simulated fabric: only the stream between them is left out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import attrs

from llmgw.aside import here
from llmgw.node.fabric import Scanner
from llmgw.node.managers import ManagerWatch
from llmgw.plane.fabric import Fabrics, Think
from llmgw.plane.fleet import Fleet
from llmgw.plane.store.memory import MemoryStore
from llmgw.rdma.managers import Patience
from llmgw.wire.agent import Heartbeat, Listening, Working
from llmgw.wire.control import Request
from llmgw.wire.facts import NodeId
from tests.plane.fabrics.fleets import Plane, ib_port, on_fabric
from tests.rigs.ib.fixture import Site, site

R = TypeVar("R")


def _nobody(_: Working | Listening) -> None:
    """Nobody waits for longer here."""


@attrs.define
class DirectHub:
    """Hands requests to the nodes' scanners as their agents would."""

    scanners: dict[str, Scanner]

    async def ask(self, node: NodeId, request: Request[R], *, within: float) -> R:
        answers: Any = self.scanners[node].answers
        found: R = await answers[type(request)](request, _nobody)
        return found


@attrs.define
class Watch:
    """What a test does to a fabric and what the plane made of it."""

    site: Site
    plane: Plane
    watches: dict[str, ManagerWatch]
    told: int = 0

    async def poll(self) -> None:
        """Every node asks for its managers once and tells the plane."""
        for node, watch in self.watches.items():
            await watch.round()
            self.plane.beats(node, Heartbeat(managers=watch.latest.value))
        await self.plane.fabrics.look_at_managers()

    async def scan(self) -> None:
        await self.plane.fabrics.round()

    def news(self) -> list[str]:
        """The kinds of events since the last time this was asked."""
        events = self.plane.events()
        new, self.told = events[self.told :], len(events)
        return [event.kind for event in new]

    @property
    def last(self) -> str:
        return self.plane.events()[-1].text

    @property
    def fabric(self) -> str:
        (name,) = self.plane.fabrics.names
        return name


@asynccontextmanager
async def watched(
    directory: Path,
    *,
    nodes: Iterable[int] = (2, 5, 9, 14),
    label: str = "",
    hold: float = 6.0,
    think: Think = here,
    **shape: Any,
) -> AsyncIterator[Watch]:
    """A fabric with a plane that has seen it once: its managers, and a whole map, and nothing to tell."""
    with site(directory, **shape) as one:
        names = {f"node-{number:02d}": number for number in nodes}
        scanners = {name: one.scanner(number) for name, number in names.items()}
        store = MemoryStore()
        fleet = Fleet(store)
        fabrics = Fabrics(fleet, DirectHub(scanners), store, patience=Patience(hold=hold), think=think)
        plane = Plane(fleet, fabrics, store)
        plane.hears(
            *(
                on_fabric(name, *(ib_port(number, rail, label=label) for rail in range(one.net.rails)))
                for name, number in names.items()
            )
        )
        watch = Watch(one, plane, {name: ManagerWatch(scanner) for name, scanner in scanners.items()})
        await watch.poll()
        await watch.scan()
        yield watch

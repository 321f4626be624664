"""Fleets for tests of fabrics: nodes with InfiniBand ports, and a hub that answers scans from maps on paper."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar, cast

import attrs
import trio
from msgspec.structs import replace

from llmgw.aside import here
from llmgw.plane.events import Event
from llmgw.plane.fabric import Fabrics
from llmgw.plane.fleet import Fleet
from llmgw.plane.store.memory import MemoryStore
from llmgw.rdma.fabric import Map, pack
from llmgw.rdma.managers import Patience
from llmgw.wire.agent import Heartbeat, Register
from llmgw.wire.control import Request, ScanReply, ScanRequest
from llmgw.wire.facts import NodeId, Port, PortManagers, SubnetManager
from tests.plane.worlds import register
from tests.rigs.ib.net import host_guid

R = TypeVar("R")
MASTER, STANDBY = "946dae0300000001", "946dae0300001001"


def ib_port(host: int, rail: int = 0, *, state: str = "ACTIVE", kind: str = "ib", label: str = "") -> Port:
    guid = host_guid(host, rail)
    return Port(
        device=f"mlx5_{rail}", kind=kind, state=state, port_guid=f"{guid + 1:016x}", node_guid=f"{guid:016x}",
        rail=rail, fabric=label,
    )  # fmt: skip


def seen_by(device: str = "mlx5_0", master: str = MASTER, *standbys: str) -> PortManagers:
    return PortManagers(
        device=device,
        master=SubnetManager(guid=master, lid=1, priority=14, state="master", activity=1),
        others=tuple(SubnetManager(guid=guid, lid=2, priority=5, state="standby", activity=1) for guid in standbys),
    )


def on_fabric(
    node: str, *ports: Port, managers: Iterable[PortManagers] = (), features: tuple[str, ...] = ("fabric-scan",)
) -> Register:
    return replace(register(node), ports=ports, managers=tuple(managers), features=features)


@attrs.define
class PaperHub:
    """Answers scans with what `see` gives: a map, or an error to raise. Remembers who was asked, and when."""

    see: Callable[[NodeId, ScanRequest], Map | Exception]
    asked: list[tuple[float, str, str]] = attrs.field(factory=list)
    takes: float = 1.0

    async def ask(self, node: NodeId, request: Request[R], *, within: float) -> R:
        assert isinstance(request, ScanRequest)
        self.asked.append((trio.current_time(), node, request.device))
        with trio.fail_after(within):
            await trio.sleep(self.takes)
        found = self.see(node, request)
        if isinstance(found, Exception):
            raise found
        reply = ScanReply(
            device=request.device, number=request.number, complete=found.complete, holes=found.holes,
            seconds=self.takes, map=pack(found),
        )  # fmt: skip
        return cast(R, reply)


@attrs.define
class Plane:
    """A fleet and its fabrics over one store."""

    fleet: Fleet
    fabrics: Fabrics
    store: MemoryStore

    def hears(self, *registers: Register) -> None:
        """These nodes connect, or come again."""
        for one in registers:
            stream = 1 + max((number for number, _ in self.fleet._streams.values()), default=0)
            self.fleet.attach(one.node, stream, "10.0.0.1:1")
            self.fleet.heard(one.node, stream, one)

    def beats(self, node: str, beat: Heartbeat) -> None:
        number, _ = self.fleet._streams[NodeId(node)]
        self.fleet.heard(NodeId(node), number, beat)

    def events(self, *, of: str = "fabric") -> list[Event]:
        """What happened to fabrics, oldest first."""
        return [event for event in self.fleet.events.after(0, 10_000) if event.kind.startswith((of, "sm-"))]

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events()]


def plane(
    see: Callable[[NodeId, ScanRequest], Map | Exception],
    *,
    store: MemoryStore | None = None,
    takes: float = 1.0,
    patience: Patience | None = None,
) -> tuple[Plane, PaperHub]:
    """A plane whose hub answers from paper. Computes in this process, since its clock may leap."""
    store = store or MemoryStore()
    fleet = Fleet(store)
    hub = PaperHub(see, takes=takes)
    return Plane(fleet, Fabrics(fleet, hub, store, think=here, patience=patience), store), hub

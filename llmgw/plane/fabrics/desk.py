"""What operators ask about fabrics, answered: rows, differences, cables, routes, drawings.

Between the watching (`llmgw.plane.fabric`) and the API: takes names as people write them, gives the API's values.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import attrs
import msgspec
import trio

from llmgw.aside import aside
from llmgw.errors import BadInput, NotFound
from llmgw.plane.admin.fabricsvg import drawn
from llmgw.plane.fabric import Fabrics, Think
from llmgw.plane.fabrics import verdict, view, whose
from llmgw.plane.fabrics.kept import Scan
from llmgw.plane.fabrics.verdict import Difference, Fault
from llmgw.plane.fabrics.view import Dated
from llmgw.plane.world import World
from llmgw.rdma.managers import Fabric, Seen
from llmgw.units import parse_duration
from llmgw.wire.fabricapi import (
    CountsView,
    DiffReply,
    FabricReply,
    FabricRow,
    FabricsReply,
    LinkReply,
    ManagerView,
    RouteReply,
    ScanView,
    SwitchView,
)
from llmgw.wire.facts import NodeId

#: A cable's history is told over at most so many kept maps.
MOMENTS = 40


@attrs.define
class FabricDesk:
    """Answers about fabrics. `world` gives the fleet now; `think` is where maps are looked into."""

    fabrics: Fabrics
    world: Callable[[], World]
    think: Think = aside
    clock: Callable[[], float] = trio.current_time
    wall: Callable[[], float] = time.time

    def all(self) -> FabricsReply:
        return FabricsReply(fabrics=tuple(self.row(name) for name in self.fabrics.names))

    def row(self, name: str) -> FabricRow:
        """One fabric in a list. Raises NotFound."""
        standing = self.fabrics.standing(name)
        managed = self.fabrics.managers.fabrics.get(name, Fabric(name))
        looks = self.fabrics.vantages().get(name, [])
        failed = standing.last is not None and standing.last.error
        return FabricRow(
            name=name,
            labelled=managed.labelled,
            master=managed.master if managed.masters else "",
            managers=sum(seen.silent_since is None for seen in managed.managers.values()),
            ports=max(len(managed.ports), len(looks)),
            nodes=len({key.node for key in managed.ports} or {look.node for look in looks}),
            troubles=tuple(sorted(kind.partition(" ")[0] for kind in managed.open)),
            scan=self.scan_view(standing.seen) if standing.seen else None,
            error=standing.last.error if failed and standing.last else "",
            faults=_graded(standing.open),
        )

    async def one(self, name: str) -> FabricReply:
        """Everything about one fabric. Raises NotFound."""
        standing = self.fabrics.standing(name)
        managed = self.fabrics.managers.fabrics.get(name, Fabric(name))
        found: tuple[SwitchView, ...] = ()
        if standing.newest:
            names, faults = await self._names(), msgspec.msgpack.encode(standing.open)
            data = await self.think(view.switches, standing.newest, names, faults)
            found = msgspec.json.decode(data, type=tuple[SwitchView, ...])
        return FabricReply(
            fabric=self.row(name),
            managers=tuple(self._manager(managed.managers[guid]) for guid in sorted(managed.managers)),
            vantages=tuple(str(look) for look in self.fabrics.vantages().get(name, [])[:10]),
            faults=tuple(view.fault_view(fault) for fault in standing.open),
            switches=found,
            scans=tuple(self.scan_view(scan) for scan in reversed(self.fabrics.kept.of(name))),
        )

    async def drawing(self, name: str, which: str = "") -> bytes:
        """The SVG of a fabric's newest map, or of a kept one. Raises NotFound."""
        standing = self.fabrics.standing(name)
        scan = self.chosen(name, which) if which else standing.seen
        if scan is None:
            raise NotFound(f"fabric {name} has no map yet", remedy="`llmgw ctl fabric-scan` makes one now")
        newest = standing.seen is not None and scan.id == standing.seen.id
        faults = standing.open if newest else scan.faults
        return await self.think(
            drawn, await self.fabrics.map(scan), await self._names(), msgspec.msgpack.encode(faults)
        )

    async def link(self, name: str, end: str) -> LinkReply:
        """A cable's numbers and history, by one of its ends: GUID/PORT. Raises NotFound and BadInput."""
        guid, _, port = end.partition("/")
        try:
            at = f"{int(guid, 16):x}/{int(port)}"
        except ValueError:
            raise BadInput(
                f"{end!r} is no end of a cable", remedy="write GUID/PORT, such as 946dae0300001000/1"
            ) from None
        standing = self.fabrics.standing(name)
        kept: list[Dated] = []
        for scan in [one for one in self.fabrics.kept.of(name) if one.has_map][-MOMENTS:]:
            try:
                packed = await self.fabrics.map(scan)
            except NotFound:
                continue
            kept.append(Dated(id=scan.id, clock=scan.clock, complete=scan.complete, map=packed))
        data = await self.think(
            view.link,
            at.encode(),
            msgspec.msgpack.encode(kept),
            await self._names(),
            msgspec.msgpack.encode(standing.open),
        )
        found = msgspec.json.decode(data, type=LinkReply)
        if not found.pace and not any(moment.pace for moment in found.history):
            raise NotFound(f"fabric {name} has no cable at {end}, nor had one in what is kept")
        return msgspec.structs.replace(found, fabric=name)

    async def diff(self, name: str, older: str = "", newer: str = "") -> DiffReply:
        """What changed between two kept maps: by id, or by age ("2h", "1d"); by default the last two complete ones."""
        new = self.chosen(name, newer) if newer else self._newest(name)
        old = self.chosen(name, older) if older else self._before(name, new)
        data = await self.think(
            verdict.compared, await self.fabrics.map(old), await self.fabrics.map(new),
            await self._names(), msgspec.msgpack.encode(await whose.replicas(self.world())),
        )  # fmt: skip
        found = msgspec.msgpack.decode(data, type=Difference)
        return DiffReply(
            fabric=name, older=self.scan_view(old), newer=self.scan_view(new), changes=view.change_views(found),
            blind=found.blind,
        )  # fmt: skip

    async def route(self, name: str, start: str, end: str) -> RouteReply:
        """The cables from one port to another: NODE:DEVICE, or a port's GUID. Raises NotFound, BadInput, ..."""
        standing = self.fabrics.standing(name)
        if not standing.newest:
            raise NotFound(f"fabric {name} has no map yet", remedy="`llmgw ctl fabric-scan` makes one now")
        ends = f"{self._port(start):x} {self._port(end):x}"
        tables = await self.fabrics.tables(name)
        data = await self.think(view.route, standing.newest, tables.tables, ends.encode())
        found = msgspec.json.decode(data, type=RouteReply)
        return msgspec.structs.replace(found, fabric=name, holes=tables.holes)

    def only(self, name: str) -> str:
        """The fabric of this name; without one, the only fabric there is. Raises NotFound and BadInput."""
        if name:
            self.fabrics.standing(name)
            return name
        names = self.fabrics.names
        if len(names) == 1:
            return names[0]
        if not names:
            raise NotFound("no InfiniBand fabric is known", remedy="nodes register their ports; see `llmgw ctl nodes`")
        raise BadInput("there is more than one fabric", remedy=f"name one of {', '.join(names)}")

    def chosen(self, name: str, which: str) -> Scan:
        """A kept scan with a map, by its id or by its age. Raises NotFound and BadInput."""
        scans = [scan for scan in self.fabrics.kept.of(name) if scan.has_map]
        self.fabrics.standing(name)
        if which.isascii() and which.isdigit():
            found = next((scan for scan in scans if scan.id == int(which)), None)
        else:
            try:
                then = self.wall() - parse_duration(which)
            except ValueError:
                raise BadInput(f"{which!r} is no scan", remedy="give its number, or an age such as 2h or 1d") from None
            found = next((scan for scan in reversed(scans) if scan.clock <= then), None)
        if found is None:
            some = ", ".join(str(scan.id) for scan in scans[-8:]) or "none"
            raise NotFound(f"fabric {name} has no kept map {which}", remedy=f"the newest are {some}")
        return found

    def scan_view(self, scan: Scan) -> ScanView:
        counts = scan.counts
        return ScanView(
            id=scan.id,
            clock=scan.clock,
            age=max(0.0, self.wall() - scan.clock),
            vantage=scan.vantage if scan.node else "",
            seconds=scan.seconds,
            complete=scan.complete,
            holes=scan.holes,
            error=scan.error,
            counts=CountsView(
                switches=counts.switches,
                hosts=counts.hosts,
                adapters=counts.adapters,
                links=counts.links,
                others=counts.others,
            ),
            changes=scan.changes,
            faults=len(scan.faults),
            bytes=scan.bytes,
            forced=scan.forced,
        )

    def _newest(self, name: str) -> Scan:
        scan = self.fabrics.standing(name).seen
        if scan is None:
            raise NotFound(f"fabric {name} has no map yet", remedy="`llmgw ctl fabric-scan` makes one now")
        return scan

    def _before(self, name: str, new: Scan) -> Scan:
        """The newest complete map before this one."""
        scans = [scan for scan in self.fabrics.kept.of(name) if scan.has_map and scan.complete and scan.id < new.id]
        if not scans:
            raise NotFound(f"fabric {name} has only one map so far", remedy="there is nothing yet to compare it with")
        return scans[-1]

    def _port(self, text: str) -> int:
        node_name, colon, device = text.partition(":")
        if colon:
            node = self.world().nodes.get(NodeId(node_name))
            if node is None or node.facts is None:
                raise NotFound(f"there is no node {node_name!r}")
            wanted, _, number = device.partition("/")
            for port in node.facts.ports:
                if port.device == wanted and port.number == int(number or 1) and port.port_guid:
                    return int(port.port_guid, 16)
            raise NotFound(f"{node_name} has no port {device}")
        try:
            return int(text, 16)
        except ValueError:
            raise BadInput(f"{text!r} is no port", remedy="write NODE:DEVICE, or a port's GUID") from None

    def _manager(self, seen: Seen) -> ManagerView:
        one = seen.manager
        return ManagerView(
            guid=one.guid,
            lid=one.lid,
            priority=one.priority,
            state=one.state if seen.silent_since is None else "",
            activity=one.activity,
            silent_for=None if seen.silent_since is None else max(0.0, self.clock() - seen.silent_since),
            error=one.error,
        )

    async def _names(self) -> bytes:
        return msgspec.msgpack.encode(await whose.names(self.world()))


def _graded(faults: tuple[Fault, ...]) -> dict[str, int]:
    """How many there are of each grade, the worst first."""
    counted = Counter(fault.grade for fault in faults)
    return {grade: counted[grade] for grade in sorted(counted, key=lambda grade: (grade != "bad", grade))}

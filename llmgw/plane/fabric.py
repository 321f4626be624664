"""Watches the fabrics of the fleet: their managers as nodes report them, their maps as one node each draws them (D8).

The first maps are drawn a while after the start and then again and again, one node a fabric, all fabrics at once,
from a second vantage when the first fails. A failed scan is kept with its error; the last good map stays, with its age.
Everything that looks into a map runs in a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Protocol, TypeVar

import attrs
import msgspec
import structlog
import trio

from llmgw.aside import aside
from llmgw.cell import Cell
from llmgw.errors import BadInput, Failed, LlmgwError, NotFound, Unavailable
from llmgw.plane.events import Events
from llmgw.plane.fabrics import told, verdict, whose
from llmgw.plane.fabrics.kept import Kept, Scan
from llmgw.plane.fabrics.reports import Reports
from llmgw.plane.fabrics.vantage import Vantage, fabric_of, vantages
from llmgw.plane.fabrics.verdict import Fault, Misplacement, Question, Verdict
from llmgw.plane.store import Store
from llmgw.plane.world import World
from llmgw.rdma.managers import Managers, Patience, PortKey
from llmgw.wire.control import Request, RoutesReply, RoutesRequest, ScanReply, ScanRequest
from llmgw.wire.facts import NodeId

R = TypeVar("R")

log = structlog.get_logger("llmgw.fabrics")

#: Seconds that a scan may take (A10), and how often managers are judged and vantages looked for.
SCAN_WITHIN, JUDGE_EVERY, LOOK_EVERY = 180.0, 1.0, 10.0
#: So many scans run at once.
AT_ONCE = 16

Think = Callable[..., Awaitable[bytes]]


class Watched(Protocol):
    """The fleet as it is watched here."""

    @property
    def world(self) -> Cell[World]: ...
    @property
    def events(self) -> Events: ...


class Asks(Protocol):
    """Where requests to nodes go in (A10)."""

    async def ask(self, node: NodeId, request: Request[R], *, within: float) -> R: ...


@attrs.define
class Standing:
    """What is known of one fabric. `base` is the newest complete map and `newest` the newest of all, as packed."""

    last: Scan | None = None  # the last attempt, failed or not
    seen: Scan | None = None  # the last one with a map
    whole: Scan | None = None  # the last one with a complete map
    newest: bytes = b""
    base: bytes = b""
    faults: dict[str, Fault] = attrs.field(factory=dict)
    switches: frozenset[int] = frozenset()

    @property
    def open(self) -> tuple[Fault, ...]:
        return tuple(self.faults[key] for key in sorted(self.faults, key=self._rank))

    def _rank(self, key: str) -> tuple[bool, str]:
        return self.faults[key].grade != "bad", key


class Fabrics:
    """All fabrics. Call `load`, then keep `run` running in the leader's nursery; all else is called from outside.

    `changed` moves with every scan and every change among managers.
    """

    def __init__(
        self,
        fleet: Watched,
        hub: Asks,
        store: Store,
        *,
        first_after: float = 30.0,
        every: float = 300.0,
        patience: Patience | None = None,
        think: Think = aside,
        clock: Callable[[], float] = trio.current_time,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._fleet, self._hub = fleet, hub
        self._first_after, self._every = first_after, every
        self._think, self._clock, self._wall = think, clock, wall
        self._reports = Reports(patience or Patience(), clock, wall)
        self._standing: dict[str, Standing] = {}
        self._looks: dict[str, list[Vantage]] = {}
        self._looked_for: tuple[World, Managers] | None = None
        self._shown: dict[str, str] = {}  # port GUIDs of ports without a known manager -> the fabric whose map has them
        self._locks: dict[str, trio.Lock] = {}
        self._limit = trio.CapacityLimiter(AT_ONCE)
        self.kept = Kept(store)
        self.changed: Cell[int] = Cell(0)

    async def load(self) -> None:
        """What a former life of the plane knew."""
        self._reports.remember(await self.kept.load())
        for name in self.kept.fabrics:
            scans = self.kept.of(name)
            standing = self._standing[name] = Standing(
                last=scans[-1], seen=self.kept.last(name), whole=self.kept.last(name, complete=True)
            )
            if standing.seen is not None:
                standing.faults = {f"{fault.kind} {fault.key}": fault for fault in standing.seen.faults}
                standing.newest = await self._map(standing.seen)
            if standing.whole is not None:
                standing.base = await self._map(standing.whole)

    async def run(self) -> None:
        """Watch for ever, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_managers)
            nursery.start_soon(self._scan_again_and_again)

    @property
    def managers(self) -> Managers:
        """Which ports are on which fabric, and who manages it."""
        return self._reports.managers

    @property
    def names(self) -> tuple[str, ...]:
        """Every fabric that has a port, or of which a scan is kept."""
        with_ports = [name for name, fabric in self.managers.fabrics.items() if fabric.ports]
        return tuple(sorted({*with_ports, *self._standing, *self.vantages()}))

    def standing(self, name: str) -> Standing:
        """What is known of a fabric. Raises NotFound."""
        if name not in self._standing and name not in self.names:
            some = ", ".join(self.names[:5]) or "none is known yet"
            raise NotFound(f"there is no fabric {name!r}", remedy=f"`llmgw ctl fabrics` lists them: {some}")
        return self._standing.get(name, Standing())

    def vantages(self) -> Mapping[str, list[Vantage]]:
        """Where each fabric can be looked at from, best first, as found a moment ago."""
        return self._looks

    async def look_for_vantages(self) -> None:
        """Find them anew: over a large fleet that takes a while, and others run meanwhile."""
        world, managers = self._fleet.world.value, self.managers
        if self._looked_for is None or self._looked_for[0] is not world or self._looked_for[1] is not managers:
            self._looks = await vantages(world, managers, self._shown)
            self._looked_for = (world, managers)

    async def scan(self, name: str) -> Scan:
        """Scan a fabric now. Raises NotFound, and Unavailable when no node can look; a failed scan is returned."""
        await self.look_for_vantages()
        looks = self._from(name)
        scan, quiet = await self._scan(name, looks[:2], forced=True)
        await self._misplaced({name: quiet})
        return scan

    async def scan_from(self, node: NodeId, device: str, number: int = 1, *, raw: bool = False) -> tuple[Scan, bytes]:
        """Scan through one port, whichever fabric that is on, and what the tool printed if wanted (compressed).

        Raises NotFound, BadInput, and whatever asking the node raises.
        """
        known_node = self._fleet.world.value.nodes.get(node)
        if known_node is None or known_node.facts is None:
            raise NotFound(f"there is no node {node!r}")
        port = next((one for one in known_node.facts.ports if (one.device, one.number) == (device, number)), None)
        if port is None:
            names = ", ".join(f"{one.device}/{one.number}" for one in known_node.facts.ports) or "no RDMA port"
            raise BadInput(f"{node} has no port {device}/{number}", remedy=f"it has {names}")
        if port.kind != "ib":
            raise BadInput(f"{node} {device}/{number} is a {port.kind} port", remedy="only InfiniBand can be scanned")
        look = Vantage(node, device, number)
        async with self._limit:
            reply = await self._hub.ask(node, ScanRequest(device=device, number=number, raw=raw), within=SCAN_WITHIN)
        name = fabric_of(self.managers, self._shown, node, port)
        async with self._lock(name):
            scan, quiet = await self._take(name, look, reply, forced=True)
        await self._misplaced({name: quiet})
        return scan, reply.raw

    async def tables(self, name: str) -> RoutesReply:
        """The forwarding tables of a fabric's switches now. Raises what `scan` raises, and the node's failure."""
        await self.look_for_vantages()
        looks = self._from(name)
        question = RoutesRequest(device=looks[0].device, number=looks[0].number)
        return await self._hub.ask(looks[0].node, question, within=SCAN_WITHIN)

    async def map(self, scan: Scan) -> bytes:
        """The packed map of a kept scan. Raises NotFound when it has none or is not kept any more."""
        standing = self._standing.get(scan.fabric)
        if standing is not None and standing.seen is not None and standing.seen.id == scan.id and standing.newest:
            return standing.newest
        packed = await self._map(scan)
        if not packed:
            raise NotFound(f"scan {scan.id} of fabric {scan.fabric} has no map", remedy="see `llmgw ctl fabric`")
        return packed

    async def _scan_again_and_again(self) -> None:
        await trio.sleep(self._first_after)
        while True:
            began = self._clock()
            await self.round()
            await trio.sleep(max(1.0, began + self._every - self._clock()))

    async def round(self) -> None:
        """Scan every fabric that somebody can look at, all at once."""
        quiet: dict[str, told.Ports] = {}

        async def one(name: str, looks: list[Vantage]) -> None:
            async with self._limit:
                try:
                    _, quiet[name] = await self._scan(name, looks[:2])
                except LlmgwError as error:
                    # The store's, most likely: one fabric's scan is lost, and the next round comes.
                    log.warning("scan not kept", fabric=name, error=str(error))

        await self.look_for_vantages()
        async with trio.open_nursery() as nursery:
            for name, looks in self.vantages().items():
                nursery.start_soon(one, name, looks)
        await self._misplaced(quiet)

    async def _scan(self, name: str, looks: Iterable[Vantage], *, forced: bool = False) -> tuple[Scan, told.Ports]:
        """One scan of a fabric, from the first vantage that gives a map; and the ports whose move it told."""
        async with self._lock(name):
            errors: list[str] = []
            blind: tuple[Vantage, ScanReply] | None = None
            for look in looks:
                question = ScanRequest(device=look.device, number=look.number)
                try:
                    reply = await self._hub.ask(look.node, question, within=SCAN_WITHIN)
                except LlmgwError as error:
                    errors.append(f"{look}: {error}")
                    continue
                if any(hole.startswith("the port that looked") for hole in reply.holes):
                    # It saw nothing but itself; the second may see more.
                    blind = blind or (look, reply)
                    continue
                return await self._take(name, look, reply, forced=forced)
            if blind is not None:
                return await self._take(name, *blind, forced=forced)
            return await self._failed(name, "; ".join(errors), forced), frozenset()

    async def _failed(self, name: str, error: str, forced: bool) -> Scan:
        standing = self._standing.setdefault(name, Standing())
        now = self._wall()
        self._fleet.events.extend(told.failed(name, error, standing.last, now))
        scan = await self.kept.add(Scan(id=0, fabric=name, clock=now, error=error, forced=forced), b"")
        standing.last = scan
        self._moved()
        return scan

    async def _take(self, name: str, look: Vantage, reply: ScanReply, *, forced: bool) -> tuple[Scan, told.Ports]:
        """A map came: what it means, told and kept."""
        standing = self._standing.setdefault(name, Standing())
        strangers = await whose.strangers(self._fleet.world.value, self.managers)
        question = Question(
            new=reply.map,
            base=standing.base,
            counted=standing.newest,
            names=tuple(await whose.names(self._fleet.world.value)),
            replicas=await whose.replicas(self._fleet.world.value),
            strangers=tuple(strangers),
        )
        try:
            answer = await self._think(verdict.judged, msgspec.msgpack.encode(question))
        except Failed as error:
            return await self._failed(name, f"{look}: {error}", forced), frozenset()
        found = msgspec.msgpack.decode(answer, type=Verdict)
        if found.unreadable:
            return await self._failed(name, f"{look}: the map cannot be read: {found.unreadable}", forced), frozenset()
        name = await self._recognise(name, [strangers[guid] for guid in found.known])
        standing = self._standing.setdefault(name, Standing())
        now = self._wall()
        misplaced = {key: fault for key, fault in standing.faults.items() if fault.kind == "cable-misplaced"}
        others = {key: fault for key, fault in standing.faults.items() if key not in misplaced}
        events, faults = told.of_scan(name, found, others, standing.last, now)
        self._fleet.events.extend(events)
        standing.faults = faults | misplaced
        scan = Scan(
            id=0, fabric=name, clock=now, node=look.node, device=look.device, number=look.number,
            seconds=round(reply.seconds, 3), complete=found.complete, holes=found.holes, counts=found.counts,
            changes=len(found.changes) + found.more_changes,
            faults=tuple(verdict.without_details(fault) for fault in standing.open), forced=forced,
        )  # fmt: skip
        scan = await self.kept.add(scan, reply.map)
        standing.last = standing.seen = scan
        standing.newest = reply.map
        standing.switches = frozenset(found.switches)
        if found.complete:
            standing.whole, standing.base = scan, reply.map
        self._moved()
        return scan, told.moved_ports(found.changes)

    async def _recognise(self, name: str, ports: Iterable[tuple[str, str]]) -> str:
        """Ports of unknown fabrics on this map are on this one, and what was kept of them joins it. Its name then."""
        here = list(ports)
        if any(alone == name for _, alone in here):
            # This fabric itself goes by one of its ports: of all such names the smallest stays.
            name = min(name, *(self._shown.get(guid, alone) for guid, alone in here))
        others = {alone for _, alone in here} | {self._shown.get(guid, name) for guid, _ in here}
        self._shown.update((guid, name) for guid, _ in here)
        self._looked_for = None
        for other in sorted(others - {name}):
            if other in self._standing:
                await self._rename(other, name)
        return name

    async def _rename(self, old: str, new: str) -> None:
        await self.kept.rename(old, new)
        standing = self._standing.pop(old, None)
        if standing is not None and new not in self._standing:
            self._standing[new] = standing

    async def _misplaced(self, quiet: Mapping[str, told.Ports]) -> None:
        """Cables in the wrong leaf, found over the newest complete maps of all fabrics together."""
        names = sorted(name for name, standing in self._standing.items() if standing.base)
        if not names:
            return
        maps = msgspec.msgpack.encode([self._standing[name].base for name in names])
        owners = msgspec.msgpack.encode(await whose.names(self._fleet.world.value))
        try:
            answer = await self._think(verdict.misplaced, maps, owners)
        except Failed as error:
            log.warning("cables in wrong leaves not looked for", error=str(error))
            return
        found: dict[str, dict[str, Fault]] = {name: {} for name in names}
        for one in msgspec.msgpack.decode(answer, type=list[Misplacement]):
            found[names[one.index]][f"{one.fault.kind} {one.fault.key}"] = one.fault
        for name, after in found.items():
            standing = self._standing.get(name)
            if standing is None:
                continue
            before = {key: fault for key, fault in standing.faults.items() if fault.kind == "cable-misplaced"}
            events = told.faults(name, before, after, self._wall(), frozenset().union(*quiet.values()))
            self._fleet.events.extend(events)
            standing.faults = {key: fault for key, fault in standing.faults.items() if key not in before} | after
            if events or before.keys() != after.keys():
                self._moved()

    async def _watch_managers(self) -> None:
        look_again = self._clock()
        while True:
            try:
                await self.look_at_managers()
            except LlmgwError as error:
                log.warning("fabrics' names not stored", error=str(error))
            if self._clock() >= look_again:
                await self.look_for_vantages()
                look_again = self._clock() + LOOK_EVERY
            await trio.sleep(JUDGE_EVERY)

    async def look_at_managers(self) -> None:
        """Take in what nodes reported of their managers since the last time."""
        looked = await self._reports.look(self._fleet.world.value)
        self._fleet.events.extend(looked.events)
        for old, new in (*looked.renamed, *self._named_by_now()):
            await self._rename(old, new)
        for name, fabric in self.managers.fabrics.items():
            if not fabric.labelled and fabric.managers:
                await self.kept.name(name, fabric.managers)
        if looked.moved:
            self._moved()

    def _named_by_now(self) -> list[tuple[str, str]]:
        """Fabrics that had a port's name for want of a better, and have one now."""
        found = []
        for name in self._standing:
            node, _, port = name.partition(":")
            device, _, number = port.rpartition("/")
            if device and number.isdecimal():
                now = self.managers.at.get(PortKey(node, device, int(number)))
                if now is not None and now != name:
                    found.append((name, now))
        return found

    def _from(self, name: str) -> list[Vantage]:
        """Where a fabric can be looked at from, at least one place. Raises NotFound and Unavailable."""
        looks = self.vantages().get(name, [])
        if not looks:
            self.standing(name)
            raise Unavailable(
                f"no node can look at fabric {name}",
                remedy="it takes a ready node with an active InfiniBand port on it whose agent answers fabric scans",
            )
        return looks

    def _lock(self, name: str) -> trio.Lock:
        return self._locks.setdefault(name, trio.Lock())

    async def _map(self, scan: Scan) -> bytes:
        try:
            return await self.kept.map(scan)
        except (KeyError, msgspec.MsgspecError):
            return b""

    def _moved(self) -> None:
        self.changed.set(self.changed.value + 1)

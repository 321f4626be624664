"""Looks at InfiniBand fabrics with the tools of the machine: maps, subnet managers, forwarding tables.

Always through a named adapter and port (without one the tools take whichever comes first). One discovery serves the map
and the error counters, by the tools' cache file. What is printed is read in a process of its own.
"""

from __future__ import annotations

import os
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import trio

from llmgw.aside import aside
from llmgw.errors import BadInput, Failed
from llmgw.node.answers import Answers, Say
from llmgw.node.mapping import Asked, Mapped, State, Suspect, confirmed, mapped, tabled
from llmgw.node.tools import Printed, printed, run
from llmgw.rdma import sminfo
from llmgw.rdma.ran import Ran, Trouble, trouble, unanswered
from llmgw.wire.agent import Working
from llmgw.wire.control import (
    ManagersReply,
    ManagersRequest,
    RoutesReply,
    RoutesRequest,
    ScanReply,
    ScanRequest,
)
from llmgw.wire.facts import Port, PortManagers, SubnetManager

#: Seconds. A whole scan stays within the three minutes that its asker waits (A10).
DISCOVERY_WITHIN, COUNTING_WITHIN, CONFIRMING_WITHIN, QUERY_WITHIN, ROUTES_WITHIN = 100.0, 40.0, 20.0, 10.0, 120.0

Ports = Callable[[], Sequence[Port]]


class Scanner:
    """Answers what the plane asks about fabrics, through this node's ports.

    `ports` gives the node's ports now; `root` is where the machine's /sys and /dev are found; `environment` is added
    to the tools' own.
    """

    def __init__(self, ports: Ports, *, root: Path = Path("/"), environment: Mapping[str, str] | None = None) -> None:
        self._ports = ports
        self._root = root
        self._environment = dict(environment or {})
        # A discovery sends thousands of packets; two at once on one node are enough.
        self._scans = trio.CapacityLimiter(2)
        self._queries = trio.CapacityLimiter(4)

    @property
    def answers(self) -> Answers:
        """This class's rows of the agent's table."""
        return {ScanRequest: self.scan, ManagersRequest: self.managers, RoutesRequest: self.routes}

    async def scan(self, request: ScanRequest, say: Say) -> ScanReply:
        """A map of the fabric that a port is on. Raises Failed with the tool's trouble in words."""
        device, number = self._named(request.device, request.number)
        began = trio.current_time()
        async with self._scans:
            with tempfile.TemporaryDirectory(prefix="llmgw-scan-", ignore_cleanup_errors=True) as place:
                where = Path(place)
                cache = where / "cache"
                found = await self._print(
                    where, "ibnetdiscover", device, number, "--cache", str(cache), within=DISCOVERY_WITHIN
                )
                self._check(found.ran if found.ran.exit == 0 else found.read(), device, number)
                counting = b""
                if cache.exists() and found.ran.exit == 0:
                    say(Working(request_id=request.request_id, seconds=COUNTING_WITHIN + 60.0, note="reading counters"))
                    counting = _asked(
                        await self._print(
                            where, "ibqueryerrors", device, number, "--load-cache", str(cache), "--skip-sl",
                            "-s", "PortXmitWait", within=COUNTING_WITHIN,
                        )
                    )  # fmt: skip
                answer = msgspec.msgpack.decode(await aside(mapped, _asked(found), counting), type=Mapped)
                if answer.trouble:
                    raise Failed(f"{device}/{number}: {answer.trouble}")
                packed = answer.map
                if answer.suspects:
                    states = await self._states(device, number, answer.suspects)
                    packed = await aside(confirmed, packed, msgspec.msgpack.encode(states))
                raw = b""
                if request.raw:
                    raw = await trio.to_thread.run_sync(lambda: zlib.compress(found.out.read_bytes(), 6))
        return ScanReply(
            device=device,
            number=number,
            complete=answer.complete,
            holes=answer.holes,
            seconds=trio.current_time() - began,
            tool="ibnetdiscover",
            map=packed,
            raw=raw,
        )

    async def managers(self, request: ManagersRequest, say: Say) -> ManagersReply:
        """Who manages the subnets of all InfiniBand ports of this node."""
        found: dict[tuple[str, int], PortManagers] = {}

        async def ask(port: Port) -> None:
            found[port.device, port.number] = await self.port_managers(port.device, port.number)

        async with trio.open_nursery() as nursery:
            for port in self.infiniband():
                nursery.start_soon(ask, port)
        return ManagersReply(ports=tuple(found[key] for key in sorted(found)))

    async def routes(self, request: RoutesRequest, say: Say) -> RoutesReply:
        """Forwarding tables of the switches with these LIDs, or of all."""
        device, number = self._named(request.device, request.number)
        say(Working(request_id=request.request_id, seconds=ROUTES_WITHIN + 60.0, note="reading forwarding tables"))
        with tempfile.TemporaryDirectory(prefix="llmgw-routes-", ignore_cleanup_errors=True) as place:
            where = Path(place)
            if request.switches:
                runs = [
                    await self._print(where, "ibroute", device, number, "-n", str(lid), within=QUERY_WITHIN)
                    for lid in request.switches
                ]
            else:
                runs = [await self._print(where, "dump_fts", device, number, "-n", within=ROUTES_WITHIN)]
            holes = [words for one in runs if (words := self._hole(one.read(), device, number))]
            if len(holes) == len(runs) and not any(one.out.stat().st_size for one in runs):
                raise Failed(f"{device}/{number}: {holes[0]}")
            tables = await aside(tabled, msgspec.msgpack.encode([_as_asked(one) for one in runs]))
        return RoutesReply(tables=tables, holes=tuple(holes))

    async def port_managers(self, device: str, number: int) -> PortManagers:
        """Who manages the subnet of one port: the master by `sminfo`, all by the master's memory, each confirmed."""
        async with self._queries:
            first = self._answer(await self._query("sminfo", device, number), device, number)
            if isinstance(first, Trouble) and first.code not in ("sm-silent", "timed-out"):
                return PortManagers(device=device, number=number, error=str(first), code=first.code)
            ran = await self._query("saquery", device, number, "SMIR")
            memory = sminfo.remembered(ran, can_read_umad=self._may_read_umad())
            asked: dict[str, SubnetManager | Trouble] = {}
            for one in () if isinstance(memory, Trouble) else memory:
                if isinstance(first, SubnetManager) and first.guid == one.guid and first.state == "master":
                    asked[one.guid] = first
                elif one.lid:
                    again = await self._query("sminfo", device, number, str(one.lid))
                    asked[one.guid] = self._answer(again, device, number)
            return sminfo.managers(device, number, first, memory, asked)

    async def master(self, device: str, number: int) -> SubnetManager | Trouble:
        """Who answers as the subnet's manager just now: one query."""
        async with self._queries:
            return self._answer(await self._query("sminfo", device, number), device, number)

    def infiniband(self) -> tuple[Port, ...]:
        """The node's ports with a cable on an InfiniBand fabric."""
        return tuple(port for port in self._ports() if port.kind == "ib" and not port.vf and linked(port))

    def _named(self, device: str, number: int) -> tuple[str, int]:
        """The port to look through. Raises BadInput for one that cannot see an InfiniBand fabric."""
        ports = self._ports()
        known = {(port.device, port.number): port for port in ports}
        if not device:
            usable = self.infiniband()
            if not usable:
                raise BadInput("this node has no active InfiniBand port", remedy="RoCE ports have no fabric to scan")
            return usable[0].device, usable[0].number
        port = known.get((device, number))
        if port is None and ports:
            names = ", ".join(f"{one.device}/{one.number}" for one in ports)
            raise BadInput(f"this node has no port {device}/{number}", remedy=f"it has {names}")
        if port is not None and port.kind != "ib":
            raise BadInput(f"{device}/{number} is a {port.kind} port: only InfiniBand has a fabric to scan")
        return device, number

    def _may_read_umad(self) -> bool:
        """Whether there is a MAD device that the tools may open."""
        try:
            names = [name for name in os.listdir(self._root / "dev/infiniband") if name.startswith("umad")]
        except OSError:
            return False
        return any(os.access(self._root / "dev/infiniband" / name, os.R_OK | os.W_OK) for name in names)

    def _port_down(self, device: str, number: int) -> bool:
        return any(
            port.device == device and port.number == number and not linked(port) and port.state != ""
            for port in self._ports()
        )

    def _answer(self, ran: Ran, device: str, number: int) -> SubnetManager | Trouble:
        return sminfo.answer(ran, port_down=self._port_down(device, number), can_read_umad=self._may_read_umad())

    def _check(self, ran: Ran, device: str, number: int) -> None:
        """Raises Failed for a run that cannot have made a map; a partial one is judged with its output."""
        why = trouble(ran, port_down=self._port_down(device, number), can_read_umad=self._may_read_umad())
        if why is not None and why.code not in ("timed-out", "crashed", "failed"):
            raise Failed(f"{device}/{number}: {why}")

    def _hole(self, ran: Ran, device: str, number: int) -> str:
        why = trouble(ran, port_down=self._port_down(device, number), can_read_umad=self._may_read_umad())
        if why is not None:
            return str(why)
        return f"{ran.tool}: some switches did not answer" if unanswered(ran) else ""

    async def _states(self, device: str, number: int, suspects: Sequence[Suspect]) -> list[State]:
        """What the ends of slow links say of themselves, as far as they answer in time."""
        states: list[State] = []
        with trio.move_on_after(CONFIRMING_WITHIN):
            for one in suspects:
                ran = await self._portinfo(device, number, one.route, one.port)
                if ran is not None:
                    states.append(State(one.guid, one.port, ran.out))
        return states

    async def _portinfo(self, device: str, number: int, route: str, port: int) -> Ran | None:
        ran = await self._query("smpquery", device, number, "-D", "portinfo", route, str(port))
        return ran if ran.exit == 0 else None

    async def _query(self, tool: str, device: str, number: int, *args: str) -> Ran:
        """One short question. A tool that its own signal ended is asked once more: it was not the fabric's fault."""
        ask = partial(
            run, tool, "-C", device, "-P", str(number), *args, within=QUERY_WITHIN, environment=self._environment
        )
        ran = await ask()
        return await ask() if ran.exit is not None and ran.exit < 0 and not ran.timed_out else ran

    async def _print(self, where: Path, tool: str, device: str, number: int, *args: str, within: float) -> Printed:
        return await printed(
            where, tool, "-C", device, "-P", str(number), *args, within=within, environment=self._environment
        )


def linked(port: Port) -> bool:
    """Whether there is a fabric at the other end: the link trained, with or without a subnet manager."""
    return port.state.upper().split(":")[-1].strip() in ("ACTIVE", "INIT", "INITIALIZING", "ARMED", "ACTIVE_DEFER")


def _as_asked(one: Printed) -> Asked:
    ran = one.ran
    return Asked(
        tool=ran.tool, exit=ran.exit, seconds=ran.seconds, timed_out=ran.timed_out, out=str(one.out), err=str(one.err),
        clock=time.time(),
    )  # fmt: skip


def _asked(one: Printed) -> bytes:
    return msgspec.msgpack.encode(_as_asked(one))

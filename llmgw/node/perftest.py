"""The node's side of a bandwidth test: one perftest process, watched from before its start to after its end.

The plane has chosen everything (E2); the node adds where it runs (next to the adapter), reads the port's state and
error counters before and after, and makes of the output a value (E7). Each request is a child task: cancelling it
kills the process at once (E3).
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import attrs
import structlog
import trio
from msgspec.structs import replace

from llmgw.errors import Failed
from llmgw.node import files, processes
from llmgw.node.run import Ran, run
from llmgw.node.toolbox import INSTALL_WITHIN, Toolbox
from llmgw.rdma import grade
from llmgw.rdma.causes import Measured, NotMeasured, verdict
from llmgw.rdma.command import Command, Pin, command, limits
from llmgw.wire.agent import Listening, Working
from llmgw.wire.control import (
    Bandwidth,
    BandwidthClient,
    BandwidthReply,
    BandwidthServe,
    PerftestReply,
    PerftestRequest,
    Request,
)

log = structlog.get_logger("llmgw.perftest")

Say = Callable[[Working | Listening], None]

#: Where servers listen: from perftest's own default on, so that one range can be opened in a firewall.
TCP_PORTS = range(18515, 18771)
#: A port that was handed out is not handed out again for so many seconds.
RESERVED = 60.0
#: Seconds between two looks for the server's socket: the kernel tells nobody when a socket begins to listen.
LOOK_EVERY = 0.05
#: Lines of output that a reply carries.
LINES = 14

_ERRORS = re.compile(r"err|discard|drop|retr|symbol|downed|seq|overrun|timeout|icrc|out_of_buffer|naks?_")


@attrs.frozen
class PortNow:
    """A port's state ("ACTIVE LinkUp") and the counters that tell of trouble."""

    state: str = ""
    counters: Mapping[str, int] = attrs.field(factory=dict)


def look(root: Path, device: str, number: int) -> PortNow:
    """Read a port. Whatever cannot be read is left out."""
    port = root / "sys/class/infiniband" / device / "ports" / str(number)
    words = [(files.text(port / name) or "").rpartition(":")[2].strip() for name in ("state", "phys_state")]
    counters = {}
    for folder in ("counters", "hw_counters"):
        for name in files.names(port / folder):
            if name in grade.TELLING or _ERRORS.search(name):
                value = files.number(port / folder / name)
                if value is not None:
                    counters[name] = value
    return PortNow(" ".join(word for word in words if word), counters)


def grown(before: PortNow, after: PortNow) -> dict[str, int]:
    """What counters grew by. One that was reset meanwhile says nothing."""
    old = before.counters
    return {name: now - old[name] for name, now in after.counters.items() if name in old and now > old[name]}


def pin_for(root: Path, device: str) -> Pin | None:
    """The adapter's NUMA node, when this process may run there."""
    node = files.number(root / "sys/class/infiniband" / device / "device/numa_node")
    if node is None or node < 0:
        return None
    cpus = files.text(root / f"sys/devices/system/node/node{node}/cpulist") or ""
    allowed = sorted(cpu_set(cpus) & os.sched_getaffinity(0))
    return Pin(node, ",".join(map(str, allowed))) if allowed else None


def cpu_set(text: str) -> frozenset[int]:
    """ "0-3,8" as numbers; what is no list of CPUs is empty."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (not last or last.isdecimal()) and int(last or first) < 65536:
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


class Perftest:
    """Answers the plane's requests about bandwidth.

    `install` says whether perftest may be installed here; `busy` names the shards that run now (E8).
    """

    def __init__(
        self,
        *,
        install: bool = True,
        busy: Callable[[], tuple[str, ...]] = tuple,
        address: str = "",
        root: Path = Path("/"),
    ) -> None:
        self._toolbox = Toolbox(may_install=install)
        self._busy = busy
        self._address = address
        self._root = root
        self._reserved: dict[int, float] = {}

    @property
    def answers(self) -> dict[type[Request[Any]], Callable[[Any, Say], Awaitable[Any]]]:
        """This module's part of the node's table of answers."""
        return {PerftestRequest: self.describe, BandwidthServe: self.serve, BandwidthClient: self.client}

    async def run(self) -> None:
        """Installs when asked; to be started in the daemon's nursery."""
        await self._toolbox.run()

    async def describe(self, request: PerftestRequest, say: Say) -> PerftestReply:
        """Which perftest there is, installed now where it is missing and may be, and a free TCP port."""
        installed, problem = False, ""
        if self._toolbox.missing:
            problem = self._toolbox.why_not() if request.install else "perftest is not installed"
            if not problem:
                say(Working(request_id=request.request_id, seconds=INSTALL_WITHIN + 30, note="installing perftest"))
                problem = await self._toolbox.installed()
                installed = not problem
        if problem:
            return PerftestReply(error=problem)
        tools = await self._toolbox.tools()
        return PerftestReply(
            version=tools.version,
            cuda=tools.cuda,
            free_port=self._free_port(),
            address=self._address,
            installed_now=installed,
        )

    def _free_port(self) -> int:
        """A port that nothing listens on and that no other test was given a moment ago."""
        now = trio.current_time()
        self._reserved = {port: until for port, until in self._reserved.items() if until > now}
        start = random.choice(TCP_PORTS)
        for port in chain(range(start, TCP_PORTS.stop), range(TCP_PORTS.start, start)):
            if port not in self._reserved and not processes.listeners(port):
                self._reserved[port] = now + RESERVED
                return port
        raise Failed(f"no free TCP port from {TCP_PORTS.start} to {TCP_PORTS.stop - 1}")

    async def serve(self, request: BandwidthServe, say: Say) -> BandwidthReply:
        """Run the server side; `Listening` is said when its own socket listens (E3)."""
        port = request.run.tcp_port
        tell = partial(say, Listening(request_id=request.request_id, port=port))
        _, limit = limits(request.run)
        return await self._side(request.run, None, limit, partial(self._listening, port, tell))

    async def client(self, request: BandwidthClient, say: Say) -> BandwidthReply:
        """Run the client side against a server that listens."""
        limit, _ = limits(request.run)
        return await self._side(request.run, request.server, limit, None)

    async def _side(
        self, test: Bandwidth, server: str | None, limit: float, meanwhile: Callable[[int], Awaitable[None]] | None
    ) -> BandwidthReply:
        tools = await self._toolbox.tools()
        pin = await trio.to_thread.run_sync(pin_for, self._root, test.device, abandon_on_cancel=True)
        made = command(test, tools, server=server, pin=pin)
        before, busy = await self._look(test), self._busy()
        log.info("perftest starts", argv=made.argv)
        ran = await run(bounded(made, limit), limit=limit, env=dict(made.env), meanwhile=meanwhile)
        after = await self._look(test)
        reply = report(test, ran, before, after, serving=server is None)
        log.info("perftest ended", exit_code=ran.exit_code, seconds=round(ran.seconds, 1), error=reply.error)
        return replace(reply, command=made.argv, version=tools.version, busy=tuple(sorted({*busy, *self._busy()})))

    async def _look(self, test: Bandwidth) -> PortNow:
        # In a thread: reading the counters of a sick adapter may block.
        return await trio.to_thread.run_sync(look, self._root, test.device, test.number, abandon_on_cancel=True)

    async def _listening(self, port: int, tell: Callable[[], None], group: int) -> None:
        """Look until a process of the group owns a socket that listens on the port."""
        while True:
            open_now = processes.listeners(port) or frozenset()
            if open_now and any(open_now & (processes.sockets(pid) or frozenset()) for pid in _members(group)):
                tell()
                return
            await trio.sleep(LOOK_EVERY)


def _members(group: int) -> list[int]:
    return [pid for pid, seen in processes.everyone().items() if seen.group == group]


def bounded(made: Command, limit: float) -> tuple[str, ...]:
    """The command under `timeout`, so that it ends even where this agent is killed and cannot end it."""
    if shutil.which("timeout") is None:
        return made.argv
    return ("timeout", "-s", "KILL", f"{limit + 10:g}", *made.argv)


def report(test: Bandwidth, ran: Ran, before: PortNow, after: PortNow, *, serving: bool) -> BandwidthReply:
    """What one side's process says, with what happened to its port meanwhile."""
    said = verdict(ran.exit_code, ran.stdout, ran.stderr, size=test.size, cut_short=ran.cut_short, device=test.device)
    reply = BandwidthReply(
        exit_code=ran.exit_code,
        lines=last_lines(ran),
        state_before=before.state,
        state_after=after.state,
        counters=grown(before, after),
        seconds=ran.seconds,
    )
    match said:
        case Measured(row=row):
            return replace(
                reply, average_gbps=row.average_gbps, latency_us=row.latency_us, message_rate=row.message_rate
            )
        case NotMeasured(cause=cause, row=row) if serving and (
            cause.code == "could-not-measure" or (row is None and ran.exit_code == 0 and not ran.cut_short)
        ):
            # The server of some tests prints no table; the client's result counts.
            return reply
        case NotMeasured(error=error, cause=cause):
            return replace(reply, error=error, cause=cause.text, cause_code=cause.code, remedy=cause.remedy)


def last_lines(ran: Ran) -> tuple[str, ...]:
    """The last lines of both streams that say something, stderr behind stdout, as a terminal would show them."""
    words = [line.strip() for text in (ran.stdout, ran.stderr) for line in text.splitlines()]
    telling = ["".join(c if c.isprintable() else " " for c in line)[:300] for line in words if line.strip("-* ")]
    return tuple(telling[-LINES:])

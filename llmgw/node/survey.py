"""What this machine is and does, kept fresh, and told to each stream as what changed since it was told last.

Sampling has its own tasks and never waits for a stream; a stream never waits for a driver. Whatever
may block (a sick adapter's sysfs, a dead mount, the driver's library) is read in a thread or a child
process with a deadline, and the last good values stand in meanwhile.
"""

from __future__ import annotations

import os
import platform
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial

import msgspec
import trio

from llmgw.cell import Cell
from llmgw.node.beats import Beats
from llmgw.node.gpus import Gpus, own_pid_namespace, owned
from llmgw.node.host import Meter, boot_id, host
from llmgw.node.imex import imex, own_addresses
from llmgw.node.kernel import Kernel, KernelEvent
from llmgw.node.nvml.probe import Probe
from llmgw.node.ports import Ports
from llmgw.node.problems.memory import Facts, recalled
from llmgw.node.problems.verdict import problems
from llmgw.node.snapshot import Snapshot
from llmgw.node.view import View
from llmgw.wire.agent import Register
from llmgw.wire.facts import Gpu, GpuFabric, GpuProcess, Host, Imex, NodeId, Port, Problem, ShardId

#: Seconds between two looks at what rarely changes: interfaces, memory, disks; and IMEX.
HOST_PERIOD, IMEX_PERIOD = 30.0, 30.0
#: Seconds after which limits and settings of the host are looked at anew, too.
HOST_WHOLE_PERIOD = 600.0
#: A survey of the host that takes longer than this is not waited for any more (a dead mount).
HOST_WITHIN = 10.0
#: A Register is not held back longer than this for a driver that takes its time; what it says then comes in another.
FIRST_WITHIN = 8.0
#: News that come together are judged together, in seconds.
TOGETHER = 0.2
#: Seconds between two writings of what must outlive the agent, while no problem comes or goes.
KEEP_PERIOD = 60.0
MOST_EVENTS = 512


class Survey:
    """The node's own eyes. `changed` moves when hardware changed so that a new Register is due; `news` when a problem
    came, went or changed its grade, so that a heartbeat is worth sending early."""

    def __init__(
        self,
        view: View,
        pids: Callable[[], Mapping[ShardId, frozenset[int]]],
        *,
        probe: Probe | None = None,
    ) -> None:
        self._view = view
        self._pids = pids
        self._meter = Meter(view)
        self._meter.host()
        self._host: Host | None = None
        self._host_since: float | None = None  # when the reading that is still out began
        self._reading = trio.CapacityLimiter(1)
        self._imex: Imex | None = None
        self._imex_asked = trio.Event()
        self._own_pids = own_pid_namespace(view)
        self._events: deque[KernelEvent] = deque(maxlen=MOST_EVENTS)
        self._problems: tuple[Problem, ...] = ()
        self._memory_file = view.state / "problems.json" if view.state else None
        self._memory = recalled(self._memory_file)
        self._moved = trio.Event()
        self._told_new = trio.Event()
        self._lasting: object = None
        self.gpus = Gpus(view, probe=probe)
        self.ports = Ports(view, lambda: self.gpus.view.value.gpus)
        self.kernel = Kernel(view, self._heard)
        self._running = False
        self.changed: Cell[int] = Cell(0)
        self.news: Cell[int] = Cell(0)

    # --- what is told ------------------------------------------------------------------------------------

    async def register(self) -> Register:
        """The machine's whole truth. Node id, version, shards, epoch and features are the caller's to put in."""
        if self._host is None:
            await self._look_at_host()
        if self._running:
            with trio.move_on_after(FIRST_WITHIN):
                await self.gpus.asked.wait()
                await self.ports.asked.wait()
                await self._imex_asked.wait()
        self._judge()
        now = self.snapshot()
        self._lasting = _lasting(now)
        return Register(
            node=NodeId(""),
            version="",
            address=self._view.address,
            host=now.host,
            gpu_driver=now.driver,
            gpus=tuple(_with_fabric(gpu, now.gpu_fabrics) for gpu in now.gpus),
            ports=now.ports,
            imex=now.imex,
            problems=now.problems,
        )

    def beats(self, register: Register) -> Beats:
        """Heartbeats for one stream that was told `register`."""
        return Beats(self.snapshot, register)

    def snapshot(self) -> Snapshot:
        """Now, from what was read last; only what /proc gives at once is read here."""
        gpus, ports = self.gpus.view.value, self.ports.view.value
        pids = self._pids()
        shard_of = {pid: str(shard) for shard, members in pids.items() for pid in members}
        return Snapshot(
            host=self._known_host(),
            load=self._meter.host(),
            shards=self._meter.shards(pids, _held(gpus.processes)),
            driver=gpus.driver,
            gpus=gpus.gpus,
            gpu_loads=gpus.loads,
            gpu_processes=owned(gpus.processes, shard_of, self._own_pids),
            gpu_fabrics=gpus.fabrics,
            ports=ports.ports,
            port_loads=ports.loads,
            imex=self._imex,
            problems=self._problems,
        )

    async def holders(self) -> tuple[GpuProcess, ...]:
        """Which processes hold memory on which GPU, asked now. Nothing where process ids mean nothing here (NV10)."""
        return (await self.gpus.fresh()).processes if self._own_pids else ()

    def facts(self) -> Facts:
        """What problems are judged by."""
        gpus, ports = self.gpus.view.value, self.ports.view.value
        return Facts(
            host=self._known_host(),
            load=self._meter.last,
            gpus=gpus,
            ports=ports,
            imex=self._imex,
            events=tuple(self._events),
            host_stalled=self._host_since,
        )

    def _known_host(self) -> Host:
        return self._host or Host(boot_id=boot_id(self._view), arch=platform.machine())

    # --- the daemon's tasks ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        self._running = True
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_host)
                nursery.start_soon(self.gpus.run)
                nursery.start_soon(self.ports.run)
                nursery.start_soon(self.kernel.run)
                nursery.start_soon(self._watch_imex)
                nursery.start_soon(self._listen, self.gpus.view.values())
                nursery.start_soon(self._listen, self.ports.view.values())
                nursery.start_soon(self._keep)
                await self._judge_news()
        finally:
            self._running = False
            self._write_memory()

    async def _listen(self, values: AsyncIterator[object]) -> None:
        async for _ in values:
            self._moved.set()

    def _heard(self, event: KernelEvent) -> None:
        self._events.append(event)
        self._moved.set()

    async def _judge_news(self) -> None:
        """Judge whenever something moved, and at least once per period: windows end without news, too."""
        while True:
            with trio.move_on_after(self._view.period):
                await self._moved.wait()
            self._moved = trio.Event()
            self._judge()
            lasting = _lasting(self.snapshot_of_facts())
            if self._lasting is not None and lasting != self._lasting:
                self._lasting = lasting
                self.changed.set(self.changed.value + 1)
            await trio.sleep(TOGETHER)

    def snapshot_of_facts(self) -> Snapshot:
        """Facts without loads: by them a shard is checked before it starts, and a new Register may be due."""
        gpus = self.gpus.view.value
        return Snapshot(
            host=self._known_host(),
            driver=gpus.driver,
            gpus=tuple(_with_fabric(gpu, gpus.fabrics) for gpu in gpus.gpus),
            ports=self.ports.view.value.ports,
        )

    def _judge(self) -> None:
        verdict = problems(self.facts(), self._memory, time.monotonic())
        before = {(each.subject, each.code, each.grade) for each in self._problems}
        self._memory, self._problems = verdict.memory, verdict.problems
        if {(each.subject, each.code, each.grade) for each in self._problems} != before:
            self.news.set(self.news.value + 1)
            self._told_new.set()

    async def _watch_host(self) -> None:
        whole_at = float("-inf")
        while True:
            whole = trio.current_time() - whole_at >= HOST_WHOLE_PERIOD
            if whole:
                whole_at = trio.current_time()
            await self._look_at_host(whole)
            self._moved.set()
            await trio.sleep(HOST_PERIOD)

    async def _look_at_host(self, whole: bool = True) -> None:
        """Read the host's facts in a thread. One reading at a time: a stuck one is not joined by others."""
        if self._reading.available_tokens == 0:
            return
        self._host_since = time.monotonic()
        with trio.move_on_after(HOST_WITHIN) as scope:
            self._host = await trio.to_thread.run_sync(
                partial(host, self._view, None if whole else self._host), limiter=self._reading, abandon_on_cancel=True
            )
        if not scope.cancelled_caught:
            self._host_since = None

    async def _watch_imex(self) -> None:
        while True:
            known = self._known_host()
            self._imex = await imex(self._view, own_addresses(known.interfaces, known.hostname))
            self._imex_asked.set()
            self._moved.set()
            await trio.sleep(IMEX_PERIOD)

    async def _keep(self) -> None:
        """Write at once what was told anew: whoever kills the agent next must not make it forget (NV15)."""
        while True:
            with trio.move_on_after(KEEP_PERIOD):
                await self._told_new.wait()
            self._told_new = trio.Event()
            await trio.to_thread.run_sync(self._write_memory, abandon_on_cancel=True)
            await trio.sleep(TOGETHER)

    def _write_memory(self) -> None:
        """A state folder that cannot be written costs only what would have been remembered."""
        if self._memory_file is None:
            return
        try:
            beside = self._memory_file.with_suffix(".new")
            beside.write_bytes(msgspec.json.encode(self._memory))
            os.replace(beside, self._memory_file)
        except OSError:
            return


def _held(processes: tuple[GpuProcess, ...]) -> dict[int, int]:
    """GPU memory by process, over all GPUs it is on."""
    held: dict[int, int] = {}
    for process in processes:
        if process.memory_bytes is not None:
            held[process.pid] = held.get(process.pid, 0) + process.memory_bytes
    return held


def _with_fabric(gpu: Gpu, fabrics: Mapping[str, GpuFabric]) -> Gpu:
    fabric = fabrics.get(gpu.uuid)
    return msgspec.structs.replace(gpu, fabric=fabric) if fabric is not None else gpu


def _identity(port: Port) -> tuple[object, ...]:
    return (port.device, port.number, port.kind, port.pci, port.role, port.rail)


def _lasting(now: Snapshot) -> object:
    """What only a Register tells; the rest comes with heartbeats."""
    return (
        msgspec.structs.replace(now.host, disks=(), memory_bytes=0),
        now.driver,
        tuple(msgspec.structs.replace(gpu, fabric=None) for gpu in now.gpus),
        tuple(_identity(port) for port in now.ports),
    )

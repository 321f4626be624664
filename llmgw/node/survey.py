"""What this machine is and does, kept fresh, and told to each stream as what changed since it was told last.

Sampling has its own tasks and never waits for a stream; a stream never waits for a driver. Whatever
may block (a sick adapter's sysfs, a dead mount, the driver's library) is read in a thread or a child
process with a deadline, and the last good values stand in meanwhile.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from functools import partial

import attrs
import trio

from llmgw.cell import Cell
from llmgw.node.host import Meter, boot_id, host
from llmgw.node.view import View
from llmgw.wire.agent import Heartbeat, Register
from llmgw.wire.facts import Disk, GpuDriver, Host, HostLoad, NodeId, Problem, ShardId, ShardLoad

#: Seconds between two looks at what rarely changes: interfaces, memory, disks.
HOST_PERIOD = 30.0
#: A survey of the host that takes longer than this is not waited for any more (a dead mount).
HOST_WITHIN = 10.0
#: Heartbeats repeat unchanged disks only after a change of this share of their size, or of this many bytes.
DISK_SHARE, DISK_BYTES = 0.01, 1 << 30


@attrs.frozen
class Snapshot:
    """Everything the survey knows at one moment."""

    host: Host = Host()
    load: HostLoad = HostLoad()
    shards: tuple[ShardLoad, ...] = ()
    driver: GpuDriver = GpuDriver()
    problems: tuple[Problem, ...] = ()


class Survey:
    """The node's own eyes. `changed` moves when hardware changed so that a new Register is due."""

    def __init__(self, view: View, pids: Callable[[], Mapping[ShardId, frozenset[int]]]) -> None:
        self._view = view
        self._pids = pids
        self._meter = Meter(view)
        self._host: Host | None = None
        self._disks: tuple[Disk, ...] = ()
        self._reading = trio.CapacityLimiter(1)
        self._meter.host()
        self.changed: Cell[int] = Cell(0)

    async def register(self) -> Register:
        """The machine's whole truth. Node id, shards, epoch and features are the caller's to put in."""
        if self._host is None:
            await self._look_at_host()
        now = self.snapshot()
        return Register(
            node=NodeId(""),
            version="",
            address=self._view.address,
            host=now.host,
            gpu_driver=now.driver,
            problems=now.problems,
        )

    def beats(self, register: Register) -> Beats:
        """Heartbeats for one stream that was told `register`."""
        return Beats(self, register)

    def snapshot(self) -> Snapshot:
        """Now, from what was read last; only what /proc gives at once is read here."""
        return Snapshot(
            host=self._host or Host(boot_id=boot_id(self._view), arch=platform.machine()),
            load=self._meter.host(),
            shards=self._meter.shards(self._pids(), {}),
        )

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_host)

    async def _watch_host(self) -> None:
        while True:
            await self._look_at_host()
            await trio.sleep(HOST_PERIOD)

    async def _look_at_host(self) -> None:
        """Read the host's facts in a thread. One reading at a time: a stuck one is not joined by others."""
        if self._reading.available_tokens == 0:
            return
        with trio.move_on_after(HOST_WITHIN):
            facts = await trio.to_thread.run_sync(
                partial(host, self._view), limiter=self._reading, abandon_on_cancel=True
            )
            before, self._host = self._host, facts
            if before is not None and _lasting(before) != _lasting(facts):
                self.changed.set(self.changed.value + 1)


class Beats:
    """What one stream has been told, so that only what changed since is said again (B1, B2)."""

    def __init__(self, survey: Survey, register: Register) -> None:
        self._survey = survey
        self._disks = register.host.disks
        self._memory_bytes = register.host.memory_bytes
        self._problems = register.problems
        self._shards: tuple[ShardLoad, ...] = ()

    async def next(self) -> Heartbeat:
        """The next heartbeat. Never waits for hardware."""
        await trio.lowlevel.checkpoint()
        now = self._survey.snapshot()
        beat = Heartbeat(
            load=now.load,
            shards=now.shards if now.shards != self._shards else None,
            problems=now.problems if now.problems != self._problems else None,
            disks=now.host.disks if moved(self._disks, now.host.disks) else None,
            memory_bytes=now.host.memory_bytes if now.host.memory_bytes != self._memory_bytes else None,
        )
        self._shards, self._problems, self._memory_bytes = now.shards, now.problems, now.host.memory_bytes
        if beat.disks is not None:
            self._disks = beat.disks
        return beat


def moved(before: tuple[Disk, ...], now: tuple[Disk, ...]) -> bool:
    """Whether disks changed by more than the small change that every log line makes."""
    if [(disk.path, disk.mount, disk.total_bytes) for disk in before] != [
        (disk.path, disk.mount, disk.total_bytes) for disk in now
    ]:
        return True
    return any(
        abs(old.free_bytes - new.free_bytes) > min(DISK_SHARE * new.total_bytes, DISK_BYTES)
        for old, new in zip(before, now, strict=True)
    )


def _lasting(facts: Host) -> Host:
    """A host's facts without what heartbeats tell."""
    return Host(
        hostname=facts.hostname,
        machine_id=facts.machine_id,
        boot_id=facts.boot_id,
        os=facts.os,
        kernel=facts.kernel,
        arch=facts.arch,
        cpu=facts.cpu,
        swap_bytes=facts.swap_bytes,
        interfaces=facts.interfaces,
        limits=facts.limits,
    )

"""What one stream has been told of a node, so that a heartbeat says only what changed since (B1, B2)."""

from __future__ import annotations

import time
from collections.abc import Callable

import trio

from llmgw.node.snapshot import Snapshot
from llmgw.wire.agent import Heartbeat, Register
from llmgw.wire.facts import Disk, GpuFabric, GpuLoad, GpuProcess, PortLoad, ShardLoad

#: Disks are told again after a change of this share of their size, or of this many bytes.
DISK_SHARE, DISK_BYTES = 0.01, 1 << 30
#: Ports that stand still are told again after this many seconds: a longer gap would give no rate (B5).
PORTS_AGAIN = 60.0


class Beats:
    """One stream's heartbeats. `look` gives the node as it is known now, without waiting for hardware."""

    def __init__(self, look: Callable[[], Snapshot], register: Register) -> None:
        self._look = look
        self._disks = register.host.disks
        self._memory_bytes = register.host.memory_bytes
        self._problems = register.problems
        self._port_facts = register.ports
        self._imex = register.imex
        self._fabrics: dict[str, GpuFabric] = {gpu.uuid: gpu.fabric for gpu in register.gpus if gpu.fabric is not None}
        self._shards: tuple[ShardLoad, ...] = ()
        self._gpus: tuple[GpuLoad, ...] = ()
        self._processes: tuple[GpuProcess, ...] = ()
        self._ports: tuple[PortLoad, ...] = ()
        self._ports_still = 0
        self._ports_at = float("-inf")

    async def next(self) -> Heartbeat:
        """The next heartbeat. Never waits for hardware."""
        await trio.lowlevel.checkpoint()
        now = self._look()
        fabrics = dict(now.gpu_fabrics)
        beat = Heartbeat(
            load=now.load,
            shards=now.shards if now.shards != self._shards else None,
            gpus=now.gpu_loads if now.gpu_loads != self._gpus else None,
            gpu_processes=now.gpu_processes if now.gpu_processes != self._processes else None,
            gpu_fabrics=fabrics if fabrics != self._fabrics else None,
            ports=now.port_loads if self._ports_due(now.port_loads) else None,
            port_facts=now.ports if now.ports != self._port_facts else None,
            imex=now.imex if now.imex != self._imex else None,
            problems=now.problems if now.problems != self._problems else None,
            disks=now.host.disks if moved(self._disks, now.host.disks) else None,
            memory_bytes=now.host.memory_bytes if now.host.memory_bytes != self._memory_bytes else None,
        )
        self._shards, self._gpus, self._processes, self._fabrics = now.shards, now.gpu_loads, now.gpu_processes, fabrics
        self._port_facts, self._imex, self._problems = now.ports, now.imex, now.problems
        self._memory_bytes = now.host.memory_bytes
        if beat.disks is not None:
            self._disks = beat.disks
        return beat

    def _ports_due(self, loads: tuple[PortLoad, ...]) -> bool:
        """Ports that changed, and once more after that, so that a rate comes down to zero; then now and then."""
        now = time.monotonic()
        self._ports_still = self._ports_still + 1 if loads == self._ports else 0
        due = self._ports_still <= 1 or now - self._ports_at >= PORTS_AGAIN
        if not loads and not self._ports:
            return False
        self._ports = loads
        if due:
            self._ports_at = now
        return due


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

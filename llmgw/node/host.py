"""The machine itself: who it is, what it has, and what it does now."""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Mapping

import attrs
from msgspec import structs

from llmgw.node import files
from llmgw.node.cgroups import Share, share
from llmgw.node.disks import disks
from llmgw.node.interfaces import interfaces
from llmgw.node.limits import fabric_manager, limits
from llmgw.node.view import View
from llmgw.wire.facts import Cpu, Host, HostLoad, ShardId, ShardLoad


def host(view: View, before: Host | None = None) -> Host:
    """The host's lasting facts. May block on a dead mount: call it in a thread.

    With what was known `before`, what only a reboot or an administrator changes is looked at anew only when asked
    for by None: it costs a walk through PCI.
    """
    own = share(view)
    memory = files.fields(files.text(view.at("proc/meminfo")))
    total = files.kilobytes(memory.get("MemTotal")) or 0
    return Host(
        hostname=files.text(view.at("proc/sys/kernel/hostname")) or os.uname().nodename,
        machine_id=files.text(view.at("etc/machine-id")) or "",
        boot_id=boot_id(view),
        os=os_name(view),
        kernel=files.text(view.at("proc/sys/kernel/osrelease")) or os.uname().release,
        arch=os.uname().machine,
        cpu=before.cpu if before else cpu(view, own),
        memory_bytes=min(total, own.memory_bytes) if own.memory_bytes is not None and total else total,
        swap_bytes=files.kilobytes(memory.get("SwapTotal")) or 0,
        interfaces=interfaces(view),
        disks=disks(view),
        limits=structs.replace(before.limits, fabric_manager=fabric_manager(view)) if before else limits(view),
        reserved_bytes=view.reserve,
    )


def boot_id(view: View) -> str:
    return files.text(view.at("proc/sys/kernel/random/boot_id")) or ""


def os_name(view: View) -> str:
    release = files.text(view.at("etc/os-release")) or files.text(view.at("usr/lib/os-release"))
    words = files.fields(release, "=")
    try:
        return " ".join(shlex.split(words.get("PRETTY_NAME") or words.get("NAME", "")))
    except ValueError:
        return ""


def cpu(view: View, own: Share) -> Cpu:
    """The processor, counted as what this process may use of it."""
    sockets, cores, model = set[str](), set[tuple[str, str]](), ""
    for block in (files.text(view.at("proc/cpuinfo")) or "").split("\n\n"):
        facts = files.fields(block)
        model = model or facts.get("model name") or facts.get("Model") or facts.get("cpu") or ""
        if "physical id" in facts:
            sockets.add(facts["physical id"])
            cores.add((facts["physical id"], facts.get("core id", facts.get("processor", ""))))
    threads = len(os.sched_getaffinity(0))
    if own.cpus is not None:
        threads = max(1, min(threads, math.ceil(own.cpus)))
    nodes = [
        name for name in files.names(view.at("sys/devices/system/node")) if name[:4] == "node" and name[4:].isdigit()
    ]
    return Cpu(
        model=model,
        sockets=len(sockets) or None,
        cores=len(cores) or None,
        threads=threads,
        numa_nodes=len(nodes) or None,
    )


@attrs.frozen
class _Ticks:
    """A process's CPU ticks so far. The start time tells a reused pid from the process it was."""

    started: int
    ticks: int


class Meter:
    """Turns the kernel's counters into loads: each reading is of the time since the one before."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._busy: tuple[int, int] | None = None
        self._processes: dict[int, _Ticks] = {}
        self._processes_at = 0.0
        self._hertz = os.sysconf("SC_CLK_TCK")
        self._page = os.sysconf("SC_PAGE_SIZE")
        self.last = HostLoad()

    def host(self) -> HostLoad:
        """The host now. The first reading has no CPU load, there being nothing to compare with."""
        memory = files.fields(files.text(self._view.at("proc/meminfo")))
        available = files.kilobytes(memory.get("MemAvailable")) or 0
        own = share(self._view)
        if own.memory_bytes is not None and own.memory_used_bytes is not None:
            available = min(available, max(0, own.memory_bytes - own.memory_used_bytes))
        load = (files.text(self._view.at("proc/loadavg")) or "0").split()[0]
        try:
            load1 = float(load)
        except ValueError:
            load1 = 0.0
        self.last = HostLoad(self._cpu_percent(), load1, available, round(time.time(), 3))
        return self.last

    def _cpu_percent(self) -> float:
        lines = (files.text(self._view.at("proc/stat")) or "").splitlines()
        ticks = [files.integer(word) or 0 for word in lines[0].split()[1:9]] if lines else []
        if len(ticks) < 5:
            return 0.0
        total, idle = sum(ticks), ticks[3] + ticks[4]
        before, self._busy = self._busy, (total, idle)
        if before is None or total <= before[0]:
            return 0.0
        share_idle = (idle - before[1]) / (total - before[0])
        return round(100 * min(1.0, max(0.0, 1 - share_idle)), 1)

    def shards(self, pids: Mapping[ShardId, frozenset[int]], gpu_memory: Mapping[int, int]) -> tuple[ShardLoad, ...]:
        """Each shard with all its processes. `gpu_memory` is what each pid holds on GPUs, in bytes."""
        now = time.monotonic()
        elapsed, self._processes_at = now - self._processes_at, now
        seen: dict[int, _Ticks] = {}
        loads = []
        for shard, members in sorted(pids.items()):
            ticks = rss = count = 0
            for pid in members:
                usage = self._process(pid)
                if usage is None:
                    continue
                count += 1
                rss += usage[1]
                seen[pid] = usage[0]
                before = self._processes.get(pid)
                if before is not None and before.started == usage[0].started:
                    ticks += usage[0].ticks - before.ticks
            held = [gpu_memory[pid] for pid in members if pid in gpu_memory]
            percent = 100 * ticks / self._hertz / elapsed if elapsed > 0 else 0.0
            loads.append(ShardLoad(shard, round(max(0.0, percent), 1), rss, sum(held) if held else None, count))
        self._processes = seen
        return tuple(loads)

    def _process(self, pid: int) -> tuple[_Ticks, int] | None:
        stat = files.text(self._view.at(f"proc/{pid}/stat"))
        # The name is in brackets and may itself hold blanks and brackets: count from the last one.
        words = stat.rpartition(")")[2].split() if stat else []
        if len(words) < 22:
            return None
        user, system, started, pages = (files.integer(words[at]) or 0 for at in (11, 12, 19, 21))
        return _Ticks(started, user + system), pages * self._page

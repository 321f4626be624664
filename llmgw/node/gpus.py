"""The node's GPUs, watched: what the driver says while it answers, the last good values while it does not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import attrs
import msgspec
import trio

from llmgw.backoff import Backoff
from llmgw.cell import Cell
from llmgw.node import files, pci
from llmgw.node.host import boot_id
from llmgw.node.nvml import inventory
from llmgw.node.nvml.probe import Ghost, Probe, Unanswered
from llmgw.node.nvml.talk import Look, Seen
from llmgw.node.view import View
from llmgw.wire.facts import Gpu, GpuDriver, GpuFabric, GpuLoad, GpuProcess

#: Seconds between two whole looks: lists GPUs anew and reads NVLink and SRAM counters.
WHOLE_PERIOD = 60.0
#: Seconds until a driver that was not there, or did not fit, is looked for in a new process.
ABSENT_AGAIN, REFUSED_AGAIN = 300.0, 60.0
#: Seconds until a GPU at which the driver hung is asked again.
HUNG_AGAIN = 600.0
#: Seconds that somebody who wants to know now waits for the driver.
FRESH_WITHIN = 3.0
#: After a process died or hung: a spread that grows, so that a sick driver is not hammered.
AGAIN = Backoff(base=2.0, cap=60.0, stable=300.0)
#: The kernel's number of the first PID namespace (include/linux/proc_ns.h).
FIRST_PID_NAMESPACE = 0xEFFFFFFC


@attrs.frozen
class GpuView:
    """GPUs at the last good answer. `at` is monotonic; None: there was none yet.

    `stalled_since` (Unix seconds) and `stalled` say that the driver does not answer now; all else then is the
    last that it said. `crashes` counts processes in a row that it ended.
    """

    at: float | None = None
    driver: GpuDriver = GpuDriver()
    gpus: tuple[Gpu, ...] = ()
    present: tuple[inventory.PciGpu, ...] = ()
    loads: tuple[GpuLoad, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    fabrics: dict[str, GpuFabric] = attrs.field(factory=dict)
    refused: int = 0
    stalled_since: float | None = None
    stalled: str = ""
    crashes: int = 0
    xids: tuple[tuple[float, str, int], ...] = ()  # (monotonic, gpu uuid, number), the newest of this agent's life


class Kept(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What outlives the agent, so that its restart erases no evidence (NV15). Valid for one boot."""

    boot: str
    driver: GpuDriver = GpuDriver()
    gpus: tuple[Gpu, ...] = ()
    stalled_since: float | None = None
    stalled: str = ""
    ghost_pid: int = 0
    ghost_started: int = 0


class Gpus:
    """Watches the GPUs. `view` is replaced at each answer, and when answers stop."""

    def __init__(self, view: View, *, probe: Probe | None = None, keep: bool = True) -> None:
        self._where = view
        self._file = view.state / "gpus.json" if view.state else None
        self._may_keep = keep
        self._boot = boot_id(view)
        kept = recall(self._file, self._boot)
        self._kept = kept
        self.view: Cell[GpuView] = Cell(
            GpuView(driver=kept.driver, gpus=kept.gpus, stalled_since=kept.stalled_since, stalled=kept.stalled)
        )
        self.probe = probe or Probe()
        if kept.ghost_pid and self.probe.ghost is None:
            self.probe.ghost = Ghost(kept.ghost_pid, kept.ghost_started)
        #: Set once there is an answer, or a reason why there is none.
        self.asked = trio.Event()
        self._present: tuple[inventory.PciGpu, ...] = ()
        self._sooner = trio.Event()
        self._skip: dict[int, float] = {}  # index of a GPU at which the driver hung -> when to try it again

    async def run(self) -> None:
        """Ask again and again, until cancelled."""
        whole_at, attempt = -WHOLE_PERIOD, 0
        try:
            while True:
                began = time.monotonic()
                whole = began - whole_at >= WHOLE_PERIOD
                if whole:
                    self._present = await self._on_the_bus()
                self._skip = {index: until for index, until in self._skip.items() if until > began}
                try:
                    seen = await self.probe.ask(Look(whole, tuple(sorted(self._skip))))
                except Unanswered as unanswered:
                    whole_at = -WHOLE_PERIOD
                    if self._sets_aside(unanswered):
                        continue
                    self.unanswered(unanswered, began)
                    whole_at, pause = -WHOLE_PERIOD, AGAIN.delay(attempt, 1.0)
                    attempt += 1
                else:
                    self.answered(seen)
                    attempt = 0
                    if seen.refused:
                        whole_at = -WHOLE_PERIOD
                        pause = ABSENT_AGAIN if seen.refused in (9, 12) else REFUSED_AGAIN
                    else:
                        whole_at = began if whole or seen.gpus is not None else whole_at
                        pause = max(0.0, self._where.period - (time.monotonic() - began))
                self.asked.set()
                with trio.move_on_after(pause):
                    await self._sooner.wait()
                self._sooner = trio.Event()
        finally:
            await self.probe.aclose()

    async def fresh(self, within: float = FRESH_WITHIN) -> GpuView:
        """What the driver says next, asked now; the last that it said when it does not answer in time."""
        with trio.move_on_after(within):
            version = self.view.version
            self._sooner.set()
            view, _ = await self.view.next(version)
            return view
        return self.view.value

    def _sets_aside(self, unanswered: Unanswered) -> bool:
        """One GPU may hang while the others live: go on without it, and come back to it now and then."""
        if unanswered.gpu is None or unanswered.gpu in self._skip:
            return False
        self._skip[unanswered.gpu] = time.monotonic() + HUNG_AGAIN
        return True

    async def once(self) -> GpuView:
        """Ask one time and end the process: for somebody who wants to know now."""
        began = time.monotonic()
        self._present = await self._on_the_bus()
        try:
            self.answered(await self.probe.ask(Look(True)))
        except Unanswered as unanswered:
            self.unanswered(unanswered, began)
        finally:
            await self.probe.aclose()
        return self.view.value

    async def _on_the_bus(self) -> tuple[inventory.PciGpu, ...]:
        with trio.move_on_after(5):
            return await trio.to_thread.run_sync(partial(pci.gpus, self._where), abandon_on_cancel=True)
        return self._present

    def answered(self, seen: Seen) -> None:
        before = self.view.value
        now = time.monotonic()
        if seen.refused:
            gpus, driver = inventory.without_driver(before.gpus, seen.refused)
            fresh = GpuView(
                at=now, driver=driver, gpus=gpus, present=self._present, refused=seen.refused, xids=before.xids
            )
        else:
            xids = (*before.xids, *((now, event.gpu, event.xid) for event in seen.xids))[-256:]
            fresh = GpuView(
                at=now,
                driver=seen.driver,
                gpus=inventory.merged(before.gpus, seen, self._present),
                present=self._present,
                loads=seen.loads,
                processes=named(seen.processes, self._where),
                fabrics=seen.fabrics,
                xids=xids,
            )
        self.view.set(fresh)
        self._keep()

    def unanswered(self, unanswered: Unanswered, began: float) -> None:
        before = self.view.value
        if unanswered.stalled:
            since = before.stalled_since or time.time() - (time.monotonic() - began)
            self.view.set(attrs.evolve(before, present=self._present, stalled_since=since, stalled=unanswered.words))
        else:
            self.view.set(
                attrs.evolve(before, present=self._present, crashes=before.crashes + 1, stalled=unanswered.words)
            )
        self._keep()

    def _keep(self) -> None:
        """Write down what must outlive us, if it changed. A state folder that cannot be written costs only that."""
        view, ghost = self.view.value, self.probe.ghost
        lasting = tuple(msgspec.structs.replace(gpu, fabric=None) for gpu in view.gpus)
        kept = Kept(
            boot=self._boot,
            driver=view.driver,
            gpus=lasting,
            stalled_since=view.stalled_since,
            stalled=view.stalled if view.stalled_since is not None else "",
            ghost_pid=ghost.pid if ghost else 0,
            ghost_started=ghost.started if ghost else 0,
        )
        if self._file is None or not self._may_keep or kept == self._kept:
            return
        self._kept = kept
        try:
            beside = self._file.with_suffix(".new")
            beside.write_bytes(msgspec.json.encode(kept))
            os.replace(beside, self._file)
        except OSError:
            return


def recall(file: Path | None, boot: str) -> Kept:
    """What an earlier agent of this boot wrote down; nothing of another boot, whose processes are all gone."""
    if file is None or (text := files.text(file)) is None:
        return Kept(boot=boot)
    try:
        kept = msgspec.json.decode(text, type=Kept)
    except (msgspec.MsgspecError, RecursionError):
        return Kept(boot=boot)
    return kept if kept.boot == boot else Kept(boot=boot)


def named(processes: Iterable[GpuProcess], view: View) -> tuple[GpuProcess, ...]:
    """Processes with the names that this PID namespace has for them."""
    return tuple(
        GpuProcess(each.gpu, each.pid, files.text(view.at(f"proc/{each.pid}/comm"), 64) or "", each.memory_bytes)
        for each in processes
    )


def own_pid_namespace(view: View) -> bool:
    """Whether process ids that the driver gives mean anything here: only in the first PID namespace they do."""
    try:
        return os.stat(view.at("proc/self/ns/pid")).st_ino == FIRST_PID_NAMESPACE
    except OSError:
        return True


def owned(processes: Iterable[GpuProcess], shard_of: dict[int, str], translated: bool) -> tuple[GpuProcess, ...]:
    """Processes with the shard each belongs to: "" for a foreign one, "?" where pids are another namespace's (NV10)."""
    return tuple(
        GpuProcess(
            each.gpu,
            each.pid,
            each.name if translated or each.pid in shard_of else "(PID namespace differs)",
            each.memory_bytes,
            shard_of.get(each.pid, "" if translated else "?"),
        )
        for each in processes
    )

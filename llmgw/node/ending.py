"""Ending an engine so that nothing of it is left: no process, no worker that moved away, no memory on a GPU (C6).

An engine is a tree of processes, and its first process is often the first to die. A worker that lost its parent
keeps the GPU's memory while the port is free again (EN01, EN03), so "stopped" is said only after looking.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path

import trio

from llmgw.node import processes
from llmgw.node.engines.environment import TOKEN
from llmgw.node.processes import Handle, Seen
from llmgw.node.records import Record
from llmgw.wire.facts import GpuProcess

#: Asks the driver which processes hold memory on which GPU.
GpuHolders = Callable[[], Awaitable[tuple[GpuProcess, ...]]]
#: Is told what does not end, in words, each time that is looked at again; "" when there is nothing to say of it yet.
Stubborn = Callable[[str], None]

_RETURN_SECONDS = 30.0
#: Giving back hundreds of gigabytes takes the kernel some seconds: one that is still there after these is stubborn.
_DIES_WITHIN = 5.0


def belonging(record: Record) -> dict[int, Seen]:
    """Every living process of a run, found by all marks it has. Reads all of /proc: call it in a thread."""
    everybody = processes.everyone()
    marked = processes.carrying(TOKEN, record.token, everybody)
    scope = processes.in_scope(Path(record.scope)) if record.scope else ()
    if not record.pid:
        return processes.members(0, 1 << 62, everybody, marked=marked)
    return processes.members(record.pid, record.started, everybody, of_scope=scope, marked=marked)


def remaining(record: Record, known: dict[int, Seen]) -> dict[int, Seen]:
    """Every living process of a run, with those that were `known` to be of it and their children; `known` grows.

    Of a worker with a session of its own that wrote over its environment only its parent tells, while that lives.
    """
    known |= belonging(record)
    everybody = processes.everyone()
    ours = [pid for pid, seen in known.items() if pid in everybody and _same(everybody[pid], seen)]
    known |= processes.members(0, 1 << 62, everybody, marked=ours)
    return {pid: everybody[pid] for pid in known if pid in everybody and _same(everybody[pid], known[pid])}


def _same(now: Seen, before: Seen) -> bool:
    return now.alive and now.started == before.started


async def clear(record: Record, *, grace: float, stubborn: Stubborn) -> tuple[int | None, int | None]:
    """End every process of a run; when none is left, the first one's (exit code, signal) if it was our child.

    SIGTERM to the process group, `grace` seconds, then SIGKILL to whatever belongs to the run, wherever it went. What
    gives its shared memory back is spared until the others have had their time to die.
    What even that does not end (a process inside the kernel, waiting for a device, or one that became another user's)
    is told to `stubborn` and waited for, for ever.
    """
    known: dict[int, Seen] = {}
    members = await trio.to_thread.run_sync(remaining, record, known)
    if grace > 0 and record.pid and any(seen.group == record.pid for seen in members.values()):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(record.pid, signal.SIGTERM)
        with trio.move_on_after(grace):
            while members:
                await _ended(members)
                members = await trio.to_thread.run_sync(remaining, record, known)
    pause, since = 1.0, trio.current_time()
    while members := await trio.to_thread.run_sync(remaining, record, known):
        late = trio.current_time() - since >= _DIES_WITHIN
        tidying = {pid for pid in members if not late and _tidying(pid)}
        for seen in members.values():
            if seen.pid not in tidying:
                kill(seen)
        with trio.move_on_after(pause) as waiting:
            await _ended(members)
        if waiting.cancelled_caught and not tidying:
            left = await trio.to_thread.run_sync(remaining, record, known)
            if left:
                late = trio.current_time() - since >= _DIES_WITHIN
                stubborn(f"these processes do not end even by SIGKILL: {_named(left)}" if late else "")
            pause = min(pause * 2, 10.0)
    return reap(record)


def _tidying(pid: int) -> bool:
    """Whether that is Python's own process that removes shared memory, by itself, once all others have ended.

    An engine's shared memory is hundreds of megabytes in /dev/shm, which nobody else would ever give back.
    """
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def reap(record: Record) -> tuple[int | None, int | None]:
    """Lay the run's first process to rest, if it is a child of ours and still waits for that."""
    seen = processes.look(record.pid) if record.pid else None
    if seen is None or seen.started != record.started:
        return None, None
    try:
        with Handle(record.pid) as handle:
            return handle.reap()
    except ProcessLookupError:
        return None, None


async def gpus_returned(record: Record, pids: frozenset[int], holders: GpuHolders | None, stubborn: Stubborn) -> str:
    """Wait until no GPU of the shard is held by one of its processes; then who else holds memory there, in words."""
    if holders is None or not record.spec.gpus:
        return ""
    since, pause = trio.current_time(), 0.1
    while True:
        there = [process for process in await holders() if process.gpu in record.spec.gpus]
        left = [process for process in there if process.pid in pids]
        if not left:
            return f"GPU memory is still held by {_holding(there)}" if there else ""
        if trio.current_time() - since > _RETURN_SECONDS:
            stubborn(f"the driver still counts memory for processes that ended: {_holding(left)}")
            pause = 5.0
        await trio.sleep(pause)
        pause = min(pause * 2, 5.0)


def kill(seen: Seen) -> None:
    """SIGKILL to exactly this process; nothing when it is gone, or another user's by now (a setuid program)."""
    try:
        with Handle(seen.pid) as handle:
            now = processes.look(seen.pid)
            # Looked at after the hold was taken: from here on the number cannot slip to another process.
            if now is not None and now.started == seen.started:
                handle.send(signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


async def _ended(members: Mapping[int, Seen]) -> None:
    """Wait until all of these have ended."""
    async with trio.open_nursery() as nursery:
        for seen in members.values():
            nursery.start_soon(_one_ended, seen)


async def _one_ended(seen: Seen) -> None:
    try:
        with Handle(seen.pid) as handle:
            now = processes.look(seen.pid)
            if now is not None and now.started == seen.started:
                await handle.ended()
    except ProcessLookupError:
        return


def _named(members: Mapping[int, Seen]) -> str:
    return ", ".join(f"{seen.pid} ({seen.name}, state {seen.state})" for seen in members.values())


def _holding(there: list[GpuProcess]) -> str:
    return ", ".join(
        f"{process.pid} ({process.name or 'unknown'}, "
        f"{'unknown' if process.memory_bytes is None else f'{process.memory_bytes >> 20} MiB'} on {process.gpu})"
        for process in there
    )

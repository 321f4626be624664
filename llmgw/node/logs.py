"""The engines' output on disk, and the answers to `ctl logs` (C7).

An engine writes straight into its run's file, so nothing of ours stands in its way: no reader that may die, hang or
fall behind, and an engine whose agent is away goes on writing. The file is kept small from outside (see `trim`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import trio

from llmgw.errors import NotFound
from llmgw.log import Ring, redact
from llmgw.node.lines import clean, last
from llmgw.node.records import file_name, shard_name
from llmgw.node.runs import RunEnd, RunName, expendable
from llmgw.wire.control import LogSource, LogsReply, LogsRequest
from llmgw.wire.facts import ShardId

AGENT = "agent"
_MOST_LINES = 5000
_MOST_READ = 2 << 20
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # fallocate(2)
_BLOCK = 4096

_libc = ctypes.CDLL(None, use_errno=True)
# musl's off_t has 64 bits everywhere and so only the plain name.
_fallocate = getattr(_libc, "fallocate64", None) or _libc.fallocate


class Logs:
    """A folder with a folder for each shard, and in it a file for each run.

    `most_bytes` is what one run may take on the disk: its first `head_bytes` and its newest output are kept.
    `keep` runs of a shard are kept besides the first failure of a crash loop.
    """

    def __init__(
        self, folder: Path, ring: Ring, *, most_bytes: int = 32 << 20, head_bytes: int = 1 << 20, keep: int = 5
    ) -> None:
        self._folder = folder
        self._ring = ring
        self._most = most_bytes
        self._head = head_bytes
        self._keep = keep

    # --- the runs' files; these may block on the disk -------------------------------------------------

    def path(self, shard: ShardId, run: RunName) -> Path:
        return self._folder / file_name(shard) / f"{run}.log"

    def begin(self, shard: ShardId, run: RunName) -> Path:
        """The file for a new run. What lies there of an older run of the same name stays above it."""
        path = self.path(shard, run)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        os.utime(path.parent)  # so that `forget` leaves it alone
        path.with_suffix(".end").unlink(missing_ok=True)
        return path

    def end(self, shard: ShardId, run: RunName, how: RunEnd) -> None:
        """Note how a run ended, and remove the logs that nobody will need."""
        folder = self.path(shard, run).parent
        if not folder.is_dir():
            return
        (folder / f"{run}.end").write_bytes(msgspec.json.encode(how))
        known = [(name, self._how(folder / f"{name}.end")) for name in self._runs(folder)]
        for name in expendable(known, self._keep):
            (folder / f"{name}.log").unlink(missing_ok=True)
            (folder / f"{name}.end").unlink(missing_ok=True)

    def forget(self, older_than: float = 14 * 86400.0) -> None:
        """Remove the logs of shards that have written nothing for so many seconds and have no run that goes on."""
        for folder in self._folders():
            runs = list(self._runs(folder))
            # The folder itself counts: a run that begins just now has no file in it yet.
            newest = max(self._written(folder), *(self._written(folder / f"{run}.log") for run in runs), 0.0)
            going_on = any(not (folder / f"{run}.end").exists() for run in runs)
            if not going_on and time.time() - newest > older_than:
                shutil.rmtree(folder, ignore_errors=True)

    def last_lines(self, shard: ShardId, run: RunName, most: int) -> tuple[str, ...]:
        """The last lines of a run that say something."""
        return tuple(map(redact, last(_tail(self.path(shard, run), 256 << 10)[0], most)))

    def evidence(self, shard: ShardId, run: RunName) -> list[str]:
        """The lines to look for a cause in: the last half megabyte, where causes stand before their consequences."""
        return clean(_tail(self.path(shard, run), 512 << 10)[0])

    def trim(self) -> None:
        """Give back the disk space between the head and the newest output of every log that is too large.

        A hole is punched into the file: places of what is kept do not move, so the engine that appends and a reader
        with a cursor notice nothing, and not a byte of the kept parts can be lost. Where a file system cannot do
        that, the newest output is written again into an emptied file, and what comes in that moment stands before
        it.
        """
        for folder in self._folders():
            for run in self._runs(folder):
                self._trim(folder / f"{run}.log")

    def _trim(self, path: Path) -> None:
        try:
            with path.open("rb+", buffering=0) as file:
                status = os.fstat(file.fileno())
                if status.st_blocks * 512 <= self._most:
                    return
                start = self._head // _BLOCK * _BLOCK
                length = (status.st_size - (self._most - self._head) // 2 - start) // _BLOCK * _BLOCK
                if length <= 0 or _punch(file.fileno(), start, length):
                    return
                newest = _tail(path, (self._most - self._head) // 2)[0]
                file.truncate(0)
            with path.open("ab", buffering=0) as file:
                file.write(b"... older output was dropped ...\n" + newest)
        except OSError:
            return  # a disk that fails is reported by others; a log is not worth dying for

    # --- answers ---------------------------------------------------------------------------------------

    async def answer(self, request: LogsRequest) -> LogsReply:
        """Lines of a source, and every source there is. Raises NotFound for one that this node does not have."""
        sources = await trio.to_thread.run_sync(self.sources)
        if request.source == AGENT:
            return await self._agent(request, sources)
        source = next((source for source in sources if source.name == request.source), None)
        if source is None or (request.run and request.run not in source.runs):
            names = ", ".join(source.name for source in sources)
            what = f"run {request.run} of {request.source}" if source is not None else request.source
            raise NotFound(f"this node has no log of {what}", remedy=f"it has: {names}")
        deadline = trio.current_time() + max(0.0, request.wait)
        while True:
            reply = await trio.to_thread.run_sync(self._read, request, source)
            if reply.lines or not request.after or trio.current_time() >= deadline:
                return reply
            # Nothing tells of an append by another process without a watch on every file; a tenth of a second is soon.
            await trio.sleep(min(0.1, max(0.0, deadline - trio.current_time())))

    def sources(self) -> tuple[LogSource, ...]:
        """ "agent" first, then each shard with a log, by name."""
        found = [LogSource(name=AGENT)]
        for folder in self._folders():
            runs = tuple(map(str, sorted(self._runs(folder))))
            size = sum(self._size(folder / f"{run}.log") for run in runs)
            if runs:
                found.append(LogSource(name=shard_name(folder.name), runs=runs, bytes=size))
        return tuple(found)

    async def _agent(self, request: LogsRequest, sources: tuple[LogSource, ...]) -> LogsReply:
        most = min(max(1, request.lines), _MOST_LINES)
        if not request.after.isdecimal():
            lines, cursor = self._ring.last(most), self._ring.cursor
            return LogsReply(lines=lines, sources=sources, source=AGENT, cursor=str(cursor))
        after = int(request.after)
        if request.wait > 0 and after <= self._ring.cursor:
            with trio.move_on_after(request.wait):
                await self._ring.newer(after)
        lines, cursor, lost = self._ring.after(after, most)
        return LogsReply(lines=lines, sources=sources, source=AGENT, cursor=str(cursor), truncated=lost)

    def _read(self, request: LogsRequest, source: LogSource) -> LogsReply:
        folder = self._folder / file_name(ShardId(source.name))
        runs = [str(run) for run in sorted(self._runs(folder))] or list(source.runs)
        most = min(max(1, request.lines), _MOST_LINES)
        run, mark, at = request.after.rpartition(":")
        if mark and at.isdecimal() and run in runs:
            data, end, lost = _from(folder / f"{run}.log", int(at))
            newer = runs[runs.index(run) + 1 :]
            if not data and newer and not request.run:
                run = newer[0]  # the one that was followed has ended: go on with the next
                data, end, lost = _from(folder / f"{run}.log", 0)
            lines = clean(data)
            if len(lines) > most:
                keep = b"\n".join(data.split(b"\n")[:most]) + b"\n"
                end, lines = end - len(data) + len(keep), clean(keep)
        else:
            run, lost = request.run or runs[-1], bool(mark)
            data, end = _tail(folder / f"{run}.log", _MOST_READ)
            lines = clean(data)[-most:]
        return LogsReply(
            lines=tuple(map(redact, lines)),
            source=source.name,
            run=run,
            cursor=f"{run}:{end}",
            truncated=lost,
            sources=self.sources(),
        )

    # --- the folder --------------------------------------------------------------------------------------

    def _folders(self) -> list[Path]:
        try:
            return sorted(path for path in self._folder.iterdir() if path.is_dir())
        except OSError:
            return []

    def _runs(self, folder: Path) -> Iterator[RunName]:
        try:
            names = os.listdir(folder)
        except OSError:
            return
        for name in names:
            if name.endswith(".log") and (run := RunName.parse(name.removesuffix(".log"))) is not None:
                yield run

    def _how(self, path: Path) -> RunEnd | None:
        try:
            return msgspec.json.decode(path.read_bytes(), type=RunEnd)
        except OSError:
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return RunEnd()

    def _written(self, path: Path) -> float:
        try:
            return path.stat().st_mtime
        except OSError:
            return 0.0

    def _size(self, path: Path) -> int:
        try:
            return path.stat().st_blocks * 512
        except OSError:
            return 0


def _punch(descriptor: int, start: int, length: int) -> bool:
    """Free the disk space of a part of a file. False where the file system cannot. Raises OSError for the rest."""
    arguments = (
        ctypes.c_int(descriptor),
        ctypes.c_int(_KEEP_SIZE | _PUNCH_HOLE),
        ctypes.c_int64(start),
        ctypes.c_int64(length),
    )
    if _fallocate(*arguments) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EOPNOTSUPP, errno.ENOSYS):
        return False
    raise OSError(number, os.strerror(number))


def _tail(path: Path, most: int) -> tuple[bytes, int]:
    """The newest output, from the beginning of a line on where that can be, and the place where it ends."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            start = max(0, end - most)
            data = os.pread(file.fileno(), end - start, start)
    except OSError:
        return b"", 0
    if start:
        _, mark, rest = data.partition(b"\n")
        data = rest if mark else data
    return data.lstrip(b"\0"), end


def _from(path: Path, at: int) -> tuple[bytes, int, bool]:
    """Whole lines from a place on, the place behind them, and whether some before them are gone.

    A line without an end is left for later, unless it is longer than anybody would wait for.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            lost = at > size
            at = 0 if lost else at
            if at < size:
                place = os.lseek(file.fileno(), at, os.SEEK_DATA)  # over the hole that `trim` made, if it lies there
                lost, at = lost or place > at, place
            data = os.pread(file.fileno(), _MOST_READ, at)
    except OSError:
        return b"", at, False
    if data.startswith(b"\0"):
        rest = data.lstrip(b"\0")
        at, data, lost = at + len(data) - len(rest), rest, True
    whole = data.rfind(b"\n") + 1
    if not whole and len(data) >= 1 << 16:
        whole = len(data)
    return data[:whole], at + whole, lost

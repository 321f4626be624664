"""The NVML process as the agent holds it: one question at a time, each with a deadline.

The driver's library may hang for ever, even so deep in the kernel that its process cannot be killed, or end
its process. So there is one process at most; when a question's time is up it is killed; and one that does not die
is left behind and no other is started beside it, since it would only join it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs
import msgspec
import trio

from llmgw.node.nvml.talk import LENGTH, MARK, MOST_BYTES, NOWHERE, Look, Seen, answers, framed

COMMAND = (sys.executable, "-P", "-m", "llmgw.node.nvml.child")
#: Seconds for the first answer: without a persistence daemon the driver first wakes every GPU.
FIRST_WITHIN = 90.0
WITHIN = 10.0
#: Seconds from SIGKILL to the conclusion that the kernel will not let go of it.
DEATH_WITHIN = 5.0


class Unanswered(Exception):
    """The question has no answer. `stalled`: the driver did not return in time; else its process died. `gpu` is the
    index of the GPU that it was asked about then, None where it was none in particular."""

    def __init__(self, words: str, *, stalled: bool, gpu: int | None = None) -> None:
        super().__init__(words)
        self.words = words
        self.stalled = stalled
        self.gpu = gpu


@attrs.frozen
class Ghost:
    """A process that was killed and did not die. The start time tells it from a later one of the same pid."""

    pid: int
    started: int

    @property
    def lives(self) -> bool:
        state = started(self.pid)
        return state is not None and state[0] == self.started and state[1] not in ("Z", "X")


def started(pid: int) -> tuple[int, str] | None:
    """(start time in ticks since boot, state letter) of a process."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(words[19]), words[0]
    except (OSError, ValueError, IndexError):
        return None


class Probe:
    """Asks NVML. Only one task may ask at a time."""

    def __init__(
        self,
        *,
        command: Sequence[str] = COMMAND,
        env: Mapping[str, str] | None = None,
        first_within: float = FIRST_WITHIN,
        within: float = WITHIN,
        death_within: float = DEATH_WITHIN,
        kill: Callable[[trio.Process], None] = trio.Process.kill,
        ghost: Ghost | None = None,
    ) -> None:
        self._command = list(command)
        self._env = env
        self._first_within = first_within
        self._within = within
        self._death_within = death_within
        self._kill = kill
        self._process: trio.Process | None = None
        self._fresh = True
        self._words: int | None = None  # a memory file with what the process says on standard error
        self._marks: int | None = None  # another, with where it is
        self.ghost = ghost
        #: Processes left behind are kept, since a Process that is forgotten alive complains.
        self._left: list[trio.Process] = []

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def ask(self, look: Look) -> Seen:
        """One answer. Raises Unanswered; the caller may then ask again later, which starts a new process."""
        if self.ghost is not None:
            if self.ghost.lives:
                raise Unanswered(
                    f"process {self.ghost.pid} hangs in the driver and cannot be killed; no other is started beside it",
                    stalled=True,
                )
            self.ghost = None
        if self._process is None:
            await self._start()
        process, within = self._process, self._first_within if self._fresh else self._within
        assert process is not None
        seen: Seen | None = None
        try:
            with trio.move_on_after(within) as scope:
                seen = await self._exchange(process, look)
            self._fresh = False
        finally:
            # Also when we were cancelled: an answer still to come would be taken for the next question's.
            if seen is None:
                await self._end()
        if seen is not None:
            if seen.refused:
                await self._end()
            return seen
        place = self._place()
        if scope.cancelled_caught:
            where = f", asked about GPU {place}" if place is not None else ""
            raise Unanswered(f"the driver did not answer within {within:.0f} s{where}", stalled=True, gpu=place)
        raise Unanswered(self._obituary(process), stalled=False, gpu=place)

    async def _start(self) -> None:
        if self._words is None:
            self._words = os.memfd_create("nvml-words")
        os.ftruncate(self._words, 0)
        os.lseek(self._words, 0, os.SEEK_SET)
        if self._marks is None:
            self._marks = os.memfd_create("nvml-place")
        os.pwrite(self._marks, MARK.pack(NOWHERE), 0)
        self._process = await trio.lowlevel.open_process(
            [*self._command, str(self._marks)],
            pass_fds=(self._marks,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            env=dict(self._env) if self._env is not None else None,
        )
        self._fresh = True

    async def _exchange(self, process: trio.Process, look: Look) -> Seen | None:
        """None when the process ended or talks nonsense."""
        assert process.stdin is not None
        assert process.stdout is not None
        if self._words is not None and os.fstat(self._words).st_size > 1 << 16:
            os.ftruncate(self._words, 0)
        try:
            await process.stdin.send_all(framed(look))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return None
        data = bytearray()
        wanted = LENGTH.size
        while len(data) < wanted:
            piece = await process.stdout.receive_some()
            if not piece:
                return None
            data += piece
            if wanted == LENGTH.size and len(data) >= LENGTH.size:
                wanted += LENGTH.unpack_from(data)[0]
                if wanted > MOST_BYTES:
                    return None
        try:
            return answers.decode(memoryview(data)[LENGTH.size : wanted])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None

    def _place(self) -> int | None:
        """Where the process was when it was last heard of."""
        data = os.pread(self._marks, MARK.size, 0) if self._marks is not None else b""
        index = MARK.unpack(data)[0] if len(data) == MARK.size else NOWHERE
        return index if index >= 0 else None

    def _obituary(self, process: trio.Process) -> str:
        code = process.returncode
        if code is not None and code < 0:
            how = f"by {signal.Signals(-code).name}" if -code in {*signal.Signals} else f"by signal {-code}"
        else:
            how = f"with code {code}"
        last = ""
        if self._words is not None:
            size = os.fstat(self._words).st_size
            lines = os.pread(self._words, 600, max(0, size - 600)).decode(errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"the process that asks the driver ended {how}" + (f": {last}" if last else "")

    async def aclose(self) -> None:
        """End the process, and leave it behind if the kernel will not. Bounded; safe to call at any time."""
        await self._end()
        for descriptor in (self._words, self._marks):
            if descriptor is not None:
                os.close(descriptor)
        self._words = self._marks = None

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with trio.CancelScope(shield=True):
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    await stream.aclose()
            self._kill(process)
            with trio.move_on_after(self._death_within) as scope:
                await process.wait()
            if scope.cancelled_caught and (since := started(process.pid)) is not None:
                self.ghost = Ghost(process.pid, since[0])
                self._left.append(process)

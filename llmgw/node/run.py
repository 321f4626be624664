"""Runs a program for a request: bounded in time and output, and gone with its whole process group when that ends.

However the block around it ends (the program's own end, the limit, the request's cancellation, the stream's loss),
the group is killed before anything is awaited, so nothing that was started for a request outlives it.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence

import attrs
import trio

from llmgw.errors import LlmgwError
from llmgw.node.lines import plain
from llmgw.node.processes import Handle

#: Output that is kept of one stream: its first and its last so many bytes.
KEPT_BYTES = 128 << 10
#: What makes tools write for programs: in English, and without colours (LG04).
PLAIN = {"LC_ALL": "C", "TERM": "dumb", "NO_COLOR": "1"}
#: Seconds for the kernel to end a process after SIGKILL; only one that hangs in a driver takes longer.
REAP_WITHIN = 5.0


class NotStarted(LlmgwError):
    """The program is missing, or may not be run."""

    code = "not-started"


@attrs.frozen
class Ran:
    """How a program ended. `exit_code` is negative for a signal; `cut_short`: by our limit, whatever the code says."""

    argv: tuple[str, ...]
    exit_code: int | None
    stdout: str
    stderr: str
    cut_short: bool
    seconds: float


class Kept:
    """What is kept of an output: all of a short one, the beginning and the end of a long one."""

    def __init__(self, most: int = KEPT_BYTES) -> None:
        self._most = most
        self._head = bytearray()
        self._tail = bytearray()
        self._lost = 0

    def add(self, data: bytes | bytearray) -> None:
        room = max(0, self._most - len(self._head))
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._most:
            self._lost += len(self._tail) - self._most
            del self._tail[: -self._most]

    def text(self) -> str:
        gap = f"\n... {self._lost} bytes left out ...\n".encode() if self._lost else b""
        return plain(bytes(self._head) + gap + bytes(self._tail))


async def run(
    argv: Sequence[str],
    *,
    limit: float,
    env: Mapping[str, str] | None = None,
    meanwhile: Callable[[int], Awaitable[None]] | None = None,
) -> Ran:
    """Run a program to its end, at most `limit` seconds. Raises NotStarted.

    `meanwhile` gets the process id, which is also that of its group, and is cancelled when the program ends.
    Cancelling the call kills the group at once.
    """
    began = trio.current_time()
    try:
        process = await trio.lowlevel.open_process(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(env or {}), **PLAIN},
            start_new_session=True,
        )
    except OSError as error:
        raise NotStarted(f"{argv[0]} cannot be run: {error.strerror or error}") from None
    out, err = Kept(), Kept()
    cut_short = False
    try:
        with trio.move_on_after(limit) as scope, Handle(process.pid) as handle:
            async with trio.open_nursery() as nursery:
                if meanwhile is not None:
                    nursery.start_soon(meanwhile, process.pid)
                async with trio.open_nursery() as readers:
                    assert process.stdout is not None
                    assert process.stderr is not None
                    readers.start_soon(_read, process.stdout, out)
                    readers.start_soon(_read, process.stderr, err)
                    await handle.ended()
                    # What it left in its group may hold the pipes open for ever.
                    _kill(process.pid)
                nursery.cancel_scope.cancel()
        cut_short = scope.cancelled_caught
    finally:
        _kill(process.pid)
        with trio.CancelScope(shield=True, deadline=trio.current_time() + REAP_WITHIN):
            await process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                with trio.CancelScope(shield=True) as closing:
                    closing.cancel()
                    await pipe.aclose()
    return Ran(tuple(argv), process.returncode, out.text(), err.text(), cut_short, trio.current_time() - began)


def _kill(group: int) -> None:
    """SIGKILL to a group whose leader has not been waited for yet, so that its number is nobody else's."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


async def _read(pipe: trio.abc.ReceiveStream, kept: Kept) -> None:
    try:
        while data := await pipe.receive_some(65536):
            kept.add(data)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        return

"""Runs a long program with its output in a file, and ends it with its whole process group; `run` is for short ones."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import trio

from llmgw.node.processes import Handle
from llmgw.node.run import REAP_WITHIN, NotStarted

#: Engines come first: this gives way to them for processors, and goes first when memory runs out (an agent is spared
#: then, and must not pass that on). exec keeps the process id.
_GIVE_WAY = (
    "ulimit -c 0 2>/dev/null; { echo 500 >/proc/self/oom_score_adj; } 2>/dev/null; "
    'command -v nice >/dev/null && exec nice -n 10 "$@"; exec "$@"'
)


async def run_to_file(
    argv: Sequence[str], output: int, *, env: Mapping[str, str], cwd: Path, limit: float
) -> int | None:
    """The program's exit status, negative for a signal; None when it was ended at the limit. Raises NotStarted.

    One that is not there leaves with 127, and its output says so. However this ends, nothing that stayed in the
    program's process group is left.
    """
    try:
        process = await trio.lowlevel.open_process(
            ["/bin/sh", "-c", _GIVE_WAY, "llmgw", *argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
        )
    except OSError as error:
        raise NotStarted(f"{argv[0]} cannot be run: {error.strerror or error}") from None
    late = True
    try:
        with trio.move_on_after(limit), Handle(process.pid) as handle:
            await handle.ended()
            late = False
    finally:
        # Before it is waited for: until then its number is nobody else's.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with trio.CancelScope(shield=True, deadline=trio.current_time() + REAP_WITHIN):
            await process.wait()
    return None if late else process.returncode

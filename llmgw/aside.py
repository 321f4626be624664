"""Heavy thinking in a process of its own, so that no loop waits for it.

A thread would not do: it shares the interpreter's lock, and decoding or comparing the map of a large fabric holds that
for tens of milliseconds at a time. A process also gives all its memory back, and ends with the scope that asked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import trio

from llmgw.errors import Failed

_ROOT = Path(__file__).resolve().parents[1]


async def aside(function: Callable[..., bytes], *args: bytes, nice: int = 5) -> bytes:
    """What `function(*args)` gives, computed by another process of lower priority.

    `function` is one of llmgw's, found by its name. Cancelling ends the process. Raises Failed when the
    function raised or its process was killed, which is what a machine without memory does.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))}
    done = await trio.run_process(
        [sys.executable, "-P", "-m", "llmgw.aside_child", function.__module__, function.__qualname__, str(nice)],
        stdin=msgspec.msgpack.encode(args), capture_stdout=True, capture_stderr=True, check=False,
        env=environment, deliver_cancel=_kill,
    )  # fmt: skip
    if done.returncode == 0:
        return bytes(done.stdout)
    said = done.stderr.decode(errors="replace").strip().rsplit("\n", 1)[-1]
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
    raise Failed(f"{function.__qualname__} in a process of its own ended with {how}{': ' + said if said else ''}")


async def _kill(process: trio.Process) -> None:
    """There is nothing in it that would need time to end well."""
    process.kill()
    await process.wait()


async def here(function: Callable[..., bytes], *args: bytes, nice: int = 0) -> bytes:
    """The same answer, computed at once in this process: for tests on a clock that leaps while a process works."""
    await trio.lowlevel.checkpoint()
    return function(*args)

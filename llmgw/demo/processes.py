"""The demo's own processes: started with their output in files, and every one of them ended with the demo."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from subprocess import DEVNULL, STDOUT

import trio

from llmgw.errors import LlmgwError

#: In the environment of all that the demo starts, engines included, so that what is left can be found. (An agent keeps
#: its own LLMGW_ variables from its engines, so the name begins otherwise.)
MARK = "DEMO_OF_LLMGW"

_ENTRY = {"llmgw-plane": "plane", "llmgw-node": "node", "llmgw": "llmgw"}


def command(program: str, *args: str) -> list[str]:
    """One of our programs, run by the interpreter that runs this one."""
    code = f"import sys; from llmgw.cli import {_ENTRY[program]} as f; sys.exit(f())"
    # Not what lies in the directory where we were started: a clone is called as the package is.
    return [sys.executable, "-P", "-c", code, *args]


def environment(mark: str) -> dict[str, str]:
    """Ours, without what would configure another fleet."""
    return {key: value for key, value in os.environ.items() if not key.startswith("LLMGW_")} | {MARK: mark}


async def call(program: str, *args: str, env: Mapping[str, str]) -> str:
    """Run one of our programs to its end and return what it printed. Raises LlmgwError with its words."""
    done = await trio.run_process(
        command(program, *args), capture_stdout=True, capture_stderr=True, check=False, env=env, stdin=DEVNULL
    )
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip() or done.stdout.decode(errors="replace").strip()
        raise LlmgwError(f"`{program} {' '.join(args[:2])}` failed: {words}")
    return done.stdout.decode(errors="replace")


async def start(program: str, *args: str, log: Path, env: Mapping[str, str]) -> trio.Process:
    """Start one of our daemons; it is in a session of its own, so that Ctrl-C reaches only the demo."""
    with log.open("ab") as output:
        return await trio.lowlevel.open_process(
            command(program, *args), stdin=DEVNULL, stdout=output, stderr=STDOUT, env=env, start_new_session=True
        )


async def stop(process: trio.Process, within: float = 8.0) -> None:
    """SIGTERM, and SIGKILL when that did not help."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    with trio.move_on_after(within):
        await process.wait()
    if process.poll() is None:
        process.kill()
        await process.wait()


def leftovers(mark: str) -> Iterator[int]:
    """Processes of this machine, not ourselves, that carry the demo's mark."""
    needle = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)
            except OSError:
                continue

"""Runs a tool of the machine: bounded in time and output, in a process group and a folder of its own, gone at the end.

Whatever ends the run (its own end, the limit, the asker's cancellation) ends every process it started. Tools are
run in the C locale, since their words are read.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL

import attrs
import trio

from llmgw.node.lines import plain
from llmgw.node.run import PLAIN
from llmgw.rdma.ran import Ran

#: The most that a tool may print: ten times the map of 10,000 hosts.
MOST_BYTES = 64 << 20


@attrs.frozen
class Printed:
    """A run whose output stays in files: the map of a large fabric is read by another process, not by this one."""

    ran: Ran  # without its streams
    out: Path
    err: Path

    def read(self) -> Ran:
        """The run with its streams."""
        return attrs.evolve(
            self.ran,
            out=plain(self.out.read_bytes()),
            err=plain(self.err.read_bytes()),
        )


async def printed(directory: Path, *argv: str, within: float, environment: Mapping[str, str] | None = None) -> Printed:
    """Run `argv`, its output in files of `directory`. Never raises for what the tool does: see `Ran`."""
    tool = argv[0]
    place = Path(tempfile.mkdtemp(prefix=f"{tool}-", dir=directory))
    out, err = place / "out", place / "err"
    env = os.environ | PLAIN | dict(environment or {})
    began = trio.current_time()
    with out.open("wb") as out_file, err.open("wb") as err_file:
        try:
            process = await trio.lowlevel.open_process(
                list(argv), stdin=DEVNULL, stdout=out_file, stderr=err_file, cwd=place, env=env, start_new_session=True
            )
        except OSError as error:
            err.write_text(f"{error.strerror}")
            return Printed(Ran(tool, None, argv=argv), out, err)
    large = False
    try:
        with trio.move_on_after(within) as limit:
            while process.returncode is None:
                with trio.move_on_after(1.0):
                    await process.wait()
                if out.stat().st_size > MOST_BYTES:
                    large = True
                    break
    finally:
        # The whole group: a tool may have started others (dump_fts and the ib* scripts do).
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with trio.CancelScope(shield=True):
            await process.wait()
    if large:
        err.write_text(f"{tool} printed more than {MOST_BYTES >> 20} MiB and was stopped\n")
    timed_out = limit.cancelled_caught
    code = process.returncode
    return Printed(
        Ran(
            tool,
            -signal.SIGKILL if large else code,
            seconds=trio.current_time() - began,
            timed_out=timed_out,
            argv=argv,
        ),
        out,
        err,
    )


async def run(*argv: str, within: float, environment: Mapping[str, str] | None = None) -> Ran:
    """Run `argv`; its streams are in the answer."""
    with tempfile.TemporaryDirectory(prefix="llmgw-", ignore_cleanup_errors=True) as place:
        return (await printed(Path(place), *argv, within=within, environment=environment)).read()

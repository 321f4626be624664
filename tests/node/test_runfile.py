"""Long programs with their output in a file."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import trio

from llmgw.node.processes import carrying, everyone
from llmgw.node.runfile import run_to_file
from tests.engines import until

pytestmark = pytest.mark.real


async def ran(folder: Path, script: str, limit: float = 60.0) -> tuple[int | None, str]:
    output = folder / "output"
    env = {**os.environ, "LLMGW_TEST_RUN": str(folder)}
    with output.open("ab") as file:
        status = await run_to_file(("/bin/sh", "-c", script), file.fileno(), env=env, cwd=folder, limit=limit)
    return status, output.read_text()


async def gone(folder: Path) -> None:
    """Wait until nothing of a run is left: what was killed ends a moment later."""
    await until(lambda: not list(carrying("LLMGW_TEST_RUN", str(folder), everyone())))


async def test_the_status_and_all_output_are_kept(tmp_path: Path) -> None:
    assert await ran(tmp_path, "echo out; echo err >&2; pwd; exit 3") == (3, f"out\nerr\n{tmp_path}\n")


async def test_an_end_by_a_signal_is_a_negative_status(tmp_path: Path) -> None:
    assert (await ran(tmp_path, "kill -9 $$"))[0] == -signal.SIGKILL


async def test_it_gives_way_to_engines_for_processors_and_for_memory(tmp_path: Path) -> None:
    # Fields behind the name, which ends in a parenthesis: nice is the 19th of all.
    status, text = await ran(tmp_path, "cat /proc/self/oom_score_adj; sed 's/.*) //' /proc/self/stat | cut -d' ' -f17")
    assert status == 0
    adjustment, nice = text.split()
    assert int(adjustment) == 500
    assert int(nice) >= 10


async def test_what_stays_in_its_group_goes_with_it_at_the_end_the_limit_and_a_cancel(tmp_path: Path) -> None:
    assert (await ran(tmp_path, "sleep 1000 & exit 0"))[0] == 0
    await gone(tmp_path)
    assert (await ran(tmp_path, "sleep 1000 & wait", limit=0.3))[0] is None
    await gone(tmp_path)
    with trio.move_on_after(0.3):
        await ran(tmp_path, "sleep 1000 & wait")
    await gone(tmp_path)


async def test_a_program_that_is_not_there_is_named_in_the_output(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with output.open("ab") as file:
        argv = ("/nowhere/python", "-m", "venv")
        status = await run_to_file(argv, file.fileno(), env=dict(os.environ), cwd=tmp_path, limit=60)
    assert status == 127
    assert "/nowhere/python" in output.read_text()

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from llmgw.node import tools
from llmgw.node.tools import run
from llmgw.rdma.ran import Ran
from tests.engines import until
from tests.leftovers import alive

pytestmark = pytest.mark.real


async def test_both_streams_and_the_exit_status_are_kept() -> None:
    ran = await run("sh", "-c", "echo out; echo err >&2; exit 3", within=60)
    assert (ran.tool, ran.exit, ran.out, ran.err, ran.timed_out) == ("sh", 3, "out\n", "err\n", False)


async def test_a_tool_that_is_not_there_has_no_exit_status() -> None:
    ran = await run("no-such-tool-here", within=60)
    assert ran.exit is None
    assert "No such file" in ran.err


async def test_tools_speak_the_c_locale_and_stand_in_a_folder_of_their_own(tmp_path: Path) -> None:
    ran = await run("sh", "-c", "echo $LC_ALL; pwd; touch left-over", within=60, environment={"LC_ALL": "C"})
    locale, where = ran.out.splitlines()
    assert locale == "C"
    assert where != os.getcwd()
    assert not Path(where).exists(), "nothing is left behind"  # noqa: ASYNC240


async def test_a_tool_that_takes_too_long_is_ended_and_what_it_printed_is_kept(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    mock_clock.rate = 1.0
    hangs = tmp_path / "hangs"
    found: list[Ran] = []

    async def bounded() -> None:
        found.append(await run("sh", "-c", f"echo first; touch {hangs}; sleep 600", within=300))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(bounded)
        await until(hangs.exists)
        await wait_all_tasks_blocked(0.1)  # the limit counts
        mock_clock.jump(300)
    (ran,) = found
    assert (ran.timed_out, ran.out) == (True, "first\n")


async def test_what_a_tool_started_and_left_behind_is_ended_with_it() -> None:
    ran = await run("sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!", within=60)
    await until(lambda: not alive(int(ran.out)))


async def test_a_tool_that_prints_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "MOST_BYTES", 100_000)
    ran = await run("sh", "-c", "yes | head -c 200000; sleep 600", within=60)
    assert ran.exit == -9
    assert "printed more than" in ran.err


async def test_bytes_that_are_no_text_do_not_stop_anything() -> None:
    ran = await run("printf", r"a\377b", within=60)
    assert ran.out == "a\ufffdb"


async def test_colours_are_no_part_of_what_a_tool_said() -> None:
    ran = await run("sh", "-c", r"printf '\033[31mDOWN\033[0m'; printf 'tput: \033[1munknown terminal' >&2", within=60)
    assert (ran.out, ran.err) == ("DOWN", "tput: unknown terminal")

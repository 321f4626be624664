from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from llmgw.node import tools
from llmgw.node.tools import run

pytestmark = pytest.mark.real


async def test_both_streams_and_the_exit_status_are_kept() -> None:
    ran = await run("sh", "-c", "echo out; echo err >&2; exit 3", within=10)
    assert (ran.tool, ran.exit, ran.out, ran.err, ran.timed_out) == ("sh", 3, "out\n", "err\n", False)


async def test_a_tool_that_is_not_there_has_no_exit_status() -> None:
    ran = await run("no-such-tool-here", within=10)
    assert ran.exit is None
    assert "No such file" in ran.err


async def test_tools_speak_the_c_locale_and_stand_in_a_folder_of_their_own(tmp_path: Path) -> None:
    ran = await run("sh", "-c", "echo $LC_ALL; pwd; touch left-over", within=10, environment={"LC_ALL": "C"})
    locale, where = ran.out.splitlines()
    assert locale == "C"
    assert where != os.getcwd()
    assert not Path(where).exists(), "nothing is left behind"  # noqa: ASYNC240


async def test_a_tool_that_takes_too_long_is_ended_and_what_it_printed_is_kept() -> None:
    began = trio.current_time()
    ran = await run("sh", "-c", "echo first; sleep 600", within=0.5)
    assert trio.current_time() - began < 20
    assert (ran.timed_out, ran.out) == (True, "first\n")


async def test_what_a_tool_started_and_left_behind_is_ended_with_it() -> None:
    ran = await run("sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!", within=10)
    pid = int(ran.out)
    with trio.fail_after(20):
        while _alive(pid):  # noqa: ASYNC110
            await trio.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def test_a_tool_that_prints_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "MOST_BYTES", 100_000)
    ran = await run("yes", within=60)
    assert ran.exit == -9
    assert "printed more than" in ran.err


async def test_bytes_that_are_no_text_do_not_stop_anything() -> None:
    ran = await run("printf", r"a\377b", within=10)
    assert ran.out == "a\ufffdb"


async def test_colours_are_no_part_of_what_a_tool_said() -> None:
    ran = await run("sh", "-c", r"printf '\033[31mDOWN\033[0m'; printf 'tput: \033[1munknown terminal' >&2", within=10)
    assert (ran.out, ran.err) == ("DOWN", "tput: unknown terminal")

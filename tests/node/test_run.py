from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from llmgw.node.run import Kept, NotStarted, Ran, run
from tests.engines import until
from tests.leftovers import alive_in

pytestmark = pytest.mark.real


@pytest.fixture
def group(tmp_path: Path) -> Callable[[], Awaitable[int]]:
    """What a child writes into the FIFO `group`, once it has: its own process group."""
    fifo = tmp_path / "group"
    os.mkfifo(fifo)
    return partial(trio.to_thread.run_sync, lambda: int(fifo.read_text()), abandon_on_cancel=True)


async def test_output_and_exit_code_come_back() -> None:
    ran = await run(["sh", "-c", "echo out; echo err >&2; exit 3"], limit=60)
    assert (ran.exit_code, ran.stdout, ran.stderr, ran.cut_short) == (3, "out\n", "err\n", False)


async def test_a_signal_is_a_negative_exit_code() -> None:
    assert (await run(["sh", "-c", "kill -9 $$"], limit=60)).exit_code == -9


async def test_the_limit_ends_the_whole_group_and_keeps_what_was_said(
    tmp_path: Path, group: Callable[[], Awaitable[int]], mock_clock: MockClock
) -> None:
    mock_clock.rate = 1.0
    found: list[Ran] = []

    async def bounded() -> None:
        script = f"echo begun; sleep 600 & echo $$ > {tmp_path}/group; sleep 600"
        found.append(await run(["sh", "-c", script], limit=300))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(bounded)
        number = await group()
        await trio.testing.wait_all_tasks_blocked(0.1)
        mock_clock.jump(300)
    (ran,) = found
    assert ran.cut_short
    assert ran.stdout == "begun\n"
    assert 300 <= ran.seconds < 400
    await until(lambda: not alive_in(number))


async def test_cancelling_kills_the_whole_group_at_once(tmp_path: Path, group: Callable[[], Awaitable[int]]) -> None:
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                partial(run, ["sh", "-c", f"sleep 600 & echo $$ > {tmp_path}/group; sleep 600"], limit=600)
            )
            number = await group()
            assert len(alive_in(number)) >= 2
            nursery.cancel_scope.cancel()
    await until(lambda: not alive_in(number))


async def test_what_a_program_left_behind_in_its_group_is_ended_and_does_not_hold_the_pipes() -> None:
    with trio.fail_after(60):
        ran = await run(["sh", "-c", "sleep 600 & echo $$"], limit=600)
    assert ran.exit_code == 0
    await until(lambda: not alive_in(int(ran.stdout)))


async def test_a_program_that_is_missing_is_an_error_with_its_name() -> None:
    with pytest.raises(NotStarted, match=r"/no/such/program cannot be run: No such file"):
        await run(["/no/such/program"], limit=1)


async def test_meanwhile_is_cancelled_when_the_program_ends() -> None:
    begun: list[int] = []

    async def meanwhile(pid: int) -> None:
        begun.append(pid)
        await trio.sleep_forever()

    with trio.fail_after(60):
        await run(["true"], limit=60, meanwhile=meanwhile)
    assert len(begun) == 1


async def test_the_environment_is_added_and_the_language_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    monkeypatch.setenv("TERM", "xterm-256color")
    ran = await run(
        [sys.executable, "-c", "import os; print(*map(os.environ.get, ('A', 'LC_ALL', 'TERM', 'NO_COLOR')))"],
        limit=60,
        env={"A": "1"},
    )
    assert ran.stdout == "1 C dumb 1\n"


async def test_a_flood_of_output_keeps_its_beginning_and_its_end() -> None:
    ran = await run(["sh", "-c", "echo first; yes x | head -c 3000000; echo last"], limit=60)
    assert ran.stdout.startswith("first\n")
    assert ran.stdout.endswith("last\n")
    assert "bytes left out" in ran.stdout
    assert len(ran.stdout) < 500_000


def test_a_short_output_is_kept_whole() -> None:
    kept = Kept(10)
    for piece in (b"0123", b"4567", b"89ab", b"cdef"):
        kept.add(piece)
    assert kept.text() == "0123456789abcdef"


async def test_no_descriptor_is_left_open() -> None:
    await run(["true"], limit=60)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        await run(["true"], limit=60)
    assert len(os.listdir("/proc/self/fd")) <= before  # fewer where others' are collected meanwhile


async def test_colours_are_taken_off_before_anybody_matches_what_was_said() -> None:
    """hca_self_test colours its answers whatever TERM says (LG04)."""
    ran = await run(["printf", r"\033[1;32mPASS\033[0m\033[K \033(Bport 1\n"], limit=60)
    assert ran.stdout == "PASS port 1\n"

import errno
import os
from pathlib import Path

import pytest
import trio

from llmgw.errors import NotFound
from llmgw.log import Ring
from llmgw.node import logs as module
from llmgw.node.logs import Logs
from llmgw.node.runs import RunEnd, RunName
from llmgw.wire.control import LogsRequest
from llmgw.wire.facts import ShardId

pytestmark = pytest.mark.real
SHARD = ShardId("m/0/0")


@pytest.fixture
def ring() -> Ring:
    return Ring()


@pytest.fixture
def logs(tmp_path: Path, ring: Ring) -> Logs:
    return Logs(tmp_path, ring, most_bytes=1 << 20, head_bytes=64 << 10, keep=2)


def write(logs: Logs, run: RunName, data: bytes) -> None:
    with logs.begin(SHARD, run).open("ab") as file:
        file.write(data)


async def test_the_last_lines_come_with_every_source_there_is(logs: Logs) -> None:
    write(logs, RunName(1), b"one\ntwo\n\x1b[31mthree\x1b[0m")
    reply = await logs.answer(LogsRequest(source=SHARD, lines=2))
    assert (reply.lines, reply.run) == (("two", "three"), "1")
    assert [(source.name, source.runs) for source in reply.sources] == [("agent", ()), (SHARD, ("1",))]


async def test_what_comes_after_a_cursor_is_waited_for(logs: Logs) -> None:
    write(logs, RunName(1), b"one\n")
    cursor = (await logs.answer(LogsRequest(source=SHARD))).cursor
    async with trio.open_nursery() as nursery:

        async def later() -> None:
            await trio.sleep(0.05)
            write(logs, RunName(1), b"two\nhalf a li")

        nursery.start_soon(later)
        with trio.fail_after(90):
            reply = await logs.answer(LogsRequest(source=SHARD, after=cursor, wait=60))
    assert reply.lines == ("two",)
    write(logs, RunName(1), b"ne\n")
    assert (await logs.answer(LogsRequest(source=SHARD, after=reply.cursor))).lines == ("half a line",)


@pytest.mark.parametrize("after", ["²", "1:²", "x", "1:x"])
@pytest.mark.parametrize("source", [SHARD, "agent"])
async def test_a_cursor_that_is_none_asks_for_the_last_lines(logs: Logs, source: str, after: str) -> None:
    write(logs, RunName(1), b"one\ntwo\n")
    plain = await logs.answer(LogsRequest(source=source))
    assert (await logs.answer(LogsRequest(source=source, after=after))).lines == plain.lines


async def test_nothing_new_within_the_wait_is_an_empty_answer_with_the_same_cursor(logs: Logs) -> None:
    write(logs, RunName(1), b"one\n")
    cursor = (await logs.answer(LogsRequest(source=SHARD))).cursor
    reply = await logs.answer(LogsRequest(source=SHARD, after=cursor, wait=0.15))
    assert (reply.lines, reply.cursor) == ((), cursor)


async def test_who_follows_is_led_into_the_next_run(logs: Logs) -> None:
    write(logs, RunName(1), b"one\n")
    cursor = (await logs.answer(LogsRequest(source=SHARD))).cursor
    write(logs, RunName(2), b"anew\n")
    reply = await logs.answer(LogsRequest(source=SHARD, after=cursor))
    assert (reply.lines, reply.run) == (("anew",), "2")
    assert (await logs.answer(LogsRequest(source=SHARD, run="1", after=cursor))).lines == ()


async def test_lines_asked_for_in_portions_come_all_and_once(logs: Logs) -> None:
    write(logs, RunName(1), b"".join(b"%d\n" % n for n in range(25)))
    cursor, seen = "1:0", list[str]()
    while (reply := await logs.answer(LogsRequest(source=SHARD, after=cursor, lines=10))).lines:
        seen += reply.lines
        cursor = reply.cursor
    assert seen == [str(n) for n in range(25)]


async def test_an_unknown_source_or_run_is_refused_with_what_there_is(logs: Logs) -> None:
    write(logs, RunName(1), b"one\n")
    with pytest.raises(NotFound, match=r"it has: agent, m/0/0"):
        await logs.answer(LogsRequest(source="other"))
    with pytest.raises(NotFound, match="run 9"):
        await logs.answer(LogsRequest(source=SHARD, run="9"))
    with pytest.raises(NotFound):
        await logs.answer(LogsRequest(source="../../etc"))


async def test_the_agents_own_lines_are_a_source_that_can_be_followed(logs: Logs, ring: Ring) -> None:
    ring.add("one")
    reply = await logs.answer(LogsRequest())
    assert reply.lines == ("one",)
    async with trio.open_nursery() as nursery:

        async def later() -> None:
            await trio.sleep(0.02)
            ring.add("two")

        nursery.start_soon(later)
        with trio.fail_after(90):
            assert (await logs.answer(LogsRequest(after=reply.cursor, wait=60))).lines == ("two",)


def disk(path: Path) -> int:
    return path.stat().st_blocks * 512


@pytest.mark.parametrize("punches", [True, False])
async def test_a_log_too_large_keeps_its_newest_output_while_the_engine_goes_on_writing(
    logs: Logs, punches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not punches:
        # As on a file system without holes; there is none to mount in a test.
        monkeypatch.setattr(module, "_punch", lambda *_: False)
    path = logs.begin(SHARD, RunName(1))
    with path.open("ab", buffering=0) as engine:
        for n in range(40_000):
            engine.write(b"line %d %s\n" % (n, b"x" * 50))
        os.fsync(engine.fileno())
        first = await logs.answer(LogsRequest(source=SHARD, lines=1))
        logs.trim()
        os.fsync(engine.fileno())
        assert disk(path) <= (1 << 20) + 8192
        engine.write(b"after\n")
        assert (await logs.answer(LogsRequest(source=SHARD, lines=2))).lines[1] == "after"
        if punches:
            # A reader's place has not moved, and what was dropped is said.
            assert (await logs.answer(LogsRequest(source=SHARD, after=first.cursor))).lines == ("after",)
            assert path.read_bytes().startswith(b"line 0 ")
            skipped = await logs.answer(LogsRequest(source=SHARD, after=f"1:{70 << 10}", lines=3))
            assert skipped.truncated
            assert all(line.endswith("x" * 50) for line in skipped.lines[1:])


async def test_200_kilobytes_without_an_end_of_line_are_one_cut_line(logs: Logs) -> None:
    write(logs, RunName(1), b"y" * 200_000 + b"\nnext\n")
    reply = await logs.answer(LogsRequest(source=SHARD))
    assert len(reply.lines[0]) < 5000
    assert reply.lines[1] == "next"


async def test_secrets_in_an_engines_output_are_blotted_out(logs: Logs) -> None:
    write(logs, RunName(1), b"Authorization: Bearer abcdefghijkl\n")
    assert "abcdefghijkl" not in (await logs.answer(LogsRequest(source=SHARD))).lines[0]


def test_only_runs_worth_keeping_are_kept(logs: Logs, tmp_path: Path) -> None:
    for n in range(1, 7):
        write(logs, RunName(n), b"x\n")
        logs.end(SHARD, RunName(n), RunEnd(True))
    assert sorted(path.name for path in tmp_path.glob("*/*.log")) == ["1.log", "5.log", "6.log"]


def test_the_logs_of_a_shard_long_gone_go_too(logs: Logs, tmp_path: Path) -> None:
    write(logs, RunName(1), b"x\n")
    logs.forget(older_than=-1)
    assert list(tmp_path.iterdir()) != []
    logs.end(SHARD, RunName(1), RunEnd())
    logs.forget(older_than=-1)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_run_that_begins_just_now_stays(logs: Logs) -> None:
    """The old ones are removed while shards start: between the folder and the engine's file there is a moment."""
    for run in (1, 2):
        path = logs.begin(SHARD, RunName(run))
        logs.forget()
        path.write_bytes(b"first\n")
        logs.end(SHARD, RunName(run), RunEnd())
        for old in (path, path.parent):
            os.utime(old, (0, 0))


def test_a_hole_cannot_be_punched_into_what_is_no_file() -> None:
    reading, writing = os.pipe()
    with pytest.raises(OSError, match=os.strerror(errno.ESPIPE)):
        module._punch(writing, 0, 4096)
    os.close(reading)
    os.close(writing)

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog
import trio
from hypothesis import given
from hypothesis import strategies as st

from llmgw import log
from llmgw.config import LogSettings
from llmgw.log import Ring, plain, redact, ring

TOKEN = "llmgw1.abcdefgh.Zs3-secret_secret-secret_secret-secret_secret12.fingerprint-fingerprint-fingerprint-finger"


@pytest.fixture
def out() -> Iterator[io.StringIO]:
    """What a process with JSON logs would write to stderr; logging is as before afterwards."""
    root = logging.getLogger()
    before, level, config = root.handlers[:], root.level, structlog.get_config()
    stream = io.StringIO()
    log.set_up(LogSettings(format="json", level="info"), stream=stream)
    yield stream
    root.handlers[:] = before
    root.setLevel(level)
    structlog.configure(**config)


def lines(out: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_an_event_is_one_line_of_json_with_its_time_level_and_logger(out: io.StringIO) -> None:
    structlog.get_logger("llmgw.x").info("node joined", node="gpu-01", count=3)
    (line,) = lines(out)
    assert {key: line[key] for key in ("event", "level", "logger", "node", "count")} == {
        "event": "node joined",
        "level": "info",
        "logger": "llmgw.x",
        "node": "gpu-01",
        "count": 3,
    }
    assert str(line["timestamp"]).endswith("Z")


def test_what_is_below_the_level_is_not_said(out: io.StringIO) -> None:
    structlog.get_logger("llmgw.x").debug("chatter")
    logging.getLogger("httpx").info("a line for every request")
    assert lines(out) == []


def test_libraries_that_warn_are_heard_in_the_same_shape(out: io.StringIO) -> None:
    logging.getLogger("hypercorn.error").warning("bad %s", "thing")
    (line,) = lines(out)
    assert (line["event"], line["level"], line["logger"]) == ("bad thing", "warning", "hypercorn.error")


def test_a_console_line_is_for_people() -> None:
    config, root = structlog.get_config(), logging.getLogger()
    before, level = root.handlers[:], root.level
    stream = io.StringIO()
    try:
        log.set_up(LogSettings(format="console"), stream=stream)
        structlog.get_logger("llmgw.x").warning("no stream", plane="a:7443")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        structlog.configure(**config)
    assert "no stream" in stream.getvalue()
    assert "plane=a:7443" in stream.getvalue()


def test_secrets_are_blotted_out_wherever_they_stand(out: io.StringIO) -> None:
    logger = structlog.get_logger("llmgw.x")
    logger.info(f"joining with {TOKEN}", token="plainsecret", deep={"api_key": "plainsecret", "list": [TOKEN]})
    logger.info("Authorization: Bearer lga-plainsecret", url="https://h/?api_key=plainsecret&x=1")
    try:
        raise ValueError(f"refused {TOKEN}")
    except ValueError:
        logger.exception("failed")
    logging.getLogger("lib").warning("key is sk-plainsecret1234")
    said = out.getvalue()
    assert "plainsecret" not in said
    assert "Zs3-secret" not in said
    assert "llmgw1.abcdefgh.***" in said  # which token it was may be known
    assert not any("plainsecret" in line or "Zs3-secret" in line for line in ring.last(10))


@pytest.mark.parametrize(
    "text",
    [
        "token create --node gpu-01",
        "tokens: 5 open",
        "made 812 tokens per second",
        "secret: no",
        "llmgw1.",
        "key=value",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


@given(st.text())
def test_blotting_twice_changes_nothing_more(text: str) -> None:
    assert redact(redact(text)) == redact(text)


def test_the_ring_keeps_the_newest_lines_of_what_was_logged(out: io.StringIO) -> None:
    before = ring.cursor
    structlog.get_logger("llmgw.x").info("first", node="gpu 01")
    structlog.get_logger("llmgw.x").error("second")
    found, cursor, lost = ring.after(before)
    assert (len(found), cursor, lost) == (2, before + 2, False)
    assert found[0].endswith("info    first node='gpu 01'")
    assert "error   second" in found[1]


def test_a_reader_goes_on_where_it_was_and_hears_when_lines_were_lost() -> None:
    kept = Ring(3)
    assert kept.after(0) == ((), 0, False)
    for number in range(1, 6):
        kept.add(f"line {number}")
    assert kept.last(2) == ("line 4", "line 5")
    assert kept.last(99) == ("line 3", "line 4", "line 5")
    assert kept.last(0) == ()
    assert kept.after(4) == (("line 5",), 5, False)
    assert kept.after(5) == ((), 5, False)
    assert kept.after(1) == (("line 3", "line 4", "line 5"), 5, True)
    assert kept.after(2, most=2) == (("line 3", "line 4"), 4, False)


def test_a_cursor_from_before_a_restart_starts_over_and_says_so() -> None:
    kept = Ring(3)
    kept.add("line 1")
    assert kept.after(500) == (("line 1",), 1, True)


def test_a_line_without_end_is_cut() -> None:
    kept = Ring(3)
    kept.add("x" * 10_000)
    assert kept.last(1)[0] == "x" * 3999 + "…"


@given(st.integers(1, 8), st.integers(0, 30), st.integers(0, 40), st.integers(1, 9))
def test_following_the_cursor_gives_every_line_once(most: int, count: int, cursor: int, take: int) -> None:
    kept = Ring(most)
    for number in range(1, count + 1):
        kept.add(str(number))
    seen: list[str] = []
    while True:
        found, cursor, _ = kept.after(cursor, take)
        seen += found
        if not found:
            break
    assert cursor == count
    assert seen == [str(number) for number in range(count - len(seen) + 1, count + 1)]
    assert len(seen) <= most


@pytest.mark.real
async def test_a_reader_that_waits_wakes_for_a_line_from_a_thread() -> None:
    kept = Ring(3)
    kept.add("old")
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kept.newer, 1)
            await trio.testing.wait_all_tasks_blocked()
            await trio.to_thread.run_sync(kept.add, "from a thread")
    assert kept.after(1)[0] == ("from a thread",)


def test_an_exception_follows_its_line() -> None:
    event = {"event": "failed", "level": "error", "timestamp": "T", "exception": "Traceback\n  ValueError: x"}
    assert plain(event) == "T error   failed\nTraceback\n  ValueError: x"


def test_a_terminal_that_went_away_does_not_end_whoever_logs() -> None:
    config, root = structlog.get_config(), logging.getLogger()
    before, level = root.handlers[:], root.level
    stream = io.StringIO()
    try:
        log.set_up(LogSettings(format="json"), stream=stream)
        stream.close()
        structlog.get_logger("llmgw.x").error("into the void")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        structlog.configure(**config)

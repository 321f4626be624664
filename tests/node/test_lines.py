import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.node.lines import MOST_LINE, clean, clean_line, last, settled


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x1b[1;32mgreen\x1b[0m plain", "green plain"),
        (b"\x1b]0;title\x07text", "text"),
        (b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        (b"\x1b(Btput: unknown terminal", "tput: unknown terminal"),
        (b"loading  1%\rloading 50%\rloading 99%", "loading 99%"),
        (b"done\r", "done"),
        (b"\xff\xfe bytes", "\ufffd\ufffd bytes"),
        (b"a\tb\x00\x07c", "a\tbc"),
        (b"", ""),
    ],
)
def test_a_line_is_what_a_person_would_have_read(data: bytes, text: str) -> None:
    assert clean_line(data) == text


def test_of_progress_bars_below_one_another_the_newest_states_are_kept() -> None:
    """tqdm goes down to its inner bar and up again; rich clears its lines on the way up."""
    nested = b"".join(b"\rshards %d%%\n\rtensors %d%%\x1b[A" % (n, n) for n in range(50)) + b"\n\n"
    assert clean(nested + b"loaded\n") == ["shards 49%", "tensors 49%", "loaded"]
    assert last(nested, 5) == ("shards 49%", "tensors 49%")
    rich = b"".join(b"a %d%%\nb %d%%\n\x1b[1A\x1b[2K\x1b[1A\x1b[2K" % (n, n) for n in range(50))
    assert clean(rich + b"done\n") == ["done", ""]
    assert clean(b"\x1b[9Afirst\n") == ["first"]


def test_going_up_again_and_again_costs_no_more_than_its_bytes() -> None:
    data = (b"x" * 4 + b"\x1b[A") * 200_000
    began = time.process_time()
    assert len(settled(data)) == 4 * 200_000
    assert time.process_time() - began < 3  # it was 10 s, and twice the bytes took four times as long


def test_a_line_without_end_is_cut_and_says_by_how_much() -> None:
    line = clean_line(b"x" * 200_000)
    assert line == "x" * MOST_LINE + f" … ({200_000 - MOST_LINE} more bytes)"


def test_the_last_lines_are_those_that_say_something() -> None:
    assert last(b"one\n\n  \ntwo\n\x1b[0m\n", 2) == ("one", "two")
    assert last(b"", 3) == ()


@given(st.binary(max_size=2000))
def test_no_bytes_leave_anything_that_a_terminal_would_act_on(data: bytes) -> None:
    for line in clean(data):
        assert all(char == "\t" or (ord(char) >= 0x20 and not 0x7F <= ord(char) < 0xA0) for char in line)
        assert "\u202e" not in line
        assert len(line) <= MOST_LINE + 40


@given(st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40), max_size=20))
def test_plain_text_comes_through_as_it_is(lines: list[str]) -> None:
    assert clean("".join(line + "\n" for line in lines).encode()) == [line.rstrip() for line in lines]

"""Tables: nothing hidden, whatever the width."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from llmgw.ctl.show import Column, clean, columns, of, rate, size

HEADS = (Column("NAME"), Column("STATE"), Column("WHY", extra=1, prose=True), Column("MORE", extra=2))

names = st.text("abcdefghij-0123456789", min_size=1, max_size=60)


def drawn(rows: list[tuple[str, ...]], width: int, heads: Sequence[Column] = HEADS) -> str:
    out = Console(file=io.StringIO(), width=width, color_system=None)
    out.print(columns(heads, rows, nothing="nothing", width=width))
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


@given(st.lists(st.tuples(names, names), min_size=1, max_size=5), st.integers(20, 200))
def test_a_name_may_be_folded_and_is_never_cut(rows: list[tuple[str, ...]], width: int) -> None:
    shown = drawn(rows, width, HEADS[:2])
    assert max(map(len, shown.splitlines())) <= width
    body = shown.replace("NAME", "").replace("STATE", "")
    assert Counter(body.replace("\n", "").replace(" ", "")) == Counter("".join(map("".join, rows)))


@given(st.lists(st.tuples(names, names, names, names), min_size=1, max_size=5))
def test_with_room_for_all_every_cell_is_there_whole(rows: list[tuple[str, ...]]) -> None:
    shown = drawn(rows, 10_000)
    for row in rows:
        for cell in row:
            assert cell in shown


def test_what_is_extra_goes_first_and_the_rest_stays() -> None:
    row = ("node-with-a-long-name", "ready", "because " * 20, "more-and-more-and-more")
    assert drawn([row], 70).splitlines()[0].split() == ["NAME", "STATE", "WHY"]
    assert drawn([row], 40).splitlines()[0].split() == ["NAME", "STATE"]


def test_an_extra_column_in_which_nothing_stands_is_left_out() -> None:
    assert drawn([("a", "b", "", "d")], 100).splitlines()[0].split() == ["NAME", "STATE", "MORE"]


def test_nothing_is_said_where_there_are_no_rows() -> None:
    assert drawn([], 80) == "nothing\n"


def test_a_cell_is_text_and_never_markup() -> None:
    assert "[bold]x[/bold]" in drawn([("[bold]x[/bold]", "[red]", "", "")], 80)


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (150 << 20, "150 MiB"), (139 << 30, "139 GiB"), (None, "")],
)
def test_bytes_at_a_glance(count: int | None, words: str) -> None:
    assert size(count) == words


def test_rates_are_spoken_of_in_bits() -> None:
    assert rate(5e9) == "40.00 Gb/s"
    assert rate(0.0) == "0.00 Gb/s"
    assert rate(None) == ""


def test_a_part_without_its_whole_says_what_is_not_known() -> None:
    assert (of("1 GiB", "2 GiB"), of("", "2 GiB"), of("1 GiB", ""), of("", "")) == (
        "1 GiB of 2 GiB",
        "? of 2 GiB",
        "1 GiB of ?",
        "",
    )


@given(st.text())
def test_a_strange_line_never_steers_the_terminal(line: str) -> None:
    shown = clean(line)
    assert len(shown) == len(line)
    assert all(letter.isprintable() or letter == "\t" for letter in shown)

"""Names and values of labels: what is read again is what was written."""

from __future__ import annotations

import pytest

from llmgw.errors import BadInput
from llmgw.labels import check_label


@pytest.mark.parametrize(
    ("name", "value"),
    [("rack", "a7"), ("rack", ""), ("example.com/rack_1", "row 3, left"), ("größe", "groß"), ("k" * 128, "v" * 256)],
)
def test_what_can_be_written_as_one_word_is_a_label(name: str, value: str) -> None:
    check_label(name, value)


@pytest.mark.parametrize("name", ["", "my rack", "a=b", "a,b", "rack-", "a\tb", "a\x1bb", "a\u00a0b", "k" * 129])
def test_what_could_not_be_read_again_is_no_name(name: str) -> None:
    with pytest.raises(BadInput, match="cannot be a label's name"):
        check_label(name)


@pytest.mark.parametrize("value", ["a\nb", "\x1b[2J", "v" * 257])
def test_what_would_break_a_line_is_no_value(value: str) -> None:
    with pytest.raises(BadInput, match="the label rack cannot have the value"):
        check_label("rack", value)

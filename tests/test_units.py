from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.units import format_duration, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1048576", 1048576),
        ("512MiB", 512 << 20),
        ("512 mib", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("10GB", 10**10),
        ("64k", 64 << 10),
        ("2T", 2 << 40),
        ("100B", 100),
    ],
)
def test_a_size_is_read_with_and_without_its_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e9", "5 apples", "1.GiB", "0x10", "1 2"])
def test_what_is_no_size_is_refused_with_the_text_in_the_words(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("2.5", 2.5),
        ("250ms", 0.25),
        ("30s", 30),
        ("5m", 300),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        ("2d", 172800),
    ],
)
def test_a_duration_is_read_with_and_without_its_units(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-5s", "5 minutes", "1h30", "30 s x", "inf", "nan", "9" * 400])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


@given(st.text())
def test_any_text_is_a_size_and_a_duration_or_a_value_error(text: str) -> None:
    for parse in (parse_size, parse_duration):
        with contextlib.suppress(ValueError):
            assert parse(text) >= 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0s"),
        (4.2, "4.2s"),
        (59, "59s"),
        (90, "1m 30s"),
        (3600, "1h"),
        (86400 * 29 + 4 * 3600 + 59, "29d 4h"),
        (-5, "-5.0s"),
    ],
)
def test_a_duration_is_shown_in_its_two_largest_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text

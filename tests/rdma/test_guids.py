from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.rdma.guids import guid, shown, written


@given(st.integers(0, 2**64 - 1))
def test_a_guid_is_the_same_number_however_it_is_written(value: int) -> None:
    assert guid(f"{value:x}") == guid(f"0x{value:016X}") == guid(shown(value)) == value
    assert written(value) == (f"{value:016x}" if value else "")


def test_colons_are_allowed_and_too_many_digits_are_not() -> None:
    assert guid("0c42:a103:00dc:f8e2") == guid("c42a10300dcf8e2")
    with pytest.raises(ValueError, match="more than 64 bits"):
        guid("1" * 17)

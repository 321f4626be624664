"""What counters mean."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmgw.rdma.counters import delta, rate, saturated


def test_the_data_counters_count_words_of_four_bytes() -> None:
    bytes_per_second = rate("port_xmit_data", 0, 12_500_000_000, 1.0)
    assert bytes_per_second == 50e9
    assert bytes_per_second * 8 == 400e9


def test_a_first_reading_a_reset_and_a_long_gap_give_no_rate_and_zero_is_zero() -> None:
    assert rate("port_rcv_packets", None, 5, 1.0) is None
    assert rate("port_rcv_packets", 9, 5, 1.0) is None
    assert rate("port_rcv_packets", 5, 9, 121.0) is None
    assert rate("port_rcv_packets", 5, 9, 0.0) is None
    assert rate("port_rcv_packets", 5, 5, 5.0) == 0.0


def test_a_counter_at_its_ceiling_says_nothing_and_a_wider_one_passes_it() -> None:
    assert saturated("link_downed", 255)
    assert delta("link_downed", 250, 255) is None
    assert delta("symbol_error", 65535, 65535) is None
    assert delta("symbol_error", 65535, 65540) == 5
    assert delta("out_of_sequence", 65535, 65535) == 0


@given(st.text(), st.none() | st.integers(0, 2**64), st.integers(0, 2**64), st.none() | st.floats())
def test_a_rate_is_never_negative(name: str, before: int | None, now: int, seconds: float | None) -> None:
    found = rate(name, before, now, seconds)
    assert found is None or found >= 0

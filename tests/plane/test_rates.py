"""B5: counters become rates on the plane."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.plane.rates import rates
from llmgw.plane.world import Reading
from llmgw.rdma.counters import CEILINGS, MOST_GAP, rate
from llmgw.wire.facts import PortLoad


def test_a_data_counter_counts_words_of_four_bytes() -> None:
    assert rate("port_xmit_data", 0, 12_500_000_000, 1.0) == 400e9 / 8
    assert rate("port_rcv_data", 0, 1_000_000_000, 10.0) == 4e8


def test_another_counter_counts_what_its_name_says() -> None:
    assert rate("port_xmit_packets", 100, 300, 2.0) == 100.0


def test_zero_is_zero_and_not_unknown() -> None:
    assert rate("port_xmit_data", 7, 7, 5.0) == 0.0


@pytest.mark.parametrize(
    ("before", "after", "seconds"),
    [
        pytest.param(None, 5, 5.0, id="no earlier reading"),
        pytest.param(6, 5, 5.0, id="went backwards"),
        pytest.param(0, 5, MOST_GAP + 0.1, id="too long a gap"),
        pytest.param(0, 5, 300.0, id="SE03: 300 s"),
        pytest.param(0, 5, 0.0, id="no time passed"),
        pytest.param(0, 5, -1.0, id="time went back"),
    ],
)
def test_nothing_is_said_where_nothing_can_be(before: int | None, after: int, seconds: float) -> None:
    assert rate("port_rcv_errors", before, after, seconds) is None


@pytest.mark.parametrize("name", sorted(CEILINGS))
def test_a_counter_at_its_ceiling_says_nothing(name: str) -> None:
    ceiling = CEILINGS[name]
    assert rate(name, ceiling - 1, ceiling, 5.0) is None
    assert rate(name, ceiling, ceiling, 5.0) is None
    assert rate(name, ceiling, ceiling + 5, 5.0) is not None  # an adapter whose counter is wider


def test_the_gap_of_exactly_two_minutes_still_counts() -> None:
    assert rate("port_rcv_errors", 0, 120, MOST_GAP) == 1.0


def test_a_counter_that_appears_later_has_no_rate_at_first() -> None:
    port = PortLoad("mlx5_0", 1)
    assert rates(Reading(port, 10.0, {"port_rcv_errors": 3})) == {"port_rcv_errors": None}
    second = Reading(port, 12.0, {"port_rcv_errors": 5, "symbol_error": 9}, {"port_rcv_errors": 3}, 10.0)
    assert rates(second) == {"port_rcv_errors": 1.0, "symbol_error": None}


counters = st.dictionaries(st.sampled_from([*CEILINGS, "out_of_sequence"]), st.integers(0, 2**64 - 1))


@given(counters, counters, st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_any_two_readings_give_rates_that_are_unknown_or_not_negative(
    first: dict[str, int], second: dict[str, int], at: float, later: float
) -> None:
    found = Reading(PortLoad("d", 1), later, second, first, at)
    assert set(rates(found)) == set(second)
    for name, value in rates(found).items():
        assert value is None or value >= 0.0
        if value is not None:
            assert second[name] >= first[name]
            assert 0 < later - at <= MOST_GAP

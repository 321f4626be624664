from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.rdma.fabric import PortCounters
from llmgw.rdma.queryerrors import compare, counted, growth, one_port, parse, window
from llmgw.rdma.ran import Ran, Trouble
from tests.rdma import captures

LEAF, HOST = 0xB0CF0E0010000000, 0x946DAE0300005001


@pytest.mark.parametrize("name", [name for name in captures.every("ibqueryerrors*.out") if "no-umad" not in name])
def test_every_recorded_line_is_understood(name: str) -> None:
    assert parse(captures.text(name).splitlines()).strange == ()


@pytest.mark.parametrize("form", ["", "-r", "-details", "-data-r"])
def test_each_form_tells_the_same_errors(form: str) -> None:
    found = parse(captures.text(f"faults/ibqueryerrors{form}.out").splitlines())
    ports = {(one.guid, one.port): one.counters for one in found.ports}
    assert ports[LEAF, 5]["SymbolErrorCounter"] == 65535
    assert ports[LEAF, 5]["LinkDownedCounter"] == 255
    assert ports[HOST, 1]["PortRcvErrors"] == 77
    assert len(ports) == 3, "a node's sum over all its ports is no port"


def test_data_counters_are_words_of_four_bytes_read_whole_and_not_as_rounded() -> None:
    found = parse(captures.text("faults/ibqueryerrors-data-r.out").splitlines())
    assert found.ports[0].counters["PortXmitData"] == 123456963252


def test_nodes_whose_agent_did_not_answer_are_counted() -> None:
    assert parse(captures.text("spine0-lossy30/ibqueryerrors.out").splitlines()).unanswered == 5


def test_without_a_manager_nothing_was_counted_and_that_is_not_zero_errors() -> None:
    assert isinstance(counted(captures.ran("no-sm/ibqueryerrors")), Trouble)
    assert isinstance(counted(captures.ran("own-port-down/ibqueryerrors")), Trouble)


def test_perfquery_gives_one_ports_counters() -> None:
    found = one_port(captures.ran("faults/perfquery"), HOST, 1)
    assert isinstance(found, PortCounters)
    assert found.counters["PortRcvErrors"] == 77
    long = one_port(captures.ran("faults/perfquery-x"), HOST, 1)
    assert isinstance(long, PortCounters)
    assert long.counters["PortXmitData"] == 123457047780
    assert isinstance(one_port(captures.ran("no-sm/perfquery"), HOST, 1), Trouble)


def test_a_counter_without_a_performance_agent_is_left_out() -> None:
    found = one_port(
        Ran("perfquery", 0, "# Port counters\nSymbolErrorCounter:....N/A (no PMA)\nPortRcvErrors:...3\n"), 1, 1
    )
    assert isinstance(found, PortCounters)
    assert found.counters == {"PortRcvErrors": 3}


def test_growth_is_unknown_after_a_reset_and_at_the_maximum() -> None:
    assert growth(5, 9) == 4
    assert growth(9, 5) is None
    assert growth(None, 5) is None
    assert growth(60000, 65535, "SymbolErrorCounter") is None
    assert growth(60000, 65535, "PortXmitData") == 5535


def test_bit_errors_are_judged_by_what_the_link_carried() -> None:
    assert window(1000, 200.0, 60.0).verdict == "bad", "1000 in 1.2e13 bits"
    assert window(0, 200.0, 1.0).verdict == "short", "a second says nothing of 1e-12"
    assert window(0, 200.0, 60.0).verdict == "good"
    assert window(3, 0.0, 60.0).bound == math.inf


def test_a_link_that_went_down_between_two_readings_is_bad() -> None:
    found = compare(
        PortCounters(1, 2, {"LinkDownedCounter": 3}), PortCounters(1, 2, {"LinkDownedCounter": 4}), 200.0, 300.0
    )
    assert (found.grown, found.grade) == ({"LinkDownedCounter": 1}, "bad")
    assert found.per_hour == {"LinkDownedCounter": 12.0}


def test_traffic_and_congestion_are_no_errors() -> None:
    after = PortCounters(1, 2, {"PortXmitWait": 10**6, "PortXmitData": 10**9, "PortRcvSwitchRelayErrors": 3})
    assert compare(None, after, 200.0, 300.0).grade == "good"


def test_a_counter_at_its_maximum_is_stuck_and_worth_a_warning() -> None:
    found = compare(None, PortCounters(1, 2, {"SymbolErrorCounter": 65535}), 200.0, 300.0)
    assert (found.stuck, found.grown, found.grade) == (("SymbolErrorCounter",), {}, "warn")


@given(
    st.lists(
        st.one_of(st.sampled_from(captures.text("faults/ibqueryerrors-data-r.out").splitlines()), st.text()),
        max_size=12,
    )
)
def test_any_text_is_read_without_an_exception(lines: list[str]) -> None:
    assert all(value >= 0 for one in parse(lines).ports for value in one.counters.values())


counts = st.dictionaries(
    st.sampled_from(["SymbolErrorCounter", "PortRcvErrors", "LinkDownedCounter", "X"]), st.integers(0, 70000)
)


@given(counts, counts, st.one_of(st.none(), st.floats(0, 2000)), st.floats(0, 1e6))
def test_no_two_readings_give_negative_growth(
    one: dict[str, int], other: dict[str, int], gbps: float | None, seconds: float
) -> None:
    found = compare(PortCounters(1, 1, one), PortCounters(1, 1, other), gbps, seconds)
    assert all(value > 0 for value in found.grown.values())
    assert not set(found.grown) & set(found.stuck)

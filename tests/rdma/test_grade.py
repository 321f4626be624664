from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from llmgw.rdma.grade import Thresholds, ceiling, efficiency, grade, pcie_raw
from llmgw.rdma.link import End, Link


def link(kind: str, rate: float | None, mtu: int | None = 4096, *, gen: int | None = 5, width: int | None = 16) -> Link:
    end = End(
        "a", "mlx5_0", 1, pcie_gen=gen, pcie_width=width, pcie_gen_max=5, pcie_width_max=16, nearest_gpus=("GPU-0",)
    )
    return Link(end, evolve(end, node="b"), kind, mtu, rate)


@pytest.mark.parametrize(
    ("kind", "mtu", "rate", "goodput"),
    [
        ("ib", 4096, 400, 397.5), ("ib", 2048, 400, 395.0), ("ib", 1024, 400, 390.1), ("ib", 4096, 200, 198.7),
        ("roce", 4096, 400, 392.1), ("roce", 2048, 400, 384.6), ("roce", 1024, 400, 370.3), ("roce", 4096, 100, 98.0),
        ("roce", 1024, 100, 92.6),
    ],
)  # fmt: skip
def test_the_ceiling_is_the_rate_less_its_headers(kind: str, mtu: int, rate: float, goodput: float) -> None:
    found = ceiling(link(kind, rate, mtu))
    assert found.gbps == pytest.approx(goodput, abs=0.06)
    assert found.limit == "link"


@pytest.mark.parametrize(("gen", "width", "raw"), [(4, 16, 252), (5, 8, 252), (5, 16, 504), (5, 4, 126), (3, 16, 126)])
def test_pcie_carries_what_its_lanes_carry(gen: int, width: int, raw: float) -> None:
    assert pcie_raw(gen, width) == pytest.approx(raw, abs=0.2)


@pytest.mark.parametrize(
    ("measured", "kind", "rate", "mtu", "word"),
    [
        (397.12, "ib", 400, 4096, "good"),
        (388.42, "ib", 400, 4096, "good"),
        (370.0, "ib", 400, 4096, "fair"),
        (350.0, "ib", 400, 4096, "bad"),
        (98.01, "roce", 100, 4096, "good"),
        (92.40, "roce", 100, 1024, "good"),
        (363.47, "roce", 400, 4096, "fair"),
        (450.0, "ib", 400, 4096, "suspicious"),
    ],
)
def test_samples_from_the_field_get_the_grade_an_operator_gives(
    measured: float, kind: str, rate: float, mtu: int, word: str
) -> None:
    assert grade(measured, link(kind, rate, mtu)).grade == word


def test_a_narrow_slot_is_named_instead_of_blaming_the_link() -> None:
    """PT14: 200 Gb/s ports on PCIe Gen5 x4 deliver 111.7."""
    said = grade(111.7, link("roce", 200, gen=5, width=4))
    assert (said.grade, said.limit) == ("good", "pcie")
    assert any("PCIe-limited" in words and "reseat" in words for words in said.why)


def test_a_small_mtu_is_named() -> None:
    said = grade(92.4, link("roce", 100, 1024))
    assert any("MTU 1024 limits" in words for words in said.why)


def test_a_figure_that_a_smaller_mtu_explains_is_told() -> None:
    said = grade(370.3, link("roce", 400, 4096))
    assert any("what MTU 1024 gives" in words for words in said.why)


def test_a_gpu_far_from_its_adapter_is_the_probable_cause() -> None:
    """PT04: half of the host's figure because GPU and adapter hang on different roots."""
    said = grade(92.3, link("ib", 200, gen=4), gpu_a="GPU-7", gpu_b="GPU-0")
    assert said.grade == "bad"
    assert any("GPU-7 is far from a mlx5_0/1 (SYS" in words and "use GPU-0" in words for words in said.why)
    assert not any("GPU-0 is far" in words for words in said.why)


def test_a_gpu_is_far_from_an_adapter_that_is_near_none() -> None:
    alone = link("ib", 200, gen=4)
    alone = evolve(alone, a=evolve(alone.a, nearest_gpus=()))
    said = grade(92.3, alone, gpu_a="GPU-0", gpu_b="GPU-0")
    assert any("GPU-0 is far from a mlx5_0/1 (SYS" in words and "no GPU" in words for words in said.why)


def test_small_messages_over_one_queue_pair_are_told_as_what_may_explain_a_low_figure() -> None:
    """PT07: 400 Gb/s looks slow with perftest's defaults and is right with large messages."""
    hint = "65536 bytes over one queue pair"
    assert any(hint in words for words in grade(250, link("ib", 400), size=65536, queue_pairs=1).why)
    for size, pairs, gbps in ((1 << 20, 1, 250), (65536, 4, 250), (65536, 1, 396)):
        assert not any(
            "queue pair" in words for words in grade(gbps, link("ib", 400), size=size, queue_pairs=pairs).why
        )


def test_ports_of_one_slot_that_are_tested_at_once_share_what_it_feeds() -> None:
    """Two 200 Gb/s ports on one PCIe Gen4 x16 slot: each is well, both together get 222."""
    made = link("ib", 200, gen=4)
    both = evolve(made, a=evolve(made.a, sharing=2), b=evolve(made.b, sharing=2))
    assert grade(110, made).grade == "bad"
    said = grade(110, both)
    assert (said.grade, said.limit) == ("good", "pcie")
    assert any("2 ports that share the slot" in words for words in said.why)


def test_errors_that_grew_during_the_run_are_shown() -> None:
    said = grade(100, link("ib", 400), counters={"a mlx5_0/1": {"symbol_error": 12, "port_xmit_wait": 99}})
    assert "a mlx5_0/1: symbol_error grew by 12 (symbol errors: cable or connector)" in said.why
    assert not any("xmit_wait" in words for words in said.why)


def test_an_unknown_rate_is_measured_and_not_graded() -> None:
    said = grade(100, link("ib", None))
    assert (said.grade, said.share, said.ceiling_gbps) == ("measured", None, None)


def test_both_directions_have_twice_the_ceiling() -> None:
    said = grade(780, link("ib", 400), bidirectional=True)
    assert said.grade == "good"
    assert said.ceiling_gbps == pytest.approx(795, abs=0.1)


def test_every_grade_prints_its_rule_and_its_numbers() -> None:
    said = grade(370, link("ib", 400))
    for words in ("fair", "from 90%, below 95%", "370", "397.5", "400 Gb/s x 0.994", "MTU 4096"):
        assert words in said.rule


def test_the_thresholds_are_parameters() -> None:
    """On an emulated link a hundredth of the rate is all there is."""
    assert grade(0.3, link("roce", 25), thresholds=Thresholds(good=0.001, fair=0.0005)).grade == "good"


@given(
    st.floats(0.001, 1000),
    st.sampled_from(["ib", "roce"]),
    st.none() | st.floats(0.1, 1600),
    st.none() | st.sampled_from([256, 512, 1024, 2048, 4096]),
    st.none() | st.integers(0, 9),
    st.none() | st.integers(0, 32),
    st.booleans(),
)
def test_more_bandwidth_never_lowers_the_grade(
    gbps: float, kind: str, rate: float | None, mtu: int | None, gen: int | None, width: int | None, both: bool
) -> None:
    order = {"measured": 0, "bad": 1, "fair": 2, "good": 3, "suspicious": 4}
    made = link(kind, rate, mtu, gen=gen, width=width)
    less, more = (grade(value, made, bidirectional=both) for value in (gbps, gbps * 1.1))
    assert order[less.grade] <= order[more.grade]
    assert less.ceiling_gbps is None or rate is not None


def test_every_extra_header_costs() -> None:
    assert (
        efficiency("roce", 4096, vlan=True, ipv6=True) < efficiency("roce", 4096, vlan=True) < efficiency("roce", 4096)
    )

"""NVML's fabric information, decoded."""

from __future__ import annotations

import uuid

from hypothesis import given
from hypothesis import strategies as st

from llmgw.node.nvml.fabric import decode, faults

CLUSTER = uuid.UUID("12345678-9abc-def0-1234-56789abcdef0")
#: Every two-bit field "false", configuration none, partition and fabric manager true.
GOOD = 2 | 2 << 2 | 2 << 4 | 2 << 6 | 1 << 8 | 1 << 12 | 1 << 14


def test_a_completed_fabric_names_its_domain_by_uuid_and_clique() -> None:
    a = decode(3, 0, 32766, CLUSTER.bytes, GOOD, 1)
    b = decode(3, 0, 32766, CLUSTER.bytes, GOOD, 1)
    assert a.domain == b.domain == f"{CLUSTER}.32766"
    assert a.healthy is True
    assert a.faults == ()


def test_a_zero_uuid_is_no_domain_even_when_completed() -> None:
    board = decode(3, 0, 0, bytes(16), GOOD)
    assert board.state == "completed"
    assert board.domain is None
    assert board.cluster_uuid == ""


def test_a_fabric_in_progress_is_no_domain_and_neither_healthy_nor_sick() -> None:
    waiting = decode(2, 0, 0, bytes(16), 0)
    assert waiting.state == "in-progress"
    assert waiting.domain is None
    assert waiting.healthy is None


def test_two_is_the_good_value_except_for_partition_and_manager() -> None:
    assert faults(GOOD) == ()
    assert faults(0) == ()
    assert faults(1) == ("degraded bandwidth",)
    assert faults(1 << 2 | 1 << 4 | 1 << 6) == (
        "route recovery in progress",
        "route unhealthy",
        "access timeout recovery",
    )
    assert faults(2 << 12) == ("no partition assigned",)
    assert faults(2 << 14) == ("global fabric manager not connected",)
    assert faults(5 << 8) == ("insufficient NVLinks",)
    assert faults(9 << 8) == ("incorrect configuration (9)",)


def test_a_status_other_than_success_is_not_healthy_and_no_domain() -> None:
    failed = decode(3, 999, 7, CLUSTER.bytes, 0)
    assert failed.healthy is False
    assert failed.domain is None


def test_the_summary_of_version_three_counts_where_the_mask_is_silent() -> None:
    assert decode(3, 0, 7, CLUSTER.bytes, 0, 2).faults == ("unhealthy",)
    assert decode(3, 0, 7, CLUSTER.bytes, GOOD, 3).faults == ("limited capacity",)
    assert decode(3, 0, 7, CLUSTER.bytes, 0, 0).healthy is None


@given(
    st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.binary(min_size=16, max_size=16)
)
def test_any_words_from_the_driver_decode(state: int, status: int, mask: int, cluster: bytes) -> None:
    fabric = decode(state, status, mask, cluster, mask)
    assert fabric.domain is None or (any(cluster) and fabric.state == "completed")

"""What Xid numbers mean here."""

from __future__ import annotations

import pytest

from llmgw.node.nvml.xids import XIDS, meaning
from llmgw.wire.facts import Grade


@pytest.mark.parametrize("xid", [13, 31, 32, 39, 43, 45, 68, 70, 83, 101, 109, 126])
def test_errors_that_programs_make_are_notes(xid: int) -> None:
    assert meaning(xid).grade is Grade.NOTE


@pytest.mark.parametrize("xid", [48, 64, 79, 95, 119, 120, 158, 167, 169, 173])
def test_errors_that_end_a_gpu_take_it_out_with_a_remedy(xid: int) -> None:
    assert meaning(xid).grade is Grade.BAD
    assert meaning(xid).remedy


def test_a_contained_error_costs_an_engine_and_not_the_gpu() -> None:
    assert meaning(94).grade is Grade.WARN
    assert "engine" in meaning(94).remedy


def test_an_unknown_number_is_watched_and_takes_nothing_out() -> None:
    assert meaning(4711).grade is Grade.WARN


def test_every_entry_says_what_it_is_and_what_to_do() -> None:
    assert all(entry.name and entry.remedy for entry in XIDS.values())

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.rdma.fabric import PortState
from llmgw.rdma.fields import blocks, fields, number
from llmgw.rdma.portinfo import portinfo
from llmgw.rdma.ran import Ran, Trouble
from tests.rdma import captures

ALL = [name.removesuffix(".out") for name in captures.every("*portinfo*.out") if "no-umad" not in name]


@pytest.mark.parametrize("name", ALL)
def test_every_recorded_portinfo_is_a_state_or_the_tools_own_failure(name: str) -> None:
    found = portinfo(captures.ran(name), 1, 5)
    assert isinstance(found, Trouble if captures.ran(name).exit else PortState)


def test_the_extended_speed_counts_since_the_plain_one_stays_at_10_gbps() -> None:
    found = portinfo(captures.ran("faults/smpquery-D-portinfo"), 7, 1)
    assert isinstance(found, PortState)
    assert (found.width, found.speed, found.mtu) == (1, "HDR", 2048)
    assert found.widths == (1, 2, 4, 8, 12)
    assert found.enabled_widths == (1, 4)
    assert "HDR" in found.enabled_speeds


def test_a_port_without_a_manager_is_in_initialize() -> None:
    found = portinfo(captures.ran("no-sm/smpquery-D-portinfo"), 7, 1)
    assert isinstance(found, PortState)
    assert found.state == "Initialize"


@pytest.mark.parametrize("pattern", ["smpquery*.out", "perfquery*.out", "saquery-*.out"])
def test_every_line_of_the_dotted_lists_is_a_field_a_flag_or_a_heading(pattern: str) -> None:
    for name in captures.every(pattern):
        for line in captures.text(name).splitlines():
            if "iberror" in line or not line.strip():
                continue
            flag = line.startswith("\t\t\t\tIs") or line.rstrip().endswith((" dump:", "ports", "RID", "ClassPortInfo:"))
            assert line.startswith("#") or flag or len(fields([line])) == 1, f"{name}: {line!r}"


def test_values_keep_their_words_and_numbers_are_read_from_their_beginning() -> None:
    found = fields(["Mkey:............................<not displayed>", "SM_Key................0x00", "MtuCap:..2048"])
    assert found == {"Mkey": "<not displayed>", "SM_Key": "0x00", "MtuCap": "2048"}
    assert [number(text) for text in ("2048", "0x10", "N/A (no PMA)", "", None)] == [2048, 16, None, None, None]


def test_blocks_begin_at_their_heading() -> None:
    lines = captures.text("faults/saquery-LR.out").splitlines()
    found = blocks(lines, "LinkRecord dump:")
    assert len(found) == 25
    assert found[0] == {"FromLID": "1", "FromPort": "1", "ToPort": "1", "ToLID": "2"}


@given(st.text())
def test_any_text_is_a_state_or_a_trouble(out: str) -> None:
    for text in (out, f"LinkWidthActive:......{out}", f"LinkSpeedExtActive:..{out}\nLinkWidthActive:..4X"):
        assert isinstance(portinfo(Ran("smpquery", 0, text), 1, 1), PortState | Trouble)

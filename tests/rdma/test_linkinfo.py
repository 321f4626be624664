from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.rdma.linkinfo import parse
from tests.rdma import captures

FILES = [
    name for name in captures.every("*iblinkinfo*") if not name.endswith((".err", ".rc")) and "no-umad" not in name
]


@pytest.mark.parametrize("name", FILES)
def test_every_recorded_line_is_understood(name: str) -> None:
    found, strange = parse(captures.text(name).splitlines())
    assert strange == ()
    assert len(found) == sum("==(" in line for line in captures.text(name).splitlines())


def test_both_forms_tell_the_same_of_each_port() -> None:
    plain, _ = parse(captures.text("healthy/iblinkinfo.out").splitlines())
    lines, _ = parse(captures.text("healthy/iblinkinfo-l.out").splitlines())
    assert [(one.guid, one.port, one.width, one.speed, one.peer_lid, one.peer_port) for one in plain] == [
        (one.guid, one.port, one.width, one.speed, one.peer_lid, one.peer_port) for one in lines
    ]


def test_a_silent_peer_is_unavailable_and_a_lost_answer_is_unknown_neither_is_down() -> None:
    found, _ = parse(captures.text("spine0-lossy30/iblinkinfo-l.out").splitlines())
    unavailable = [one for one in found if one.unavailable]
    assert unavailable
    assert {(one.width, one.speed, one.state) for one in unavailable} == {(4, "HDR", "Active")}
    unknown = [one for one in found if one.unknown]
    assert len(unknown) == 2
    assert {(one.width, one.speed, one.state) for one in unknown} == {(0, "", "")}


def test_a_fabric_without_a_manager_is_initialize_everywhere() -> None:
    found, _ = parse(captures.text("no-sm/iblinkinfo-l.out").splitlines())
    assert {(one.state, one.lid) for one in found} == {("Initialize", 0)}


def test_ports_that_are_down_are_told() -> None:
    found, _ = parse(captures.text("faults/iblinkinfo-d-l.out").splitlines())
    assert [(one.port, one.state, one.physical, one.peer_port) for one in found] == [
        (3, "Down", "Polling", 0),
        (6, "Down", "Polling", 0),
        (2, "Down", "Polling", 0),
    ]


def test_ndr_and_xdr_lane_rates_have_their_names() -> None:
    line = '0x{:016x} "a"  1  1[  ] ==( 4X  {} Gbps Active/  LinkUp)==>  0x{:016x}  2  3[  ] "b" ( )'
    found, strange = parse([line.format(1, "106.25", 2), line.format(1, "212.5", 2), line.format(1, "10.0", 2)])
    assert strange == ()
    assert [one.speed for one in found] == ["NDR", "XDR", "QDR"]


@given(st.lists(st.one_of(st.sampled_from(captures.text("odd/iblinkinfo-l.out").splitlines()), st.text()), max_size=20))
def test_any_text_is_read_without_an_exception(lines: list[str]) -> None:
    found, strange = parse(lines)
    assert len(found) + len(strange) <= len(lines)

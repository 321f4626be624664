from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.rdma.ran import Ran, Trouble
from llmgw.rdma.sminfo import answer, managers, remembered
from llmgw.wire.facts import SubnetManager
from tests.rdma import captures

A, B = "946dae0300000001", "946dae0300001001"
MASTER = SubnetManager(guid=A, lid=1, priority=14, state="master", activity=921)


def test_the_master_answers_with_its_guid_lid_priority_and_state() -> None:
    assert answer(captures.ran("healthy/sminfo")) == MASTER


def test_guids_are_written_alike_however_they_were_printed() -> None:
    out = "sminfo: sm lid 4 sm guid 0x2c9020048d2a1, activity count 524649304 priority 0 state 3 SMINFO_MASTER\n"
    found = answer(Ran("sminfo", 0, out))
    assert isinstance(found, SubnetManager)
    assert (found.guid, found.activity) == ("0002c9020048d2a1", 524649304)


@pytest.mark.parametrize(
    ("name", "state"),
    [("sminfo-notact", "standby"), ("sminfo-switch-sm", "master"), ("side-A", "master"), ("merged-B", "master")],
)
def test_recorded_answers_have_their_states(name: str, state: str) -> None:
    found = answer(Ran("sminfo", 0, captures.text(f"misc/{name}.txt")))
    assert isinstance(found, SubnetManager)
    assert found.state == state


@pytest.mark.parametrize("lid", [2, 3, 4, 5, 200])
def test_a_lid_without_a_manager_does_not_answer(lid: int) -> None:
    found = answer(captures.ran(f"healthy/sminfo-lid{lid}"))
    assert isinstance(found, Trouble)
    assert f"LID {lid}" in found.text


def test_the_masters_memory_is_read_whole() -> None:
    found = remembered(captures.ran("faults/saquery-SMIR"))
    assert not isinstance(found, Trouble)
    assert [(one.guid, one.lid, one.priority, one.state) for one in found] == [
        (A, 1, 14, "master"),
        (B, 9, 5, "standby"),
    ]
    eight = remembered(Ran("saquery", 0, captures.text("misc/saquery-SMIR-8.txt")))
    assert not isinstance(eight, Trouble)
    assert [one.state for one in eight] == ["master", *["discovering"] * 4]


def test_each_manager_of_the_memory_counts_only_as_it_answered_itself() -> None:
    memory = (MASTER, SubnetManager(guid=B, lid=9, priority=5, state="standby"), SubnetManager(guid="c", lid=7))
    starting = SubnetManager(guid=B, lid=9, priority=5, state="discovering")
    found = managers("mlx5_0", 1, MASTER, memory, {A: MASTER, B: starting, "c": Trouble("sm-silent", "no answer")})
    assert found.master == MASTER
    assert [(one.guid, one.state, one.error) for one in found.others] == [
        (B, "discovering", ""),
        ("c", "", "no answer"),
    ]


def test_a_lid_that_another_manager_has_taken_over_does_not_vouch_for_the_old_one() -> None:
    found = managers("mlx5_0", 1, MASTER, (SubnetManager(guid=B, lid=1),), {B: MASTER})
    assert found.master == MASTER
    assert [one.error for one in found.others] == [f"LID 1 is answered by the manager {A}"]


def test_a_standby_that_answers_in_the_moment_of_a_hand_back_is_not_taken_for_the_master() -> None:
    standing = SubnetManager(guid=B, lid=9, priority=5, state="standby")
    found = managers("mlx5_0", 1, standing, (MASTER, standing), {A: MASTER, B: standing})
    assert found.master == MASTER
    assert found.error == ""
    alone = managers("mlx5_0", 1, standing, Trouble("sm-silent", "gone"), {})
    assert alone.master is None
    assert "standby" in alone.error


def test_without_an_answer_the_trouble_is_kept() -> None:
    found = managers("mlx5_0", 1, Trouble("no-sm", "no subnet manager"), Trouble("no-sm", "none"), {})
    assert (found.master, found.error, found.code) == (None, "no subnet manager", "no-sm")


@given(st.text(), st.text(), st.integers(0, 255))
def test_any_text_is_an_answer_or_a_trouble(out: str, err: str, status: int) -> None:
    assert isinstance(answer(Ran("sminfo", status, out, err)), SubnetManager | Trouble)
    assert isinstance(remembered(Ran("saquery", status, f"SMInfoRecord dump:\n{out}", err)), tuple | Trouble)

"""Two machines with one identity are told from one with a poor network (A6)."""

from __future__ import annotations

import pytest

from llmgw.plane.clones import MANY, SILENT, WINDOW, Displacements, host_of
from llmgw.wire.facts import NodeId

N = NodeId("n1")
A, B = "192.0.2.1:5001", "192.0.2.2:5001"


def test_two_addresses_in_turn_are_a_clone_and_told_once_with_both() -> None:
    seen = Displacements()
    assert seen.add(N, A, B, 0.0, 0.0) is None
    event = seen.add(N, B, A, 10.0, 0.0)
    assert event is not None
    assert (event.kind, event.data) == ("identity-cloned", {"node": "n1", "first": B, "second": A})
    for number in range(10):
        assert seen.add(N, A, B, 20.0 + number, 0.0) is None
    assert seen.add(N, B, A, 11.0 + SILENT, 0.0) is None  # the turns before are forgotten
    assert seen.add(N, A, B, 12.0 + SILENT, 0.0) is not None


def test_a_machine_that_moved_to_another_address_is_no_clone() -> None:
    seen = Displacements()
    assert seen.add(N, A, B, 0.0, 0.0) is None
    assert seen.add(N, B, "192.0.2.3:1", 10.0, 0.0) is None


def test_one_machine_whose_streams_died_unseen_is_no_clone() -> None:
    seen = Displacements()
    for number in range(MANY - 1):
        assert seen.add(N, f"192.0.2.1:{number}", f"192.0.2.1:{number + 1}", 1.0 + number, 0.0) is None


def test_many_displacements_from_one_address_are_a_clone_behind_it() -> None:
    seen = Displacements()
    events = [seen.add(N, f"192.0.2.1:{n}", f"192.0.2.1:{n + 1}", 1.0 + n, 0.0) for n in range(MANY)]
    assert [event is not None for event in events] == [False] * (MANY - 1) + [True]


def test_displacements_long_apart_are_no_clone() -> None:
    seen = Displacements()
    for number in range(20):
        older, newer = (A, B) if number % 2 else (B, A)
        assert seen.add(N, older, newer, number * (WINDOW + 1), 0.0) is None


def test_nodes_are_judged_each_by_itself() -> None:
    seen = Displacements()
    assert seen.add(NodeId("a"), A, B, 0.0, 0.0) is None
    assert seen.add(NodeId("b"), B, A, 1.0, 0.0) is None


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("192.0.2.1:77", "192.0.2.1"),
        ("[2001:db8::1]:77", "2001:db8::1"),
        ("2001:db8::1", "2001:db8::1"),
        ("n1.example:7", "n1.example"),
        ("n1.example", "n1.example"),
        ("", ""),
    ],
)
def test_the_host_of_an_address(address: str, host: str) -> None:
    assert host_of(address) == host

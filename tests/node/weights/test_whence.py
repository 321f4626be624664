"""Whom a node waits for, and that among many that wait for each other somebody always goes on."""

from __future__ import annotations

import random

import attrs
from hypothesis import given
from hypothesis import strategies as st

from llmgw.config import Listen
from llmgw.node.weights.manifest import Manifest
from llmgw.node.weights.whence import (
    BEGINS_WITHIN,
    FULL,
    STILL,
    Answer,
    Fetches,
    Has,
    Nothing,
    Seen,
    Verdict,
    Whence,
    judged,
    watched,
)

MANIFEST = Manifest(source="hf://a/b", folder="models--a--b", revision="r", files=())


def at(number: int) -> Listen:
    return Listen("10.0.0.1", number)


def verdict(
    answers: dict[Listen, Answer], *, own: str = "n5", soon: tuple[Listen, ...] = (), after: float = 0.0
) -> Verdict:
    """What is said when the answers have stayed the same for so long."""
    seen = watched({}, answers, 100.0)
    seen = watched(seen, answers, 100.0 + after)
    return judged(answers, Whence(soon=soon), own, 100.0, seen, 100.0 + after)


def test_the_first_that_has_it_and_a_place_is_taken() -> None:
    answers: dict[Listen, Answer] = {
        at(1): Nothing(),
        at(2): Has("n2", MANIFEST, room=False),
        at(3): Has("n3", MANIFEST),
    }
    assert verdict(answers) == Verdict(take=at(3))


def test_a_place_is_waited_for_and_in_the_end_taken_without_one() -> None:
    answers: dict[Listen, Answer] = {at(2): Has("n2", MANIFEST, room=False)}
    assert verdict(answers).wait == "weights, until n2 has a place free"
    assert verdict(answers, after=FULL) == Verdict(take=at(2))


def test_whoever_brings_bytes_is_waited_for_whatever_its_name_until_none_come() -> None:
    answers: dict[Listen, Answer] = {at(9): Fetches("n9", moving=True, done=7)}
    assert verdict(answers, after=STILL - 1).wait == "weights, until n9 has them"
    assert verdict(answers, after=STILL) == Verdict()


def test_of_two_that_wait_the_earlier_name_goes_on() -> None:
    answers: dict[Listen, Answer] = {at(9): Fetches("n9", moving=False)}
    assert verdict(answers, own="n5") == Verdict()
    answers = {at(5): Fetches("n5", moving=False)}
    assert verdict(answers, own="n9").wait == "weights, after n5"
    assert verdict(answers, own="n9", after=STILL) == Verdict()


def test_one_that_waits_is_waited_for_as_long_as_anybody_brings_bytes() -> None:
    answers: dict[Listen, Answer] = {at(1): Fetches("n1", moving=True, done=1), at(2): Fetches("n2", moving=False)}
    seen = watched({}, answers, 0.0)
    for now in (50.0, 100.0, 150.0):
        answers[at(1)] = Fetches("n1", moving=True, done=int(now))
        seen = watched(seen, answers, now)
    answers[at(1)] = Nothing()
    seen = watched(seen, answers, 155.0)
    assert judged(answers, Whence(), "n3", 0.0, seen, 155.0).wait == "weights, after n2"


def test_one_that_is_about_to_fetch_has_a_moment_to_begin_and_only_once() -> None:
    nothing: dict[Listen, Answer] = {at(1): Nothing()}
    assert verdict(nothing) == Verdict()
    assert verdict(nothing, soon=(at(1),)).wait == "weights, until 10.0.0.1:1 begins"
    assert verdict(nothing, soon=(at(1),), after=BEGINS_WITHIN) == Verdict()
    seen = watched(watched({}, {at(1): Fetches("n1", True)}, 0.0), nothing, 1.0)
    assert judged(nothing, Whence(soon=(at(1),)), "n5", 0.0, seen, 1.0) == Verdict()


def test_addresses_that_cannot_be_meant_are_left_out() -> None:
    told = Whence.told(["10.0.0.1:7445", "nonsense", "[::1]:7445"], [":x"], "abc")
    assert told == Whence((Listen("10.0.0.1", 7445), Listen("::1", 7445)), (), "abc")


@attrs.define
class _Node:
    """A node of the model: where it stands, and what it was told by a plane that may be wrong."""

    name: str
    address: Listen
    peers: tuple[Listen, ...]
    soon: tuple[Listen, ...]
    begins: float
    state: str = "idle"
    done: int = 0
    began: float = 0.0
    outside: bool = False
    seen: dict[Listen, Seen] = attrs.field(factory=dict)

    def answer(self) -> Answer:
        if self.state == "has":
            return Has(self.name, MANIFEST)
        if self.state == "waiting":
            return Fetches(self.name, moving=False)
        return Fetches(self.name, moving=True, done=self.done) if self.state == "moving" else Nothing()


@given(st.integers(2, 6), st.randoms(use_true_random=False), st.booleans())
def test_everybody_has_it_in_the_end_and_with_a_plane_that_knows_all_one_goes_outside(
    count: int, chance: random.Random, honest: bool
) -> None:
    everybody = [at(n + 1) for n in range(count)]
    nodes = []
    for n, address in enumerate(everybody):
        others = tuple(other for other in everybody if other != address)
        soon = tuple(everybody[:n]) if honest else tuple(other for other in others if chance.random() < 0.5)
        peers = others if honest else tuple(other for other in others if other in soon or chance.random() < 0.3)
        nodes.append(_Node(f"n{n}", address, peers, soon, begins=chance.uniform(0, 10)))
    by_address = {node.address: node for node in nodes}
    now = 0.0
    while now < 1000 and not all(node.state == "has" for node in nodes):
        now += 1.0
        for node in chance.sample(nodes, count):
            if node.state == "idle" and node.begins <= now:
                node.state, node.began = "waiting", now
            if node.state == "waiting":
                asked = dict.fromkeys((*node.peers, *node.soon)) if not honest else dict.fromkeys(node.soon)
                answers = {address: by_address[address].answer() for address in asked}
                node.seen = watched(node.seen, answers, now)
                found = judged(answers, Whence(soon=node.soon), node.name, node.began, node.seen, now)
                if found.take is not None or not found.wait:
                    node.state, node.outside = "moving", found.take is None
            elif node.state == "moving":
                node.done += 1
                if node.done > 20:
                    node.state = "has"
    assert all(node.state == "has" for node in nodes)
    assert now < count * (BEGINS_WITHIN + 30)
    if honest:
        assert sum(node.outside for node in nodes) == 1

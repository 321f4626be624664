from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.locate import TREES, World, adaptive, score
from llmgw.rdma.locate import Noise, Result, ends, locate, next_round


def results(*rows: tuple[str, str, float]) -> list[Result]:
    return [Result(*row) for row in rows]


def test_two_slow_pairs_with_one_node_in_common_name_that_node() -> None:
    found = locate(results(("a", "b", 0.4), ("a", "c", 0.42), ("b", "c", 0.99), ("c", "d", 1.0)))
    assert [suspect.parts for suspect in found.suspects] == [("a",)]
    assert "a > b 40%" in found.suspects[0].evidence
    assert found.suspects[0].cleared == 2


def test_one_slow_pair_suspects_both_ends_and_the_next_round_splits_them() -> None:
    rows = results(("a", "b", 0.4), ("c", "d", 1.0), ("e", "f", 1.0))
    found = locate(rows)
    assert [set(suspect.parts) for suspect in found.suspects] == [{"a", "b"}]
    pairs = next_round(list("abcdef"), rows)
    assert not any({"a", "b"} == set(pair) for pair in pairs)
    assert {"a", "b"} & {node for pair in pairs for node in pair}


def test_all_fast_is_no_suspect_and_nothing_more_to_test() -> None:
    rows = results(("a", "b", 0.99), ("c", "d", 1.01))
    assert locate(rows, parts="abcd") == locate(rows, parts="dcba")
    assert locate(rows, parts="abcd").suspects == ()
    assert locate(rows, parts="abcd").settled
    assert next_round(list("abcd"), rows, parts="abcd") == ()


def test_a_failed_test_counts_as_the_slowest() -> None:
    found = locate(results(("a", "b", 0.0), ("a", "c", 0.0), ("b", "c", 1.0)))
    assert found.suspects[0].parts == ("a",)


def test_one_noisy_figure_is_tested_again_and_accuses_nobody() -> None:
    rows = results(("a", "b", 0.84), ("c", "d", 1.0))
    assert locate(rows).suspects == ()
    assert not locate(rows, parts="abcd").settled
    again = next_round(list("abcd"), rows, parts="abcd")
    assert {"a", "b"} & {node for pair in again for node in pair}
    cleared = rows + results(("a", "c", 0.98), ("b", "d", 1.0))
    assert locate(cleared, parts="abcd").settled


def test_untested_parts_are_counted_and_tested_next() -> None:
    assert locate(results(("a", "b", 1.0)), parts="abcd").untested == 2
    pairs = next_round(list("abcd"), results(("a", "b", 1.0)), parts="abcd")
    assert {"c", "d"} <= {node for pair in pairs for node in pair}


def test_parts_that_no_test_can_tell_apart_stay_together() -> None:
    def path(a: str, b: str) -> tuple[str, ...]:
        return (f"{a} adapter", f"{a} cable", f"{b} adapter", f"{b} cable")

    rows = results(("a", "b", 0.5), ("a", "c", 0.5), ("b", "c", 1.0))
    found = locate(rows, path)
    assert set(found.suspects[0].parts) == {"a adapter", "a cable"}
    assert found.settled
    assert next_round(list("abc"), rows, path) == ()


def test_two_faults_are_two_suspects() -> None:
    nodes = "abcdef"
    bad = {"a": 0.3, "d": 0.6}
    rows = [Result(x, y, min(bad.get(x, 1.0), bad.get(y, 1.0))) for x in nodes for y in nodes if x < y]
    assert sorted(suspect.parts for suspect in locate(rows).suspects) == [("a",), ("d",)]


@pytest.mark.parametrize("nodes", [16, 64, 256])
def test_one_bad_part_among_n_nodes_is_found_within_the_bound(nodes: int) -> None:
    tree = TREES[nodes]
    bound = 2 * math.log2(nodes) + 3
    for seed in range(20):
        dice = random.Random(seed)
        part = dice.choice(tree.parts)
        found, rounds = adaptive(World(tree, {part: dice.uniform(0.2, 0.7)}, dice))
        assert part in found, (seed, part)
        assert rounds <= bound


@settings(max_examples=30)
@given(st.integers(3, 60), st.integers(0, 1 << 30))
def test_one_bad_node_is_found_within_the_bound_without_any_map(count: int, seed: int) -> None:
    """Odd and small fleets too; no noise, so the answer is exact."""
    dice = random.Random(seed)
    nodes = [f"n{at}" for at in range(count)]
    bad = dice.choice(nodes)
    rows: list[Result] = []
    rounds = 0
    while pairs := next_round(nodes, rows, ends, parts=nodes, seed=rounds):
        rows += [Result(a, b, 0.5 if bad in (a, b) else 1.0) for a, b in pairs]
        rounds += 1
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs)
    assert [suspect.parts for suspect in locate(rows, parts=nodes).suspects] == [(bad,)]
    assert rounds <= 2 * math.log2(count) + 3


def test_the_search_beats_testing_by_hand_and_needs_a_fraction_of_all_rounds() -> None:
    ours, by_hand = score(64, "adaptive", 60), score(64, "retest", 60)
    assert ours.precision > max(0.95, by_hand.precision)
    assert ours.recall > max(0.95, by_hand.recall)
    assert ours.rounds_mean < 63 / 5


@given(st.floats(0, 1.2), st.floats(0, 1.2))
def test_a_slower_result_never_speaks_less_for_a_fault(x: float, y: float) -> None:
    noise = Noise()
    assert (x <= y) == (noise.weight(x) >= noise.weight(y)) or noise.weight(x) == noise.weight(y)
    assert noise.weight(1.0) < 0 < noise.weight(0.6)


def test_every_suspect_explains_something_that_no_other_does() -> None:
    """Beside c and e, a would explain as much as d does; but in d's place it would leave nothing to e."""
    shares = {("a", "b"): 1.5, ("a", "c"): 0.75, ("a", "d"): 0.0, ("a", "e"): 0.5, ("b", "d"): 1.5, ("c", "d"): 0.0}
    found = locate([Result(a, b, share) for (a, b), share in shares.items()], parts="abcdef")
    assert [suspect.parts for suspect in found.suspects] == [("d", "a"), ("e",), ("c",)]
    assert all(suspect.slow and suspect.weight > 0 for suspect in found.suspects)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from("abcdef"), st.floats(0, 1.5)), max_size=12))
def test_any_results_give_a_finding_and_a_round(rows: list[tuple[str, str, float]]) -> None:
    given_rows = [Result(*row) for row in rows if row[0] != row[1]]
    found = locate(given_rows, parts="abcdef")
    assert all(suspect.weight > 0 for suspect in found.suspects)
    next_round(list("abcdef"), given_rows, parts="abcdef")

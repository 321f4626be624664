from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmgw.rdma.tournament import key, progress, remaining, rounds


def names(count: int) -> list[str]:
    return [f"n{at}" for at in range(count)]


@given(st.integers(0, 40))
def test_every_pair_meets_once_in_rounds_of_disjoint_pairs(count: int) -> None:
    schedule = rounds(names(count))
    met = [key(*match) for each in schedule for match in each]
    assert len(met) == len(set(met)) == count * (count - 1) // 2
    for each in schedule:
        busy = [node for match in each for node in match]
        assert len(busy) == len(set(busy))


def test_n_nodes_need_one_round_less_and_an_odd_number_one_rests_each() -> None:
    assert len(rounds(names(8))) == 7
    assert len(rounds(names(7))) == 7
    assert all(len(each) == 3 for each in rounds(names(7)))
    assert rounds(["alone"]) == ()


@given(st.integers(2, 20), st.randoms(use_true_random=False))
def test_a_tournament_goes_on_where_it_stopped(count: int, dice: object) -> None:
    schedule = rounds(names(count))
    every = [key(*match) for each in schedule for match in each]
    done = set(every[: dice.randint(0, len(every))])  # type: ignore[attr-defined]
    rest = remaining(schedule, done)
    assert sorted(key(*match) for each in rest for match in each) == sorted(set(every) - done)
    for each in rest:
        assert len({node for match in each for node in match}) == 2 * len(each)


def test_both_roles_are_played() -> None:
    schedule = rounds(names(8))
    clients = [match[0] for each in schedule for match in each]
    assert all(1 <= clients.count(node) <= 6 for node in names(8))


def test_the_time_left_comes_from_what_rounds_took() -> None:
    schedule = rounds(names(8))
    begun = progress(schedule, 0, 0, 0.0, 20.0)
    assert (begun.round, begun.rounds, begun.total, begun.seconds_left) == (1, 7, 28, 140.0)
    later = progress(schedule, 2, 8, 60.0, 20.0)
    assert (later.done, later.round, later.seconds_left) == (8, 3, 150.0)
    assert progress((), 0, 0, 0.0, 20.0).seconds_left == 0.0

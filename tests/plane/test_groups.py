"""So many nodes of which no two are foes: found exactly when there are so many (D6)."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from llmgw.plane.groups import Liking, Rails, Way, common, together

Pairs = dict[int, set[int]]


def both(pairs: list[tuple[int, int]]) -> Pairs:
    found: Pairs = {}
    for a, b in pairs:
        if a != b:
            found.setdefault(a, set()).add(b)
            found.setdefault(b, set()).add(a)
    return found


SMALL = st.integers(min_value=0, max_value=9)
PAIRS = st.lists(st.tuples(SMALL, SMALL), max_size=30)


@given(count=st.integers(1, 6), size=st.integers(0, 10), foes=PAIRS, friends=PAIRS)
def test_a_group_is_found_exactly_when_there_is_one(
    count: int, size: int, foes: list[tuple[int, int]], friends: list[tuple[int, int]]
) -> None:
    order, apart = list(range(size)), both(foes)
    found = together(order, count, apart, both(friends))
    exists = any(
        all(b not in apart.get(a, ()) for a, b in combinations(some, 2)) for some in combinations(order, count)
    )
    assert (found is not None) == exists
    if found is not None:
        assert len(set(found)) == count
        assert set(found) <= set(order)
        assert all(b not in apart.get(a, ()) for a, b in combinations(found, 2))


@given(size=st.integers(0, 12), count=st.integers(1, 5))
def test_without_foes_or_friends_the_first_are_taken(size: int, count: int) -> None:
    order = list(range(size))
    assert together(order, count, {}, {}) == (tuple(order[:count]) if count <= size else None)


def test_a_friend_of_those_chosen_comes_before_a_stranger() -> None:
    friends = both([(0, 4)])
    assert together([0, 1, 2, 3, 4], 2, {}, friends) == (0, 4)
    assert together([0, 1, 2, 3, 4], 3, {}, friends) == (0, 4, 1)


def test_a_friend_that_is_worth_less_does_not() -> None:
    liking = Liking[int](lambda node: True, lambda node: (node == 2,), lambda node: (node,))
    assert together([0, 1, 2], 2, {}, both([(0, 2)]), liking) == (0, 1)


def test_a_friend_that_cannot_be_had_is_not_taken() -> None:
    liking = Liking[int](lambda node: node < 3, lambda node: (), lambda node: (node,))
    assert together([0, 1, 2], 2, {}, both([(0, 7), (0, 2)]), liking) == (0, 2)


def test_one_node_that_is_bad_with_all_others_is_left_out() -> None:
    size = 400
    foes = both([(0, other) for other in range(1, size)])
    assert together(range(size), size - 1, foes, {}) == tuple(range(1, size))
    assert together(range(size), size, foes, {}) is None


def test_many_pairs_at_random_end_in_time_with_a_set_that_holds() -> None:
    size = 300
    foes = both([(a, (a * 7 + step * 13) % size) for a in range(size) for step in range(1, 9)])
    found = together(range(size), 30, foes, {})
    assert found is not None
    assert all(b not in foes.get(a, ()) for a, b in combinations(found, 2))


# --- rails in common -------------------------------------------------------------------------------------

KEYS = st.sampled_from([(("pci of 4", at, 0), "red") for at in range(4)])
SIGNATURES = st.lists(st.frozensets(KEYS, max_size=4), max_size=6)


@given(signatures=SIGNATURES, fewest=st.integers(1, 4), count=st.integers(2, 4))
def test_every_set_of_rails_that_some_nodes_have_in_common_is_looked_at(
    signatures: list[Rails], fewest: int, count: int
) -> None:
    sets = common(signatures, fewest)
    assert all(len(rails) >= fewest for rails in sets)
    assert list(map(len, sets)) == sorted(map(len, sets), reverse=True)
    for some in combinations(signatures, count):
        shared = frozenset.intersection(*some)
        assert (len(shared) >= fewest) <= (shared in sets)


def test_nvlink_comes_before_rdma_and_more_rails_before_fewer() -> None:
    rail = (("label", 0, 0), "fabric red")
    other = (("label", 1, 0), "fabric red")
    ways = [
        Way("tcp"),
        Way("rdma", "roce4", frozenset({rail})),
        Way("rdma", "ib", frozenset({rail})),
        Way("rdma", "roce4", frozenset({rail, other})),
        Way("nvlink", "uuid.1"),
    ]
    assert sorted(ways, key=lambda way: way.order) == list(reversed(ways))


def test_of_several_versions_the_newest_is_taken() -> None:
    versions = ["0.10.1", "0.10", "0.9.2", "0.9", "0.9rc1", ""]
    mixed = [versions[at] for at in (3, 5, 0, 4, 1, 2)]
    assert sorted(mixed, key=lambda version: Way("tcp", version=version).order) == versions

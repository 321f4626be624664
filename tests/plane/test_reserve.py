"""Port numbers that the plane gives: from the top of a node's range down, none that is held, never the last ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmgw.node import tcp
from llmgw.plane.reserve import RANGE, purposes, reserve
from llmgw.wire.spans import spanned


def test_each_engine_has_its_purposes_by_rank() -> None:
    assert [purposes("vllm", rank) for rank in (0, 1)] == [("master",), ()]
    assert [purposes("sglang", rank) for rank in (0, 1)] == [("dist+",), ()]
    assert [purposes("llamacpp", rank) for rank in (0, 1, 2)] == [(), ("rpc",), ("rpc",)]
    assert purposes("unknown", 0) == ()


def test_numbers_go_from_the_top_of_the_range_down() -> None:
    assert reserve(("master",), None, ()) == {"master": RANGE[1]}
    assert reserve(("master",), (21000, 21009), {21009, 21008}) == {"master": 21007}
    assert reserve(("dist+",), (21000, 21017), ()) == {"dist+": 21002}
    assert reserve(("dist+",), (21000, 21017), {21004}) is None
    assert reserve(("rpc",), (21000, 21000), {21000}) is None


def test_the_next_attempt_goes_on_below_the_last_and_then_from_the_top() -> None:
    assert reserve(("master",), (21000, 21002), (), {"master": 21002}) == {"master": 21001}
    assert reserve(("master",), (21000, 21002), (), {"master": 21000}) == {"master": 21002}
    assert reserve(("master",), (21000, 21000), (), {"master": 21000}) == {"master": 21000}
    assert reserve(("master",), (21000, 21002), (), {"master": 40000}) == {"master": 21002}


def test_a_block_is_as_wide_as_the_nodes_have_it() -> None:
    assert set(spanned({"dist+": 21000, "rpc": 5})) == {*range(21000, 21016), 5}
    assert tcp.width(("dist+", "rpc")) == 17
    assert reserve(("rpc", "dist+"), (21000, 21016), ()) == {"rpc": 21016, "dist+": 21000}


NUMBERS = st.integers(100, 140)


@given(
    names=st.lists(st.sampled_from(["a", "b", "dist+"]), max_size=3, unique=True).map(tuple),
    first=NUMBERS,
    width=st.integers(0, 30),
    held=st.frozensets(NUMBERS),
    last=st.dictionaries(st.sampled_from(["a", "dist+"]), NUMBERS),
)
def test_numbers_are_in_the_range_free_and_not_those_of_before(
    names: tuple[str, ...], first: int, width: int, held: frozenset[int], last: dict[str, int]
) -> None:
    found = reserve(names, (first, first + width), held, last)
    if found is None:
        assert names
        return
    used = list(spanned(found))
    assert len(used) == len(set(used))
    assert not set(used) & held
    assert all(first <= number <= first + width for number in used)
    if len(names) == 1 and names[0] in last:
        before = set(spanned({names[0]: last[names[0]]}))
        if before & set(used):
            assert reserve(names, (first, first + width), held | before) is None

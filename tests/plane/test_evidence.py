"""What a bandwidth test of two nodes tells placement: which rails are bad, which work, and nothing of the rest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.plane import evidence
from llmgw.plane.world import DEFAULT, Evidence, World
from llmgw.rdma.grade import Verdict
from llmgw.rdma.results import EndView, Failure, PairResult, Parameters, RailResult
from tests.plane.fabrics_of import labelled, nodes, wanted
from tests.plane.worlds import world

NOW, CLOCK = 500.0, 1_700_000_500.0


def rail(device: str, grade: str = "good", *, code: str = "", gbps: float | None = 390.0, busy: str = "") -> RailResult:
    failure = Failure(side="n1", error="exit code 1", code=code, cause="it broke") if grade == "failed" else None
    return RailResult(
        rail=device[-1],
        a=EndView(node="n2", device=device, busy=(busy,) if busy else ()),
        b=EndView(node="n1", device=device),
        rate_gbps=400.0,
        gbps=None if failure else gbps,
        verdict=Verdict(grade=grade, rule=grade),
        failure=failure,
    )


def result_of(*rails: RailResult, clock: float = CLOCK, **fields: object) -> PairResult:
    return PairResult(a="n2", b="n1", clock=clock, rails=rails, **fields)  # type: ignore[arg-type]


def known(*results: PairResult) -> Evidence | None:
    found: Evidence | None = None
    for result in results:
        found = evidence.heard(found, result, NOW, CLOCK)
    return found


def test_a_rail_that_was_graded_bad_is_bad_at_both_its_ends() -> None:
    found = known(result_of(rail("mlx5_0", "bad", gbps=12.0), rail("mlx5_1"), clock=CLOCK - 100))
    assert found is not None
    assert found.bad == ("n2 mlx5_0/1", "n1 mlx5_0/1")
    assert found.good == ("n2 mlx5_1/1", "n1 mlx5_1/1")
    assert found.figures == dict.fromkeys(found.bad, "12 Gb/s of 400")
    assert (found.clock, found.at) == (CLOCK - 100, NOW - 100)
    assert "rail 0" in found.text


@pytest.mark.parametrize("code", sorted(evidence.WIRES))
def test_a_failure_that_blames_the_wires_is_bad(code: str) -> None:
    found = known(result_of(rail("mlx5_0", "failed", code=code)))
    assert found is not None
    assert found.figures["n1 mlx5_0/1"] == "it broke"


@pytest.mark.parametrize(
    "code", ["", "killed", "no-server", "option", "port-down", "no-gid", "memory-lock", "peer-left", "not-listening"]
)
def test_a_failure_of_tools_or_processes_tells_nothing(code: str) -> None:
    assert known(result_of(rail("mlx5_0", "failed", code=code))) is None


def test_a_low_figure_of_a_busy_node_or_of_all_rails_at_once_tells_nothing() -> None:
    assert known(result_of(rail("mlx5_0", "bad", busy="ib_write_bw"))) is None
    assert known(result_of(rail("mlx5_0", "bad"), busy=("tiny-0",))) is None
    assert known(result_of(rail("mlx5_0", "bad"), parameters=Parameters(at_once=True))) is None
    good = known(result_of(rail("mlx5_0", "good"), busy=("tiny-0",)))
    assert good is not None
    assert good.good


@pytest.mark.parametrize("grade", ["measured", "suspicious"])
def test_what_cannot_be_graded_is_neither_good_nor_bad(grade: str) -> None:
    assert known(result_of(rail("mlx5_0", grade))) is None


def test_a_pair_that_could_not_be_tested_keeps_what_was_known() -> None:
    before = result_of(rail("mlx5_0", "bad"), clock=CLOCK - 10)
    assert known(before, result_of(error="n1: no agent")) == known(before)


def test_of_each_rail_the_newest_test_counts() -> None:
    first = result_of(rail("mlx5_0", "bad", gbps=12.0), rail("mlx5_1", "bad"), clock=CLOCK - 200)
    found = known(first, result_of(rail("mlx5_1", "good"), clock=CLOCK - 100))
    assert found is not None
    assert found.bad == ("n2 mlx5_0/1", "n1 mlx5_0/1")
    assert found.since == dict.fromkeys(found.bad, CLOCK - 200)
    assert set(found.figures) == set(found.bad)
    again = known(first, result_of(rail("mlx5_1", "good"), clock=CLOCK - 100), result_of(rail("mlx5_0"), clock=CLOCK))
    assert again is not None
    assert (again.bad, again.figures) == ((), {})
    assert len(again.good) == 4


def test_a_test_that_ended_before_the_one_that_is_known_changes_nothing() -> None:
    newer = result_of(rail("mlx5_0"), clock=CLOCK)
    assert known(newer, result_of(rail("mlx5_0", "bad"), clock=CLOCK - 1)) == known(newer)


def test_a_bad_rail_that_a_newer_test_left_out_grows_old_by_its_own_test() -> None:
    """One of another rail does not make it young again."""
    here = world(labelled("n1", 2), labelled("n2", 2))
    old = result_of(rail("mlx5_0", "bad"), clock=CLOCK - DEFAULT.evidence + 50)
    here = evidence.tested(here, old, NOW, CLOCK)
    here = evidence.tested(here, result_of(rail("mlx5_1")), NOW, CLOCK)
    assert nodes(here, wanted(2), now=NOW + 49) == ()
    assert nodes(here, wanted(2), now=NOW + 51) == ("n1", "n2")


def test_a_test_is_in_the_world_at_once_and_wakes_whoever_plans() -> None:
    here = world(labelled("n1"), labelled("n2"))
    after = evidence.tested(here, result_of(rail("mlx5_0", "bad")), NOW, CLOCK)
    assert after.version == here.version + 1
    assert nodes(after, wanted(2)) == ()
    assert evidence.tested(after, result_of(error="busy"), NOW, CLOCK) is after
    healed = evidence.tested(after, result_of(rail("mlx5_0", "good"), clock=CLOCK + 1), NOW + 1, CLOCK + 1)
    assert nodes(healed, wanted(2)) == ("n1", "n2")


def test_old_tests_and_those_of_nodes_that_are_no_more_are_forgotten() -> None:
    here = evidence.tested(world(labelled("n1"), labelled("n2")), result_of(rail("mlx5_0", "bad")), NOW, CLOCK)
    assert evidence.aged(here, NOW + DEFAULT.evidence, DEFAULT) is here
    aged = evidence.aged(here, NOW + DEFAULT.evidence + 1, DEFAULT)
    assert (len(aged.evidence), aged.version) == (0, here.version + 1)
    assert not evidence.aged(evidence.tested(World(), result_of(rail("mlx5_0")), NOW, CLOCK), NOW, DEFAULT).evidence


RESULTS = st.lists(
    st.builds(
        lambda clock, grades: result_of(
            *(rail(f"mlx5_{n}", grade) for n, grade in enumerate(grades) if grade != "left out"), clock=CLOCK - clock
        ),
        st.integers(0, 2 * int(DEFAULT.evidence)).map(float),
        st.lists(st.sampled_from(["good", "bad", "measured", "left out"]), min_size=1, max_size=3),
    ),
    max_size=6,
    unique_by=lambda result: result.clock,
)


@given(results=RESULTS)
def test_stored_tests_say_the_same_in_whatever_order_they_are_read(results: list[PairResult]) -> None:
    found = evidence.of_history(results, NOW, CLOCK, DEFAULT)
    assert found == evidence.of_history(reversed(results), NOW, CLOCK, DEFAULT)
    newest: dict[str, str] = {}
    for result in sorted(results, key=lambda result: result.clock):
        if CLOCK - result.clock <= DEFAULT.evidence:
            for one in result.rails:
                if one.verdict.grade in ("good", "bad"):
                    newest[one.a.device] = one.verdict.grade
    told = found.get(evidence.pair_of(result_of()))
    assert {end.partition(" ")[2].partition("/")[0] for end in (told.bad if told else ())} == {
        device for device, grade in newest.items() if grade == "bad"
    }

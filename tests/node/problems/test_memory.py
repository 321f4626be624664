"""Two speeds: a problem is told at once and taken back only after it was gone for a while."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmgw.node.problems.memory import AGE, Held, Symptom, settled, told
from llmgw.wire.facts import Grade, Problem


def symptom(text: str = "it hurts", grade: Grade = Grade.WARN, *, after: float = 0, clear: float = 60) -> Symptom:
    return Symptom(Problem(subject="node", code="pain", grade=grade, text=text), after, clear)


def texts(held: dict[str, Held]) -> list[str]:
    return [problem.text for problem in told(held)]


def test_a_symptom_is_a_problem_at_once_and_stays_for_its_window_after_it_is_gone() -> None:
    held = settled({}, [symptom()], 100)
    assert texts(held) == ["it hurts"]
    held = settled(held, [], 159)
    assert texts(held) == ["it hurts"]
    assert texts(settled(held, [], 218)) == ["it hurts"]
    assert texts(settled(held, [], 219)) == []


def test_time_in_which_nobody_looked_clears_nothing() -> None:
    held = settled(settled({}, [symptom()], 100), [], 10_000)
    assert texts(held) == ["it hurts"]


def test_a_symptom_that_returns_within_its_window_is_the_same_problem() -> None:
    held = settled(settled(settled({}, [symptom()], 100), [], 130), [symptom()], 150)
    (only,) = held.values()
    assert (only.first, only.gone_at) == (100, None)


def test_a_symptom_that_must_last_is_not_told_before_and_is_forgotten_when_it_passes() -> None:
    held = settled({}, [symptom(after=60)], 100)
    assert texts(held) == []
    assert settled(held, [], 110) == {}
    held = settled(held, [symptom(after=60)], 161)
    assert texts(held) == ["it hurts"]


def test_words_keep_still_for_a_minute_and_a_new_grade_is_told_at_once() -> None:
    held = settled({}, [symptom("3 errors")], 100)
    held = settled(held, [symptom("4 errors")], 130)
    assert texts(held) == ["3 errors"]
    assert texts(settled(held, [symptom("5 errors")], 161)) == ["5 errors"]
    assert texts(settled(held, [symptom("5 errors", Grade.BAD)], 131)) == ["5 errors"]


def test_words_with_an_age_count_the_seconds_since_it_began() -> None:
    held = settled({}, [symptom(f"for {AGE}")], 100)
    assert texts(held) == ["for 0 s"]
    assert texts(settled(held, [symptom(f"for {AGE}")], 220)) == ["for 120 s"]


def test_two_symptoms_with_one_identity_are_one_problem() -> None:
    assert texts(settled({}, [symptom("first"), symptom("second")], 100)) == ["first"]


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans(), st.floats(0, 90), st.floats(0, 90)), max_size=20))
def test_problems_are_a_set_whatever_comes_and_goes(looks: list[tuple[float, bool, float, float]]) -> None:
    held: dict[str, Held] = {}
    now = 0.0
    for step, there, after, clear in looks:
        now += step
        held = settled(held, [symptom(after=after, clear=clear)] if there else [], now)
        assert len(told(held)) <= 1
        if there and after == 0:
            assert len(told(held)) == 1

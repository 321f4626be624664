from hypothesis import given
from hypothesis import strategies as st

from llmgw.node.runs import RunEnd, RunName, expendable

FAILED, WELL, HELD = RunEnd(True), RunEnd(False, 10), RunEnd(True, 500)
REPLACED = RunEnd(replaced=True)


def names(*numbers: int) -> tuple[RunName, ...]:
    return tuple(map(RunName, numbers))


def test_the_first_failure_of_the_loop_is_kept_besides_the_last_runs() -> None:
    runs = [(RunName(n), FAILED) for n in range(1, 10)]
    assert expendable(runs, 3) == names(2, 3, 4, 5, 6)


def test_a_run_that_held_begins_a_new_loop_with_its_failure() -> None:
    runs = [(RunName(1), FAILED), (RunName(2), HELD), (RunName(3), FAILED), (RunName(4), FAILED), (RunName(5), FAILED)]
    assert expendable(runs, 1) == names(1, 3, 4)


def test_after_a_good_end_there_is_no_loop() -> None:
    assert expendable([(RunName(1), FAILED), (RunName(2), WELL), (RunName(3), WELL)], 1) == names(1, 2)


def test_a_run_that_went_with_another_member_of_its_replica_belongs_to_the_loop() -> None:
    runs = [(RunName(1), FAILED), *((RunName(n), REPLACED) for n in range(2, 6)), (RunName(6), FAILED)]
    assert expendable(runs, 2) == names(2, 3, 4)


def test_a_run_that_had_held_when_it_was_replaced_ends_the_loop() -> None:
    runs = [(RunName(1), FAILED), (RunName(2), RunEnd(held=500, replaced=True)), (RunName(3), FAILED)]
    assert expendable([*runs, (RunName(4), REPLACED), (RunName(5), REPLACED)], 1) == names(1, 2, 4)


@given(
    st.lists(
        st.tuples(
            st.builds(RunName, st.integers(0, 50), st.integers(1, 3)),
            st.one_of(st.none(), st.just(FAILED), st.just(WELL), st.just(REPLACED)),
        ),
        unique_by=lambda r: r[0],
    ),
    st.integers(0, 5),
)
def test_what_goes_on_and_the_last_few_always_stay(runs: list[tuple[RunName, RunEnd | None]], keep: int) -> None:
    gone = set(expendable(runs, keep))
    assert not gone & {name for name, end in runs if end is None}
    assert not gone & {name for name, _ in sorted(runs, key=lambda run: run[0])[-keep:]} if keep else True
    assert len(runs) - len(gone) >= min(keep, len(runs))


@given(st.text(max_size=8))
def test_names_of_runs_are_read_back_or_are_none(text: str) -> None:
    name = RunName.parse(text)
    assert name is None or str(name) == text
    assert RunName.parse(str(RunName(7, 2))) == RunName(7, 2)

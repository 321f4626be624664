from __future__ import annotations

from io import StringIO

from rich.console import Console, RenderableType

from llmgw.ctl import fabrictables as tables
from llmgw.rdma.grade import Verdict
from llmgw.rdma.results import (
    EndView,
    Failure,
    FleetResult,
    PairResult,
    Parameters,
    Progress,
    RailResult,
    SuspectView,
)


def text(shown: RenderableType, width: int = 200) -> str:
    out = Console(file=StringIO(), width=width, no_color=True, highlight=False)
    out.print(shown)
    found = out.file
    assert isinstance(found, StringIO)
    return found.getvalue()


def rail(
    name: str = "0", gbps: float | None = 97.0, grade: str = "good", share: float | None = 0.99, **more: object
) -> RailResult:
    return RailResult(
        rail=name,
        a=EndView(node="gpu-01", device="mlx5_0", version="6.06"),
        b=EndView(node="gpu-02", device="mlx5_3", version="6.28"),
        gbps=gbps,
        verdict=Verdict(
            grade=grade, share=share, ceiling_gbps=98.0, rule="good: from 95% (97 of 98 Gb/s)", why=("MTU 1024",)
        ),
        **more,  # type: ignore[arg-type]
    )


def pair(a: str, b: str, *rails: RailResult, clock: float = 1.0, error: str = "") -> PairResult:
    return PairResult(a=a, b=b, clock=clock, rails=rails, error=error)


BROKEN = rail(
    gbps=None,
    grade="failed",
    share=None,
    failure=Failure(side="gpu-02", error="exit code 1", cause="TCP port 18515 is taken", remedy="run it again"),
)


def test_a_rail_shows_both_ends_its_figure_and_why() -> None:
    shown = " ".join(str(cell) for cell in tables.rail_row(rail()))
    assert shown == "0 gpu-01 mlx5_0/1 gpu-02 mlx5_3/1 97 Gb/s 98 99.0% good MTU 1024"


def test_a_failure_shows_its_side_its_remedy_and_both_sides_last_lines() -> None:
    failed = RailResult(
        rail="0",
        a=EndView(node="gpu-01", device="x", error="it was not started"),
        b=EndView(node="gpu-02", device="y", lines=("Couldn't listen to port 18515", "\x1b[31mred")),
        verdict=Verdict(grade="failed"),
        failure=BROKEN.failure,
    )
    shown = text(tables.failure(failed))
    for words in (
        "gpu-02: exit code 1: TCP port 18515 is taken",
        "run it again",
        "Couldn't listen",
        "it was not started",
    ):
        assert words in shown
    assert "\x1b[31m" not in shown


def test_the_matrix_has_percents_where_there_is_room_and_one_cell_a_pair_else() -> None:
    results = [pair("a", "b", rail()), pair("a", "c", rail(share=0.42, grade="bad")), pair("b", "c", BROKEN)]
    wide = text(tables.matrix(results, 100))
    assert "99%" in wide
    assert "42%" in wide
    assert "X" in wide.splitlines()[2]
    narrow = text(tables.matrix([pair(f"n{x}", f"n{y}", rail()) for x in range(30) for y in range(x)], 60), 60)
    assert narrow.splitlines()[0].count("\N{FULL BLOCK}") == 29
    assert text(tables.matrix([], 80)).strip() == "no pair has been tested"


def test_the_newest_result_of_a_pair_counts_in_the_matrix() -> None:
    older, newer = pair("a", "b", rail(share=0.5, grade="bad"), clock=1.0), pair("b", "a", rail(), clock=2.0)
    shown = text(tables.matrix([newer, older], 100))
    assert "99%" in shown
    assert "50%" not in shown


def test_progress_tells_the_time_left() -> None:
    assert str(tables.progress(Progress(done=3, total=28, round=2, rounds=7, seconds_left=130))) == (
        "round 2 of 7, 3 of 28 pairs, 2m 10s left"
    )


def test_suspects_come_with_their_evidence() -> None:
    suspect = SuspectView(
        rail="0", parts=("gpu-03 (adapter, cable or leaf port)",), evidence="slow: gpu-03 > gpu-01 40%"
    )
    shown = text(
        tables.fleet(FleetResult(nodes=("a", "b"), tested=1, total=1, rounds=1, suspects=(suspect,), settled=False))
    )
    assert "gpu-03 (adapter, cable or leaf port)" in shown
    assert "slow: gpu-03 > gpu-01 40%" in shown
    assert "--search" in shown
    assert "no part is suspect" in text(tables.fleet(FleetResult(nodes=("a", "b"), tested=1, total=1, rounds=1)))


def test_history_shows_parameters_and_versions() -> None:
    result = PairResult(a="a", b="b", clock=1.0, rails=(rail(),), parameters=Parameters(seconds=5, bidirectional=True))
    shown = text(tables.history([result, pair("a", "b", error="no agent")], 300), 300)
    for words in ("ib_write_bw 5s both ways", "6.06/6.28", "no agent"):
        assert words in shown


def test_a_running_test_shows_what_runs_and_what_waits() -> None:
    from llmgw.rdma.results import Planned

    view = tables.PairView(quiet=True)
    view.take(Planned(a="a", b="b", rails=("0", "1", "2"), devices=(("x", "y"),) * 3))
    view.take(rail("0"))
    shown = text(view.table())
    assert [word for word in shown.split() if word in ("good", "runs", "waits")] == ["good", "runs", "waits"]

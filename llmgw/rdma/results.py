"""The values of bandwidth tests: what plane, store, API, ctl and page all speak of.

Lines of a running test are a tagged union, so that a reader of the stream matches on what it got. Gb/s are decimal;
`clock` is the plane's wall clock in Unix seconds, shown and never compared.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from llmgw.rdma.grade import Verdict
from llmgw.wire.apicommon import ApiError


class EndView(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One side of a tested link, with what its process said."""

    node: str
    device: str
    number: int = 1
    gid_index: int | None = None
    address: str = ""
    version: str = ""
    exit_code: int | None = None
    error: str = ""
    cause: str = ""
    lines: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    state_before: str = ""
    state_after: str = ""
    counters: dict[str, int] = {}
    busy: tuple[str, ...] = ()


class Failure(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a rail has no figure (E7): the side where it went wrong, the probable cause, what to do."""

    side: str
    error: str
    code: str = ""
    cause: str = ""
    remedy: str = ""

    @property
    def text(self) -> str:
        words = f"{self.side}: {self.error}" if self.side else self.error
        return f"{words}: {self.cause}" if self.cause and self.cause != self.error else words


class Parameters(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was asked for. `at_once`: all rails together, which shows a bottleneck that they share."""

    test: str = "ib_write_bw"
    size: int = 1 << 20
    queue_pairs: int = 2
    seconds: int = 10
    bidirectional: bool = False
    at_once: bool = False
    gpu: bool = False
    routed: bool = False
    extra: tuple[str, ...] = ()
    rails: tuple[str, ...] = ()
    good: float = 0.95
    fair: float = 0.90

    @property
    def latency(self) -> bool:
        return self.test.endswith("_lat")


class RailResult(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="rail"):
    """One rail between two nodes: a figure with its verdict, or a failure, never both."""

    rail: str
    a: EndView
    b: EndView
    kind: str = ""
    mtu: int | None = None
    rate_gbps: float | None = None
    paired_by: str = ""
    gbps: float | None = None
    latency_us: float | None = None
    verdict: Verdict
    failure: Failure | None = None
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0


class PairResult(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="pair"):
    """All rails between two nodes at one time. `a` was the client; `share` is the worst rail's, 0 for a failed one."""

    a: str
    b: str
    clock: float
    rails: tuple[RailResult, ...] = ()
    parameters: Parameters = Parameters()
    notes: tuple[str, ...] = ()
    installed: tuple[str, ...] = ()  # nodes on which perftest was installed for this test
    busy: tuple[str, ...] = ()  # shards that ran meanwhile (E8)
    total_gbps: float | None = None
    nccl_ib_hca: dict[str, str] = {}  # by node: what makes NCCL use exactly the rails that were tested
    error: str = ""  # why the pair could not be tested at all
    seconds: float = 0.0

    @property
    def grade(self) -> str:
        """The worst rail's."""
        if self.error or not self.rails:
            return "failed"
        return max((rail.verdict.grade for rail in self.rails), key=WORST.index)

    @property
    def share(self) -> float | None:
        """The worst rail's share of its ceiling; None where nothing was graded."""
        if self.error or any(rail.failure is not None for rail in self.rails):
            return 0.0
        return min((rail.verdict.share for rail in self.rails if rail.verdict.share is not None), default=None)


#: Grades from what needs no look to what does.
WORST = ("good", "measured", "suspicious", "fair", "bad", "failed")


class Note(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="note"):
    """What is being done or was decided, in a sentence."""

    text: str


class Planned(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="planned"):
    """The rails that will be tested, before the first one is."""

    a: str
    b: str
    rails: tuple[str, ...] = ()
    devices: tuple[tuple[str, str], ...] = ()
    address: str = ""


class Progress(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="progress"):
    """Where a test of the fleet stands. `seconds_left` is an estimate; None while there is none."""

    done: int
    total: int
    round: int = 0
    rounds: int = 0
    seconds_left: float | None = None


class SuspectView(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parts of which one is bad, and the evidence."""

    rail: str
    parts: tuple[str, ...]
    evidence: str
    weight: float = 0.0


class FleetResult(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="fleet"):
    """How a test of the fleet ended: who took part, who did not and why, and the suspects."""

    nodes: tuple[str, ...] = ()
    skipped: dict[str, str] = {}
    tested: int = 0
    total: int = 0
    rounds: int = 0
    suspects: tuple[SuspectView, ...] = ()
    settled: bool = True
    clock: float = 0.0
    seconds: float = 0.0


class Ended(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="error"):
    """The last line of a test that could not go on."""

    error: ApiError


Line = Note | Planned | Progress | RailResult | PairResult | FleetResult | Ended
"""One line of the stream that a running test is."""


class History(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Stored results, newest first."""

    results: tuple[PairResult, ...] = ()


class Square(Struct, frozen=True, kw_only=True):
    """One pair in the matrix, by its newest result: the worst rail's grade and share, and what is wrong in a line."""

    a: str
    b: str
    grade: str
    share: float | None
    clock: float
    text: str


class Matrix(Struct, frozen=True, kw_only=True):
    """Who can reach whom, and how well: every pair's newest result."""

    nodes: tuple[str, ...] = ()
    squares: tuple[Square, ...] = ()


def matrix(results: Iterable[PairResult]) -> Matrix:
    """The matrix of these results; of several of one pair the newest counts."""
    newest: dict[frozenset[str], PairResult] = {}
    for result in sorted(results, key=lambda each: each.clock):
        newest[frozenset((result.a, result.b))] = result
    squares = [
        Square(a=r.a, b=r.b, grade=r.grade, share=r.share, clock=r.clock, text=summary(r)) for r in newest.values()
    ]
    return Matrix(
        nodes=tuple(sorted({name for pair in newest for name in pair})),
        squares=tuple(sorted(squares, key=lambda square: (square.a, square.b))),
    )


def summary(result: PairResult) -> str:
    """What an operator should know of a pair, in a line: its bad rails, else its figures."""
    if result.error:
        return result.error
    wrong = [
        f"rail {rail.rail} {rail.failure.text if rail.failure is not None else rail.verdict.rule}"
        for rail in result.rails
        if rail.verdict.grade not in ("good", "measured")
    ]
    figures = [f"rail {rail.rail} {rail.gbps:.4g} Gb/s" for rail in result.rails if rail.gbps is not None]
    return "; ".join(wrong or figures)

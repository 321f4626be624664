"""Results of bandwidth tests, kept with their parameters, versions and dates; placement reads the latest as evidence.

Keys are "results/bandwidth/<a>/<b>/<clock>" with the two names in order: both directions of a pair lie together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import structlog

from llmgw.plane.store import Store
from llmgw.rdma.results import PairResult
from llmgw.rdma.tournament import Match, key

PREFIX = "results/bandwidth/"
#: Results of one pair that are kept.
KEPT = 50

log = structlog.get_logger("llmgw.bandwidth")
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(PairResult)


def place(a: str, b: str) -> str:
    """Where a pair's results lie."""
    first, second = key(a, b)
    return f"{PREFIX}{first}/{second}/"


async def keep(store: Store, result: PairResult) -> None:
    """Store one result, and drop the oldest of its pair beyond those that are kept."""
    where = place(result.a, result.b)
    known = sorted((await store.load(where)).values)
    at = int(result.clock * 1000)
    while (name := f"{where}{at:015d}") in known:
        at += 1
    await store.commit({name: _encoder.encode(result)}, known[: max(0, len(known) + 1 - KEPT)])


async def between(store: Store, a: str, b: str) -> tuple[PairResult, ...]:
    """A pair's results, newest first."""
    return tuple(reversed(_read((await store.load(place(a, b))).values)))


async def every(store: Store) -> tuple[PairResult, ...]:
    """All results that are kept."""
    return tuple(_read((await store.load(PREFIX)).values))


async def latest(store: Store) -> dict[Match, PairResult]:
    """The newest result of each pair."""
    found: dict[Match, PairResult] = {}
    for result in _read((await store.load(PREFIX)).values):
        known = found.get(key(result.a, result.b))
        if known is None or known.clock <= result.clock:
            found[key(result.a, result.b)] = result
    return found


def _read(values: Mapping[str, bytes]) -> list[PairResult]:
    """Results in order of their keys. One that cannot be read (a newer plane wrote it) is passed over and logged."""
    found: list[PairResult] = []
    broken: list[str] = []
    for name in sorted(values):
        try:
            found.append(_decoder.decode(values[name]))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            broken.append(name)
    if broken:
        log.warning("stored results that cannot be read are passed over", count=len(broken), first=broken[0])
    return found


def since(results: Iterable[PairResult], clock: float) -> dict[Match, PairResult]:
    """Each pair's newest result from `clock` on, without pairs that could not be tested at all."""
    return {key(r.a, r.b): r for r in sorted(results, key=lambda r: r.clock) if r.clock >= clock and not r.error}

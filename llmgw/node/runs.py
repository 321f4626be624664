"""Which runs' logs are kept: the first failure of a crash loop, which has the cause, and the last few. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from msgspec import Struct

#: A run that served for so many seconds was no part of a crash loop.
HELD = 120.0


class RunEnd(Struct, frozen=True, omit_defaults=True):
    """How a run ended: whether by failure, and for how many seconds it had served.

    One that was `replaced` was ended for the sake of the next attempt, or with the other members of its replica.
    """

    failed: bool = False
    held: float = 0.0
    replaced: bool = False


@attrs.frozen(order=True)
class RunName:
    """Runs are named by generation, and by attempt within one where a port was lost: "7", "7.2"."""

    generation: int
    attempt: int = 1

    def __str__(self) -> str:
        return str(self.generation) if self.attempt == 1 else f"{self.generation}.{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> RunName | None:
        generation, mark, attempt = text.partition(".")
        if not (generation.isascii() and generation.isdigit()) or (
            mark and not (attempt.isascii() and attempt.isdigit())
        ):
            return None
        name = cls(int(generation), int(attempt) if mark else 1)
        return name if str(name) == text else None


def expendable(runs: Sequence[tuple[RunName, RunEnd | None]], keep: int) -> tuple[RunName, ...]:
    """The runs whose logs may go. A run without an end goes on, so it always stays.

    Runs that failed one after the other are a loop; the first of the newest loop is kept beside the last `keep` runs.
    In a replica of several nodes the members take turns in failing: a run that was replaced soon belongs to the loop.
    """
    ordered = sorted(runs, key=lambda run: run[0])
    kept = {name for name, end in ordered if end is None}
    kept |= {name for name, _ in ordered[max(0, len(ordered) - keep) :]} if keep > 0 else set()
    first = None
    for name, end in ordered:
        if end is None:
            continue
        if not end.failed:
            first = first if end.replaced and end.held < HELD else None
        elif first is None or end.held >= HELD:
            first = name
    if first is not None:
        kept.add(first)
    return tuple(name for name, _ in ordered if name not in kept)

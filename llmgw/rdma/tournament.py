"""Every pair of a fleet once, in rounds whose pairs share no node (`fabric-test --all`).

With n nodes there are n-1 rounds, or n where n is odd and one node rests in each. Nodes keep their place in the
schedule whatever was done before, so a run that was cut short goes on where it stopped. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import attrs

Match = tuple[str, str]
Round = tuple[Match, ...]


def key(a: str, b: str) -> Match:
    """A pair without a direction."""
    return (a, b) if a <= b else (b, a)


def rounds(nodes: Sequence[str]) -> tuple[Round, ...]:
    """The schedule by the circle method: one node stays, the others move on by one place each round.

    Who serves and who is the client alternates, so that both directions of every adapter are used.
    """
    names: list[str | None] = list(dict.fromkeys(nodes))
    if len(names) < 2:
        return ()
    if len(names) % 2:
        names.append(None)
    count = len(names)
    schedule = []
    for turn in range(count - 1):
        pairs = []
        for at in range(count // 2):
            a, b = names[at], names[count - 1 - at]
            if a is not None and b is not None:
                # The node that stays alternates by round, the others by the place they have moved to.
                pairs.append((a, b) if (at or turn) % 2 else (b, a))
        schedule.append(tuple(pairs))
        names = [names[0], names[-1], *names[1:-1]]
    return tuple(schedule)


def remaining(schedule: Sequence[Round], done: Collection[Match]) -> tuple[Round, ...]:
    """What is left after `done` (pairs as `key` makes them), in rounds as full as the nodes allow."""
    known = set(done)
    left = [match for each in schedule for match in each if key(*match) not in known]
    if len(left) == sum(map(len, schedule)):
        return tuple(schedule)
    packed: list[list[Match]] = []
    busy: list[set[str]] = []
    first = 0
    for match in left:
        at = next((n for n in range(first, len(packed)) if not busy[n] & set(match)), len(packed))
        if at == len(packed):
            packed.append([])
            busy.append(set())
        packed[at].append(match)
        busy[at].update(match)
    return tuple(tuple(each) for each in packed)


@attrs.frozen
class Progress:
    """Where a tournament stands. `seconds_left` is None until a round has shown how long one takes."""

    done: int
    total: int
    round: int
    rounds: int
    seconds_left: float | None = None


def progress(schedule: Sequence[Round], finished: int, pairs_done: int, seconds: float, estimate: float) -> Progress:
    """Progress after `finished` whole rounds and `pairs_done` pairs in `seconds`.

    Before the first round ends, `estimate` (seconds of one round, from the test's own length) stands in.
    """
    total = sum(map(len, schedule))
    each = seconds / finished if finished else estimate
    left = max(0.0, each * len(schedule) - seconds)
    return Progress(pairs_done, total, min(finished + 1, len(schedule)), len(schedule), left if schedule else 0.0)

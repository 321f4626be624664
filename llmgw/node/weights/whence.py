"""Where in the fleet a source may be had, as the plane says it, and whom it is worth waiting for. Pure.

Of many nodes that want the same files at the same time one goes outside, and the others wait for it. Nobody decides
that for all of them: each asks the others how they stand. Two rules keep them from waiting in a circle, whatever each
believes of the rest: whoever brings bytes waits for nobody, and of two that wait it is the later name that goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from llmgw.config import Listen
from llmgw.node.weights.manifest import Manifest

#: Seconds that somebody of whom the plane says that it will fetch has for beginning.
BEGINS_WITHIN = 20.0
#: One that brought no byte for so many seconds is not waited for any longer.
STILL = 60.0
#: So long one waits for a free place at those who have it; then it is for the transfer's own patience.
FULL = 900.0


@attrs.frozen
class Whence:
    """Nodes that have all of a source, nodes that fetch it or are about to, and the commit that the fleet holds."""

    complete: tuple[Listen, ...] = ()
    soon: tuple[Listen, ...] = ()
    revision: str = ""

    @classmethod
    def told(cls, complete: Iterable[str], soon: Iterable[str], revision: str) -> Whence:
        """As the plane wrote it; an address that cannot be meant is left out."""
        return cls(tuple(_addresses(complete)), tuple(_addresses(soon)), revision)


def _addresses(texts: Iterable[str]) -> Iterable[Listen]:
    for text in texts:
        try:
            yield Listen.parse(text)
        except ValueError:
            continue


@attrs.frozen
class Has:
    """A peer that has all of it. `room`: it has a place free for one more who takes."""

    node: str
    manifest: Manifest
    room: bool = True


@attrs.frozen
class Fetches:
    """A peer that is on it: `moving` once it brings bytes itself, `done` of them so far."""

    node: str
    moving: bool
    done: int = 0


@attrs.frozen
class Nothing:
    """A peer that has none of it, or does not answer."""


Answer = Has | Fetches | Nothing


@attrs.frozen
class Seen:
    """When a peer's bytes last grew, and to how many. `begun`: it had or did something since it was asked first."""

    done: int
    at: float
    begun: bool = False


@attrs.frozen
class Verdict:
    """Take it from `take`; or wait, for the reason `wait`; or, with neither, go elsewhere."""

    take: Listen | None = None
    wait: str = ""


def judged(
    answers: Mapping[Listen, Answer],
    whence: Whence,
    own: str,
    began: float,
    seen: Mapping[Listen, Seen],
    now: float,
) -> Verdict:
    """What to do when the peers have answered so, in the order in which they were asked.

    `seen` is of these answers already (`watched`), `began` when they were asked first.
    """
    full: Listen | None = None
    wait = ""
    stirred = max((known.at for known in seen.values()), default=began)  # somebody, somewhere
    for address, answer in answers.items():
        match answer:
            case Has(room=True):
                return Verdict(take=address)
            case Has(node=node):
                full = full or address
                wait = wait or f"weights, until {node} has a place free"
            case Fetches(node=node, moving=True) if now - seen[address].at < STILL:
                wait = wait or f"weights, until {node} has them"
            case Fetches(node=node, moving=False) if node < own and now - stirred < STILL:
                wait = wait or f"weights, after {node}"
            case Nothing() if address in whence.soon and now - began < BEGINS_WITHIN and not seen[address].begun:
                wait = wait or f"weights, until {address} begins"
            case _:
                pass
    if full is not None and now - seen[full].at >= FULL:
        return Verdict(take=full)  # it does not get free: its own patience decides
    return Verdict(wait=wait)


def watched(seen: Mapping[Listen, Seen], answers: Mapping[Listen, Answer], now: float) -> dict[Listen, Seen]:
    """What is known of each peer's progress after these answers. Bytes that shrink are none."""
    after: dict[Listen, Seen] = {}
    for address, answer in answers.items():
        step, before = _step(answer), seen.get(address)
        changed = before is None or step > before.done or (step < 0 and step != before.done)
        begun = not isinstance(answer, Nothing) or (before is not None and before.begun)
        after[address] = Seen(step, now, begun) if before is None or changed else before
    return after


def _step(answer: Answer) -> int:
    match answer:
        case Fetches(moving=True, done=done):
            return max(0, done)
        case Fetches():
            return -1
        case Nothing():
            return -2
        case Has():
            return -3

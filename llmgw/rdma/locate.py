"""Which part is bad, from how fast pairs of nodes were: the smallest set of suspects, and what to test next.

A test of two nodes is slow when one part on its path is bad. A part that was on a fast path is good; a part that
only slow paths have in common is suspect. Figures are noisy, so this is weighed and not cut: each result says by a
likelihood ratio how much rather it came over a bad part than over good ones, and a suspect must explain more than
the assumption of one more fault costs. Parts that no test can tell apart (an adapter, its cable and its leaf port)
stay together as one suspect with several names. Pure: results in, suspects and the next round out.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

#: The parts that traffic from the first node to the second passes, in order.
Path = Callable[[str, str], Sequence[str]]
#: A step in the search that gains less is none: sums of floats differ by as much.
_LEAST = 1e-6


@attrs.frozen
class Result:
    """One test: `share` of the ceiling, 0 for a failed test. The client `a` sent to the server `b`."""

    a: str
    b: str
    share: float


@attrs.frozen
class Noise:
    """What results look like: good parts give 1 with this deviation, bad ones anything up to `worst`."""

    deviation: float = 0.05
    worst: float = 0.85
    #: Odds against one given part being bad, as a logarithm: what a suspect must explain before it is one.
    doubt: float = 7.0

    def weight(self, share: float) -> float:
        """log(P(share | a bad part on the path) / P(share | all good)): positive speaks for a fault."""
        good = -0.5 * (min(0.0, share - 1.0) / self.deviation) ** 2 - math.log(self.deviation * math.sqrt(2 * math.pi))
        tail = 0.5 * math.erfc((share - self.worst) / (self.deviation * math.sqrt(2)))
        return max(-12.0, min(60.0, math.log(max(tail, 1e-12) / self.worst) - good))


@attrs.frozen
class Suspect:
    """Parts of which one is bad, as far as tests can tell, with the results that say so.

    `weight` is the logarithm of the odds; `slow` are the slow results that it explains, `cleared` counts parts on
    those paths that fast results have cleared.
    """

    parts: tuple[str, ...]
    weight: float
    slow: tuple[Result, ...]
    cleared: int

    @property
    def evidence(self) -> str:
        pairs = ", ".join(f"{r.a} > {r.b} {r.share:.0%}" for r in self.slow[:4])
        more = f" and {len(self.slow) - 4} more" if len(self.slow) > 4 else ""
        return f"slow: {pairs}{more}; {self.cleared} other parts of those paths were on fast ones"


@attrs.frozen
class Finding:
    """Where a search stands. `settled`: no test can say more; `untested` counts parts no result has judged yet."""

    suspects: tuple[Suspect, ...]
    untested: int
    settled: bool


def ends(a: str, b: str) -> tuple[str, str]:
    """The path where no map of the fabric is known: each node's own connection."""
    return (a, b)


@attrs.frozen
class Evidence:
    """Results by the parts that they passed; `floor` is how near to the best a rival must be to stay suspect."""

    noise: Noise
    path: Path
    results: tuple[Result, ...]
    paths: tuple[frozenset[str], ...]
    weights: tuple[float, ...]
    by_part: Mapping[str, tuple[int, ...]]
    floor: float = 3.0

    def gain(self, part: str, explained: Iterable[int] = ()) -> float:
        """How much better the results are explained when this part is bad too."""
        known = set(explained)
        return sum(self.weights[at] for at in self.by_part.get(part, ()) if at not in known) - self.noise.doubt


def gather(results: Sequence[Result], path: Path = ends, noise: Noise | None = None) -> Evidence:
    """Index results by part."""
    model = noise or Noise()
    paths = tuple(frozenset(path(r.a, r.b)) for r in results)
    by_part: dict[str, list[int]] = defaultdict(list)
    for at, parts in enumerate(paths):
        for part in parts:
            by_part[part].append(at)
    frozen = {part: tuple(found) for part, found in by_part.items()}
    return Evidence(model, path, tuple(results), paths, tuple(model.weight(r.share) for r in results), frozen)


def faults(evidence: Evidence) -> tuple[tuple[str, ...], ...]:
    """The likeliest smallest set of faults: for each, the parts that explain the results equally well, best first.

    Greedy with second thoughts: a fault gives way to a part that explains more beside the others, and is dropped when
    nothing is left that only it explains. Each step makes all results likelier, so there is an end.
    """
    chosen: list[str] = []
    while _grown(evidence, chosen) or _exchanged(evidence, chosen):
        pass
    groups = []
    for part in chosen:
        gains = _rivals(evidence, chosen, part)
        close = [p for p, gain in gains.items() if gain >= gains[part] - evidence.floor]
        groups.append(tuple(sorted(close, key=lambda p: (p != part, -gains[p], p))))
    return tuple(groups)


def _grown(evidence: Evidence, chosen: list[str]) -> bool:
    """One fault more, where that explains enough of what none explains yet."""
    explained = _explained(evidence, chosen)
    slow = {p for at, w in enumerate(evidence.weights) if w > 0 and at not in explained for p in evidence.paths[at]}
    best = max(sorted(slow), key=lambda part: evidence.gain(part, explained), default=None)
    if best is None or evidence.gain(best, explained) < _LEAST or len(chosen) == 64:
        return False
    chosen.append(best)
    _thin(evidence, chosen, best)
    return True


def _exchanged(evidence: Evidence, chosen: list[str]) -> bool:
    """One fault replaced by a part of its slow paths that explains more beside the other faults."""
    for at, part in enumerate(chosen):
        gains = _rivals(evidence, chosen, part)
        best = max(sorted(gains), key=lambda p: gains[p])
        if gains[best] > gains[part] + _LEAST:
            chosen[at] = best
            _thin(evidence, chosen, best)
            return True
    return False


def _thin(evidence: Evidence, chosen: list[str], newest: str) -> None:
    """Drop the faults of which the newest one leaves too little."""
    for part in [part for part in chosen if part != newest]:
        if evidence.gain(part, _explained(evidence, [other for other in chosen if other != part])) <= 0:
            chosen.remove(part)


def _rivals(evidence: Evidence, chosen: Sequence[str], part: str) -> dict[str, float]:
    """What a fault gains beside the others, and what the other parts of its slow paths would in its place."""
    explained = _explained(evidence, [other for other in chosen if other != part])
    passed = {p for at in evidence.by_part[part] if evidence.weights[at] > 0 for p in evidence.paths[at]}
    return {p: evidence.gain(p, explained) for p in passed if p == part or p not in chosen}


def _explained(evidence: Evidence, parts: Iterable[str]) -> set[int]:
    return {at for part in parts for at in evidence.by_part.get(part, ())}


def locate(
    results: Sequence[Result], path: Path = ends, *, parts: Iterable[str] = (), noise: Noise | None = None
) -> Finding:
    """The suspects after these results. `parts` are all parts there are, so that untested ones are counted."""
    evidence = gather(results, path, noise)
    groups = faults(evidence)
    suspects = []
    for group in groups:
        explained = _explained(evidence, [other[0] for other in groups if other is not group])
        slow = [at for at in evidence.by_part[group[0]] if evidence.weights[at] > 0 and at not in explained]
        others = {p for at in slow for p in evidence.paths[at]} - set(group)
        suspects.append(
            Suspect(
                group,
                evidence.gain(group[0], explained),
                tuple(sorted((evidence.results[at] for at in slow), key=lambda r: r.share)),
                len(others),
            )
        )
    unknown = sum(1 for part in parts if not judged(evidence, part))
    settled = all(_inseparable(evidence, group) for group in groups) and not _doubtful(evidence, groups)
    return Finding(tuple(suspects), unknown, settled and not unknown)


def judged(evidence: Evidence, part: str) -> bool:
    """Whether some result says anything of a part: it was on a fast path, or it is among the suspects of a slow one."""
    return part in evidence.by_part


def _inseparable(evidence: Evidence, group: tuple[str, ...]) -> bool:
    """Whether all parts of a group were on the same paths so far, so that no result tells them apart."""
    return len({evidence.by_part[part] for part in group}) == 1


def _doubtful(evidence: Evidence, groups: Sequence[tuple[str, ...]]) -> tuple[int, ...]:
    """Slow results that no suspect explains and that no later fast result has outweighed."""
    explained = _explained(evidence, [group[0] for group in groups])
    found = []
    for at, weight in enumerate(evidence.weights):
        if weight > 0 and at not in explained:
            totals = (
                sum(evidence.weights[n] for n in evidence.by_part[p] if n not in explained) for p in evidence.paths[at]
            )
            if any(total > 0 for total in totals):
                found.append(at)
    return tuple(found)


def next_round(
    nodes: Sequence[str],
    results: Sequence[Result],
    path: Path = ends,
    *,
    parts: Iterable[str] = (),
    noise: Noise | None = None,
    seed: int = 0,
    tries: int = 24,
) -> tuple[tuple[str, str], ...]:
    """Disjoint pairs that tell most: first those that split suspects, then those that pass untested parts.

    A pair splits when its path holds some of a group's parts and no other suspect, so its result clears one side
    or the other. Empty when nothing is left to learn. Deterministic for one `seed`.
    """
    evidence = gather(results, path, noise)
    groups = list(faults(evidence))
    # A slow result that nothing explains yet is tested again like a suspect: its parts may be bad, or it was noise.
    doubts = [tuple(sorted(evidence.paths[at])) for at in _doubtful(evidence, groups)]
    open_groups = [frozenset(g) for g in groups if len(g) > 1] + [frozenset(d) for d in doubts]
    suspect = {p for g in groups for p in g} | {p for d in doubts for p in d}
    untested = {p for p in parts if p not in evidence.by_part}
    dice = random.Random(seed * 1_000_003 + len(results))
    pairs: list[tuple[str, str]] = []
    free = dict.fromkeys(nodes)
    tried = {(r.a, r.b) for r in results}
    for pair in _splitting(evidence, open_groups, suspect, list(free), tried, dice, tries):
        if pair[0] in free and pair[1] in free:
            pairs.append(pair)
            del free[pair[0]], free[pair[1]]
    if untested:
        pairs += _covering(path, untested, suspect, list(free), dice, tries)
    return tuple(pairs)


def _splitting(
    evidence: Evidence,
    groups: Sequence[frozenset[str]],
    suspect: set[str],
    nodes: list[str],
    tried: set[tuple[str, str]],
    dice: random.Random,
    tries: int,
) -> list[tuple[str, str]]:
    """For each group a few pairs, each with as near to half of the group as can be found and no other suspect.

    Pairs come from the nodes whose own tests passed the group's parts, each with nodes drawn from all.
    """
    taken: set[str] = set()
    chosen: list[tuple[str, str]] = []
    for group in groups:
        left = set(group)
        near = [n for at in {at for p in group for at in evidence.by_part.get(p, ())} if evidence.weights[at] > 0
                for n in (evidence.results[at].a, evidence.results[at].b)]  # fmt: skip
        near = list(dict.fromkeys(near))
        ways = max(1, min(len(group), 4))
        for _ in range(ways):
            best: tuple[float, tuple[str, str], frozenset[str]] | None = None
            for start in [n for n in near if n not in taken] + _draw(nodes, taken, dice, tries // 4):
                for other in _draw(nodes, taken, dice, tries):
                    if other == start:
                        continue
                    for pair in ((start, other), (other, start)):
                        inside = frozenset(evidence.path(*pair)) & left
                        if not inside or (inside == group and len(group) != 1):
                            continue
                        foreign = len((frozenset(evidence.path(*pair)) & suspect) - group)
                        score = -abs(len(inside) - max(1, len(group) // 2)) - 3 * foreign - 0.5 * (pair in tried)
                        if best is None or score > best[0]:
                            best = (score, pair, inside)
            if best is None:
                break
            chosen.append(best[1])
            taken.update(best[1])
            left -= best[2]
            if not left:
                break
    return chosen


def _draw(nodes: list[str], taken: set[str], dice: random.Random, count: int) -> list[str]:
    drawn = dice.sample(nodes, min(len(nodes), count + len(taken)))
    return [node for node in drawn if node not in taken][:count]


def _covering(
    path: Path, untested: set[str], suspect: set[str], nodes: list[str], dice: random.Random, tries: int
) -> list[tuple[str, str]]:
    """Pairs of free nodes whose paths hold as many untested parts and as few suspects as can be found."""
    left = set(untested)
    dice.shuffle(nodes)
    pairs: list[tuple[str, str]] = []
    while len(nodes) > 1 and left:
        start = nodes.pop()
        best: tuple[int, int, tuple[str, str]] | None = None
        for at in dice.sample(range(len(nodes)), min(tries, len(nodes))):
            for pair in ((start, nodes[at]), (nodes[at], start)):
                parts = path(*pair)
                score = sum(part in left for part in parts) - 4 * sum(part in suspect for part in parts)
                if best is None or score > best[0]:
                    best = (score, at, pair)
        if best is not None and best[0] > 0:
            pairs.append(best[2])
            nodes[best[1]] = nodes[-1]
            nodes.pop()
            left.difference_update(path(*best[2]))
    return pairs

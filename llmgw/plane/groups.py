"""Which nodes reach one another, and so many of them that no test found bad together (D6). Pure.

Nodes that share a `Way` reach one another over it. Choosing among them is greedy, best first; where pairs that were
found bad leave it short, the largest set without such a pair is looked for. That search is exact as long as it ends
within a bounded number of steps, which it does where bad pairs are few or come from a few bad nodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from typing import Generic, TypeVar

import attrs

from llmgw.plane.wires import Key

N = TypeVar("N", bound=Hashable)

#: The rails of one way: what each is called, and its fabric.
Rails = frozenset[tuple[Key, str]]


@attrs.frozen(cache_hash=True)
class Way:
    """One way in which nodes reach one another: all that have it do.

    `network` is "nvlink", "rdma" or "tcp"; `over` the NVLink domain, or the family of `rails`; `site` is a machine
    whose agents are reached by loopback alone, `version` the engine's.
    """

    network: str
    over: str = ""
    rails: Rails = frozenset()
    site: str = ""
    version: str = ""

    @property
    def rank(self) -> tuple[int, int, int]:
        """The smaller, the better: NVLink, then most rails, InfiniBand first."""
        return ("nvlink", "rdma", "tcp").index(self.network), -len(self.rails), len(self.over)

    @property
    def order(self) -> tuple[object, ...]:
        """Settles ties, the same every time: the newer version first."""
        return (*self.rank, self.over, self.site, _newest(self.version), sorted(self.rails))


def _newest(version: str) -> tuple[tuple[int, str], ...]:
    """A version as something that sorts before older ones: 0.10.1 before 0.10 before 0.9; an unknown one last."""
    parts = [part for part in re.split(r"([0-9]{1,9})", version) if part not in ("", ".")]
    return (*((-1 - int(part), "") if part.isdecimal() else (2, part) for part in parts), (1, ""))


#: Sets of rails that are looked at, at most: a fleet whose every node misses other rails has too many to try.
MOST = 512


def common(signatures: Iterable[Rails], fewest: int) -> tuple[Rails, ...]:
    """Every set of at least `fewest` rails that some nodes have in common, the largest first."""
    distinct = {rails for rails in signatures if len(rails) >= fewest}
    found = set(distinct)
    fresh = set(distinct)
    while fresh and len(found) < MOST:
        met: set[Rails] = set()
        for one in sorted(fresh, key=_size):
            for other in distinct:
                both = one & other
                if len(both) >= fewest and both not in found:
                    met.add(both)
            if len(found) + len(met) >= MOST:
                break
        found |= met
        fresh = met
    return tuple(sorted(found, key=_size))


def _size(rails: Rails) -> tuple[int, list[tuple[Key, str]]]:
    return -len(rails), sorted(rails)


def together(
    order: Sequence[N],
    count: int,
    foes: Mapping[N, Set[N]],
    friends: Mapping[N, Set[N]],
    liking: Liking[N] | None = None,
) -> tuple[N, ...] | None:
    """`count` of these nodes of which no two are foes, the first in `order` before later ones; None when there are
    none. A friend of those chosen comes before a stranger that is worth no more, and before other friends by `liking`.
    """
    if len(order) < count:
        return None
    chosen = _greedy(order, count, foes, friends, liking or Liking.by(order))
    if chosen is not None or not any(foes.get(node) for node in order):
        return chosen
    place = {node: at for at, node in enumerate(order)}
    fought = {node: {foe for foe in foes[node] if foe in place} for node in order if foes.get(node)}
    fought = {node: there for node, there in fought.items() if there}
    free = [node for node in order if node not in fought]
    apart = _independent(fought, place, count - len(free))
    if len(free) + len(apart) < count:
        return None
    return tuple(sorted((*free, *apart), key=place.__getitem__)[:count])


@attrs.frozen
class Liking(Generic[N]):
    """What is known of nodes beside their order: whether one may be taken, what weighs more than friendship (the
    smaller, the better), and which of two comes first."""

    has: Callable[[N], bool]
    worth: Callable[[N], tuple[object, ...]]
    rank: Callable[[N], tuple[object, ...]]

    @classmethod
    def by(cls, order: Sequence[N]) -> Liking[N]:
        """Nothing but the order."""
        place = {node: at for at, node in enumerate(order)}
        return cls(place.__contains__, lambda node: (), lambda node: (place[node],))


def _greedy(
    order: Sequence[N], count: int, foes: Mapping[N, Set[N]], friends: Mapping[N, Set[N]], liking: Liking[N]
) -> tuple[N, ...] | None:
    chosen: list[N] = []
    shut: set[N] = set()
    good: dict[N, int] = {}
    at = 0
    while len(chosen) < count:
        while at < len(order) and order[at] in shut:
            at += 1
        if at == len(order):
            return None
        best = order[at]
        if good:
            worth = liking.worth(best)
            near = [node for node in good if node not in shut and liking.worth(node) <= worth]
            best = min((*near, best), key=lambda node: (-good.get(node, 0), liking.rank(node)))
        chosen.append(best)
        shut.add(best)
        shut |= foes.get(best, frozenset())
        for node in friends.get(best, ()):
            if liking.has(node):
                good[node] = good.get(node, 0) + 1
    return tuple(chosen)


#: Steps of the search for the largest set without foes, over all of a group: some milliseconds.
STEPS = 4000


def _independent(foes: Mapping[N, Set[N]], place: Mapping[N, int], enough: int) -> set[N]:
    """The largest set of nodes that are no foes of one another, component by component, or one that is enough."""
    left = set(foes)
    found: set[N] = set()
    steps = [STEPS]
    for node in sorted(foes, key=place.__getitem__):
        if len(found) >= enough:
            break
        if node not in left:
            continue
        component, edge = {node}, [node]
        while edge:
            for foe in foes[edge.pop()]:
                if foe not in component:
                    component.add(foe)
                    edge.append(foe)
        left -= component
        found |= _largest(component, foes, place, steps, enough - len(found))
    return found


def _largest(nodes: set[N], foes: Mapping[N, Set[N]], place: Mapping[N, int], steps: list[int], enough: int) -> set[N]:
    """Depth first over an explicit stack: a node with at most one foe is always in some largest set; of the node with
    most foes both ways are tried, without it first, since that one is mostly what is broken."""
    best: set[N] = set()
    stack: list[tuple[set[N], set[N]]] = [(set(nodes), set())]
    while stack:
        left, kept = stack.pop()
        while left:
            if len(kept) + len(left) <= len(best):
                break
            degrees = [(len(foes[node] & left), place[node], node) for node in left]
            if lonely := {node for degree, _, node in degrees if not degree}:
                kept |= lonely
                left -= lonely
                continue
            fewest = min(degrees, key=_by_degree)
            if fewest[0] <= 1 or (steps[0] <= 0 and fewest[0] > 1):
                kept.add(fewest[2])
                left -= {fewest[2], *foes[fewest[2]]}
                continue
            steps[0] -= 1
            most = max(degrees, key=_by_degree)[2]
            stack.append((left - {most, *foes[most]}, {*kept, most}))
            left.discard(most)
        if not left and len(kept) > len(best):
            best = kept
        if len(best) >= enough or (steps[0] <= 0 and best):
            break
    return best


def _by_degree(entry: tuple[int, int, object]) -> tuple[int, int]:
    return entry[0], entry[1]

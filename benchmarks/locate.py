"""How well bad parts of a fabric are located: precision, recall and rounds on simulated fat trees.

    python -m benchmarks.locate            a minute at most
    python -m benchmarks.locate --full     thousands of trials, up to 1,024 nodes

Each trial breaks 1 to 3 parts (adapters, cables, leaf ports, spine ports) so that they carry 20 to 80 % of their
rate, and measures pairs with 5 % noise. An adapter, its cable and its leaf port lie on exactly the same paths, so
bandwidth alone cannot tell them apart: they count as one place ("host"), as do the two ports and the cable between
a leaf and a spine ("trunk").

Compared are the product's search (`adaptive`), `everything`: each pair once, judged by the same rules, and `retest`:
one round, then each node of a slow pair again with a node of a fast one, the way it is done by hand.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Sequence

import attrs
from rich.console import Console
from rich.table import Table

from llmgw.rdma import tournament
from llmgw.rdma.locate import Result, locate, next_round

NOISE = 0.05
SLOW = 0.9


@attrs.frozen
class Tree:
    """A fat tree of two levels without oversubscription; each leaf has one link to every spine.

    Routes are by destination, as InfiniBand's min-hop routing spreads them: the spine is the destination's number
    modulo the number of spines.
    """

    nodes: int
    per_leaf: int

    def path(self, a: str, b: str) -> tuple[str, ...]:
        x, y = int(a), int(b)
        leaf_x, leaf_y = x // self.per_leaf, y // self.per_leaf
        if leaf_x == leaf_y:
            return (f"host {x}", f"host {y}")
        spine = y % self.per_leaf
        return (f"host {x}", f"trunk {leaf_x}-{spine}", f"trunk {leaf_y}-{spine}", f"host {y}")

    @property
    def names(self) -> list[str]:
        return [str(node) for node in range(self.nodes)]

    @property
    def parts(self) -> list[str]:
        leaves = range(self.nodes // self.per_leaf)
        return [f"host {n}" for n in range(self.nodes)] + [
            f"trunk {leaf}-{s}" for leaf in leaves for s in range(self.per_leaf)
        ]


TREES = {n: Tree(n, per_leaf) for n, per_leaf in ((16, 4), (64, 8), (256, 16), (1024, 32))}


@attrs.frozen
class World:
    """A tree with faults: the share of its rate that each bad part still carries."""

    tree: Tree
    faults: dict[str, float]
    dice: random.Random

    def measure(self, a: str, b: str) -> Result:
        share = min((self.faults[part] for part in self.tree.path(a, b) if part in self.faults), default=1.0)
        return Result(a, b, max(0.0, share * self.dice.gauss(1.0, NOISE)))


def broken(tree: Tree, dice: random.Random) -> World:
    """A tree with 1 to 3 faults; each of the four kinds is as likely as the others."""
    faults = {}
    for _ in range(dice.randint(1, 3)):
        kind = dice.choice(["adapter", "cable", "leaf port", "spine port"])
        wanted = "trunk" if kind == "spine port" else "host"
        part = dice.choice([part for part in tree.parts if part.startswith(wanted)])
        faults[part] = dice.uniform(0.2, 0.8)
    return World(tree, faults, dice)


def adaptive(world: World) -> tuple[set[str], int]:
    tree, results = world.tree, list[Result]()
    most = 4 * math.ceil(math.log2(tree.nodes)) + 8
    names, parts = tree.names, tree.parts
    for turn in range(most):
        pairs = next_round(names, results, tree.path, parts=parts, seed=turn)
        if not pairs:
            break
        results += [world.measure(*pair) for pair in pairs]
    else:
        turn = most
    found = locate(results, tree.path, parts=parts)
    return {part for suspect in found.suspects for part in suspect.parts}, turn


def everything(world: World) -> tuple[set[str], int]:
    schedule = tournament.rounds(world.tree.names)
    results = [world.measure(*pair) for each in schedule for pair in each]
    found = locate(results, world.tree.path)
    return {part for suspect in found.suspects for part in suspect.parts}, len(schedule)


def retest(world: World) -> tuple[set[str], int]:
    names = world.tree.names
    world.dice.shuffle(names)
    first = [world.measure(a, b) for a, b in zip(names[::2], names[1::2], strict=True)]
    good = [r.a for r in first if r.share >= SLOW]
    doubtful = [node for r in first if r.share < SLOW for node in (r.a, r.b)]
    if not doubtful or not good:
        return {f"host {node}" for node in doubtful}, 1
    named = {
        f"host {node}" for at, node in enumerate(doubtful) if world.measure(node, good[at % len(good)]).share < SLOW
    }
    return named, 1 + math.ceil(len(doubtful) / len(good))


Strategy = Callable[[World], tuple[set[str], int]]
STRATEGIES: dict[str, Strategy] = {"adaptive": adaptive, "everything": everything, "retest": retest}


@attrs.frozen
class Score:
    nodes: int
    strategy: str
    trials: int
    precision: float
    recall: float
    rounds_mean: float
    rounds_most: int
    seconds: float


def score(nodes: int, strategy: str, trials: int, seed: int = 1) -> Score:
    """Run trials on one size. Precision and recall are over all trials' named and broken parts together."""
    right = named = broke = 0
    rounds: list[int] = []
    begun = time.perf_counter()
    for trial in range(trials):
        world = broken(TREES[nodes], random.Random(seed * 1_000_000 + trial))
        found, turns = STRATEGIES[strategy](world)
        right += len(found & world.faults.keys())
        named += len(found)
        broke += len(world.faults)
        rounds.append(turns)
    took = time.perf_counter() - begun
    return Score(
        nodes, strategy, trials, right / named if named else 0.0, right / broke, sum(rounds) / trials, max(rounds), took
    )


def table(scores: Sequence[Score]) -> Table:
    shown = Table(title=f"Locating 1 to 3 bad parts, {NOISE:.0%} noise")
    for heading in (
        "nodes",
        "strategy",
        "trials",
        "precision",
        "recall",
        "rounds mean",
        "most",
        "2 log2 n + 3",
        "s/trial",
    ):
        shown.add_column(heading, justify="left" if heading == "strategy" else "right")
    for s in scores:
        bound = 2 * math.log2(s.nodes) + 3
        shown.add_row(
            f"{s.nodes:,}", s.strategy, f"{s.trials:,}", f"{s.precision:.3f}", f"{s.recall:.3f}",
            f"{s.rounds_mean:.1f}", f"{s.rounds_most}", f"{bound:.0f}", f"{s.seconds / s.trials:.3f}",
        )  # fmt: skip
    return shown


QUICK = {16: (500, 300, 1000), 64: (300, 50, 500), 256: (100, 5, 200), 1024: (30, 1, 100)}
FULL = {16: (4000, 2000, 4000), 64: (4000, 400, 4000), 256: (2000, 40, 2000), 1024: (500, 4, 1000)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--full", action="store_true", help="thousands of trials")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(arguments)
    scores = []
    for nodes, trials in (FULL if chosen.full else QUICK).items():
        scores += [
            score(nodes, name, count, chosen.seed) for name, count in zip(STRATEGIES, trials, strict=True) if count
        ]
    Console(width=120).print(table(scores))


if __name__ == "__main__":
    main()

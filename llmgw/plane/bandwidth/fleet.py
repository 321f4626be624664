"""Tests the whole fleet: every pair once in rounds of disjoint pairs, or as many rounds as finding the bad part takes.

Each pair's result is stored when it is there, so a tournament that was cut short goes on where it stopped. At the
end the slow pairs are explained by the smallest set of suspects, rail by rail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs
import msgspec
import trio
from msgspec import Struct

from llmgw.cell import Cell
from llmgw.errors import Conflict, LlmgwError
from llmgw.plane.bandwidth import history
from llmgw.plane.bandwidth.pair import Runner, Say
from llmgw.plane.bandwidth.plan import known, plan, sane, serving
from llmgw.plane.store import Store
from llmgw.plane.world import Node, World
from llmgw.rdma import locate, tournament
from llmgw.rdma.command import SLACK
from llmgw.rdma.results import FleetResult, Line, Note, PairResult, Parameters, Progress, SuspectView
from llmgw.rdma.tournament import Match, Round
from llmgw.wire.control import BandwidthServe

RECORD = "results/tournament"
#: Rounds that a search may take at most for n nodes; it ends far earlier.
_MOST_SEARCH = 64

#: The parts that a rail's traffic between two nodes passes.
Routes = Callable[[str, str, str], Sequence[str]]


class Tournament(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was begun: enough to go on with it. `ended` is 0 while it runs or when it was cut short."""

    nodes: tuple[str, ...]
    clock: float
    parameters: Parameters = Parameters()
    ended: float = 0.0


@attrs.frozen
class Order:
    """What was asked for. `search`: only as many rounds as locating the bad parts takes, instead of every pair."""

    parameters: Parameters = Parameters()
    nodes: tuple[str, ...] = ()
    fabric: str = ""
    force: bool = False
    resume: bool = False
    search: bool = False


def own_ends(a: str, b: str, rail: str) -> tuple[str, str]:
    """Without a map of the fabric: each node's adapter, cable and leaf port, which bandwidth cannot tell apart."""
    return (f"{a} (adapter, cable or leaf port)", f"{b} (adapter, cable or leaf port)")


def candidates(world: World, order: Order) -> tuple[tuple[str, ...], dict[str, str]]:
    """Who takes part, and why others do not. Raises NotFound for a name that was asked for and nothing has."""
    asked = [known(world, name) for name in order.nodes] or [world.nodes[name] for name in sorted(world.nodes)]
    taken, skipped = [], {}
    for node in asked:
        if why := _out(world, node, order):
            skipped[str(node.id)] = why
        else:
            taken.append(str(node.id))
    return tuple(taken), skipped


def _out(world: World, node: Node, order: Order) -> str:
    if node.facts is None or not node.connected:
        return "no agent is connected"
    if BandwidthServe.feature not in node.facts.features:
        return f"its agent ({node.version}) is too old for fabric-test"
    fit = [p for p in node.facts.ports if p.role == "fabric" and not p.vf and p.kind in ("ib", "roce")]
    if order.fabric:
        fit = [p for p in fit if p.fabric == order.fabric]
    if not fit:
        return (
            f"it has no port on fabric {order.fabric!r}" if order.fabric else "it has no RDMA port that could be a rail"
        )
    running = serving(world, node.id)
    if running and not order.force:
        return f"it serves {', '.join(running)}: --force tests it all the same"
    return ""


@attrs.define
class FleetTest:
    """One run over the fleet."""

    runner: Runner
    store: Store
    world: Cell[World]
    order: Order
    say: Say
    routes: Routes = own_ends
    _results: dict[Match, PairResult] = attrs.field(factory=dict)

    async def run(self) -> FleetResult:
        """Run it to its end. Raises LlmgwError when it cannot begin."""
        sane(self.order.parameters)
        begun = trio.current_time()
        nodes, skipped = candidates(self.world.value, self.order)
        for name, why in skipped.items():
            self.say(Note(text=f"{name} takes no part: {why}"))
        record = await self._record(nodes)
        if len(nodes) < 2:
            raise Conflict(
                f"{len(nodes)} node(s) can be tested, and a test takes two",
                remedy="; ".join(f"{name}: {why}" for name, why in list(skipped.items())[:5]) or "join more nodes",
            )
        if self.order.search:
            rounds, total = await self._search(nodes)
        else:
            rounds, total = await self._all(nodes)
        await self._note(msgspec.structs.replace(record, ended=self.runner.wall()))
        suspects, settled = await trio.to_thread.run_sync(self.suspects)
        return FleetResult(
            nodes=nodes,
            skipped=skipped,
            tested=len(self._results),
            total=total,
            rounds=rounds,
            suspects=suspects,
            settled=settled,
            clock=record.clock,
            seconds=trio.current_time() - begun,
        )

    async def _record(self, nodes: tuple[str, ...]) -> Tournament:
        """The tournament that begins, or the one that was cut short and goes on: then its results count."""
        if self.order.resume:
            older = await self._begun()
            if older is None or older.ended:
                raise Conflict("no test of the fleet was cut short", remedy="start one without --resume")
            stored = history.since((await history.latest(self.store)).values(), older.clock)
            self._results = {pair: result for pair, result in stored.items() if set(pair) <= set(nodes)}
            self.say(Note(text=f"{len(self._results)} pairs were tested before"))
            return older
        record = Tournament(nodes=nodes, clock=self.runner.wall(), parameters=self.order.parameters)
        await self._note(record)
        return record

    async def _begun(self) -> Tournament | None:
        data = (await self.store.load(RECORD)).values.get(RECORD)
        return msgspec.json.decode(data, type=Tournament) if data else None

    async def _note(self, record: Tournament) -> None:
        await self.store.commit({RECORD: msgspec.json.encode(record)})

    async def _all(self, nodes: tuple[str, ...]) -> tuple[int, int]:
        whole = tournament.rounds(nodes)
        schedule = tournament.remaining(whole, self._results.keys())
        begun = trio.current_time()
        pairs = 0
        for at, each in enumerate(schedule):
            self._progress(schedule, at, pairs, trio.current_time() - begun)
            await self._round(each)
            pairs += len(each)
        self._progress(schedule, len(schedule), pairs, trio.current_time() - begun)
        return len(schedule), sum(map(len, whole))

    def _progress(self, schedule: Sequence[Round], at: int, pairs: int, seconds: float) -> None:
        known = tournament.progress(schedule, at, pairs, seconds, self._estimate())
        self.say(
            Progress(
                done=known.done,
                total=known.total,
                round=known.round,
                rounds=known.rounds,
                seconds_left=known.seconds_left,
            )
        )

    def _estimate(self) -> float:
        """Seconds of one round before any was seen: the test's own length, for each rail that is tested by itself."""
        rails = 1 if self.order.parameters.at_once else max(1, len(self.order.parameters.rails))
        return rails * (self.order.parameters.seconds + SLACK / 10)

    async def _search(self, nodes: tuple[str, ...]) -> tuple[int, int]:
        """Rounds chosen by what is still unknown, until nothing more can be learnt."""
        pairs = 0
        for turn in range(_MOST_SEARCH):
            # Off the loop: for a thousand nodes this takes a moment.
            chosen = await trio.to_thread.run_sync(self._next, nodes, turn)
            if not chosen:
                return turn, pairs
            self.say(Progress(done=pairs, total=pairs + len(chosen), round=turn + 1))
            await self._round(chosen)
            pairs += len(chosen)
        return _MOST_SEARCH, pairs

    def _next(self, nodes: tuple[str, ...], turn: int) -> Round:
        """The next round for the first rail that still has questions, filled up with those of the other rails."""
        free, chosen = set(nodes), []
        for rail in self._rails() or [""]:
            path = partial(self._path, rail)
            parts = _parts(nodes, path)
            for a, b in locate.next_round(nodes, self._shares(rail), path, parts=parts, seed=turn):
                if a in free and b in free:
                    chosen.append((a, b))
                    free -= {a, b}
        return tuple(chosen)

    async def _round(self, pairs: Round) -> None:
        async with trio.open_nursery() as nursery:
            for a, b in pairs:
                nursery.start_soon(self._pair, a, b)

    async def _pair(self, a: str, b: str) -> None:
        """One pair, whatever becomes of it: a node that left meanwhile is a result too."""
        clock = self.runner.wall()
        try:
            order = self.order
            made = plan(self.world.value, a, b, order.parameters, force=order.force, fabric=order.fabric)
            result = await self.runner.pair(made, _quiet)
        except LlmgwError as error:
            result = PairResult(a=a, b=b, clock=clock, parameters=self.order.parameters, error=str(error))
        self._results[tournament.key(a, b)] = result
        await history.keep(self.store, result)
        self.say(result)

    # --- what the results say --------------------------------------------------------------------------

    def _rails(self) -> list[str]:
        return sorted({rail.rail for result in self._results.values() for rail in result.rails})

    def _path(self, rail: str, a: str, b: str) -> Sequence[str]:
        return self.routes(a, b, rail)

    def _shares(self, rail: str) -> list[locate.Result]:
        """Every figure of a rail as a share of its ceiling; a failed one is 0, an ungraded one says nothing."""
        found = []
        for result in self._results.values():
            for each in result.rails:
                if each.rail == rail:
                    share = 0.0 if each.failure is not None else each.verdict.share
                    if share is not None:
                        found.append(locate.Result(result.a, result.b, min(share, 1.0)))
        return found

    def suspects(self) -> tuple[tuple[SuspectView, ...], bool]:
        """The smallest set of parts that explains the slow pairs, rail by rail, and whether tests can say no more."""
        found: list[SuspectView] = []
        settled = True
        for rail in self._rails():
            finding = locate.locate(self._shares(rail), partial(self._path, rail))
            settled = settled and finding.settled
            found += [
                SuspectView(rail=rail, parts=suspect.parts, evidence=suspect.evidence, weight=suspect.weight)
                for suspect in finding.suspects
            ]
        return tuple(found), settled


def _parts(nodes: Sequence[str], path: locate.Path) -> set[str]:
    """The parts there are, as far as ways from each node to some others show them; to all others in a small fleet."""
    steps = range(1, len(nodes)) if len(nodes) <= 64 else sorted({*range(1, 17), *(2**n for n in range(4, 16))})
    found: set[str] = set()
    for at, node in enumerate(nodes):
        for step in steps:
            other = nodes[(at + step) % len(nodes)]
            if other != node:
                found.update(path(node, other))
    return found


def _quiet(_: Line) -> None:
    """A pair's own lines are not a fleet's: its result says all."""

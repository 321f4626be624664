"""Where tests are asked for: a node is in one test at a time, and one that serves waits for an idle window (E8)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import attrs
import trio

from llmgw.cell import Cell
from llmgw.errors import Conflict
from llmgw.plane.bandwidth import history
from llmgw.plane.bandwidth.fleet import FleetTest, Order, candidates, own_ends
from llmgw.plane.bandwidth.mapped import Maps, mapped
from llmgw.plane.bandwidth.pair import Asks, Runner, Say
from llmgw.plane.bandwidth.plan import known, plan, sane, serving
from llmgw.plane.store import Store
from llmgw.plane.world import World
from llmgw.rdma.results import Line, Note, PairResult, Parameters
from llmgw.wire.facts import NodeId

#: Seconds between two looks at whether requests are in flight.
LOOK_EVERY = 0.25

#: A test that was checked and can be run: it says its lines and returns when it is over.
Work = Callable[[Say], Awaitable[None]]


@attrs.define
class Desk:
    """Bandwidth tests of one plane. `in_flight` counts the gateway's requests by replica; `tested` hears each result
    of a pair as soon as it is stored."""

    hub: Asks
    store: Store
    world: Cell[World]
    in_flight: Callable[[], Mapping[str, int]] = dict
    maps: Maps | None = None
    wall: Callable[[], float] = time.time
    tested: Callable[[PairResult], None] | None = None
    _testing: set[str] = attrs.field(factory=set)

    def pair(
        self, a: str, b: str, parameters: Parameters, *, force: bool = False, when_idle: float | None = None
    ) -> Work:
        """A test of two nodes. Raises at once what can be known before: see `plan.plan`."""
        # With a window to wait for, that something runs is no reason to refuse; the window is.
        plan(self.world.value, a, b, parameters, force=force or when_idle is not None)

        async def work(say: Say) -> None:
            with self._only((a, b)):
                if when_idle is not None:
                    await self._idle((a, b), when_idle, say)
                made = plan(self.world.value, a, b, parameters, force=force or when_idle is not None)
                result = await Runner(self.hub, self.wall).pair(made, say)
                await history.keep(self.store, result)
                self._hearing(say)(result)

        return work

    def fleet(self, order: Order) -> Work:
        """A test of the whole fleet. Raises what can be known before."""
        sane(order.parameters)
        for name in order.nodes:
            known(self.world.value, name)

        async def work(say: Say) -> None:
            nodes, _ = candidates(self.world.value, order)
            with self._only(nodes):
                routes = own_ends if self.maps is None else await mapped(self.maps, self.world.value, say)
                runner = Runner(self.hub, self.wall)
                say(await FleetTest(runner, self.store, self.world, order, self._hearing(say), routes).run())

        return work

    async def between(self, a: str, b: str) -> tuple[PairResult, ...]:
        """A pair's stored results, newest first."""
        return await history.between(self.store, a, b)

    async def latest(self) -> tuple[PairResult, ...]:
        """Each pair's newest result."""
        return tuple((await history.latest(self.store)).values())

    def _hearing(self, say: Say) -> Say:
        """What is said, once `tested` has heard of it where it is a pair's result."""

        def said(line: Line) -> None:
            if isinstance(line, PairResult) and self.tested is not None:
                self.tested(line)
            say(line)

        return said

    @contextmanager
    def _only(self, nodes: Iterable[str]) -> Iterator[None]:
        """While the block runs no other test uses these nodes: two tests on one adapter measure each other."""
        wanted = set(nodes)
        if taken := sorted(wanted & self._testing):
            raise Conflict(f"{', '.join(taken)} is in another bandwidth test", remedy="wait until that one has ended")
        self._testing |= wanted
        try:
            yield
        finally:
            self._testing -= wanted

    async def _idle(self, nodes: Iterable[str], seconds: float, say: Say) -> None:
        """Wait for a moment in which no request is in flight at what these nodes serve."""
        told = False
        with trio.move_on_after(seconds):
            while busy := self._busy(nodes):
                if not told:
                    say(Note(text=f"waiting for an idle window: requests are in flight at {', '.join(busy)}"))
                    told = True
                await trio.sleep(LOOK_EVERY)
            return
        raise Conflict(
            f"no idle window within {seconds:g} s: requests are in flight at {', '.join(self._busy(nodes))}",
            remedy="try again later, drain the nodes, or use --force",
        )

    def _busy(self, nodes: Iterable[str]) -> list[str]:
        counts, world = self.in_flight(), self.world.value
        shards = {name for node in nodes for name in serving(world, NodeId(node))}
        replicas = {world.shards[shard].replica for shard in world.shards if shard in shards}
        return sorted(replica for replica in replicas if counts.get(replica, 0) > 0)

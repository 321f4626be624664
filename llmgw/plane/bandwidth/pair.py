"""Runs the test of two nodes: both sides asked, watched and ended together (E1, E3, A10).

Each side is one request to one node. The nursery around a rail is the test's lifetime: whoever waited and went
away cancels it, and with it both requests, and so both processes on both nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import attrs
import trio

from llmgw.errors import Conflict, Failed, LlmgwError
from llmgw.plane.bandwidth.judged import ended, refused
from llmgw.plane.bandwidth.plan import Plan, RailPlan, sides, thresholds
from llmgw.rdma import perftest
from llmgw.rdma.command import limits
from llmgw.rdma.link import Refusal
from llmgw.rdma.outcome import Lost, Said, outcome
from llmgw.rdma.rails import nccl_ib_hca
from llmgw.rdma.results import Line, Note, PairResult, Planned, RailResult
from llmgw.wire.agent import Listening
from llmgw.wire.control import (
    Bandwidth,
    BandwidthClient,
    BandwidthReply,
    BandwidthServe,
    PerftestReply,
    PerftestRequest,
    Request,
)
from llmgw.wire.facts import NodeId

R = TypeVar("R")

#: Seconds for a node to say what perftest it has; an installation asks for more by itself.
DESCRIBE_WITHIN = 60.0
#: Seconds for a server's socket to listen: a busy machine takes long to start a program.
LISTEN_WITHIN = 60.0
#: Seconds that a server has to end by itself after its client, so that its last words are heard, of a busy machine too.
SERVER_GRACE = 10.0
#: Seconds that a reply may take beyond the node's own limit.
REPLY_SLACK = 20.0
#: How often a port that was taken between the question and the start is chosen anew.
PORT_TRIES = 3


class Asks(Protocol):
    """Requests to nodes (A10); cancelling `ask` withdraws the request there."""

    async def ask(
        self,
        node: NodeId,
        request: Request[R],
        *,
        within: float,
        listening: Callable[[Listening], None] | None = None,
    ) -> R: ...


Say = Callable[[Line], None]


@attrs.frozen
class Runner:
    """What tests are run with: where requests go in, and the wall clock for showing."""

    hub: Asks
    wall: Callable[[], float] = time.time

    async def pair(self, plan: Plan, say: Say) -> PairResult:
        """Test two nodes. Raises LlmgwError when the test cannot begin; a rail that fails is a result."""
        began, clock = trio.current_time(), self.wall()
        for note in plan.notes:
            say(Note(text=note))
        say(
            Planned(
                a=plan.a,
                b=plan.b,
                rails=tuple(made.rail.name for made in plan.rails),
                devices=tuple((made.rail.a.device, made.rail.b.device) for made in plan.rails),
                address=next((made.meeting.address for made in plan.rails if made.meeting), ""),
            )
        )
        tools = await self._tools(plan, say)
        results: dict[int, RailResult] = {}

        async def one(at: int, made: RailPlan) -> None:
            results[at] = await self._rail(plan, made)
            say(results[at])

        if plan.parameters.at_once:
            async with trio.open_nursery() as nursery:
                for at, made in enumerate(plan.rails):
                    nursery.start_soon(one, at, made)
        else:
            for at, made in enumerate(plan.rails):
                await one(at, made)
        rails = tuple(results[at] for at in range(len(plan.rails)))
        figures = [rail.gbps for rail in rails if rail.gbps is not None]
        return PairResult(
            a=plan.a,
            b=plan.b,
            clock=clock,
            rails=rails,
            parameters=plan.parameters,
            notes=plan.notes,
            installed=tuple(node for node, tool in tools.items() if tool.installed_now),
            busy=tuple(
                sorted({*plan.busy, *(name for rail in rails for end in (rail.a, rail.b) for name in end.busy)})
            ),
            nccl_ib_hca={
                plan.a: nccl_ib_hca(made.rail.a for made in plan.rails),
                plan.b: nccl_ib_hca(made.rail.b for made in plan.rails),
            },
            total_gbps=sum(figures) if plan.parameters.at_once and figures else None,
            seconds=trio.current_time() - began,
        )

    async def _tools(self, plan: Plan, say: Say) -> dict[NodeId, PerftestReply]:
        """Both nodes' perftest, installed where it is missing and may be. Raises Failed, or Conflict for versions."""
        found: dict[NodeId, PerftestReply] = {}
        problems: list[LlmgwError] = []

        async def ask(node: NodeId) -> None:
            try:
                found[node] = await self.hub.ask(node, PerftestRequest(), within=DESCRIBE_WITHIN)
            except LlmgwError as error:
                problems.append(error)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for node in (plan.a, plan.b):
                nursery.start_soon(ask, node)
        if problems:
            raise problems[0]
        for node, tool in found.items():
            if tool.error:
                raise Failed(f"{node}: {tool.error}")
            if tool.installed_now:
                say(Note(text=f"perftest {tool.version} was installed on {node}"))
        versions = found[plan.a].version, found[plan.b].version
        if apart := perftest.differ(*versions):
            raise Conflict(
                f"{plan.a} and {plan.b} cannot be tested: {apart}", remedy="install the same perftest on both"
            )
        if plan.parameters.gpu and not all(tool.cuda for tool in found.values()):
            bare = ", ".join(node for node, tool in found.items() if not tool.cuda)
            raise Conflict(
                f"perftest on {bare} cannot use GPU memory", remedy="build it with CUDA support, or test without --gpu"
            )
        return found

    async def _rail(self, plan: Plan, made: RailPlan) -> RailResult:
        began = trio.current_time()
        link = made.link
        if isinstance(link, Refusal) or made.meeting is None:
            return refused(plan, made)
        client: Said = Lost("never started", stopped=True)
        server: Said = Lost("never started", stopped=True)
        for attempt in range(PORT_TRIES):
            try:
                free = await self.hub.ask(plan.b, PerftestRequest(install=False), within=DESCRIBE_WITHIN)
            except LlmgwError as error:
                server = Lost(str(error), error.code)
                break
            if free.error:
                server = Lost(free.error)
                break
            runs = sides(made, link, plan.parameters, free.free_port)
            client, server = await self._both(plan, runs, made.meeting.address)
            taken = isinstance(server, BandwidthReply) and server.cause_code == "port-in-use"
            if not taken or attempt == PORT_TRIES - 1:
                break
        said = outcome(plan.a, client, plan.b, server)
        took = trio.current_time() - began
        return ended(plan, made, link, client, server, said, took, thresholds(plan.parameters))

    async def _both(self, plan: Plan, runs: tuple[Bandwidth, Bandwidth], address: str) -> tuple[Said, Said]:
        """What the client and the server say. The client starts when the server's socket listens."""
        client_limit, server_limit = limits(runs[0])
        client: Said = Lost("it was not started, because the server never listened", stopped=True)
        server: Said = Lost(f"it did not end within {SERVER_GRACE:g} s of its client and was stopped", stopped=True)
        listening, server_ended = trio.Event(), trio.Event()
        moved = trio.Event()
        running = trio.CancelScope()

        def heard(_: Listening) -> None:
            listening.set()
            moved.set()

        async def serve() -> None:
            nonlocal server
            server = await self._asked(plan.b, BandwidthServe(run=runs[1]), server_limit + REPLY_SLACK, heard)
            server_ended.set()
            moved.set()
            if isinstance(server, Lost):
                running.cancel()  # nobody is left to talk to the client

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            with trio.move_on_after(LISTEN_WITHIN):
                await moved.wait()
            if listening.is_set():
                with running:
                    request = BandwidthClient(run=runs[0], server=address)
                    client = await self._asked(plan.a, request, client_limit + REPLY_SLACK)
                if running.cancelled_caught:
                    client = Lost("it was stopped, because the server's node was lost", stopped=True)
                with trio.move_on_after(SERVER_GRACE):
                    await server_ended.wait()
            elif not server_ended.is_set():
                server = Lost(f"its socket did not listen within {LISTEN_WITHIN:g} s", "not-listening")
            nursery.cancel_scope.cancel()
        return client, server

    async def _asked(
        self,
        node: NodeId,
        request: BandwidthServe | BandwidthClient,
        within: float,
        listening: Callable[[Listening], None] | None = None,
    ) -> Said:
        try:
            return await self.hub.ask(node, request, within=within, listening=listening)
        except LlmgwError as error:
            return Lost(str(error), error.code)

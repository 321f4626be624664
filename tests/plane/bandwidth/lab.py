"""Nodes with RDMA ports, and agents that answer bandwidth requests as such nodes would, on any clock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

import attrs
import trio
from immutables import Map
from msgspec.structs import replace

from llmgw.errors import AgentGone, LlmgwError
from llmgw.plane.world import Model, World
from llmgw.wire.agent import Listening, Register
from llmgw.wire.control import (
    BandwidthClient,
    BandwidthReply,
    BandwidthServe,
    PerftestReply,
    PerftestRequest,
    Request,
)
from llmgw.wire.facts import Interface, NodeId, Port
from tests.plane.worlds import ready, register, settle
from tests.plane.worlds import world as registered
from tests.rdma.ports import roce

R = TypeVar("R")
GOOD = 97.0


def node(name: str, number: int, *, rails: int = 2, ports: tuple[Port, ...] | None = None) -> Register:
    """A node with so many RoCE rails at 100 Gb/s, and a management interface."""
    made = (
        ports
        if ports is not None
        else tuple(
            roce(f"mlx5_{rail}", f"10.{rail}.0.{number}", pci=f"0000:{rail + 1:02x}:00.0") for rail in range(rails)
        )
    )
    interface = Interface(name="eth0", addresses=(f"192.168.0.{number}/16",), up=True)
    plain = register(name)
    return replace(
        plain,
        version="1.0",
        features=("fabric-test",),
        address="",
        host=replace(plain.host, interfaces=(interface,)),
        ports=made,
    )


def world(*nodes: Register, models: tuple[Model, ...] = ()) -> World:
    """These nodes, connected; models are placed and ready on them."""
    made = registered(*nodes, models=models)
    if models:
        made = ready(settle(made)[0])
    return attrs.evolve(
        made,
        nodes=Map({name: attrs.evolve(found, connected=True) for name, found in made.nodes.items()}),
    )


@attrs.define
class Lab:
    """The far side of every request. `speed` gives the Gb/s between two nodes over a device.

    `spoil` changes a side's reply; setting an event of `lost` loses a node.
    """

    speed: Callable[[str, str, str], float] = lambda a, b, device: GOOD
    spoil: Callable[[str, str, BandwidthReply], BandwidthReply] = lambda node, role, reply: reply
    tools: dict[str, PerftestReply] = attrs.field(factory=dict)
    silent_servers: bool = False
    running: set[tuple[str, str]] = attrs.field(factory=set)  # (node, role) of sides that run now
    most_running: int = 0
    asked: list[tuple[str, Request[object]]] = attrs.field(factory=list)
    lost: dict[str, trio.Event] = attrs.field(factory=dict)
    _ports: int = 18514
    _servers: dict[int, tuple[str, trio.Event]] = attrs.field(factory=dict)

    async def ask(
        self,
        node: NodeId,
        request: Request[R],
        *,
        within: float,
        listening: Callable[[Listening], None] | None = None,
    ) -> R:
        self.asked.append((node, cast(Request[object], request)))
        gone = self.lost.setdefault(node, trio.Event())
        if gone.is_set():
            raise AgentGone(f"no agent is connected for {node}")
        answer: list[object] = []
        lost = False

        async def losing(scope: trio.CancelScope) -> None:
            nonlocal lost
            await gone.wait()
            lost = True
            scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(losing, nursery.cancel_scope)
            answer.append(await self._answer(node, request, listening))
            nursery.cancel_scope.cancel()
        if lost:
            raise AgentGone(f"stream closed: {node} lost its stream")
        found = answer[0]
        if isinstance(found, LlmgwError):
            raise found
        return cast(R, found)

    async def _answer(self, node: str, request: object, listening: Callable[[Listening], None] | None) -> object:
        match request:
            case PerftestRequest():
                self._ports += 1
                return replace(self.tools.get(node, PerftestReply(version="6.06")), free_port=self._ports)
            case BandwidthServe(run=run):
                return await self._side(node, "server", self._serve(node, run.tcp_port, listening))
            case BandwidthClient(run=run):
                return await self._side(node, "client", self._client(node, run.tcp_port, run.device, run.seconds))
            case _:
                raise AssertionError(request)

    async def _side(self, node: str, role: str, reply: Awaitable[BandwidthReply]) -> BandwidthReply:
        self.running.add((node, role))
        self.most_running = max(self.most_running, len(self.running))
        try:
            return self.spoil(node, role, await reply)
        finally:
            self.running.discard((node, role))

    async def _serve(self, node: str, port: int, listening: Callable[[Listening], None] | None) -> BandwidthReply:
        done = trio.Event()
        self._servers[port] = (node, done)
        await trio.sleep(0.5)
        if self.silent_servers:
            await trio.sleep_forever()
        if listening is not None:
            listening(Listening(request_id=1, port=port))
        await done.wait()
        return BandwidthReply(average_gbps=GOOD, exit_code=0, state_before=UP, state_after=UP, version="6.06")

    async def _client(self, node: str, port: int, device: str, seconds: int) -> BandwidthReply:
        server, done = self._servers[port]
        await trio.sleep(seconds)
        done.set()
        gbps = self.speed(node, server, device)
        return BandwidthReply(average_gbps=gbps, exit_code=0, state_before=UP, state_after=UP, version="6.06")


UP = "ACTIVE LinkUp"

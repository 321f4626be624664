from __future__ import annotations

import attrs
import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from llmgw.cell import Cell
from llmgw.errors import BadInput, Conflict, NotFound, TooOld
from llmgw.plane.agents import Hub
from llmgw.plane.bandwidth.desk import Desk
from llmgw.plane.bandwidth.fleet import Order
from llmgw.plane.store.memory import MemoryStore
from llmgw.plane.stream import AgentStream
from llmgw.plane.world import World
from llmgw.rdma.results import FleetResult, Line, Note, PairResult, Parameters
from llmgw.wire.agent import Heartbeat, Register, ShardStatus
from llmgw.wire.control import Renewed
from llmgw.wire.facts import NodeId
from tests.fakes.frames import pair as frames
from tests.plane.bandwidth.lab import Lab, node, world
from tests.plane.worlds import model

SHORT = Parameters(seconds=5)
WORLD = world(node("a", 1), node("b", 2), node("c", 3))


def desk(of: World = WORLD, *, in_flight: dict[str, int] | None = None) -> Desk:
    return Desk(Lab(), MemoryStore(), Cell(of), lambda: in_flight or {}, wall=trio.current_time)


async def test_a_test_is_stored_before_its_result_is_told(autojump_clock: MockClock) -> None:
    made = desk()
    said: list[Line] = []
    await made.pair("a", "b", SHORT)(said.append)
    (stored,) = await made.between("b", "a")
    assert stored == said[-1]
    assert await made.latest() == (stored,)


async def test_one_node_is_in_one_test_at_a_time(autojump_clock: MockClock) -> None:
    made = desk()
    said: list[Line] = []

    async def second() -> None:
        await trio.sleep(1)
        with pytest.raises(Conflict, match="b is in another bandwidth test"):
            await made.pair("b", "c", SHORT)(said.append)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(second)
        await made.pair("a", "b", SHORT)(said.append)
    await made.pair("b", "c", SHORT)(said.append)
    assert isinstance(said[-1], PairResult)


async def test_a_test_that_was_cancelled_frees_its_nodes(autojump_clock: MockClock) -> None:
    made = desk()
    with trio.move_on_after(2):
        await made.pair("a", "b", SHORT)(lambda line: None)
    await made.pair("a", "b", SHORT)(lambda line: None)


def test_what_cannot_be_meant_is_refused_before_anything_runs() -> None:
    made = desk()
    with pytest.raises(NotFound):
        made.pair("a", "x", SHORT)
    with pytest.raises(BadInput):
        made.pair("a", "b", replace(SHORT, seconds=0))
    with pytest.raises(NotFound):
        made.fleet(Order(SHORT, nodes=("a", "x")))


async def test_a_node_that_serves_waits_for_a_moment_without_requests(autojump_clock: MockClock) -> None:
    """E8."""
    made = world(node("a", 1), node("b", 2), models=(model(),))
    flights: dict[str, int] = {next(iter(made.shards.values())).replica: 3}
    made_desk = desk(made, in_flight=flights)
    with pytest.raises(Conflict, match="--force"):
        made_desk.pair("a", "b", SHORT)
    said: list[Line] = []

    async def quiet() -> None:
        await trio.sleep(4)
        flights.clear()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(quiet)
        await made_desk.pair("a", "b", SHORT, when_idle=30)(said.append)
    assert any(isinstance(line, Note) and "idle window" in line.text for line in said)
    assert isinstance(said[-1], PairResult)
    assert said[-1].busy


async def test_a_fleet_is_one_test_of_all_its_nodes(autojump_clock: MockClock) -> None:
    made = desk()
    said: list[Line] = []

    async def second() -> None:
        await trio.sleep(1)
        with pytest.raises(Conflict, match="a, b is in another bandwidth test"):
            await made.pair("a", "b", SHORT)(said.append)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(second)
        await made.fleet(Order(SHORT))(said.append)
    assert isinstance(said[-1], FleetResult)
    assert len(await made.latest()) == 3


async def test_each_pairs_result_is_heard_of(autojump_clock: MockClock) -> None:
    heard: list[PairResult] = []
    made = attrs.evolve(desk(), tested=heard.append)
    said: list[Line] = []
    await made.pair("a", "b", SHORT)(said.append)
    assert heard == list(await made.latest()) == [said[-1]]
    await made.fleet(Order(SHORT))(said.append)
    assert {frozenset((result.a, result.b)) for result in heard[1:]} == {*map(frozenset, ("ab", "ac", "bc"))}
    assert len(heard) == 4


class Ear:
    def attach(self, node: NodeId, stream: int, address: str) -> None: ...
    def detach(self, node: NodeId, stream: int) -> None: ...
    def heard(self, node: NodeId, stream: int, message: Register | Heartbeat | ShardStatus) -> None: ...


async def renewal(csr: str) -> Renewed:
    raise AssertionError(csr)


async def test_an_agent_that_is_too_old_is_refused_at_once_with_its_version(autojump_clock: MockClock) -> None:
    """A11, through the real hub and stream."""
    hub = Hub(Ear())
    old = replace(node("b", 2), features=("doctor",), version="0.0.9")
    async with trio.open_nursery() as nursery:
        for number, register in enumerate((node("a", 1), old), 1):
            ours, _theirs = frames()
            stream = AgentStream(ours, register, number=number, address="10.0.0.1")

            async def carry(stream: AgentStream = stream) -> None:
                with hub.attached(stream):
                    await stream.run(Ear(), renewal)

            nursery.start_soon(carry)
        await trio.testing.wait_all_tasks_blocked()
        made = Desk(hub, MemoryStore(), Cell(world(node("a", 1), old)))
        began = trio.current_time()  # node a answers nothing, and nobody waits for it
        with pytest.raises(TooOld, match=r"b cannot answer perftest: its agent is version 0\.0\.9.*fabric-test"):
            await made.pair("a", "b", SHORT)(lambda line: None)
        assert trio.current_time() == began
        nursery.cancel_scope.cancel()

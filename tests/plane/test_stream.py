"""One agent's stream on the plane's side (A3-A14), over frames in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from msgspec import Raw
from trio.testing import MockClock

from llmgw.errors import AgentGone, Failed, NotKeepingUp, TimedOut, TooOld
from llmgw.plane.agents import Hub
from llmgw.plane.stream import KINDS, QUEUE, AgentStream
from llmgw.wire.agent import (
    AgentMessage,
    Heartbeat,
    Listening,
    Part,
    Register,
    Renew,
    Reply,
    RequestFailed,
    ShardStatus,
    Working,
)
from llmgw.wire.codec import Broken, Unknown, control_codec, encode
from llmgw.wire.control import (
    BandwidthReply,
    BandwidthServe,
    ControlMessage,
    DoctorRequest,
    Goodbye,
    LogsReply,
    LogsRequest,
    Pace,
    Renewed,
    StopShard,
    Withdraw,
)
from llmgw.wire.facts import NodeId, ShardId
from llmgw.wire.stream import MOST_SERIES, Closed, Joiner, parts
from tests.fakes.frames import MemoryFrames, pair

Heard = tuple[NodeId, int, Register | Heartbeat | ShardStatus]


class Ears:
    """Hears what the streams of a hub bring."""

    def __init__(self) -> None:
        self.heard_: list[Heard] = []
        self.attached: list[tuple[NodeId, int, str]] = []
        self.detached: list[tuple[NodeId, int]] = []

    def heard(self, node: NodeId, stream: int, message: Register | Heartbeat | ShardStatus) -> None:
        self.heard_.append((node, stream, message))

    def attach(self, node: NodeId, stream: int, address: str) -> None:
        self.attached.append((node, stream, address))

    def detach(self, node: NodeId, stream: int) -> None:
        self.detached.append((node, stream))


async def renewal(csr: str) -> Renewed:
    return Renewed(certificate=f"signed {csr}")


class Bench:
    """A hub with one stream whose agent the test plays."""

    def __init__(self, features: tuple[str, ...] = ("doctor", "fabric-test")) -> None:
        self.ears = Ears()
        self.hub = Hub(self.ears)
        self.features = features
        self.goodbyes: list[Goodbye | None] = []
        self.over = trio.Event()

    async def carry(self, number: int, frames: MemoryFrames, address: str = "10.0.0.1") -> None:
        register = Register(node=NodeId("n1"), version="0.1.0", features=self.features)
        stream = AgentStream(frames, register, number=number, address=address)
        with self.hub.attached(stream):
            self.goodbyes.append(await stream.run(self.ears, renewal))
        self.over.set()
        await frames.aclose()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[MemoryFrames]:
        ours, theirs = pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.carry, self.hub.number(), ours)
            await trio.testing.wait_all_tasks_blocked()
            yield theirs
            nursery.cancel_scope.cancel()


async def say(agent: MemoryFrames, message: AgentMessage) -> None:
    await agent.send(encode(message))


async def hear(agent: MemoryFrames) -> ControlMessage:
    message = control_codec.decode(await agent.receive())
    assert not isinstance(message, Unknown)
    return message


def flood(hub: Hub) -> None:
    for _ in range(100):
        hub.tell(NodeId("n1"), Pace(heartbeat=5.0))


async def asked(agent: MemoryFrames) -> int:
    """The number of the request that comes next."""
    return (await hear(agent)).request_id  # type: ignore[union-attr]


async def test_a_reply_ends_the_wait_with_the_typed_value() -> None:
    bench = Bench()
    async with bench.open() as agent, trio.open_nursery() as nursery:

        async def ask() -> None:
            reply = await bench.hub.ask(NodeId("n1"), LogsRequest(lines=5), within=10)
            assert reply == LogsReply(lines=("one", "two"))

        nursery.start_soon(ask)
        number = await asked(agent)
        await say(agent, Reply(request_id=number, value=Raw(encode(LogsReply(lines=("one", "two"))))))


async def test_the_nodes_error_ends_the_wait_with_the_nodes_words() -> None:
    bench = Bench()
    async with bench.open() as agent, trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(Failed, match="n1: no such source"):
                await bench.hub.ask(NodeId("n1"), LogsRequest(), within=10)

        nursery.start_soon(ask)
        await say(agent, RequestFailed(request_id=await asked(agent), error="no such source"))


async def test_a_deadline_names_the_node_and_the_request_and_withdraws_it(autojump_clock: MockClock) -> None:
    bench = Bench()
    async with bench.open() as agent:
        began = trio.current_time()
        with pytest.raises(TimedOut, match=r"n1 did not answer logs within 10 s"):
            await bench.hub.ask(NodeId("n1"), LogsRequest(), within=10)
        assert trio.current_time() - began == 10
        number = await asked(agent)
        assert await hear(agent) == Withdraw(request_id=number)


async def test_working_moves_the_deadline_and_never_backwards(autojump_clock: MockClock) -> None:
    bench = Bench()
    async with bench.open() as agent, trio.open_nursery() as nursery:
        began = trio.current_time()

        async def ask() -> None:
            with pytest.raises(TimedOut):
                await bench.hub.ask(NodeId("n1"), LogsRequest(), within=10)
            assert trio.current_time() - began == 35

        nursery.start_soon(ask)
        number = await asked(agent)
        await trio.sleep(5)
        await say(agent, Working(request_id=number, seconds=30, note="installing"))
        await say(agent, Working(request_id=number, seconds=1))
        for _ in range(2):
            await trio.sleep(12)
            await say(agent, Heartbeat())


async def test_the_streams_end_ends_the_wait_at_once(autojump_clock: MockClock) -> None:
    bench = Bench()
    async with bench.open() as agent, trio.open_nursery() as nursery:
        began = trio.current_time()

        async def ask() -> None:
            with pytest.raises(AgentGone, match="stream closed"):
                await bench.hub.ask(NodeId("n1"), LogsRequest(), within=10)
            assert trio.current_time() == began

        nursery.start_soon(ask)
        await asked(agent)
        await agent.aclose()


async def test_an_asker_that_goes_away_withdraws_the_request() -> None:
    bench = Bench()
    async with bench.open() as agent:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: bench.hub.ask(NodeId("n1"), LogsRequest(), within=10))
            number = await asked(agent)
            nursery.cancel_scope.cancel()
        assert await hear(agent) == Withdraw(request_id=number)


async def test_a_request_that_nobody_waits_for_any_more_never_leaves_the_queue() -> None:
    bench = Bench()
    ours, agent = pair(room=0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.carry, bench.hub.number(), ours)
        await trio.testing.wait_all_tasks_blocked()
        bench.hub.tell(NodeId("n1"), Pace(heartbeat=1.0))
        await trio.testing.wait_all_tasks_blocked()  # the writer waits for the agent to take it
        with trio.CancelScope() as asking:
            async with trio.open_nursery() as askers:
                askers.start_soon(lambda: bench.hub.ask(NodeId("n1"), LogsRequest(), within=10))
                await trio.testing.wait_all_tasks_blocked()
                asking.cancel()
        bench.hub.tell(NodeId("n1"), Pace(heartbeat=2.0))
        assert await hear(agent) == Pace(heartbeat=1.0)
        assert await hear(agent) == Pace(heartbeat=2.0)
        nursery.cancel_scope.cancel()


async def test_a_greeting_longer_than_the_queue_is_told_whole_and_first() -> None:
    bench = Bench()
    ours, agent = pair()
    stream = AgentStream(ours, Register(node=NodeId("n1"), version="0.1.0"), number=1, address="10.0.0.1")
    stops = [StopShard(shard=ShardId(f"m-{n}-0"), generation=1) for n in range(3 * QUEUE)]
    async with trio.open_nursery() as nursery:
        with bench.hub.attached(stream):
            bench.hub.tell(NodeId("n1"), Pace(heartbeat=1.0))
            stream.greet(*stops)
            nursery.start_soon(stream.run, bench.ears, renewal)
            assert [await hear(agent) for _ in stops] == stops
            assert await hear(agent) == Pace(heartbeat=1.0)
        nursery.cancel_scope.cancel()


async def test_a_missing_feature_is_refused_at_once_with_the_agents_version() -> None:
    bench = Bench(features=())
    async with bench.open():
        with pytest.raises(TooOld, match=r"version 0\.1\.0 and has no feature 'doctor'"):
            await bench.hub.ask(NodeId("n1"), DoctorRequest(), within=60)


async def test_listening_reaches_who_asked_for_it() -> None:
    bench = Bench()
    ports: list[int] = []
    async with bench.open() as agent, trio.open_nursery() as nursery:

        async def ask() -> None:
            await bench.hub.ask(
                NodeId("n1"), BandwidthServe(), within=10, listening=lambda message: ports.append(message.port)
            )

        nursery.start_soon(ask)
        number = await asked(agent)
        await say(agent, Listening(request_id=number, port=18515))
        await say(agent, Reply(request_id=number, value=Raw(encode(BandwidthReply(average_gbps=1.0)))))
    assert ports == [18515]


async def test_a_late_reply_is_no_error(autojump_clock: MockClock) -> None:
    bench = Bench()
    async with bench.open() as agent:
        with pytest.raises(TimedOut):
            await bench.hub.ask(NodeId("n1"), LogsRequest(), within=1)
        await say(agent, Reply(request_id=await asked(agent), value=Raw(encode(LogsReply()))))
        await say(agent, Heartbeat())
        await trio.testing.wait_all_tasks_blocked()
        assert len(bench.ears.heard_) == 1


async def test_a_full_queue_says_that_the_node_is_not_keeping_up() -> None:
    bench = Bench()
    ours, theirs = pair(room=0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.carry, 1, ours)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(NotKeepingUp, match="n1 is not keeping up: 64 commands wait"):
            flood(bench.hub)
        nursery.cancel_scope.cancel()
    del theirs


async def test_a_node_without_a_stream_is_an_error_that_says_so() -> None:
    with pytest.raises(AgentGone, match="no agent is connected for n9"):
        Hub(Ears()).tell(NodeId("n9"), Pace(heartbeat=5.0))


async def test_a_newer_stream_wins_and_the_older_is_told(autojump_clock: MockClock) -> None:
    bench = Bench()
    first, first_agent = pair()
    second, second_agent = pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.carry, bench.hub.number(), first)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(bench.carry, bench.hub.number(), second, "10.0.0.2")
        await trio.testing.wait_all_tasks_blocked()
        assert [goodbye.code for goodbye in bench.goodbyes if goodbye] == ["superseded"]
        assert [(stream, address) for _, stream, address in bench.ears.attached] == [(1, "10.0.0.1"), (2, "10.0.0.2")]
        # The older one's end takes nothing from the newer.
        assert bench.ears.detached == []
        bench.hub.tell(NodeId("n1"), Pace(heartbeat=7.0))
        assert await hear(second_agent) == Pace(heartbeat=7.0)
        nursery.cancel_scope.cancel()
    del first_agent


async def test_silence_ends_the_stream(autojump_clock: MockClock) -> None:
    bench = Bench()
    async with bench.open() as agent:
        agent.deaf = True
        with trio.fail_after(60):
            await bench.over.wait()
    assert bench.goodbyes[0] is not None
    assert bench.goodbyes[0].code == "silent"


async def test_a_writer_that_cannot_write_ends_the_stream(autojump_clock: MockClock) -> None:
    bench = Bench()
    ours, _theirs = pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.carry, 1, ours)
        await trio.testing.wait_all_tasks_blocked()
        ours.stalled = True
        bench.hub.tell(NodeId("n1"), Pace(heartbeat=5.0))
        with trio.fail_after(60):
            await bench.over.wait()
        nursery.cancel_scope.cancel()
    assert bench.goodbyes[0] is not None
    assert bench.goodbyes[0].code == "silent"


async def test_an_unknown_kind_is_ignored_and_a_broken_frame_closes() -> None:
    bench = Bench()
    async with bench.open() as agent:
        await agent.send(encode({"type": "from-the-future", "x": 1}))
        await agent.send(encode({"type": "from-the-future", "x": 2}))
        await say(agent, Heartbeat())
        await trio.testing.wait_all_tasks_blocked()
        assert len(bench.ears.heard_) == 1
        await agent.send(encode({"type": "heartbeat", "shards": "none"}))
        with pytest.raises(Closed):
            await agent.receive()
    assert bench.goodbyes[0] is not None
    assert bench.goodbyes[0].code == "protocol"


@pytest.mark.parametrize("data", [b"", b"\xff" * 10, b"\x91" * 100_000, encode([1, 2]), encode("x"), encode({})])
async def test_garbage_closes_with_a_reason(data: bytes) -> None:
    bench = Bench()
    async with bench.open() as agent:
        await agent.send(data)
        with pytest.raises(Closed):
            await agent.receive()
    assert bench.goodbyes[0] is not None
    assert "cannot be read" in bench.goodbyes[0].reason


async def test_parts_make_one_frame_and_heartbeats_pass_between_them() -> None:
    bench = Bench()
    async with bench.open() as agent, trio.open_nursery() as nursery:
        lines = tuple(f"line {n}" for n in range(5000))

        async def ask() -> None:
            assert (await bench.hub.ask(NodeId("n1"), LogsRequest(), within=10)).lines == lines

        nursery.start_soon(ask)
        number = await asked(agent)
        whole = encode(Reply(request_id=number, value=Raw(encode(LogsReply(lines=lines)))))
        for piece, last in parts(whole, 10_000):
            await say(agent, Part(series=1, data=piece, last=last))
            await say(agent, Heartbeat())
    assert len(bench.ears.heard_) == len(list(parts(whole, 10_000)))


async def test_a_register_on_a_live_stream_replaces_the_inventory_but_not_the_name() -> None:
    bench = Bench()
    async with bench.open() as agent:
        await say(agent, Register(node=NodeId("n1"), version="0.2.0", features=("new",)))
        await trio.testing.wait_all_tasks_blocked()
        assert len(bench.ears.heard_) == 1
        await say(agent, Register(node=NodeId("n2"), version="0.2.0"))
        with pytest.raises(Closed):
            await agent.receive()
    assert bench.goodbyes[0] is not None
    assert bench.goodbyes[0].code == "identity"


async def test_a_certificate_is_renewed_on_the_same_stream() -> None:
    bench = Bench()
    async with bench.open() as agent:
        await say(agent, Renew(csr="mine"))
        assert await hear(agent) == Renewed(certificate="signed mine")
        assert not bench.goodbyes


async def test_a_renewal_that_fails_is_answered_and_ends_no_stream() -> None:
    bench = Bench()

    async def renewal_of_a_sick_store(csr: str) -> Renewed:
        await trio.lowlevel.checkpoint()
        raise Failed("the store cannot be written")

    ours, agent = pair()
    stream = AgentStream(ours, Register(node=NodeId("n1"), version="0.1.0"), number=1, address="10.0.0.1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.run, bench.ears, renewal_of_a_sick_store)
        for _ in range(2):
            await say(agent, Renew(csr="mine"))
            assert await hear(agent) == Renewed(error="the store cannot be written")
        nursery.cancel_scope.cancel()


async def test_kinds_that_are_made_up_without_end_are_not_remembered_without_end() -> None:
    bench = Bench()
    async with bench.open() as agent:
        stream = bench.hub._stream(NodeId("n1"))
        for n in range(10 * KINDS):
            await agent.send(encode({"type": f"{n}" * 1000}))
        await trio.testing.wait_all_tasks_blocked()
        assert len(stream._strange) == KINDS


def test_frames_begun_in_parts_and_never_ended_are_bounded() -> None:
    joiner = Joiner()
    for series in range(MOST_SERIES):
        joiner.add(series, b"", False)
    with pytest.raises(Broken, match="frames in parts at a time"):
        joiner.add(MOST_SERIES, b"", False)

"""The agent's side of a stream, with the test as the plane (A2-A14, B1, B2)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, NoReturn

import attrs
import pytest
import trio
from msgspec import structs
from trio.testing import MockClock

from llmgw.cell import Cell
from llmgw.errors import NotFound
from llmgw.node.answers import Say, features
from llmgw.node.stream import Duties, Outdated, PlaneStream
from llmgw.wire.agent import AgentMessage, Heartbeat, Part, Register, Reply, RequestFailed, ShardStatus, Working
from llmgw.wire.codec import Unknown, agent_codec, encode
from llmgw.wire.control import (
    ControlMessage,
    DoctorRequest,
    Goodbye,
    LogsReply,
    LogsRequest,
    Pace,
    Registered,
    ScanRequest,
    StopShard,
    Withdraw,
)
from llmgw.wire.facts import (
    ModelName,
    NodeId,
    ReplicaId,
    ShardId,
    ShardState,
)
from llmgw.wire.stream import Closed
from tests.fakes.frames import MemoryFrames, pair


def status(state: ShardState = ShardState.READY) -> ShardStatus:
    return ShardStatus(
        shard=ShardId("m-0-0"), replica=ReplicaId("m-0"), model=ModelName("m"), generation=1, state=state
    )


class Beats:
    def __init__(self, told: Register) -> None:
        self.told = told

    async def next(self) -> Heartbeat:
        await trio.lowlevel.checkpoint()
        return Heartbeat(memory_bytes=len(self.told.gpus))


class Daemon:
    """What a stream borrows from its daemon, with every part in the test's hands."""

    def __init__(self) -> None:
        self.facts = Register(node=NodeId("n1"), version="0.1.0", shards=(status(),))
        self.commands: list[object] = []
        self.epoch = 0
        self.withdrawn = trio.Event()
        self.tell_hardware, self._hardware = trio.open_memory_channel[int](10)
        self.tell_change, self._changes = trio.open_memory_channel[ShardStatus](10)
        self.news: Cell[int] = Cell(0)
        self.goodbye: Goodbye | None = None
        self.began = False

    def obey(self, registered: Registered) -> None:
        if registered.epoch < self.epoch:
            raise Outdated(f"epoch {registered.epoch} is older than {self.epoch}")
        self.epoch = registered.epoch

    async def register(self) -> Register:
        await trio.lowlevel.checkpoint()
        return self.facts

    async def hardware(self) -> AsyncIterator[int]:
        yield 0
        async for version in self._hardware:
            yield version

    @contextmanager
    def changes(self) -> Iterator[trio.MemoryReceiveChannel[ShardStatus]]:
        yield self._changes

    async def logs(self, request: LogsRequest, say: Say) -> LogsReply:
        await trio.lowlevel.checkpoint()
        if request.source == "nothing":
            raise NotFound("there is no source 'nothing'", remedy="ask without one to see them all")
        if request.source == "broken":
            raise ZeroDivisionError("division by zero")
        return LogsReply(lines=("x" * 1000,) * request.lines)

    async def doctor(self, request: DoctorRequest, say: Say) -> NoReturn:
        self.began = True
        say(Working(request_id=0, seconds=60, note="looking"))
        try:
            await trio.sleep_forever()
        finally:
            self.withdrawn.set()

    def duties(self) -> Duties:
        return Duties(
            register=self.register,
            beats=Beats,
            hardware=self.hardware,
            changes=self.changes,
            command=self.commands.append,
            obey=self.obey,
            renewals=None,
            answers={LogsRequest: self.logs, DoctorRequest: self.doctor},
            news=self.news.values,
        )

    async def carry(self, frames: MemoryFrames) -> None:
        self.goodbye = await PlaneStream(frames, self.duties()).run()
        await frames.aclose()

    @asynccontextmanager
    async def open(self, acknowledge: bool = True) -> AsyncIterator[MemoryFrames]:
        ours, theirs = pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.carry, ours)
            if acknowledge:
                assert await hear(theirs) == self.facts
                await say(theirs, Registered(plane="p", version="0.1.0", epoch=1, heartbeat=5.0))
            yield theirs
            nursery.cancel_scope.cancel()


async def hear(plane: MemoryFrames) -> AgentMessage:
    message = agent_codec.decode(await plane.receive())
    assert not isinstance(message, Unknown)
    return message


async def say(plane: MemoryFrames, message: ControlMessage) -> None:
    await plane.send(encode(message))


async def gone(plane: MemoryFrames) -> None:
    with suppress(Closed):
        while True:
            await plane.receive()


async def test_heartbeats_follow_the_acknowledgement_at_the_planes_pace(autojump_clock: MockClock) -> None:
    daemon = Daemon()
    async with daemon.open() as plane:
        began = trio.current_time()
        for beat in (1, 2):
            assert isinstance(await hear(plane), Heartbeat)
            assert trio.current_time() - began == pytest.approx(5.0 * beat)
        await say(plane, Pace(heartbeat=1.0))
        began = trio.current_time()
        assert isinstance(await hear(plane), Heartbeat)
        assert trio.current_time() - began == pytest.approx(0.0)
        assert isinstance(await hear(plane), Heartbeat)
        assert trio.current_time() - began == pytest.approx(1.0)


async def test_news_bring_the_next_heartbeat_forward_and_not_more_than_once_a_second(autojump_clock: MockClock) -> None:
    daemon = Daemon()
    async with daemon.open() as plane:
        assert isinstance(await hear(plane), Heartbeat)
        await trio.sleep(2.0)
        began = trio.current_time()
        for count in (1, 2, 3):
            daemon.news.set(count)
            await trio.testing.wait_all_tasks_blocked()
        assert isinstance(await hear(plane), Heartbeat)
        assert trio.current_time() - began == pytest.approx(0.0)
        # What came meanwhile is told together, and the usual pace goes on from there.
        assert isinstance(await hear(plane), Heartbeat)
        assert trio.current_time() - began == pytest.approx(1.0)
        assert isinstance(await hear(plane), Heartbeat)
        assert trio.current_time() - began == pytest.approx(6.0)


async def test_a_refusals_words_are_what_the_agent_logs(autojump_clock: MockClock) -> None:
    daemon = Daemon()
    async with daemon.open(acknowledge=False) as plane:
        await say(plane, Goodbye(code="not-leader", reason="this plane stands by", leader="wss://b:7443"))
        await gone(plane)
    assert daemon.goodbye == Goodbye(code="not-leader", reason="this plane stands by", leader="wss://b:7443")


async def test_a_refusal_that_came_before_the_register_was_sent_is_heard_too(autojump_clock: MockClock) -> None:
    daemon = Daemon()
    ours, plane = pair()
    refused = Goodbye(code="revoked", reason="the certificate of n1 was revoked: join again", retry_after=60.0)
    await say(plane, refused)
    await plane.aclose()
    await daemon.carry(ours)
    assert daemon.goodbye == refused


async def test_a_plane_of_an_older_epoch_is_left_at_once(autojump_clock: MockClock) -> None:
    daemon = Daemon()
    daemon.epoch = 5
    async with daemon.open() as plane:
        await gone(plane)
    assert daemon.goodbye is not None
    assert daemon.goodbye.reason == "epoch 1 is older than 5"


async def test_no_acknowledgement_ends_the_stream(autojump_clock: MockClock) -> None:
    daemon = Daemon()
    async with daemon.open(acknowledge=False) as plane:
        await gone(plane)
    assert daemon.goodbye is not None
    assert daemon.goodbye.reason == "no acknowledgement within 15 s"


async def test_a_silent_plane_is_noticed_by_pings(autojump_clock: MockClock) -> None:
    daemon = Daemon()
    async with daemon.open() as plane:
        plane.deaf = True
        began = trio.current_time()
        await gone(plane)
        assert trio.current_time() - began <= 20
    assert daemon.goodbye is not None
    assert daemon.goodbye.code == "silent"


async def test_shard_changes_and_commands_pass_in_both_directions(autojump_clock: MockClock) -> None:
    daemon = Daemon()
    async with daemon.open() as plane:
        await daemon.tell_change.send(status(ShardState.FAILED))
        assert await hear(plane) == status(ShardState.FAILED)
        stop = StopShard(shard=ShardId("m-0-0"), generation=1)
        await say(plane, stop)
        await trio.testing.wait_all_tasks_blocked()
        assert daemon.commands == [stop]


async def test_new_hardware_is_registered_again(autojump_clock: MockClock) -> None:
    daemon = Daemon()
    async with daemon.open() as plane:
        daemon.facts = structs.replace(daemon.facts, address="10.0.0.9")
        await daemon.tell_hardware.send(1)
        assert await hear(plane) == daemon.facts


async def test_a_request_is_answered_and_errors_are_its_own(autojump_clock: MockClock) -> None:
    daemon = Daemon()
    async with daemon.open() as plane:
        await say(plane, LogsRequest(request_id=1, lines=1))
        reply = await hear(plane)
        assert isinstance(reply, Reply)
        await say(plane, LogsRequest(request_id=2, source="nothing"))
        failed = await hear(plane)
        assert isinstance(failed, RequestFailed)
        assert failed.error == "there is no source 'nothing': ask without one to see them all"
        assert failed.code == "not-found"
        await say(plane, LogsRequest(request_id=3, source="broken"))
        failed = await hear(plane)
        assert isinstance(failed, RequestFailed)
        assert "ZeroDivisionError" in failed.error
        await say(plane, ScanRequest(request_id=4))
        failed = await hear(plane)
        assert isinstance(failed, RequestFailed)
        assert failed.code == "unsupported"


async def test_a_withdrawn_request_is_cancelled_on_the_node(autojump_clock: MockClock) -> None:
    daemon = Daemon()
    async with daemon.open() as plane:
        await say(plane, DoctorRequest(request_id=7))
        assert await hear(plane) == Working(request_id=7, seconds=60, note="looking")
        await say(plane, Withdraw(request_id=7))
        with trio.fail_after(5):
            await daemon.withdrawn.wait()


async def test_a_request_withdrawn_before_it_began_is_never_answered(autojump_clock: MockClock) -> None:
    for number in range(1, 21):  # which task runs first is drawn
        daemon = Daemon()
        async with daemon.open() as plane:
            await say(plane, DoctorRequest(request_id=number))
            await say(plane, Withdraw(request_id=number))
            await say(plane, LogsRequest(request_id=100, lines=1))
            assert isinstance(await hear(plane), Reply | Working)
            await trio.testing.wait_all_tasks_blocked()
            began = daemon.began
            assert daemon.withdrawn.is_set() == began


async def test_the_streams_end_cancels_requests_on_the_node(autojump_clock: MockClock) -> None:
    daemon = Daemon()
    async with daemon.open() as plane:
        await say(plane, DoctorRequest(request_id=7))
        await hear(plane)
        await plane.aclose()
        with trio.fail_after(5):
            await daemon.withdrawn.wait()


async def test_a_long_answer_goes_in_parts_and_short_frames_pass_it(autojump_clock: MockClock) -> None:
    daemon = Daemon()
    async with daemon.open() as plane:
        await say(plane, LogsRequest(request_id=1, lines=2000))
        first = await hear(plane)
        assert isinstance(first, Part)
        kinds: list[Any] = []
        for _ in range(150):
            await daemon.tell_change.send(status())
            message = await hear(plane)
            kinds.append(type(message))
            if isinstance(message, Part) and message.last:
                break
        assert ShardStatus in kinds[:-1]
        assert kinds[-1] is Part


async def test_frames_of_an_unknown_kind_are_ignored_and_broken_ones_end_the_stream(autojump_clock: MockClock) -> None:
    daemon = Daemon()
    async with daemon.open() as plane:
        await plane.send(encode({"type": "later"}))
        await say(plane, LogsRequest(request_id=1, lines=1))
        assert isinstance(await hear(plane), Reply)
        await plane.send(encode({"type": "pace", "heartbeat": "fast"}))
        await gone(plane)
    assert daemon.goodbye is not None
    assert daemon.goodbye.code == "protocol"


def test_features_are_those_of_the_answers_and_no_others() -> None:
    daemon = Daemon()
    assert features(daemon.duties().answers) == ("doctor",)


async def test_changes_older_than_the_register_are_not_told_behind_it(autojump_clock: MockClock) -> None:
    daemon = Daemon()
    daemon.tell_change.send_nowait(status(ShardState.STARTING))
    async with daemon.open() as plane:
        daemon.tell_change.send_nowait(status(ShardState.DRAINING))
        assert await hear(plane) == status(ShardState.DRAINING)


async def test_a_failure_inside_a_stream_ends_it_and_not_the_agent(autojump_clock: MockClock) -> None:
    daemon = Daemon()

    def fail(registered: Registered) -> None:
        raise ZeroDivisionError("division by zero")

    ours, theirs = pair()
    async with trio.open_nursery() as nursery:

        async def carry() -> None:
            duties = attrs.evolve(daemon.duties(), obey=fail)
            daemon.goodbye = await PlaneStream(ours, duties).run()

        nursery.start_soon(carry)
        await hear(theirs)
        await say(theirs, Registered(plane="p", version="0.1.0", epoch=1, heartbeat=5.0))
    assert daemon.goodbye is not None
    assert daemon.goodbye.reason == "the agent itself failed: division by zero; its log says more"


async def test_a_plane_that_does_not_even_read_the_register_is_left(autojump_clock: MockClock) -> None:
    daemon = Daemon()
    ours, _theirs = pair()
    ours.stalled = True
    await daemon.carry(ours)
    assert daemon.goodbye is not None
    assert daemon.goodbye.reason == "no acknowledgement within 15 s"


@pytest.mark.parametrize("period", [0.0, -1.0, float("nan"), float("inf")])
async def test_a_pace_that_nobody_could_keep_is_not_taken(period: float, autojump_clock: MockClock) -> None:
    daemon = Daemon()
    async with daemon.open(acknowledge=False) as plane:
        await hear(plane)
        await say(plane, Registered(plane="p", version="0.1.0", epoch=1, heartbeat=period))
        began = trio.current_time()
        assert isinstance(await hear(plane), Heartbeat)
        assert trio.current_time() - began == pytest.approx(5.0)

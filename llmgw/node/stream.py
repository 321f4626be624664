"""One stream to the plane, as the agent holds it (A7-A14, B1, B2).

Everything in here dies with the stream: the sender, the heartbeats, the reports of shards, one child task for each
request that is being answered. What must outlive it (engines, downloads, the survey) is only spoken to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import attrs
import structlog
import trio
from msgspec import structs

from llmgw.node.answers import Answers, answer
from llmgw.node.lean import lean
from llmgw.node.outbox import Outbox, TooLong
from llmgw.scopes import Scopes
from llmgw.wire.agent import Heartbeat, Listening, Register, Renew, RequestFailed, ShardStatus, Working
from llmgw.wire.codec import Broken, Unknown, control_codec, encode
from llmgw.wire.control import (
    DrainShard,
    FetchWeights,
    Goodbye,
    Joined,
    Pace,
    Provision,
    Registered,
    Renewed,
    Request,
    Revoked,
    StartShard,
    StopShard,
    Withdraw,
    tag_of,
)
from llmgw.wire.counters import Packer
from llmgw.wire.stream import Closed, Frames

log = structlog.get_logger("llmgw.stream")


class Beats(Protocol):
    """Heartbeats of one stream: each says what changed since that stream was last told."""

    async def next(self) -> Heartbeat: ...


class Changes(Protocol):
    """Shard states as they change, from when the block around them began."""

    def __aiter__(self) -> AsyncIterator[ShardStatus]: ...
    def receive_nowait(self) -> ShardStatus: ...


@attrs.frozen
class Timing:
    """How long this side waits for what, in seconds (A14)."""

    registered_within: float = 15.0
    ping_every: float = 10.0
    pong_within: float = 10.0
    silent_after: float = 25.0


@attrs.frozen
class Duties:
    """What the daemon lends to each of its streams."""

    register: Callable[[], Awaitable[Register]]  # the whole truth now, shards and epoch included
    beats: Callable[[Register], Beats]
    hardware: Callable[[], AsyncIterator[int]]  # yields once now, then after each change of hardware
    changes: Callable[[], AbstractContextManager[Changes]]
    command: Callable[[StartShard | StopShard | DrainShard | Provision | FetchWeights | Revoked], None]
    obey: Callable[[Registered], None]  # raises Outdated for a plane of an older epoch
    renewals: Callable[[Callable[[Renew], None], trio.MemoryReceiveChannel[Renewed]], Awaitable[None]] | None
    answers: Answers
    news: Callable[[], AsyncIterator[int]] | None = (
        None  # yields once now, then when a heartbeat is worth an early send
    )


#: News make heartbeats early, and not more than one in so many seconds.
NEWS_EVERY = 1.0


#: Unknown kinds of frames that are told apart on one stream.
KINDS = 32


class Over(Exception):
    """The stream ended with the plane's words, or with ours."""

    def __init__(self, goodbye: Goodbye) -> None:
        super().__init__(goodbye.reason)
        self.goodbye = goodbye


class Outdated(Exception):
    """The plane leads by an older epoch than one this agent has obeyed (D4)."""


class PlaneStream:
    """A stream from the first Register to its end."""

    def __init__(self, frames: Frames, duties: Duties, timing: Timing | None = None) -> None:
        self._frames = frames
        self._duties = duties
        self._timing = timing or Timing()
        self._outbox = Outbox()
        self._requests: Scopes[int, str] = Scopes()
        self._asked: set[int] = set()
        self._strange: Counter[str] = Counter()
        self._liveness = trio.CancelScope()
        self._period = 5.0
        self._beats: Beats
        self._packer = Packer()
        self._early = trio.Event()

    async def run(self) -> Goodbye:
        """Carry the stream; the plane's last words, or a Goodbye of our own making that says how it broke."""
        over: list[Goodbye] = []
        try:
            # Subscribed before the Register is made, so that no change falls between the two.
            with self._duties.changes() as changes:
                async with trio.open_nursery() as nursery:
                    await self._live(nursery, changes)
        except* Over as ends:
            over += [error.goodbye for error in _flat(ends) if isinstance(error, Over)]
        except* Closed as closes:
            error = _flat(closes)[0]
            over.append(Goodbye(code="closed", reason=str(error)))
        except* Outdated as error_group:
            over.append(Goodbye(code="not-leader", reason=str(_flat(error_group)[0]), retry_after=5.0))
        except* Exception as failures:
            # The edge of a stream: its failure must not end the agent, and engines with it unwatched.
            log.exception("the stream failed", exc_info=failures)
            words = str(_flat(failures)[0])
            over.append(Goodbye(code="failed", reason=f"the agent itself failed: {words}; its log says more"))
        return over[0] if over else Goodbye(code="closed", reason="the stream ended")

    async def _live(self, nursery: trio.Nursery, changes: Changes) -> None:
        whole = await self._duties.register()
        with suppress(trio.WouldBlock):
            while True:  # older than the Register: told behind it they would take a shard back to what it was
                changes.receive_nowait()
        register, later = lean(whole)
        await self._registered(encode(register))
        if later is not None:
            self._outbox.put(later)
        self._beats = self._duties.beats(whole)
        nursery.start_soon(self._write)
        nursery.start_soon(self._stay_alive)
        nursery.start_soon(self._report, changes)
        nursery.start_soon(self._beat)
        nursery.start_soon(self._follow_hardware)
        if self._duties.news is not None:
            nursery.start_soon(self._follow_news, self._duties.news())
        renewed, receive = trio.open_memory_channel[Renewed](4)
        if self._duties.renewals is not None:
            nursery.start_soon(self._duties.renewals, self._outbox.put, receive)
        await self._read(nursery, renewed)

    async def _registered(self, register: bytes) -> None:
        """Say it and wait for the acknowledgement; a refusal is a Goodbye in its place (A2-A4)."""
        with trio.move_on_after(self._timing.registered_within) as scope:
            # A plane that refuses this certificate has said why, and closed, before it reads anything.
            with suppress(Closed):
                await self._frames.send(register)
            while True:
                match self._decode(await self._frames.receive()):
                    case Registered() as registered:
                        self._duties.obey(registered)
                        self._pace(registered.heartbeat)
                        log.info("registered", plane=registered.plane, version=registered.version)
                        return
                    case Goodbye() as goodbye:
                        raise Over(goodbye)
                    case _:
                        continue  # a plane says nothing of weight before its acknowledgement
        if scope.cancelled_caught:
            raise Over(Goodbye(code="silent", reason=f"no acknowledgement within {self._timing.registered_within:g} s"))

    async def _write(self) -> None:
        while True:
            await self._frames.send(await self._outbox.next())

    async def _stay_alive(self) -> None:
        beat = 0
        while True:
            await trio.sleep(self._timing.ping_every)
            beat += 1
            with trio.move_on_after(self._timing.pong_within) as scope:
                await self._frames.ping(beat.to_bytes(8, "big"))
            if scope.cancelled_caught:
                words = f"the plane answers no ping within {self._timing.pong_within:g} s"
                raise Over(Goodbye(code="silent", reason=words))
            self._alive()

    def _alive(self) -> None:
        self._liveness.deadline = trio.current_time() + self._timing.silent_after

    async def _report(self, changes: Changes) -> None:
        async for status in changes:
            self._outbox.put(status)

    async def _beat(self) -> None:
        while True:
            with trio.move_on_after(self._period):
                await self._early.wait()
            self._outbox.put(self._packer.pack(await self._beats.next()))

    def _beat_now(self) -> None:
        early, self._early = self._early, trio.Event()
        early.set()

    async def _follow_news(self, news: AsyncIterator[int]) -> None:
        await anext(news)
        async for _ in news:
            self._beat_now()
            await trio.sleep(NEWS_EVERY)

    async def _follow_hardware(self) -> None:
        hardware = self._duties.hardware()
        await anext(hardware)
        async for _ in hardware:
            log.info("the hardware changed; registering again")
            fresh = await self._duties.register()
            self._beats, self._packer = self._duties.beats(fresh), Packer()
            self._outbox.put(fresh)

    async def _read(self, nursery: trio.Nursery, renewed: trio.MemorySendChannel[Renewed]) -> None:
        with self._liveness as silence:
            self._alive()
            while True:
                data = await self._frames.receive()
                self._alive()
                self._take(self._decode(data), nursery, renewed)
        if silence.cancelled_caught:
            words = f"nothing was heard from the plane for {self._timing.silent_after:g} s"
            raise Over(Goodbye(code="silent", reason=words))

    def _decode(self, data: bytes) -> object:
        try:
            message = control_codec.decode(data)
        except Broken as error:
            raise Over(
                Goodbye(code="protocol", reason=f"the plane sent a frame that cannot be read: {error}")
            ) from None
        if isinstance(message, Unknown) and (message.tag in self._strange or len(self._strange) < KINDS):
            self._strange[message.tag] += 1
            if self._strange[message.tag] == 1:
                log.info("frames of an unknown kind are ignored", kind=message.tag[:40])
        return message

    def _take(self, message: object, nursery: trio.Nursery, renewed: trio.MemorySendChannel[Renewed]) -> None:
        match message:
            case Request(request_id=number):
                if number not in self._asked:  # told twice: the first one is being answered
                    self._asked.add(number)
                    nursery.start_soon(self._answer, message)
            case Withdraw(request_id=number):
                self._asked.discard(number)  # it may not have begun
                self._requests.end(number, "withdrawn")
            case StartShard() | StopShard() | DrainShard() | Provision() | FetchWeights() | Revoked():
                self._duties.command(message)
            case Registered():
                self._duties.obey(message)
                self._pace(message.heartbeat)
            case Pace(heartbeat=period):
                self._pace(period)
            case Renewed():
                try:
                    renewed.send_nowait(message)
                except trio.WouldBlock:
                    log.warning("an unasked certificate was ignored")
            case Goodbye():
                raise Over(message)
            case Joined() | Unknown():
                return
            case _:
                log.warning("a frame without meaning here was ignored", kind=type(message).__name__)

    def _pace(self, period: float) -> None:
        if 0 < period < float("inf"):
            self._period = period
            self._beat_now()  # a new pace counts from now

    async def _answer(self, request: Request[Any]) -> None:
        def say(word: Working | Listening) -> None:
            self._outbox.put(structs.replace(word, request_id=request.request_id))

        if request.request_id not in self._asked:
            return
        with self._requests.open(request.request_id) as slot:
            reply = await answer(self._duties.answers, request, say)
            try:
                self._outbox.put(reply)
            except TooLong as error:
                words = f"the answer to {tag_of(request)!r} is {error}"
                self._outbox.put(RequestFailed(request_id=request.request_id, error=words))
        self._asked.discard(request.request_id)
        if slot.value is not None:
            log.info("request withdrawn", request=tag_of(request), request_id=request.request_id)


def _flat(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _flat(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found

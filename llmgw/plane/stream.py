"""One agent's stream, as the plane holds it (A3-A14).

The stream's nursery has one writer, one reader and one that asks for signs of life; it ends as a whole, and
everything that waits on it ends with it. The reader never waits for anything but the next frame.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import attrs
import structlog
import trio
from msgspec import structs

from llmgw.errors import AgentGone, Failed, LlmgwError, NotKeepingUp, TimedOut, TooOld, Unavailable
from llmgw.plane.goodbye import Ended, refusal
from llmgw.plane.waits import StreamEnded, Waits
from llmgw.wire.agent import (
    AgentMessage,
    Heartbeat,
    Join,
    Listening,
    Part,
    Register,
    Renew,
    Reply,
    RequestFailed,
    ShardStatus,
    Working,
)
from llmgw.wire.codec import Broken, Unknown, agent_codec, decode_value, encode
from llmgw.wire.control import ControlMessage, Goodbye, Renewed, Request, Withdraw, reply_type, tag_of
from llmgw.wire.facts import NodeId
from llmgw.wire.stream import Closed, Frames, Joiner

log = structlog.get_logger("llmgw.stream")

R = TypeVar("R")

#: Unknown kinds of frames that are told apart on one stream, and the characters of one that are kept.
KINDS, KIND = 32, 40

#: Commands that wait for one node before it counts as not keeping up (A9).
QUEUE = 64


@attrs.frozen
class Timing:
    """How long a stream waits for what, in seconds (A3, A14)."""

    register_within: float = 10.0
    ping_every: float = 10.0
    pong_within: float = 10.0
    silent_after: float = 25.0
    write_within: float = 20.0


@attrs.frozen
class _Queued:
    """A frame on its way to the writer; `request_id` 0 for what is no request. Empty: look at what was withdrawn."""

    data: bytes
    request_id: int


#: Signs a node's request for a new certificate (PEM), or says why not.
Renewal = Callable[[str], Awaitable[Renewed]]


class Ear(Protocol):
    """Who hears what the agent says."""

    def heard(self, node: NodeId, stream: int, message: Register | Heartbeat | ShardStatus) -> None: ...


class AgentStream:
    """A stream whose agent has registered: commands go in by `tell`, requests by `ask`."""

    def __init__(
        self, frames: Frames, register: Register, *, number: int, address: str, timing: Timing | None = None
    ) -> None:
        self.node = register.node
        self.number = number
        self.address = address
        self.version = register.version
        self.features = frozenset(register.features)
        self._frames = frames
        self._timing = timing or Timing()
        self._waits = Waits()
        self._outbox, self._orders = trio.open_memory_channel[_Queued](QUEUE)
        self._unsent: set[int] = set()
        self._first: list[bytes] = []
        self._withdrawn: list[int] = []
        self._joiner = Joiner()
        self._strange: Counter[str] = Counter()
        self._renewing = False
        self._scope = trio.CancelScope()
        self._ended: Goodbye | None = None
        self._liveness = trio.CancelScope()

    # --- from the plane's side ---------------------------------------------------------------------

    def tell(self, command: ControlMessage) -> None:
        """Queue a frame. Raises NotKeepingUp when the queue is full, AgentGone when the stream is over."""
        if self._ended is not None:
            raise AgentGone(f"{self.node} has just lost its stream", remedy="try again when its agent is back")
        request_id = command.request_id if isinstance(command, Request) else 0
        try:
            self._outbox.send_nowait(_Queued(encode(command), request_id))
        except trio.WouldBlock:
            raise NotKeepingUp(
                f"{self.node} is not keeping up: {QUEUE} commands wait for it",
                remedy="look at its load and at the network between it and the plane",
            ) from None
        except trio.BrokenResourceError:
            raise AgentGone(f"{self.node} has just lost its stream") from None
        if request_id:
            self._unsent.add(request_id)

    def greet(self, *commands: ControlMessage) -> None:
        """What leaves before everything else, however much it is (A7): a node may run more than a queue holds."""
        self._first += map(encode, commands)

    async def ask(
        self, request: Request[R], *, within: float, listening: Callable[[Listening], None] | None = None
    ) -> R:
        """Send a request and wait for its reply, `within` seconds unless the node says that it goes on.

        Raises TooOld, NotKeepingUp, AgentGone, TimedOut, or Failed with the node's own words. When the caller is
        cancelled or the time is over, the node is told that nobody waits any more.
        """
        if request.feature and request.feature not in self.features:
            raise TooOld(
                f"{self.node} cannot answer {tag_of(request)}: its agent is version {self.version or 'unknown'} "
                f"and has no feature {request.feature!r}",
                remedy="upgrade its agent",
            )
        with self._waits.open(deadline=trio.current_time() + within, listening=listening) as wait:
            try:
                self.tell(structs.replace(request, request_id=wait.request_id))  # type: ignore[arg-type]
                await wait.ended()
            finally:
                if wait.slot.value is None:
                    self._withdraw(wait.request_id)
        match wait.slot.value:
            case Reply(value=raw):
                try:
                    return decode_value(raw, reply_type(request))
                except Broken as error:
                    raise Failed(f"{self.node} answered {tag_of(request)} with something unreadable: {error}") from None
            case RequestFailed(error=words, code=code):
                raise _failed(self.node, words, code)
            case StreamEnded(reason=reason):
                raise AgentGone(
                    f"stream closed: {self.node} lost its stream while it answered {tag_of(request)} ({reason})",
                    remedy="try again when its agent is back",
                )
            case _:
                raise TimedOut(f"{self.node} did not answer {tag_of(request)} within {within:g} s")

    def end(self, goodbye: Goodbye) -> None:
        """End the stream with these words; the first ones said count."""
        if self._ended is None:
            self._ended = goodbye
            self._waits.end_all(goodbye.reason)
            self._scope.cancel()

    def _withdraw(self, request_id: int) -> None:
        if request_id in self._unsent:
            self._unsent.remove(request_id)  # it never leaves
            return
        # Never refused: a full queue must not keep work going that nobody waits for. It is bounded by the waits.
        self._withdrawn.append(request_id)
        try:
            self._outbox.send_nowait(_Queued(b"", 0))
        except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
            return

    # --- the stream's own tasks --------------------------------------------------------------------

    async def run(self, ear: Ear, renew: Renewal) -> Goodbye | None:
        """Carry the stream until it ends; what the plane said at the end, None when the agent went first."""
        reason = "the agent went away"
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    nursery.start_soon(self._stay_alive)
                    await self._read(ear, lambda csr: nursery.start_soon(self._renew, csr, renew))
                    nursery.cancel_scope.cancel()
        except* Ended as ended:
            self.end(_first(ended).goodbye)
        except* Closed as closed:
            reason = str(_first_closed(closed))
        finally:
            self._waits.end_all(self._ended.reason if self._ended else reason)
            self._outbox.close()
            self._orders.close()
        if self._ended is None:
            log.info("stream closed", node=self.node, address=self.address, reason=reason)
        return self._ended

    async def _write(self) -> None:
        first, self._first = self._first, []
        for data in first:
            await self._send(data)
        async for queued in self._orders:
            withdrawn, self._withdrawn = self._withdrawn, []
            for request_id in withdrawn:
                await self._send(encode(Withdraw(request_id=request_id)))
            if queued.request_id:
                if queued.request_id not in self._unsent:
                    continue  # nobody waits for it any more
                self._unsent.remove(queued.request_id)
            if queued.data:
                await self._send(queued.data)

    async def _send(self, frame: bytes) -> None:
        with trio.move_on_after(self._timing.write_within) as scope:
            await self._frames.send(frame)
        if scope.cancelled_caught:
            raise refusal("silent", f"nothing could be sent to {self.node} for {self._timing.write_within:g} s")

    async def _stay_alive(self) -> None:
        beat = 0
        while True:
            await trio.sleep(self._timing.ping_every)
            beat += 1
            with trio.move_on_after(self._timing.pong_within) as scope:
                await self._frames.ping(beat.to_bytes(8, "big"))
            if scope.cancelled_caught:
                raise refusal("silent", f"no answer to a ping for {self._timing.pong_within:g} s")
            self._alive()

    def _alive(self) -> None:
        # Moving a deadline costs more than looking at the clock, and a second more or less says nothing of a peer.
        deadline = trio.current_time() + self._timing.silent_after
        if deadline - self._liveness.deadline > 1.0:
            self._liveness.deadline = deadline

    async def _renew(self, csr: str, renew: Renewal) -> None:
        try:
            renewed = await renew(csr)
        except LlmgwError as error:
            renewed = Renewed(error=str(error))
        try:
            self.tell(renewed)
        except Unavailable as error:
            # The node asks again; its stream must not end for want of an answer to this.
            log.warning("a certificate could not be told", node=self.node, error=str(error))
        finally:
            self._renewing = False

    async def _read(self, ear: Ear, renew: Callable[[str], None]) -> None:
        with self._liveness as silence:
            self._liveness.deadline = trio.current_time() + self._timing.silent_after
            while True:
                data = await self._frames.receive()
                self._alive()
                message = self._decode(data)
                if isinstance(message, Part):
                    try:
                        whole = self._joiner.add(message.series, message.data, message.last)
                    except Broken as error:
                        raise refusal("protocol", str(error)) from None
                    if whole is None:
                        continue
                    message = self._decode(whole)
                if message is not None:
                    self._take(message, ear, renew)
        if silence.cancelled_caught:
            raise refusal("silent", f"nothing was heard for {self._timing.silent_after:g} s")

    def _decode(self, data: bytes) -> AgentMessage | None:
        try:
            message = agent_codec.decode(data)
        except Broken as error:
            log.warning("frame refused", node=self.node, address=self.address, error=str(error), bytes=len(data))
            raise refusal("protocol", f"a frame that cannot be read: {error}") from None
        if isinstance(message, Unknown):
            kind = message.tag[:KIND]
            # A peer that makes up kinds without end is not remembered, nor logged, without end.
            if kind in self._strange or len(self._strange) < KINDS:
                self._strange[kind] += 1
                if self._strange[kind] == 1:
                    log.info("frames of an unknown kind are ignored", node=self.node, kind=kind)
            return None
        return message

    def _take(self, message: AgentMessage, ear: Ear, renew: Callable[[str], None]) -> None:
        match message:
            case Heartbeat() | ShardStatus():
                ear.heard(self.node, self.number, message)
            case Register():
                if message.node != self.node:
                    raise refusal(
                        "identity", f"a second Register names {message.node!r} on the stream of {self.node!r}"
                    )
                self.version, self.features = message.version, frozenset(message.features)
                ear.heard(self.node, self.number, message)
            case Reply() | RequestFailed():
                self._waits.settle(message)
            case Working():
                self._waits.extend(message, trio.current_time())
            case Listening():
                self._waits.listens(message)
            case Renew():
                if self._renewing:
                    log.warning("asked for a certificate while one is being made", node=self.node)
                else:
                    self._renewing = True
                    renew(message.csr)
            case Join():
                raise refusal("protocol", "this node has joined already")
            case Part():
                raise refusal("protocol", "a part inside a part")


def _failed(node: str, words: str, code: str) -> Failed | TooOld:
    what = f"{node}: {words}"
    return TooOld(what) if code == "unsupported" else Failed(what, said=code)


def _leaves(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _first(group: BaseExceptionGroup[Ended]) -> Ended:
    error = _leaves(group)
    assert isinstance(error, Ended)
    return error


def _first_closed(group: BaseExceptionGroup[Closed]) -> BaseException:
    return _leaves(group)

"""The network between agents and planes: connections that stall, break, lag and repeat themselves, one way or both.

In each direction frames stay in order, as TCP keeps them; what is on its way when a side dies may be lost with it.
What a partition holds back arrives when it heals, the end of a connection included: that is how half-open ones come
to be.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import attrs
import trio

from llmgw.wire.agent import ShardStatus
from llmgw.wire.codec import agent_codec, control_codec
from llmgw.wire.control import DrainShard, StartShard, StopShard
from llmgw.wire.stream import Closed

#: Frames on their way before a sender has to wait.
ROOM = 200
#: Seconds within which a connection comes about or is given up.
DIAL_WITHIN = 5.0
#: What may be told twice without meaning more (A9, C4).
REPEATABLE = (StartShard, StopShard, DrainShard, ShardStatus)


class Way:
    """One direction between one node and the planes."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.blocked = False
        self.delay = 0.001
        self.repeats = False
        self.pipes: set[Pipe] = set()
        self._opened = trio.Event()

    def set(self, *, blocked: bool | None = None, delay: float | None = None, repeats: bool | None = None) -> None:
        self.delay = self.delay if delay is None else delay
        self.repeats = self.repeats if repeats is None else repeats
        if blocked is not None and blocked != self.blocked:
            self.blocked = blocked
            if not blocked:
                self._opened.set()
                self._opened = trio.Event()
            for pipe in self.pipes:
                pipe.wake()

    async def passage(self) -> None:
        """Wait until something sent now would have arrived."""
        while self.blocked:
            await self._opened.wait()
        await trio.sleep(self.delay)


@attrs.define(eq=False)
class Absence:
    """Until when something that was killed stays away; it can be called back sooner."""

    until: float
    _called: trio.Event = attrs.field(factory=trio.Event)

    def last(self, seconds: float) -> None:
        self.until = max(self.until, trio.current_time() + seconds)

    def call(self) -> None:
        self.until = min(self.until, trio.current_time())
        self._called.set()
        self._called = trio.Event()

    async def over(self) -> None:
        await trio.lowlevel.checkpoint()
        while (until := self.until) > trio.current_time():
            with trio.move_on_at(until):
                await self._called.wait()


@attrs.define(eq=False)
class Pipe:
    """One direction of one connection."""

    way: Way
    items: deque[tuple[float, bytes | Closed]] = attrs.field(factory=deque)
    moved: trio.Event = attrs.field(factory=trio.Event)
    last: float = 0.0

    def wake(self) -> None:
        self.moved.set()
        self.moved = trio.Event()

    def put(self, item: bytes | Closed) -> None:
        # Never before the one in front of it.
        self.last = max(self.last, trio.current_time() + self.way.delay * self.way.rng.uniform(0.5, 1.5))
        self.items.append((self.last, item))
        self.wake()

    def lose_some(self) -> None:
        """The sender has died: of what it had handed over only the beginning still arrives."""
        for _ in range(self.way.rng.randint(0, len(self.items))):
            self.items.pop()

    def due(self) -> bool:
        return bool(self.items) and not self.way.blocked and self.items[0][0] <= trio.current_time()

    async def arrival(self) -> None:
        """Wait until the next item may be there."""
        if self.items and not self.way.blocked:
            with trio.move_on_at(self.items[0][0]):
                await self.moved.wait()
        else:
            await self.moved.wait()


class Wire:
    """One end of a connection: `Frames` for the code that is tested."""

    def __init__(self, out: Pipe, into: Pipe) -> None:
        self._out, self._into = out, into
        self._closed: Closed | None = None
        self.sent: Callable[[], object] = lambda: None
        out.way.pipes.add(out)

    def _check(self) -> None:
        if self._closed is None and self._into.due() and isinstance(self._into.items[0][1], Closed):
            self._closed = self._into.items[0][1]
        if self._closed is not None:
            raise self._closed

    async def send(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self._check()
        while len(self._out.items) >= ROOM:
            await self._out.moved.wait()
            self._check()
        self._out.put(data)
        if self._out.way.repeats and self._out.way.rng.random() < 0.5 and repeatable(data):
            self._out.put(data)
        self.sent()

    async def receive(self) -> bytes:
        await trio.lowlevel.checkpoint()
        while True:
            self._check()
            if self._into.due():
                _, item = self._into.items.popleft()
                self._into.wake()
                assert isinstance(item, bytes)
                return item
            await self._into.arrival()

    async def ping(self, payload: bytes) -> None:
        self._check()
        await self._out.way.passage()
        await self._into.way.passage()
        self._check()

    async def aclose(self, code: int = 1000, reason: str = "") -> None:
        await trio.lowlevel.checkpoint()
        self._end(Closed(code, reason))

    def close(self) -> None:
        """Close without a word, at once."""
        self._end(Closed())

    def die(self) -> None:
        """The process at this end was killed."""
        if self._closed is None:
            self._out.lose_some()
            self._end(Closed(1006, "connection reset"))

    def _end(self, how: Closed) -> None:
        if self._closed is None:
            self._closed = Closed(1006, "closed here")
            self._out.put(how)
            self._into.wake()
            self._into.way.pipes.discard(self._into)


def connection(up: Way, down: Way) -> tuple[Wire, Wire]:
    """The agent's end and the plane's."""
    rising, falling = Pipe(up), Pipe(down)
    return Wire(rising, falling), Wire(falling, rising)


def repeatable(data: bytes) -> bool:
    return any(
        data[:40].find(tag) >= 0 for tag in (b"\xa5start", b"\xa4stop", b"\xa5drain", b"\xa5shard")
    ) and isinstance(_decoded(data), REPEATABLE)


def _decoded(data: bytes) -> object:
    for codec in (agent_codec, control_codec):
        message = codec.decode(data)
        if isinstance(message, REPEATABLE):
            return message
    return None

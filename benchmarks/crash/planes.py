"""The plane of the simulation: one after the other on one store, each with the shipped fleet, hub and streams."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import trio

from benchmarks.crash.ledger import Ledger
from benchmarks.crash.wires import Absence, Wire
from llmgw.cell import Cell
from llmgw.errors import LlmgwError, Unavailable
from llmgw.plane.agents import Hub
from llmgw.plane.event import Event
from llmgw.plane.fleet import Fleet
from llmgw.plane.listen import Leading, Listener, Standby
from llmgw.plane.store.memory import MemoryStore
from llmgw.plane.stream import Timing
from llmgw.plane.world import Settings, World
from llmgw.tls import Peer
from llmgw.wire.control import ControlMessage, LogsRequest, Renewed
from llmgw.wire.facts import NodeId
from llmgw.wire.stream import Frames

TIMING = Timing(register_within=5.0, ping_every=4.0, pong_within=4.0, silent_after=10.0, write_within=8.0)
#: The rules of D four times as fast.
QUICK = Settings(
    unreachable_after=5.0,
    lost_after=22.0,
    settle=8.0,
    quiet=22.0,
    together=8.0,
    believe=45.0,
    drain=6.0,
    restart_cap=8.0,
    stable=30.0,
    resend=4.0,
)
HEARTBEAT = 2.0
#: A plane or an agent that is cancelled as a whole has no task left after so many seconds.
ENDS_WITHIN = 5.0


class Shelf(MemoryStore):
    """The shipped store in memory, slow or failing when told so; the plane may be killed on either side of a commit."""

    def __init__(self, ledger: Ledger, rng: random.Random) -> None:
        super().__init__()
        self._ledger, self._rng = ledger, rng
        self.step: Callable[[str], bool] = lambda name: False
        self.slow_until = self.fails_until = 0.0

    async def commit(
        self, puts: Mapping[str, bytes], deletes: Iterable[str] = (), *, if_revision: int | None = None
    ) -> int:
        if self.step("commit"):
            await trio.sleep_forever()
        now = trio.current_time()
        await trio.sleep(self._rng.uniform(1.0, 6.0) if now < self.slow_until else self._rng.choice((0.0, 0.002)))
        fails = now < self.fails_until
        if fails and self._rng.random() < 0.5:
            raise Unavailable("the disk is full")
        revision = await super().commit(puts, deletes, if_revision=if_revision)
        self._ledger.committed(puts)
        if self.step("committed"):
            await trio.sleep_forever()
        if fails:
            raise Unavailable("it is not known whether that was written")  # it was
        return revision


class Everybody:
    """Every certificate is welcome: there are none here."""

    def refused(self, peer: Peer) -> str:
        return ""

    async def renew(self, node: str, csr: str, presented: Peer) -> Renewed:
        await trio.lowlevel.checkpoint()
        return Renewed(error="not here")


class Watched(Fleet):
    """The shipped fleet; the ledger sees each of its worlds."""

    ledger: Ledger

    def _take(self, world: World, events: tuple[Event, ...]) -> None:
        super()._take(world, events)
        self.ledger.world(self.world.value)


class Plane:
    """One plane after the other. `wall` is whatever the machine's clock says just now."""

    def __init__(self, seed: int, ledger: Ledger) -> None:
        self.rng = random.Random(f"{seed} plane")
        self.store = Shelf(ledger, random.Random(f"{seed} store"))
        self.store.step = self._step
        self.absence = Absence(0.0)
        self.wall = 1.7e9
        self.armed: dict[str, int] = {}
        self.fleet: Fleet | None = None
        self.hub: Hub | None = None
        self.asking = 0
        self._ledger = ledger
        self._scope = trio.CancelScope()
        self._killed = False
        self._killed_at = 0.0
        self._nursery: trio.Nursery | None = None
        self._listener: Listener | None = None
        self._wires: set[Wire] = set()

    @property
    def runs(self) -> bool:
        return self._nursery is not None and not self._killed

    def kill(self, back_after: float) -> None:
        self.absence.last(back_after)
        if not self._killed:
            self._killed_at = trio.current_time()
        self._killed = True
        self._scope.cancel()

    def _step(self, name: str) -> bool:
        left = self.armed.get(name)
        if left is None or self._killed:
            return self._killed
        if left > 1:
            self.armed[name] = left - 1
            return False
        del self.armed[name]
        self.kill(self.rng.choice((0.1, 2.0, 10.0, 30.0)))
        return True

    def accept(self, wire: Wire, address: str) -> bool:
        """A connection from an agent; False when nobody listens."""
        if not self.runs:
            return False
        assert self._nursery is not None
        self._nursery.start_soon(self._carry, wire, address)
        return True

    async def _carry(self, wire: Wire, address: str) -> None:
        assert self._listener is not None
        self._wires.add(wire)
        try:
            await self._listener.carry("/agent", wire, None, address)
        finally:
            if self._killed:
                wire.die()
            else:
                wire.close()
            self._wires.discard(wire)

    def tell(self, node: NodeId, command: ControlMessage) -> None:
        """As `Hub.tell`; a plane that was killed says nothing more."""
        assert self.hub is not None
        if self._killed:
            return
        self.hub.tell(node, command)
        self._ledger.told(node, command)
        self._step("told")

    async def run(self) -> None:
        """One plane after the other, for ever."""
        while True:
            await self.absence.over()
            self._killed = False
            with trio.CancelScope() as self._scope:
                await self._lead()
            if trio.current_time() - self._killed_at > ENDS_WITHIN and self._killed:
                self._ledger.wrong("tasks of a plane that was killed went on")
            for wire in list(self._wires):
                wire.die()
            self._wires.clear()
            self.fleet = self.hub = self._nursery = self._listener = None

    async def _lead(self) -> None:

        fleet = Watched(
            self.store,
            settings=QUICK,
            heartbeat=HEARTBEAT,
            wall=lambda: self.wall + trio.current_time(),
        )
        fleet.ledger = self._ledger
        try:
            await fleet.load()
        except LlmgwError:
            self.absence.last(1.0)  # as systemd starts it again
            return
        hub = Hub(fleet)
        self._listener = Listener(
            hub=hub,
            fleet=fleet,
            certificates=Everybody(),
            join=_nobody_joins,
            standing=Cell[Leading | Standby](Leading(fleet.epoch)),
            context=None,
            heartbeat=fleet.heartbeat,
            timing=TIMING,
        )
        async with trio.open_nursery() as nursery:
            self.fleet, self.hub, self._nursery = fleet, hub, nursery
            await fleet.run(self)

    def operate(self, work: Callable[..., Any], *args: Any) -> None:
        """What an operator does; it ends with the plane."""
        if self.runs:
            assert self._nursery is not None
            self._nursery.start_soon(self._operate, work, args)

    async def _operate(self, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            await work(*args)
        except LlmgwError:
            return  # an operator would see it

    async def forget(self, node: NodeId) -> None:
        """As the API does it."""
        assert self.fleet is not None
        assert self.hub is not None
        hub = self.hub
        await self.fleet.forget(node)
        hub.disconnect(node, "revoked", "this node was forgotten")

    async def ask(self, node: NodeId) -> None:
        assert self.hub is not None
        self.asking += 1
        try:
            await self.hub.ask(node, LogsRequest(), within=5.0)
        finally:
            self.asking -= 1


async def _nobody_joins(frames: Frames, address: str) -> None:
    await trio.lowlevel.checkpoint()

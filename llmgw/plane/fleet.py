"""The fleet: the single writer of the world, and the loop that carries out what the pure parts decide.

Streams tell it what nodes say (`heard`), operators what they want (`apply`, `cordon`, ...). Whatever decides where
a shard runs is in the store before any node hears of it, so that no crash can make two of one shard (D4).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import attrs
import msgspec
import trio
from immutables import Map

from llmgw.cell import Cell
from llmgw.errors import BadInput, LlmgwError, Unavailable
from llmgw.plane import converge, drains, evidence, idle, memory, operate, whence
from llmgw.plane.bandwidth import history
from llmgw.plane.clones import Displacements, host_of
from llmgw.plane.event import Event
from llmgw.plane.events import Events
from llmgw.plane.expect import EVERY, Expectations
from llmgw.plane.expiry import SHORTEST, expire, heartbeat_for, started
from llmgw.plane.fold import fold
from llmgw.plane.models import models_of, revised
from llmgw.plane.plan import plan
from llmgw.plane.rollout import Rollouts
from llmgw.plane.steps import Plan, enact, told
from llmgw.plane.store import Store
from llmgw.plane.store.records import EPOCH, FLOOR, LEARNED, MODELS, NODES, RETIRED, SHARDS, Stored, world_of
from llmgw.plane.thinking import Thinking
from llmgw.plane.world import DEFAULT, Model, Node, Settings, Unplaced, Want, World
from llmgw.rdma.results import PairResult
from llmgw.wire.agent import Heartbeat, Register, ShardStatus
from llmgw.wire.control import ControlMessage, Pace, Provision
from llmgw.wire.facts import EngineInstall, EnginePackage, ModelName, NodeId, ReplicaId

#: Rounds are at least this far apart, so that a thousand nodes that return at once are planned for together.
_PAUSE = 0.01

#: From so many nodes and shards on, plans are made beside the loop: fewer take some milliseconds.
_MANY = 256


class Orders(Protocol):
    """Where commands to nodes go in: the hub."""

    def tell(self, node: NodeId, command: ControlMessage) -> None:
        """Raises AgentGone or NotKeepingUp; both pass, and the command is told again."""
        ...


@attrs.frozen
class Applied:
    """What applying a models.toml changed, or would change, by model name; of those that change, how, in words."""

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    words: Map[str, str] = Map()


class Fresh(Cell[World]):
    """The world. Readers wake when its version grows; loads are there for who looks, and wake nobody."""

    def take(self, world: World) -> None:
        if world.version != self._value.version:
            self.set(world)
        else:
            self._value = world


class Fleet:
    """Everything the plane knows and wants. Call `load`, then keep `run` running; all else is called from outside.

    `engines` are those that every node which can should have; `heartbeat` is the period of a small fleet.
    """

    def __init__(
        self,
        store: Store,
        *,
        settings: Settings = DEFAULT,
        engines: Iterable[EngineInstall] = (),
        packages: Mapping[str, EnginePackage] | None = None,
        heartbeat: float = SHORTEST,
        clock: Callable[[], float] = trio.current_time,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.world = Fresh(World())
        self.events = Events(kept=settings.events_kept)
        self.epoch = 0  # grows with every leadership; agents refuse a plane with a lower one
        self._store, self._settings, self._engines = store, settings, tuple(engines)
        self._packages = dict(packages or {})
        self._provided: dict[NodeId, Provision] = {}
        self._provided_for: Map[ModelName, Model] | None = None
        self._clock, self._wall = clock, wall
        self._heartbeat = self._paced = heartbeat
        self._streams: dict[NodeId, tuple[int, str]] = {}
        self._displacements = Displacements()
        self._stored = Stored()
        self._told = converge.Told(settings.resend)
        self._writing = trio.Lock()  # one commit at a time: each is a difference to what the last one stored
        self._planned: int | None = None
        self._look_again: float | None = None
        self._expectations, self._compared_at = Expectations(), float("-inf")
        self._rollouts = Rollouts()
        self._thinking = Thinking()

    @property
    def settings(self) -> Settings:
        """The numbers by which it judges."""
        return self._settings

    # Streams: synchronous and cheap -----------------------------------------------------------------------

    def attach(self, node: NodeId, stream: int, address: str) -> None:
        """A stream speaks for this node from now on; what an older one says changes nothing any more (A6)."""
        current = self._streams.get(node)
        if current is not None and current[0] >= stream:
            return
        self._streams[node] = (stream, address)
        now, clock = self._clock(), self._wall()
        if current is not None:
            event = self._displacements.add(node, current[1], address, now, clock)
            if event is not None:
                self.events.extend([event])
        known = self.world.value.nodes.get(node)
        if known is not None:
            # Not connected before its Register: nothing may be told before the acknowledgement (A7).
            known = attrs.evolve(known, stream=stream, peer_address=host_of(address), connected=False)
            self._take(self._with_node(known), ())

    def heard(self, node: NodeId, stream: int, message: Register | Heartbeat | ShardStatus) -> None:
        """A frame of a stream. One that does not speak for the node any more is not listened to (A6)."""
        current = self._streams.get(node)
        if current is None or current[0] != stream:
            return
        now, clock = self._clock(), self._wall()
        address = host_of(current[1]) if type(message) is Register else ""
        self._take(*fold(self.world.value, node, message, now, clock, self._settings, stream=stream, address=address))

    def detach(self, node: NodeId, stream: int) -> None:
        """The stream has ended. The node is not lost by that (A8): only silence makes it so."""
        current = self._streams.get(node)
        if current is None or current[0] != stream:
            return
        del self._streams[node]
        known = self.world.value.nodes.get(node)
        if known is not None and known.stream == stream:
            event = Event(
                kind="node-disconnected",
                subject=f"node:{node}",
                text=f"{node} has no stream any more ({current[1]})",
                clock=self._wall(),
                data={"node": str(node), "address": current[1]},
            )
            self._take(self._with_node(attrs.evolve(known, connected=False)), (event,))

    def greeting(self, node: NodeId) -> tuple[ControlMessage, ...]:
        """What follows the acknowledgement of a Register (A7): what to install, then what to stop."""
        world = self.world.value
        if node not in world.nodes:
            return ()
        stops = [converge.stop_stray(world, key) for key in sorted(world.strays) if key[0] == node]
        for stop in stops:
            self._told.sent(node, stop, world.nodes[node].stream, self._clock())
        self._provided[node] = provision = self.provision(node)
        return (provision, *stops)

    @property
    def engines(self) -> tuple[EngineInstall, ...]:
        """The engines that every node which can should have."""
        return self._engines

    def want_engines(self, engines: Iterable[EngineInstall], packages: Mapping[str, EnginePackage]) -> None:
        """From now on every node that can should have these; each is told in the next round."""
        self._engines, self._packages = tuple(engines), dict(packages)
        self._provided_for = None

    def provision(self, node: NodeId) -> Provision:
        """The engines that a node should have now."""
        return converge.provision(self.world.value, node, self._engines, self._packages)

    def heartbeat(self) -> float:
        """The period for agents now, in seconds (B1)."""
        return self._heartbeat * heartbeat_for(len(self.world.value.nodes)) / SHORTEST

    def idle(self, replica: ReplicaId) -> None:
        """The gateways have no request in flight to a draining replica any more: it need not wait to be stopped."""
        world, now = self.world.value, self._clock()
        shards = world.shards
        members = [shard for shard in shards.values() if shard.replica == replica]
        within = drains.of_replica(world, members, self._settings)
        for shard in members:
            if shard.want is Want.DRAIN:
                shards = shards.set(shard.id, attrs.evolve(shard, want_at=now - within))
        if shards is not world.shards:
            self._take(attrs.evolve(world, shards=shards, version=world.version + 1), ())

    def asked(self, models: Iterable[str]) -> None:
        """Requests for these models wait at a gateway or are being answered: one that is unloaded is loaded."""
        self._take(*idle.asked(self.world.value, models, self._clock(), self._wall()))

    # Operators: stored before they return -----------------------------------------------------------------

    async def apply(self, text: str, *, dry_run: bool = False, name: str = "models.toml") -> Applied:
        """The wanted models, all of them: what the text does not name is wanted no more. Raises BadInput."""
        models = models_of(text, name)
        applied = _compared(self.world.value.models, revised(self.world.value.models, models))
        if not dry_run:
            clock = self._wall()
            await self._change(lambda world: operate.want(world, revised(world.models, models, clock), clock))
        return applied

    async def rollback(self, model: str, to: int | None = None) -> None:
        """The profile that a model had before, or that of revision `to`. Raises NotFound, Conflict."""
        await self._change(lambda world: operate.rollback(world, model, self._wall(), to))

    async def cordon(self, node: NodeId, on: bool) -> None:
        """A cordoned node takes no new shard; what runs there stays. Off also ends a drain."""
        await self._change(lambda world: self._kept(world, operate.cordon(world, node, on, self._wall())))

    async def drain(self, node: NodeId, on: bool, within: float | None = None) -> None:
        """A draining node's replicas are started elsewhere, then stopped here; it takes no new shard.

        What leaves it may finish its requests for `within` seconds; None: for as long as `Settings.drain` says.
        """

        def change(world: World) -> operate.Changed:
            changed = operate.drain(world, node, on, self._wall(), within)
            return changed if on else self._kept(world, changed)

        await self._change(change)

    def _kept(self, before: World, changed: operate.Changed) -> operate.Changed:
        return drains.kept(before, changed[0], self._settings), changed[1]

    async def scale(self, model: str, replicas: int) -> None:
        """So many replicas of a model, until models are applied again. Raises NotFound, BadInput."""
        await self._change(lambda world: operate.scale(world, model, replicas, self._wall()))

    async def label(self, node: NodeId, labels: Mapping[str, str | None]) -> None:
        """Set an operator's labels, which win over the node's own; None takes one away."""
        if any(not key.strip() for key in labels):
            raise BadInput("a label without a name", remedy="write NAME=VALUE")
        await self._change(lambda world: operate.label(world, node, labels, self._wall()))

    async def acknowledge(self, node: NodeId, subject: str, code: str, seconds: float) -> None:
        """A problem is known and accepted for so long: it keeps no shards away meanwhile. 0 ends that."""
        await self._change(
            lambda world: operate.acknowledge(world, node, subject, code, seconds, self._clock(), self._wall())
        )

    async def expect(self, node: NodeId, on: bool = True) -> None:
        """What the node has now is what it should have; off: its peers say so. Raises NotFound, Conflict."""
        await self._change(lambda world: operate.expect(world, node, on, self._clock(), self._wall()))

    async def forget(self, node: NodeId) -> None:
        """The node is gone for good: its shards are placed elsewhere, and nothing is known of it any more."""

        def change(world: World) -> tuple[World, tuple[Event, ...]]:
            return operate.forget(world, node, self._wall())

        await self._change(change)
        self._streams.pop(node, None)
        self._provided.pop(node, None)

    def tested(self, result: PairResult) -> None:
        """A bandwidth test has ended: from now on placement knows of it."""
        self._take(evidence.tested(self.world.value, result, self._clock(), self._wall()), ())

    async def load(self) -> None:
        """What the store holds, and a new epoch. Nodes are expected back, and nothing is placed before (D3)."""
        values: dict[str, bytes] = {}
        for prefix in (MODELS, NODES, SHARDS, RETIRED, LEARNED, FLOOR):
            values.update((await self._store.load(prefix)).values)
        await self.events.load(self._store)
        known = (await self._store.load(EPOCH)).values.get(EPOCH, b"0")
        try:
            epoch = msgspec.json.decode(known, type=int) + 1
        except msgspec.MsgspecError as error:
            raise BadInput(f"the stored epoch {known!r} cannot be read: {error}") from None
        await self._store.commit({EPOCH: msgspec.json.encode(epoch)})
        self.epoch = epoch
        now, clock = self._clock(), self._wall()
        self._stored.loaded(values)
        world = world_of(values, now, clock)
        known_tests = evidence.of_history(await history.every(self._store), now, clock, self._settings)
        world = attrs.evolve(world, evidence=known_tests)
        self._take(*started(world, now, clock, self._settings))

    # The loop ---------------------------------------------------------------------------------------------

    async def run(self, hub: Orders) -> None:
        """Judge silence, plan, store, tell: for ever. A store that cannot be written stops nothing but new orders."""
        storing, due = True, self._clock() + self._settings.tick
        while True:
            begun, seen = self._clock(), self.world.version
            self._take(*expire(self.world.value, begun, self._wall(), self._settings, max(0.0, begun - due)))
            if begun - self._compared_at >= EVERY:
                since, self._compared_at = self._compared_at, begun
                self._take(*self._expectations.judge(self.world.value, begun, self._wall()))
                self._take(evidence.aged(self.world.value, begun, self._settings), ())
                self._take(memory.learn(self.world.value, begun, self._wall(), since), ())
            try:
                await self._decide(begun)
            except LlmgwError as error:
                if storing:
                    text = f"the state cannot be stored, so nothing new is ordered: {error}"
                    self.events.add("store-failed", "plane", text, clock=self._wall())
                storing, self._planned = False, None
            else:
                if not storing:
                    self.events.add("store-restored", "plane", "the state is stored again", clock=self._wall())
                storing = True
                self._tell(hub, self._clock())
            ended = self._clock()
            rested = ended + min(max(_PAUSE, 2 * (ended - begun)), self._settings.tick)
            due = ended + self._settings.tick
            if storing and self._look_again is not None:
                due = min(due, self._look_again)
            due = max(due, rested)
            await trio.sleep_until(rested)
            if storing:
                with trio.move_on_at(due):
                    await self.world.next(seen)
            else:
                await trio.sleep_until(due)

    async def _decide(self, now: float) -> None:
        """One plan, stored and then made the world's; and whatever else became due for the store."""
        async with self._writing:
            self._take(idle.kept(self.world.value, now), ())
            world, clock = self.world.value, self._wall()
            decided = Plan((), world.unplaced, self._look_again, world.ahead)
            if self._planned != world.version or (self._look_again is not None and now >= self._look_again):
                decided = await self._plan(world, now)
            # What is heard while it is planned and stored stays: a step names only what it decides.
            await self._write(enact(self.world.value, decided.steps, now, clock))
            newest = self.world.value
            events = [told(step, world, clock) for step in decided.steps]
            following, more = _unplaced(enact(newest, decided.steps, now, clock), decided.unplaced, clock)
            if decided.ahead != following.ahead:
                following = attrs.evolve(following, ahead=decided.ahead, version=following.version + 1)
            self._planned = following.version if newest.version == world.version else None
            self._look_again = decided.look_again
            self._take(following, (*events, *more, *self._rollouts.judge(following, clock, self._settings)))

    async def _plan(self, world: World, now: float) -> Plan:
        """A plan for a large fleet takes a part of a second, or seconds when all of it is placed anew: streams are
        read meanwhile."""
        looked_at = len(world.shards) + (len(world.nodes) if world.models else 0)
        if looked_at < _MANY:
            return plan(world, now, self._settings)
        return await self._thinking.of(lambda: plan(world, now, self._settings))

    def _tell(self, hub: Orders, now: float) -> None:
        world = self.world.value
        self._provide(hub, world)
        due = self._told.due(converge.commands(world), world, now)
        for (node, command), (_, directed) in zip(due, whence.directed(world, due), strict=True):
            try:
                hub.tell(node, directed)
            except Unavailable:
                continue  # no stream, or one that does not keep up: in a moment again
            self._told.sent(node, command, world.nodes[node].stream, now)
        period = self.heartbeat()
        if abs(period - self._paced) > 0.05 * self._paced:
            self._paced = period
            for known in world.nodes.values():
                if known.connected:
                    try:
                        hub.tell(known.id, Pace(heartbeat=period))
                    except Unavailable:
                        continue  # its next Register is answered with the period

    def _provide(self, hub: Orders, world: World) -> None:
        """Tell nodes what they should have installed when the wanted models changed that, before they are to run it."""
        if self._provided_for is world.models:
            return
        self._provided_for = world.models
        for node in world.nodes.values():
            if not node.connected:
                continue  # its Register is answered with it
            wanted = self.provision(node.id)
            if wanted == self._provided.get(node.id):
                continue
            try:
                hub.tell(node.id, wanted)
            except Unavailable:
                self._provided_for = None  # in a moment again
                continue
            self._provided[node.id] = wanted

    async def _change(self, change: Callable[[World], tuple[World, tuple[Event, ...]]]) -> None:
        """Store what a pure change makes of the world, then make it so."""
        async with self._writing:
            await self._write(change(self.world.value)[0])
            self._take(*change(self.world.value))

    async def _write(self, world: World) -> None:
        puts, deletes, seen = self._stored.difference(world)
        event_puts, event_deletes, mark = self.events.due()
        if puts or deletes or event_puts:
            await self._store.commit({**puts, **event_puts}, (*deletes, *event_deletes))
            self.events.written(mark)
        self._stored.written(puts, deletes, seen)

    def _take(self, world: World, events: tuple[Event, ...]) -> None:
        events = (*events, *drains.emptied(self.world.value, world, self._wall()))
        self.world.take(world)
        if events:
            self.events.extend(events)

    def _with_node(self, node: Node) -> World:
        world = self.world.value
        return attrs.evolve(world, nodes=world.nodes.set(node.id, node), version=world.version + 1)


def _compared(before: Map[ModelName, Model], after: Map[ModelName, Model]) -> Applied:
    changed = sorted(name for name, model in after.items() if name in before and before[name] != model)
    return Applied(
        added=tuple(sorted(name for name in after if name not in before)),
        changed=tuple(changed),
        removed=tuple(sorted(name for name in before if name not in after)),
        unchanged=tuple(sorted(name for name, model in after.items() if before.get(name) == model)),
        words=Map({str(name): operate.changes(before[name], after[name]) for name in changed}),
    )


def _unplaced(world: World, found: Map[ModelName, Unplaced], clock: float) -> tuple[World, tuple[Event, ...]]:
    """The world with what could not be placed. Ages of facts alone are no change that anybody must hear of."""
    events: list[Event] = []
    for name, new in found.items():
        old = world.unplaced.get(name)
        if old is None or (old.wanted, old.placed) != (new.wanted, new.placed):
            text = f"{name}: {new.placed} of {new.wanted} replicas are placed; smallest change: {new.smallest_change}"
            if not new.smallest_change:
                text = f"{name}: {new.placed} of {new.wanted} replicas are placed: no node has joined"
            events.append(Event(kind="model-unplaced", subject=f"model:{name}", text=text, clock=clock))
    for name in world.unplaced:
        if name not in found and name in world.models:
            text = f"{name}: every replica has its place"
            events.append(Event(kind="model-placed", subject=f"model:{name}", text=text, clock=clock))
    same = {name: _gist(entry) for name, entry in found.items()} == {
        name: _gist(entry) for name, entry in world.unplaced.items()
    }
    return attrs.evolve(world, unplaced=found, version=world.version + (not same)), tuple(events)


def _gist(entry: Unplaced) -> tuple[object, ...]:
    return (entry.wanted, entry.placed, tuple((r.node, r.check, r.needed) for r in entry.reasons))

"""A plane in this process on the test's clock, with nodes that obey it at once, or are deaf, or silent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import attrs
import trio
import trio.testing

from llmgw.plane.fleet import Fleet
from llmgw.plane.store.memory import MemoryStore
from llmgw.plane.world import Settings
from llmgw.wire.agent import Heartbeat, Register, ShardStatus
from llmgw.wire.control import ControlMessage, DrainShard, Provision, StartShard, StopShard
from llmgw.wire.facts import NodeId, ShardState
from tests.plane.worlds import CLOCK, register, status

Clock = trio.testing.MockClock

TINY = """
[[models]]
name = "tiny"
engine = "llamacpp"
source = "/models/tiny.gguf"
replicas = 2
resources = { cpu_threads = 1 }
"""
NONE = ""


@attrs.define
class Agent:
    """A node that runs what it is told, at once."""

    fleet: Fleet
    name: str
    stream: int = 0
    runs: dict[str, tuple[int, ShardState]] = attrs.field(factory=dict)
    told: list[ControlMessage] = attrs.field(factory=list)
    provided: list[Provision] = attrs.field(factory=list)
    silent: bool = False
    deaf: bool = False
    gpus: int = 0

    @property
    def id(self) -> NodeId:
        return NodeId(self.name)

    def connect(self, stream: int, address: str = "192.0.2.1:5000") -> tuple[ControlMessage, ...]:
        self.stream, self.silent = stream, False
        self.fleet.attach(self.id, stream, address)
        self.say(self.register())
        return self.fleet.greeting(self.id)

    def register(self) -> Register:
        shards = [status(shard, generation, state) for shard, (generation, state) in sorted(self.runs.items())]
        return register(self.name, threads=2, shards=shards, gpu=self.gpus)

    def say(self, message: Register | Heartbeat | ShardStatus) -> None:
        self.fleet.heard(self.id, self.stream, message)

    def report(self, shard: str, state: ShardState, **fields: object) -> None:
        self.runs[shard] = (self.runs[shard][0], state)
        self.say(status(shard, self.runs[shard][0], state, **fields))

    def obey(self, command: ControlMessage) -> None:
        self.told.append(command)
        match command:
            case _ if self.deaf:
                return
            case StartShard(shard=shard, generation=generation):
                self.runs[shard] = (generation, ShardState.READY)
                self.say(status(shard, generation))
            case StopShard(shard=shard, generation=generation):
                if shard in self.runs and self.runs[shard][0] <= generation:
                    self.report(shard, ShardState.STOPPED)
            case DrainShard(shard=shard):
                self.report(shard, ShardState.DRAINING)

    async def beat(self) -> None:
        while True:
            await trio.sleep(5)
            if not self.silent:
                self.say(Heartbeat())


class Hub:
    """Tells commands to agents, and can refuse to."""

    def __init__(self) -> None:
        self.agents: dict[str, Agent] = {}
        self.refuse: Exception | None = None
        self.before: Callable[[NodeId, ControlMessage], None] = lambda node, command: None

    def tell(self, node: NodeId, command: ControlMessage) -> None:
        if self.refuse is not None:
            raise self.refuse
        agent = self.agents[node]
        if agent.silent:
            return
        if isinstance(command, Provision):
            agent.provided.append(command)
            return
        self.before(node, command)
        agent.obey(command)


@attrs.define
class Plane:
    fleet: Fleet
    hub: Hub
    store: MemoryStore
    nursery: trio.Nursery
    streams: int = 0

    def agent(self, name: str, runs: Mapping[str, tuple[int, ShardState]] | None = None) -> Agent:
        self.streams += 1
        agent = self.hub.agents[name] = Agent(self.fleet, name, runs=dict(runs or {}))
        agent.connect(self.streams)
        self.nursery.start_soon(agent.beat)
        return agent

    def where(self) -> dict[str, tuple[str, int]]:
        return {s.id: (s.node, s.generation) for s in self.fleet.world.value.shards.values()}

    def kinds(self) -> list[str]:
        return [event.kind for event in self.fleet.events.after(0)]

    def node(self, name: str = "n1") -> object:
        return self.fleet.world.value.nodes[NodeId(name)]


@asynccontextmanager
async def plane(store: MemoryStore | None = None, **settings: float) -> AsyncIterator[Plane]:
    """A plane on a store, running; the store is the caller's, so that another plane may follow on it."""
    kept = store if store is not None else MemoryStore()
    fleet = Fleet(kept, settings=Settings(**settings), wall=lambda: CLOCK + trio.current_time())  # type: ignore[arg-type]
    await fleet.load()
    async with trio.open_nursery() as nursery:
        made = Plane(fleet, Hub(), kept, nursery)
        nursery.start_soon(fleet.run, made.hub)
        yield made
        nursery.cancel_scope.cancel()

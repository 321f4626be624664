"""The single writer and its loop, with nodes that obey or not, on the test's clock."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager

import attrs
import pytest
import trio
import trio.lowlevel
import trio.testing
from immutables import Map

from llmgw.errors import AgentGone, BadInput, NotFound, NotKeepingUp, Unavailable
from llmgw.plane.bandwidth import history
from llmgw.plane.fleet import Applied, Fleet
from llmgw.plane.store.memory import MemoryStore
from llmgw.plane.world import Settings, Stage, Want
from llmgw.rdma.grade import Verdict
from llmgw.rdma.results import EndView, PairResult, RailResult
from llmgw.wire.agent import Heartbeat, Register, ShardStatus
from llmgw.wire.control import ControlMessage, DrainShard, Pace, Provision, StartShard, StopShard
from llmgw.wire.facts import EngineInstall, EnginePackage, Grade, NodeId, ReplicaId, ShardId, ShardLoad, ShardState
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


async def test_an_applied_model_is_placed_started_and_ready(autojump_clock: Clock) -> None:
    async with plane() as p:
        p.agent("n1")
        p.agent("n2")
        assert await p.fleet.apply(TINY) == Applied(added=("tiny",))
        await trio.sleep(1)
        assert p.where() == {"tiny-0-0": ("n1", 1), "tiny-1-0": ("n2", 1)}
        assert all(s.state is ShardState.READY for s in p.fleet.world.value.shards.values())
        await trio.sleep(60)
        assert [type(c).__name__ for a in p.hub.agents.values() for c in a.told] == ["StartShard"] * 2


async def test_a_placement_is_stored_before_the_node_hears_of_it(autojump_clock: Clock) -> None:
    async with plane() as p:

        def stored(node: NodeId, command: ControlMessage) -> None:
            if isinstance(command, StartShard):
                assert f"shards/{command.shard}" in p.store._entries

        p.hub.before = stored
        agent = p.agent("n1")
        await p.fleet.apply(TINY)
        await trio.sleep(1)
        assert len(agent.told) == 2


async def test_a_dry_run_changes_nothing_and_says_what_would_change(autojump_clock: Clock) -> None:
    async with plane() as p:
        assert await p.fleet.apply(TINY, dry_run=True) == Applied(added=("tiny",))
        assert len(p.fleet.world.value.models) == 0
        await p.fleet.apply(TINY)
        assert await p.fleet.apply(TINY) == Applied(unchanged=("tiny",))
        assert await p.fleet.apply(TINY.replace("= 2", "= 3"), dry_run=True) == Applied(
            changed=("tiny",), words=Map({"tiny": "replicas 2 -> 3"})
        )
        assert await p.fleet.apply(NONE, dry_run=True) == Applied(removed=("tiny",))
        assert p.fleet.world.value.models["tiny"].replicas == 2  # type: ignore[index]


async def test_bad_text_changes_nothing(autojump_clock: Clock) -> None:
    async with plane() as p:
        await p.fleet.apply(TINY)
        with pytest.raises(BadInput, match=r"models\.toml, line 2"):
            await p.fleet.apply("[[models]]\nnme = 1")
        assert list(p.fleet.world.value.models) == ["tiny"]


async def test_a_restarted_plane_adopts_what_runs_and_tells_nobody_anything(autojump_clock: Clock) -> None:
    store = MemoryStore()
    async with plane(store) as p:
        first, second = p.agent("n1"), p.agent("n2")
        await p.fleet.apply(TINY)
        await trio.sleep(1)
        running = p.where()
        runs = {"n1": first.runs, "n2": second.runs}
    async with plane(store) as p:
        assert p.fleet.epoch == 2
        assert p.where() == running
        assert p.node().stage is Stage.EXPECTED  # type: ignore[attr-defined]
        agents = [p.agent(name, runs[name]) for name in ("n1", "n2")]
        await trio.sleep(120)
        assert p.where() == running
        assert [agent.told for agent in agents] == [[], []]
        assert all(s.state is ShardState.READY for s in p.fleet.world.value.shards.values())


async def test_a_restarted_plane_places_nothing_before_its_nodes_had_time_to_return(autojump_clock: Clock) -> None:
    store = MemoryStore()
    async with plane(store) as p:
        p.agent("n1")
        p.agent("n2")
        await trio.sleep(1)
    async with plane(store) as p:
        agent = p.agent("n1")
        await p.fleet.apply(TINY)
        await trio.sleep(28)
        assert agent.told == []
        await trio.sleep(3)
        assert len(agent.told) == 2
        assert [e.text for e in p.fleet.events.after(0) if e.kind == "settled"] == ["placing begins; not returned: n2"]


async def test_a_placement_that_never_reached_its_node_is_told_at_the_same_generation(autojump_clock: Clock) -> None:
    store = MemoryStore()
    async with plane(store) as p:
        p.agent("n1")
        p.hub.refuse = AgentGone("no agent is connected for n1")
        await p.fleet.apply(TINY)
        await trio.sleep(1)
        assert len(p.where()) == 2
    async with plane(store) as p:
        agent = p.agent("n1")
        await trio.sleep(1)
        assert sorted((c.shard, c.generation) for c in agent.told if isinstance(c, StartShard)) == [
            ("tiny-0-0", 1),
            ("tiny-1-0", 1),
        ]


async def test_a_node_that_does_not_keep_up_is_told_again(autojump_clock: Clock) -> None:
    async with plane() as p:
        agent = p.agent("n1")
        p.hub.refuse = NotKeepingUp("n1 does not keep up")
        await p.fleet.apply(TINY)
        await trio.sleep(5)
        assert agent.told == []
        p.hub.refuse = None
        await trio.sleep(2)
        assert len(agent.told) == 2


async def test_a_command_without_effect_is_told_again_after_a_while_and_over_a_new_stream(
    autojump_clock: Clock,
) -> None:
    async with plane() as p:
        agent = p.agent("n1")
        agent.deaf = True
        heard = agent.told
        await p.fleet.apply(TINY.replace("= 2", "= 1"))
        await trio.sleep(5)
        assert len(heard) == 1
        await trio.sleep(8)
        assert len(heard) == 2
        agent.connect(99)
        await trio.sleep(0.5)
        assert len(heard) == 3
        assert {c.generation for c in heard if isinstance(c, StartShard)} == {1}


async def test_a_greeting_is_what_to_install_then_what_to_stop(autojump_clock: Clock) -> None:
    async with plane() as p:
        p.streams = 1
        agent = Agent(p.fleet, "n1", runs={"b-0-0": (3, ShardState.READY), "a-0-0": (2, ShardState.STARTING)})
        p.hub.agents["n1"] = agent
        greeting = agent.connect(1)
        assert greeting == (
            Provision(),
            StopShard(shard=ShardId("a-0-0"), generation=2, why="nothing claims this shard"),
            StopShard(shard=ShardId("b-0-0"), generation=3, why="nothing claims this shard"),
        )
        await trio.sleep(1)
        assert agent.told == []  # the greeting told it already


async def test_the_engines_of_the_settings_go_into_the_greeting(autojump_clock: Clock) -> None:
    fleet = Fleet(MemoryStore(), engines=[EngineInstall(engine="llamacpp", version="b1")])
    await fleet.load()
    wanted = (EngineInstall(engine="llamacpp", version="b1"),)
    assert Agent(fleet, "n1").connect(1) == (Provision(engines=wanted, preferred={"llamacpp": "b1"}),)


async def test_a_model_that_pins_an_engines_version_is_told_of_before_it_is_started(autojump_clock: Clock) -> None:
    async with plane() as p:
        agent = p.agent("n1")
        seen: list[int] = []
        p.hub.before = lambda node, command: seen.append(len(agent.provided))
        await p.fleet.apply(TINY.replace('engine = "llamacpp"', 'engine = "llamacpp"\nengine_version = "b2"'))
        await trio.sleep(1)
        assert agent.provided[-1].engines == (EngineInstall(engine="llamacpp", version="b2"),)
        await p.fleet.apply(TINY)
        await trio.sleep(1)
        assert agent.provided[-1].engines == (EngineInstall(engine="llamacpp"),)
        count = len(agent.provided)
        await p.fleet.apply(TINY)
        await trio.sleep(30)
        assert len(agent.provided) == count


async def test_other_engines_of_the_settings_are_told_to_every_node_that_can_have_them(autojump_clock: Clock) -> None:
    async with plane() as p:
        agents = [p.agent("n1"), p.agent("n2")]
        p.fleet.want_engines([EngineInstall(engine="llamacpp", version="b3")], {"llamacpp": EnginePackage(name="own")})
        await trio.sleep(5)
        for agent in agents:
            assert agent.provided == [
                Provision(
                    engines=(EngineInstall(engine="llamacpp", version="b3"),),
                    preferred={"llamacpp": "b3"},
                    packages={"llamacpp": EnginePackage(name="own")},
                )
            ]


async def test_what_a_node_should_have_installed_is_told_again_when_its_queue_was_full(autojump_clock: Clock) -> None:
    async with plane() as p:
        agent = p.agent("n1")
        p.hub.refuse = NotKeepingUp("n1 does not keep up")
        await p.fleet.apply(TINY)
        await trio.sleep(1)
        assert agent.provided == []
        p.hub.refuse = None
        await trio.sleep(5)
        assert [told.engines for told in agent.provided] == [(EngineInstall(engine="llamacpp"),)]


async def test_what_an_older_stream_says_changes_nothing(autojump_clock: Clock) -> None:
    async with plane() as p:
        agent = p.agent("n1")
        p.fleet.attach(agent.id, 50, "192.0.2.1:6000")
        before = p.fleet.world.value
        assert before.nodes[agent.id].connected is False
        p.fleet.heard(agent.id, agent.stream, register("n1", threads=64))
        p.fleet.detach(agent.id, agent.stream)
        p.fleet.attach(agent.id, 49, "192.0.2.1:6001")
        assert p.fleet.world.value is before
        agent.connect(50)


async def test_losing_a_stream_is_not_losing_a_node(autojump_clock: Clock) -> None:
    async with plane() as p:
        agent = p.agent("n1")
        await trio.sleep(1)
        p.fleet.detach(agent.id, agent.stream)
        node = p.fleet.world.value.nodes[agent.id]
        assert (node.stage, node.connected) == (Stage.READY, False)
        assert "node-disconnected" in p.kinds()


async def test_a_cut_off_node_is_unreachable_then_lost_then_replaced_and_on_return_told_to_stop(
    autojump_clock: Clock,
) -> None:
    async with plane() as p:
        first, second = p.agent("n1"), p.agent("n2")
        await p.fleet.apply(TINY)
        await trio.sleep(1)
        first.silent = True
        await trio.sleep(22)
        assert p.node("n1").stage is Stage.UNREACHABLE  # type: ignore[attr-defined]
        assert p.where()["tiny-0-0"] == ("n1", 1)
        await trio.sleep(80)
        assert p.node("n1").stage is Stage.LOST  # type: ignore[attr-defined]
        assert p.where()["tiny-0-0"] == ("n2", 2)
        assert second.runs["tiny-0-0"] == (2, ShardState.READY)
        assert first.runs["tiny-0-0"] == (1, ShardState.READY)
        for command in first.connect(77):
            first.obey(command)
        assert first.runs["tiny-0-0"] == (1, ShardState.STOPPED)
        await trio.sleep(30)
        assert second.runs["tiny-0-0"] == (2, ShardState.READY)
        assert len(p.fleet.world.value.strays) == 0


async def test_a_lost_node_that_speaks_again_over_its_old_stream_is_told_to_stop_too(autojump_clock: Clock) -> None:
    async with plane() as p:
        first = p.agent("n1")
        p.agent("n2")
        await p.fleet.apply(TINY)
        await trio.sleep(1)
        first.silent = True
        await trio.sleep(110)
        assert p.where()["tiny-0-0"] == ("n2", 2)
        first.silent = False
        await trio.sleep(7)
        assert first.runs["tiny-0-0"] == (1, ShardState.STOPPED)


async def test_an_engine_that_died_is_started_again_within_a_moment(autojump_clock: Clock) -> None:
    async with plane() as p:
        agent = p.agent("n1")
        await p.fleet.apply(TINY)
        await trio.sleep(1)
        agent.report("tiny-0-0", ShardState.FAILED, signal="SIGKILL", lines=("dead",))
        await trio.sleep(0.1)
        assert agent.runs["tiny-0-0"] == (2, ShardState.READY)
        assert (await p.store.load("shards/tiny-0-0")).values["shards/tiny-0-0"].count(b"SIGKILL") == 2


async def test_a_removed_model_is_drained_and_stopped_and_an_idle_one_at_once(autojump_clock: Clock) -> None:
    async with plane() as p:
        agent = p.agent("n1")
        await p.fleet.apply(TINY)
        await trio.sleep(1)
        await p.fleet.apply(NONE)
        await trio.sleep(1)
        assert {s.want for s in p.fleet.world.value.shards.values()} == {Want.DRAIN}
        p.fleet.idle(ReplicaId("tiny-0"))
        await trio.sleep(1)
        assert [c.shard for c in agent.told if isinstance(c, StopShard)] == ["tiny-0-0"]
        await trio.sleep(31)
        assert p.where() == {}
        assert dict((await p.store.load("shards/")).values) == {}
        assert set((await p.store.load("retired/")).values) == {"retired/tiny-0-0", "retired/tiny-1-0"}


async def test_draining_a_node_moves_its_replicas_off(autojump_clock: Clock) -> None:
    async with plane() as p:
        p.agent("n1")
        p.agent("n2")
        await p.fleet.apply(TINY)
        await trio.sleep(1)
        await p.fleet.drain(NodeId("n1"), True)
        await trio.sleep(40)
        assert {node for node, _ in p.where().values()} == {"n2"}


def finishing(p: Plane) -> list[str]:
    """What gets no new requests and is not stopped yet."""
    return [s.id for s in p.fleet.world.value.shards.values() if s.want is Want.DRAIN]


async def test_a_drain_has_its_own_deadline_which_taking_it_back_does_not_shorten(autojump_clock: Clock) -> None:
    async with plane() as p:
        p.agent("n1")
        await p.fleet.apply(TINY.replace("= 2", "= 1"))
        await trio.sleep(1)
        p.agent("n2")
        await p.fleet.drain(NodeId("n1"), True, 600.0)
        await trio.sleep(590)
        assert finishing(p) == ["tiny-0-0"]
        await p.fleet.drain(NodeId("n1"), False)
        await trio.sleep(8)
        assert finishing(p) == ["tiny-0-0"]
        await trio.sleep(4)
        assert p.where() == {"tiny-1-0": ("n2", 1)}
        assert "node-drained" not in p.kinds()


async def test_a_shorter_deadline_counts_at_once_and_the_end_of_a_drain_is_told(autojump_clock: Clock) -> None:
    async with plane() as p:
        p.agent("n1")
        await p.fleet.apply(TINY.replace("= 2", "= 1"))
        await trio.sleep(1)
        p.agent("n2")
        await p.fleet.drain(NodeId("n1"), True, 600.0)
        await trio.sleep(100)
        await p.fleet.drain(NodeId("n1"), True, 100.0)
        await trio.sleep(2)
        assert p.where() == {"tiny-1-0": ("n2", 1)}
        assert p.kinds().count("node-drained") == 1


async def test_a_plane_that_starts_anew_keeps_the_deadline_of_a_drain(autojump_clock: Clock) -> None:
    store = MemoryStore()
    async with plane(store) as p:
        first = p.agent("n1")
        await p.fleet.apply(TINY.replace("= 2", "= 1"))
        await trio.sleep(1)
        second = p.agent("n2")
        await p.fleet.drain(NodeId("n1"), True, 600.0)
        await trio.sleep(300)
        runs = {"n1": first.runs, "n2": second.runs}
    async with plane(store) as p:
        p.agent("n2", runs["n2"])
        await trio.sleep(60)  # longer than the plane waits for its nodes
        p.agent("n1", runs["n1"])
        await trio.sleep(235)
        assert finishing(p) == ["tiny-0-0"]
        await trio.sleep(10)
        assert p.where() == {"tiny-1-0": ("n2", 1)}


async def test_a_drain_is_over_as_soon_as_nothing_is_served_whatever_its_deadline(autojump_clock: Clock) -> None:
    async with plane() as p:
        p.agent("n1")
        await p.fleet.apply(TINY.replace("= 2", "= 1"))
        await trio.sleep(1)
        p.agent("n2")
        await p.fleet.drain(NodeId("n1"), True, 600.0)
        await trio.sleep(10)
        p.fleet.idle(ReplicaId("tiny-0"))
        await trio.sleep(2)
        assert p.where() == {"tiny-1-0": ("n2", 1)}


async def test_operators_words_are_stored_before_they_are_answered(autojump_clock: Clock) -> None:
    async with plane() as p:
        p.agent("n1")
        await trio.sleep(1)
        await p.fleet.cordon(NodeId("n1"), True)
        await p.fleet.label(NodeId("n1"), {"zone": "a"})
        record = (await p.store.load("nodes/n1")).values["nodes/n1"]
        assert b'"cordoned":true' in record
        assert b'"zone":"a"' in record
        with pytest.raises(NotFound):
            await p.fleet.cordon(NodeId("n9"), True)
        with pytest.raises(BadInput):
            await p.fleet.label(NodeId("n1"), {" ": "a"})
        await p.fleet.forget(NodeId("n1"))
        assert dict((await p.store.load("nodes/")).values) == {}
        assert len(p.fleet.world.value.nodes) == 0


async def test_heartbeats_never_write_to_the_store(autojump_clock: Clock) -> None:
    async with plane() as p:
        p.agent("n1")
        await p.fleet.apply(TINY)
        await trio.sleep(10)
        before = (await p.store.load("")).revision
        await trio.sleep(600)
        assert (await p.store.load("")).revision == before


async def test_loads_are_seen_but_wake_nobody(autojump_clock: Clock) -> None:
    async with plane() as p:
        agent = p.agent("n1")
        await trio.sleep(3)
        version = p.fleet.world.version
        agent.say(Heartbeat(memory_bytes=64 << 30))
        agent.say(Heartbeat())
        assert p.fleet.world.version == version
        assert p.fleet.world.value.nodes[agent.id].heard_at == trio.current_time()


class Failing(MemoryStore):
    """A store whose disk is full for a while."""

    full = False

    async def commit(
        self, puts: Mapping[str, bytes], deletes: Iterable[str] = (), *, if_revision: int | None = None
    ) -> int:
        if self.full:
            raise Unavailable("the disk is full")
        return await super().commit(puts, deletes, if_revision=if_revision)


async def test_a_store_that_fails_stops_new_orders_and_nothing_else(autojump_clock: Clock) -> None:
    store = Failing()
    async with plane(store) as p:
        agent = p.agent("n1")
        await p.fleet.apply(TINY)
        await trio.sleep(1)
        store.full = True
        agent.report("tiny-0-0", ShardState.FAILED, exit_code=1)
        with pytest.raises(Unavailable):
            await p.fleet.apply(NONE)
        await trio.sleep(20)
        assert agent.runs["tiny-0-0"] == (1, ShardState.FAILED)
        assert p.kinds().count("store-failed") == 1
        agent.silent = True
        await trio.sleep(20)
        assert p.node("n1").stage is Stage.UNREACHABLE  # type: ignore[attr-defined]
        store.full, agent.silent = False, False
        await trio.sleep(20)
        assert agent.runs["tiny-0-0"] == (2, ShardState.READY)
        assert "store-restored" in p.kinds()


async def test_what_cannot_be_placed_is_said_once_and_placed_when_there_is_room(autojump_clock: Clock) -> None:
    async with plane() as p:
        p.agent("n1")
        await p.fleet.apply(TINY.replace("= 2", "= 3"))
        await trio.sleep(60)
        assert p.kinds().count("model-unplaced") == 1
        unplaced = p.fleet.world.value.unplaced["tiny"]  # type: ignore[index]
        assert (unplaced.wanted, unplaced.placed, [r.check for r in unplaced.reasons]) == (3, 2, ["cpu-threads"])
        p.agent("n2")
        await trio.sleep(6)
        assert p.kinds().count("model-placed") == 1
        assert len(p.where()) == 3


async def test_streams_are_read_while_a_large_fleet_is_planned(mock_clock: Clock) -> None:
    fleet = Fleet(MemoryStore(), wall=lambda: CLOCK)
    await fleet.load()
    for number in range(300):
        Agent(fleet, f"n{number}").connect(number + 1)
    hub, turns = Hub(), 0
    hub.refuse = Unavailable("no stream")
    await fleet.apply(TINY.replace("= 2", "= 600"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.run, hub)
        while not fleet.world.value.shards:
            await trio.lowlevel.checkpoint()  # the clock stands: only the plan is waited for
            turns += 1
        nursery.cancel_scope.cancel()
    assert len(fleet.world.value.shards) == 600
    assert turns > 20


async def test_events_are_there_after_a_restart(autojump_clock: Clock) -> None:
    store = MemoryStore()
    async with plane(store) as p:
        p.agent("n1")
        await p.fleet.apply(TINY)
        await trio.sleep(2)
        before = p.fleet.events.after(0)
        assert len(before) > 3
    async with plane(store) as p:
        assert p.fleet.events.after(0)[: len(before)] == before


async def test_a_node_with_less_than_confirmed_is_told_of_over_restarts_and_cleared(autojump_clock: Clock) -> None:
    store = MemoryStore()
    async with plane(store) as p:
        agent = p.agent("n1")
        agent.gpus = 8
        agent.say(agent.register())
        with pytest.raises(NotFound, match="n7"):
            await p.fleet.expect(NodeId("n7"))
        await p.fleet.expect(NodeId("n1"))
        agent.gpus = 7
        agent.say(agent.register())
        await trio.sleep(14)
        assert "problem-opened" not in p.kinds()
        await trio.sleep(8)
        assert p.kinds()[-1] == "problem-opened"
        assert p.fleet.world.value.nodes[NodeId("n1")].problems["node", "fewer-gpus"].problem.grade is Grade.BAD
        await trio.sleep(5)
    async with plane(store) as p:
        again = p.agent("n1")
        again.gpus = 7
        again.say(again.register())
        await trio.sleep(40)
        # The same problem as before, as old as it is, and in the history once.
        open_ = p.fleet.world.value.nodes[NodeId("n1")].problems["node", "fewer-gpus"]
        assert trio.current_time() - open_.first_at > 50
        assert p.kinds().count("problem-opened") == 1
        again.gpus = 8
        again.say(again.register())
        await trio.sleep(75)
        assert p.kinds()[-1] == "problem-cleared"
        assert not p.fleet.world.value.nodes[NodeId("n1")].problems


async def test_a_cloned_identity_is_one_event_with_both_addresses(autojump_clock: Clock) -> None:
    fleet = Fleet(MemoryStore())
    await fleet.load()
    for number in range(1, 9):
        Agent(fleet, "n1").connect(number, f"192.0.2.{1 + number % 2}:5000")
    clones = [event for event in fleet.events.after(0) if event.kind == "identity-cloned"]
    assert [sorted((e.data["first"], e.data["second"])) for e in clones] == [["192.0.2.1:5000", "192.0.2.2:5000"]]


async def test_a_growing_fleet_is_told_a_slower_pace(autojump_clock: Clock) -> None:
    async with plane() as p:
        first = p.agent("n1")
        assert p.fleet.heartbeat() == 5.0
        for number in range(3000):
            agent = p.hub.agents[f"m{number}"] = Agent(p.fleet, f"m{number}")
            agent.connect(10_000 + number)
        await trio.sleep(3)
        paces = [c.heartbeat for c in first.told if isinstance(c, Pace)]
        assert paces
        assert 5.5 < paces[-1] < 6.5


async def test_a_record_in_the_way_is_a_clear_error(autojump_clock: Clock) -> None:
    store = MemoryStore()
    await store.commit({"plane/epoch": b'"x"'})
    with pytest.raises(BadInput, match="the stored epoch"):
        await Fleet(store).load()


def starts(agent: Agent) -> int:
    return sum(isinstance(command, StartShard) for command in agent.told)


async def test_a_model_that_is_unloaded_while_idle_runs_from_a_request_until_nobody_asked_for_so_long(
    autojump_clock: Clock,
) -> None:
    async with plane() as p:
        agent = p.agent("n1")
        await p.fleet.apply(TINY.replace("replicas = 2", 'replicas = 2\nidle = "60s"'))
        await trio.sleep(100)
        assert (p.where(), starts(agent)) == ({}, 0)
        assert not p.fleet.world.value.unplaced
        p.fleet.asked(["tiny", "unknown"])
        await trio.sleep(1)
        assert len(p.where()) == 2
        for _ in range(10):  # a long stream, or one short request after the other
            await trio.sleep(30)
            version = p.fleet.world.version
            p.fleet.asked(["tiny"])
            assert p.fleet.world.version == version
        await trio.sleep(55)
        assert {s.state for s in p.fleet.world.value.shards.values()} == {ShardState.READY}
        await trio.sleep(10)
        assert {s.want for s in p.fleet.world.value.shards.values()} == {Want.DRAIN}
        await trio.sleep(60)
        assert p.where() == {}
        assert p.kinds().count("model-asked") == 1
        assert starts(agent) == 2


async def test_a_model_that_loads_or_runs_when_the_plane_starts_has_its_time_from_then(autojump_clock: Clock) -> None:
    store = MemoryStore()
    async with plane(store) as p:
        agent = p.agent("n1")
        await p.fleet.apply(TINY.replace("replicas = 2", 'replicas = 2\nidle = "60s"'))
        p.fleet.asked(["tiny"])
        await trio.sleep(1)
    async with plane(store) as p:
        again = p.agent("n1", agent.runs)
        await trio.sleep(55)
        assert len(p.where()) == 2
        assert starts(again) == 0
        await trio.sleep(60)
        assert p.where() == {}
    async with plane(store) as p:
        asleep = p.agent("n1")
        await trio.sleep(200)
        assert (p.where(), starts(asleep)) == ({}, 0)


async def test_a_running_model_that_becomes_one_to_unload_is_not_stopped_under_its_clients(
    autojump_clock: Clock,
) -> None:
    async with plane() as p:
        p.agent("n1")
        await p.fleet.apply(TINY)
        await trio.sleep(100)
        await p.fleet.apply(TINY.replace("replicas = 2", 'replicas = 2\nidle = "60s"'))
        await trio.sleep(50)
        assert {s.want for s in p.fleet.world.value.shards.values()} == {Want.RUN}
        await trio.sleep(20)
        assert {s.want for s in p.fleet.world.value.shards.values()} == {Want.DRAIN}


def a_test(grade: str) -> PairResult:
    rail = RailResult(
        rail="0",
        a=EndView(node="n1", device="mlx5_0"),
        b=EndView(node="n2", device="mlx5_0"),
        rate_gbps=400.0,
        gbps=12.0,
        verdict=Verdict(grade=grade),
    )
    return PairResult(a="n1", b="n2", clock=CLOCK + trio.current_time(), rails=(rail,))


async def test_a_bandwidth_test_is_known_to_placement_at_once_after_a_restart_and_until_it_is_old(
    autojump_clock: Clock,
) -> None:
    store, pair = MemoryStore(), (NodeId("n1"), NodeId("n2"))
    async with plane(store, evidence=600.0) as p:
        p.agent("n1")
        p.agent("n2")
        version = p.fleet.world.version
        bad = a_test("bad")
        await history.keep(store, bad)
        p.fleet.tested(bad)
        assert p.fleet.world.version == version + 1
        assert p.fleet.world.value.evidence[pair].bad == ("n1 mlx5_0/1", "n2 mlx5_0/1")
        await trio.sleep(60)
    async with plane(store, evidence=600.0) as p:
        known = p.fleet.world.value.evidence[pair]
        assert (known.bad, known.at) == (("n1 mlx5_0/1", "n2 mlx5_0/1"), 0.0)
        p.agent("n1")
        p.agent("n2")
        await trio.sleep(530)
        assert pair in p.fleet.world.value.evidence
        await trio.sleep(20)
        assert pair not in p.fleet.world.value.evidence


async def test_what_an_engine_took_is_learned_while_it_runs_and_known_after_a_restart(autojump_clock: Clock) -> None:
    store = MemoryStore()
    async with plane(store) as p:
        p.agent("n1")
        await p.fleet.apply(TINY)
        await trio.sleep(5)
        p.hub.agents["n1"].say(Heartbeat(shards=(ShardLoad(ShardId("tiny-0-0"), 0.0, 7 << 30),)))
        assert not p.fleet.world.value.learned
        await trio.sleep(30)
        (name,) = p.fleet.world.value.learned
        assert name == "llamacpp /models/tiny.gguf gpus=0 nodes=1"
        assert p.fleet.world.value.learned[name].memory_bytes == 7 << 30
    async with plane(store) as p:
        assert p.fleet.world.value.learned[name].memory_bytes == 7 << 30

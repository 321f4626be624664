"""The single writer and its loop, with nodes that obey or not, on the test's clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
import trio
import trio.lowlevel
from immutables import Map

from llmgw.errors import AgentGone, BadInput, NotFound, NotKeepingUp, Unavailable
from llmgw.plane.fleet import Applied, Fleet
from llmgw.plane.store.memory import MemoryStore
from llmgw.plane.world import Stage, Want
from llmgw.wire.agent import Heartbeat
from llmgw.wire.control import ControlMessage, Pace, StartShard, StopShard
from llmgw.wire.facts import Grade, NodeId, ReplicaId, ShardState
from tests.plane.planes import NONE, TINY, Agent, Clock, Hub, plane
from tests.plane.worlds import CLOCK


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

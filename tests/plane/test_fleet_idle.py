"""Models that are unloaded while idle, and loaded on demand."""

from __future__ import annotations

import trio

from llmgw.plane.store.memory import MemoryStore
from llmgw.plane.world import Want
from llmgw.wire.control import StartShard
from llmgw.wire.facts import ShardState
from tests.plane.planes import TINY, Agent, Clock, plane


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

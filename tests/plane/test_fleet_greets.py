"""What a node is greeted with, and what it is told to have installed (A7)."""

from __future__ import annotations

import trio

from llmgw.errors import NotKeepingUp
from llmgw.plane.fleet import Fleet
from llmgw.plane.store.memory import MemoryStore
from llmgw.wire.control import Provision, StopShard
from llmgw.wire.facts import EngineInstall, EnginePackage, ShardId, ShardState
from tests.plane.planes import TINY, Agent, Clock, plane


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

"""Streams that are lost, nodes that are lost, and what happens when they speak again (A6, A8, D1)."""

from __future__ import annotations

import trio

from llmgw.plane.world import Stage
from llmgw.wire.facts import ShardState
from tests.plane.planes import TINY, Clock, plane
from tests.plane.worlds import register


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

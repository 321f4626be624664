"""Drains with a deadline, over restarts too."""

from __future__ import annotations

import trio

from llmgw.plane.store.memory import MemoryStore
from llmgw.plane.world import Want
from llmgw.wire.facts import NodeId, ReplicaId
from tests.plane.planes import TINY, Clock, Plane, plane


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

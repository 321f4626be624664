"""The order in which an agent's frames leave (A13): short before long, and facts in the order of their coming true."""

from __future__ import annotations

import trio
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from llmgw.node.outbox import Outbox
from llmgw.wire.agent import AgentMessage, Heartbeat, Part, Register, Reply, ShardStatus
from llmgw.wire.codec import Unknown, agent_codec, encode
from llmgw.wire.facts import HostLoad, ModelName, NodeId, ReplicaId, ShardId, ShardState
from llmgw.wire.stream import Joiner

PART = 256


def register(size: int = 0) -> Register:
    return Register(node=NodeId("n1"), version="1", labels={"padding": "x" * size})


def status(generation: int) -> ShardStatus:
    return ShardStatus(
        shard=ShardId("tiny-0-0"),
        replica=ReplicaId("tiny-0"),
        model=ModelName("tiny"),
        generation=generation,
        state=ShardState.STARTING,
    )


def reply(number: int, size: int) -> Reply:
    return Reply(request_id=number, value=Raw(encode("x" * size)))


class Plane:
    """Takes what leaves and puts it together again."""

    def __init__(self, box: Outbox) -> None:
        self._box = box
        self._joiner = Joiner()
        self.heard: list[AgentMessage] = []

    async def take(self, frames: int = 10_000) -> None:
        for _ in range(frames):
            data: bytes | None = None
            with trio.CancelScope() as scope:
                scope.cancel()  # it waits only when there is nothing to say
                data = await self._box.next()
            if data is None:
                return
            message = agent_codec.decode(data)
            if isinstance(message, Part):
                data = self._joiner.add(message.series, message.data, message.last)
                if data is None:
                    continue
                message = agent_codec.decode(data)
            assert not isinstance(message, Unknown | Part)
            self.heard.append(message)


async def test_a_status_never_overtakes_the_register_that_was_made_before_it() -> None:
    """Or the Register, which does not know the shard yet, would take it back: the plane would start a second one."""
    box = Outbox(PART)
    plane = Plane(box)
    box.put(register(4000))
    await plane.take(2)
    box.put(status(1))
    box.put(Heartbeat(load=HostLoad(cpu_percent=1.0)))
    await plane.take()
    assert [type(message) for message in plane.heard] == [Register, ShardStatus, Heartbeat]


async def test_a_long_reply_holds_no_fact_up_for_more_than_a_part() -> None:
    box = Outbox(PART)
    plane = Plane(box)
    box.put(reply(1, 100_000))
    await plane.take(3)
    box.put(status(1))
    await plane.take(1)
    assert plane.heard == [status(1)]


async def test_a_long_register_and_a_long_reply_share_the_way() -> None:
    box = Outbox(PART)
    plane = Plane(box)
    box.put(reply(1, 100_000))
    box.put(register(4000))
    box.put(status(2))
    await plane.take(60)
    assert [type(message) for message in plane.heard] == [Register, ShardStatus]


@given(st.data())
async def test_whatever_is_said_facts_arrive_in_order_and_nothing_is_lost(data: st.DataObject) -> None:
    box = Outbox(PART)
    plane = Plane(box)
    facts: list[AgentMessage] = []
    replies: list[AgentMessage] = []
    for number in range(data.draw(st.integers(1, 12))):
        size = data.draw(st.sampled_from([0, 10, 600, 3000]))
        kind = data.draw(st.sampled_from(["register", "status", "reply"]))
        if kind == "reply":
            replies.append(reply(number, size))
            box.put(replies[-1])
        else:
            facts.append(register(size) if kind == "register" else status(number))
            box.put(facts[-1])
        await plane.take(data.draw(st.integers(0, 8)))
    await plane.take()
    assert [message for message in plane.heard if not isinstance(message, Reply)] == facts
    assert sorted(m.request_id for m in plane.heard if isinstance(m, Reply)) == [
        m.request_id for m in replies if isinstance(m, Reply)
    ]

"""How long what leaves may finish, and when a node is empty."""

from __future__ import annotations

import attrs
import pytest

from llmgw.plane import drains, operate
from llmgw.plane.steps import GiveUp, enact
from llmgw.plane.world import DEFAULT, Want, World
from llmgw.wire.facts import NodeId, ShardId
from tests.plane.worlds import CLOCK, hear, model, profile, register, settle, status, world

N1, N2 = NodeId("n1"), NodeId("n2")


def running() -> World:
    here, _ = settle(world(register("n1"), register("n2"), models=(model("a", 2, of=profile(threads=5)),)))
    return here


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ({}, DEFAULT.drain),
        ({N1: 600.0}, 600.0),
        ({N1: 0.0}, 0.0),
        ({N1: None}, DEFAULT.drain),
        ({N1: 600.0, N2: 5.0}, 5.0),
        ({N1: None, N2: 600.0}, 600.0),
    ],
)
def test_what_an_operator_said_of_a_draining_node_counts_the_shortest_first(
    said: dict[NodeId, float | None], seconds: float
) -> None:
    here = running()
    for node, within in said.items():
        here, _ = operate.drain(here, node, True, CLOCK, within)
    assert drains.of_replica(here, here.shards.values(), DEFAULT) == seconds


def test_a_deadline_does_not_outlive_its_drain() -> None:
    here, _ = operate.drain(running(), N1, True, CLOCK, 600.0)
    here, _ = operate.drain(here, N1, False, CLOCK)
    assert drains.of_replica(here, here.shards.values(), DEFAULT) == DEFAULT.drain
    assert drains.within([None, attrs.evolve(here.nodes[N1], drain_within=5.0)], DEFAULT) == DEFAULT.drain


def test_the_end_of_a_drain_is_told_once_and_only_when_nothing_is_left() -> None:
    here, _ = operate.drain(running(), N1, True, CLOCK)
    mine = [shard.id for shard in here.shards.values() if shard.node == N1]
    after = enact(here, [GiveUp(id, "") for id in mine], 0.0, CLOCK)
    assert [event.text for event in drains.emptied(here, after, CLOCK)] == [
        "n1 is drained: nothing runs there any more"
    ]
    assert drains.emptied(after, after, CLOCK) == ()
    assert drains.emptied(after, attrs.evolve(after, shards=after.shards.delete(ShardId("a-1-0"))), CLOCK) == ()


def test_a_stray_keeps_a_node_from_being_drained() -> None:
    here, _ = operate.drain(running(), N1, True, CLOCK)
    here = hear(here, "n1", status("x-0-0"))
    mine = [shard.id for shard in here.shards.values() if shard.node == N1]
    after = enact(here, [GiveUp(id, "") for id in mine], 0.0, CLOCK)
    assert drains.emptied(here, after, CLOCK) == ()
    gone = attrs.evolve(after, strays=after.strays.delete((N1, ShardId("x-0-0"))))
    assert [event.subject for event in drains.emptied(after, gone, CLOCK)] == ["node:n1"]


def test_a_node_that_nobody_drains_may_be_empty_without_a_word() -> None:
    here = running()
    after = enact(here, [GiveUp(id, "") for id in here.shards], 0.0, CLOCK)
    assert drains.emptied(here, after, CLOCK) == ()
    assert all(shard.want is Want.RUN for shard in here.shards.values())

"""How long what leaves may finish, and when a node is empty."""

from __future__ import annotations

import attrs
import pytest

from llmgw.plane import drains, operate
from llmgw.plane.steps import Drain, GiveUp, Start, enact
from llmgw.plane.store.records import Stored, world_of
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


def draining(within: float | None, at: float = 0.0) -> World:
    """n1 is drained and its replica finishes what it serves."""
    here, _ = operate.drain(running(), N1, True, CLOCK, within)
    mine = next(shard.id for shard in here.shards.values() if shard.node == N1)
    return enact(here, [Drain(mine, "n1 is being drained")], at, CLOCK + at)


def due(here: World) -> float:
    """Until when what finishes may go on."""
    (shard,) = (shard for shard in here.shards.values() if shard.want is Want.DRAIN)
    assert shard.want_at is not None
    return shard.want_at + drains.of_replica(here, [shard], DEFAULT)


def test_taking_a_drain_back_cuts_nothing_that_was_to_finish() -> None:
    here = draining(600.0, at=5.0)
    assert due(here) == 605.0
    for after, _ in (operate.drain(here, N1, False, CLOCK), operate.cordon(here, N1, False, CLOCK)):
        assert due(after) == 35.0
        assert due(drains.kept(here, after, DEFAULT)) == 605.0


def test_taking_a_short_drain_back_gives_the_usual_time() -> None:
    here = draining(1.0, at=5.0)
    after, _ = operate.drain(here, N1, False, CLOCK)
    assert drains.kept(here, after, DEFAULT) is after
    assert due(after) == 35.0


@pytest.mark.parametrize("within", [None, 600.0])
def test_a_restart_of_the_plane_moves_no_deadline(within: float | None) -> None:
    here = draining(within, at=5.0)
    again = world_of(
        Stored().difference(here)[0], 1000.0, CLOCK + 15.0
    )  # 10 s later by the wall, a new monotonic clock
    assert due(again) - 1000.0 == due(here) - 15.0
    back = world_of(Stored().difference(here)[0], 1000.0, CLOCK - 3600.0)
    assert due(back) - 1000.0 == due(here) - 5.0  # the wall clock was set back: as if it had begun now


def test_a_drain_that_an_older_plane_stored_is_over_at_once() -> None:
    here = draining(None)
    (shard,) = (shard for shard in here.shards.values() if shard.want is Want.DRAIN)
    here = attrs.evolve(here, shards=here.shards.set(shard.id, attrs.evolve(shard, want_clock=0.0)))
    assert world_of(Stored().difference(here)[0], 1000.0, CLOCK).shards[shard.id].want_at is None


def test_an_attempt_that_begins_anew_is_not_taken_for_one_that_finishes() -> None:
    here = draining(None)
    (shard,) = (shard for shard in here.shards.values() if shard.want is Want.DRAIN)
    after = enact(here, [Start(attrs.evolve(shard, want=Want.RUN, generation=2), "")], 9.0, CLOCK)
    assert after.shards[shard.id].want_clock == 0.0

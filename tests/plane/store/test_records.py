"""What of the world is stored, and that it comes back as it was (D4, B9)."""

from __future__ import annotations

import json

import attrs
import pytest
from immutables import Map
from msgspec.structs import replace

from llmgw.errors import Conflict
from llmgw.plane import operate
from llmgw.plane.store.records import Stored, world_of
from llmgw.plane.world import Failure, Stage, Want, World
from llmgw.wire.agent import Heartbeat
from llmgw.wire.facts import Grade, HostLoad, NodeId, Problem, ShardId, ShardState
from tests.plane.worlds import CLOCK, fold_events, hear, model, profile, ready, register, settle, status, world

N = NodeId("n1")


def a_world() -> World:
    models = [model(replicas=2, of=profile(gpus=1, labels={"zone": "a"})), model("org/b", revision=7)]
    here = world(register("n1", gpu=2, labels={"zone": "a"}), register("n2"), models=models)
    here = ready(settle(here)[0])
    here = hear(here, "n1", status("tiny-0-0", 1, ShardState.FAILED, exit_code=3, cause="no memory", lines=("x",)), 5.0)
    here = operate.drain(here, N, True, CLOCK, 600.0)[0]
    here = operate.label(here, N, {"rack": "7"}, CLOCK)[0]
    here = hear(here, "n1", Heartbeat(problems=(Problem(subject="node", code="c", grade=Grade.BAD, text="t"),)), 5.0)
    here = operate.acknowledge(here, N, "node", "c", 100.0, 5.0, CLOCK + 5.0)[0]
    return attrs.evolve(here, retired=Map({ShardId("gone-0-0"): 4}), floor=3)


def stored(here: World) -> dict[str, bytes]:
    return Stored().difference(here)[0]


def test_what_is_stored_comes_back() -> None:
    here = a_world()
    again = world_of(stored(here), 1000.0, CLOCK + 25.0)
    assert again.models == here.models
    assert (again.retired, again.floor) == (here.retired, here.floor)
    assert set(again.nodes) == set(here.nodes)
    node = again.nodes[N]
    assert (node.stage, node.stage_at, node.facts, node.connected) == (Stage.EXPECTED, 1000.0, None, False)
    assert (node.draining, node.drain_within, node.labels) == (True, 600.0, Map({"rack": "7"}))
    assert node.acks["node", "c"].until_at == 1080.0  # 80 of 100 s are left
    for id, shard in here.shards.items():
        kept = attrs.evolve(shard, status=None, status_at=None, ready_at=None, not_before=None, want_at=None)
        assert again.shards[id] == kept
    assert again.shards[ShardId("tiny-0-0")].first_failure == Failure(1, CLOCK + 5.0, 3, "", "no memory", ("x",), "n1")


def test_problems_and_what_was_confirmed_outlive_a_restart_and_do_not_open_twice() -> None:
    here = a_world()
    here = operate.expect(here, N, True, 6.0, CLOCK + 6.0)[0]
    again = world_of(stored(here), 1000.0, CLOCK + 25.0)
    node = again.nodes[N]
    assert node.expected == here.nodes[N].expected
    assert node.expected is not None
    assert node.expected.clock == CLOCK + 6.0
    open_ = node.problems["node", "c"]
    assert (open_.problem.text, open_.first_clock, open_.first_at) == ("t", CLOCK + 5.0, 980.0)
    assert open_.acknowledged_until == 1080.0
    told = Problem(subject="node", code="c", grade=Grade.BAD, text="t")
    back, events = fold_events(again, "n1", replace(register("n1", gpu=2), problems=(told,)), 1001.0)
    assert [event.kind for event in events if event.kind.startswith("problem")] == []
    assert back.nodes[N].problems["node", "c"].first_at == 980.0


def test_words_of_a_problem_that_change_are_not_written() -> None:
    def saying(words: str, grade: Grade = Grade.BAD) -> Heartbeat:
        return Heartbeat(problems=(Problem(subject="node", code="c", grade=grade, text=words),))

    here, kept = a_world(), Stored()
    puts, deletes, seen = kept.difference(here)
    kept.written(puts, deletes, seen)
    assert kept.difference(hear(here, "n1", saying("81 C"), 6.0))[0] == {}
    assert list(kept.difference(hear(here, "n1", saying("t", Grade.WARN), 6.0))[0]) == ["nodes/n1"]
    assert list(kept.difference(hear(here, "n1", Heartbeat(problems=()), 6.0))[0]) == ["nodes/n1"]


def test_a_lost_node_stays_lost_over_a_restart() -> None:
    here = a_world()
    here = attrs.evolve(here, nodes=here.nodes.set(N, attrs.evolve(here.nodes[N], stage=Stage.LOST)))
    assert world_of(stored(here), 0.0, CLOCK).nodes[N].stage is Stage.LOST


def test_an_acknowledgement_that_ended_meanwhile_is_left_out() -> None:
    assert len(world_of(stored(a_world()), 0.0, CLOCK + 200.0).nodes[N].acks) == 0


def test_values_are_json_that_people_can_read() -> None:
    for key, value in stored(a_world()).items():
        assert json.loads(value) is not None, key


def test_only_what_differs_is_written() -> None:
    kept, here = Stored(), a_world()
    puts, deletes, seen = kept.difference(here)
    assert (deletes, set(puts)) == ((), set(stored(here)))
    kept.written(puts, deletes, seen)
    assert kept.difference(here)[:2] == ({}, ())
    shard = attrs.evolve(here.shards[ShardId("tiny-1-0")], want=Want.STOP)
    later = attrs.evolve(here, shards=here.shards.set(shard.id, shard).delete(ShardId("tiny-0-0")))
    puts, deletes, _ = kept.difference(later)
    assert (set(puts), deletes) == ({"shards/tiny-1-0"}, ("shards/tiny-0-0",))


def test_heartbeats_and_states_never_write() -> None:
    kept, here = Stored(), a_world()
    kept.written(*kept.difference(here))
    here = hear(here, "n1", Heartbeat(load=HostLoad(5.0)), 6.0)
    here = hear(here, "n1", status("tiny-1-0", 1, ShardState.DRAINING), 7.0)
    here = hear(here, "n2", register("n2", threads=3), 8.0)
    assert kept.difference(here)[:2] == ({}, ())


def test_what_was_loaded_is_not_written_again() -> None:
    values = stored(a_world())
    kept = Stored()
    kept.loaded(values)
    assert kept.difference(world_of(values, 0.0, CLOCK))[:2] == ({}, ())


@pytest.mark.parametrize(
    ("key", "value"),
    [("shards/a-0-0", b"{}"), ("nodes/n1", b"["), ("models/a", b'{"name": 3}'), ("retired/x", b'"high"')],
)
def test_a_record_that_cannot_be_read_is_refused_by_its_key(key: str, value: bytes) -> None:
    with pytest.raises(Conflict, match=f"the stored record '{key}' cannot be read"):
        world_of({key: value}, 0.0, CLOCK)

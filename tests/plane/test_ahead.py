"""Where a replica must go before its successor comes, the successor's weights are there first."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio
import trio.testing
from msgspec.structs import replace

from llmgw.plane.converge import FETCH_AGAIN, Told, commands
from llmgw.plane.members import Choice
from llmgw.plane.place import Rooms
from llmgw.plane.plan import plan
from llmgw.plane.rollout import Rollouts, after_change, rollout_of
from llmgw.plane.steps import enact
from llmgw.plane.whatif import ApplyModels, what_if
from llmgw.plane.world import DEFAULT, Model, World
from llmgw.wire.agent import Heartbeat
from llmgw.wire.control import FetchWeights
from llmgw.wire.facts import HostLoad, ModelName, NodeId, ShardState, Weights
from tests.plane.ideal import ideal, placements
from tests.plane.test_gang import gang
from tests.plane.test_plan import wanted, words
from tests.plane.worlds import CLOCK, GIB, hear, model, profile, ready, register, settle, world

TINY = ModelName("tiny")
OLD, NEW = "hf://org/old", "hf://org/new"


def tiny(surge: int = 0, source: str = OLD, disk: int = 0) -> Model:
    return replace(model(of=profile(source=source, threads=2, disk=disk)), surge=surge)


def serving(*nodes: str, of: Model, threads: int = 2, disk: int = 1000 * GIB) -> World:
    return ready(settle(world(*(register(n, threads=threads, disk=disk) for n in nodes), models=[of]))[0])


def changed(here: World, **fields: object) -> World:
    known = here.models[TINY]
    return wanted(here, after_change(known, replace(known.profile, source=NEW, **fields), CLOCK))


def planned(here: World, now: float = 1.0) -> tuple[World, list[str]]:
    """The world that follows from a plan, as the plane makes it, and the steps in words."""
    found = plan(here, now)
    following = attrs.evolve(enact(here, found.steps, now, CLOCK + now), ahead=found.ahead, unplaced=found.unplaced)
    return following, words(found.steps)


def fetches(here: World) -> list[str]:
    found = sorted(commands(here).items())
    return [f"{node} {order.source}" for (node, _), order in found if isinstance(order, FetchWeights)]


def holds(here: World, node: str, *weights: Weights) -> World:
    return hear(here, node, Heartbeat(weights=weights), 1.0)


def has(here: World, node: str, source: str = NEW) -> World:
    return holds(here, node, Weights(source=source, complete=True))


def test_an_old_replica_serves_until_the_weights_of_the_new_one_are_there() -> None:
    for surge in (0, 1):  # none is wanted beside it, or has no room there
        here, steps = planned(changed(serving("n1", of=tiny(surge))))
        assert (steps, fetches(here)) == ([], [f"n1 {NEW}"])
        assert str(rollout_of(here, here.models[TINY])) == (
            f"0 of 1 replicas have revision 2, waiting for {NEW} to be brought to n1"
        )
        here = holds(here, "n1", Weights(source=NEW, fetching=True))
        assert (planned(here)[1], fetches(here)) == ([], [])
        here, steps = planned(has(here, "n1"))
        assert (steps, fetches(here), dict(here.ahead)) == (["drain tiny-0-0"], [], {})


def test_weights_go_where_the_successor_goes() -> None:
    # n2 has room while tiny-0 still finishes: its successor goes there at once.
    here, _ = planned(changed(serving("n1", "n2", of=tiny())))
    assert fetches(here) == [f"n2 {NEW}"]
    assert planned(has(here, "n1"))[1] == []
    here, steps = planned(has(here, "n2"))
    assert steps == ["drain tiny-0-0", "start tiny-1-0 g1 on n2"]


def test_of_equal_nodes_the_one_that_fetches_already_stays_the_one() -> None:
    here, _ = planned(changed(serving("n1", "n2", "n3", of=tiny())))
    assert fetches(here) == [f"n2 {NEW}"]
    less = HostLoad(memory_available_bytes=60 * GIB)
    here, _ = planned(hear(here, "n3", Heartbeat(load=less), 2.0))  # n3 would be the tighter fit
    assert fetches(here) == [f"n2 {NEW}"]
    assert planned(has(here, "n3"))[1] == ["drain tiny-0-0", "start tiny-1-0 g1 on n3"]


def test_one_replica_after_the_other_gets_its_weights() -> None:
    two = replace(tiny(), replicas=2)
    here, _ = planned(changed(serving("n1", "n2", of=two)))
    assert fetches(here) == [f"n1 {NEW}"]
    # One that could go on is not kept by another that cannot.
    assert planned(has(here, "n2"))[1] == ["drain tiny-1-0"]


def test_all_who_read_the_weights_get_them() -> None:
    for engine, nodes in (("vllm", ["n1", "n2"]), ("llamacpp", ["n1"])):
        made = gang(source=OLD, engine=engine)
        names = (register(name, threads=1, engine_ports=(20_000, 20_999)) for name in ("n1", "n2"))
        here = ready(settle(world(*names, models=[replace(made, surge=0)]))[0])
        here, steps = planned(changed(here))
        assert (steps, fetches(here)) == ([], [f"{node} {NEW}" for node in nodes])
        for node in nodes:
            assert planned(here)[1] == []
            here = has(here, node)
        assert planned(here)[1] == ["drain tiny-0-0", "drain tiny-0-1"]


def test_a_path_is_taken_to_be_there() -> None:
    here = serving("n1", of=tiny(source="/models/old"))
    here = wanted(here, after_change(here.models[TINY], replace(tiny().profile, source="/models/new"), CLOCK))
    assert planned(here)[1] == ["drain tiny-0-0"]


def test_weights_that_cannot_be_brought_pause_the_change_and_are_tried_again() -> None:
    said, book = Rollouts(), Told(10.0)
    here, _ = planned(changed(serving("n1", of=tiny())))
    said.judge(here, CLOCK)
    (first,) = book.due({k: c for k, c in commands(here).items() if isinstance(c, FetchWeights)}, here, 0.0)
    book.sent(*first, here.nodes[NodeId("n1")].stream, 0.0)
    here = holds(here, "n1", Weights(source=NEW, error="the hub says no"))
    here, steps = planned(here)
    assert steps == []
    assert [event.kind for event in said.judge(here, CLOCK)] == ["rollout-paused"]
    assert str(rollout_of(here, here.models[TINY])).startswith(
        f"paused: {NEW} cannot be brought to n1: the hub says no; "
    )
    again = holds(here, "n1", Weights(source=NEW, error="the hub says no", fetching=True))
    assert said.judge(again, CLOCK) == ()
    assert "the hub says no, and is tried again now; " in str(rollout_of(again, here.models[TINY]))
    assert book.due(commands(here), here, 20.0) == ()
    assert [node for node, _ in book.due(commands(here), here, FETCH_AGAIN)] == ["n1"]


def test_where_the_disk_does_not_hold_both_nothing_goes_and_it_is_said() -> None:
    here = changed(has(serving("n1", of=tiny(disk=400 * GIB), disk=300 * GIB), "n1", OLD))
    here, steps = planned(here)
    assert (steps, fetches(here)) == ([], [])
    assert "300.0 GiB of disk for weights, 400.0 GiB needed" in here.unplaced[TINY].reasons[0].text


def test_a_disk_that_fills_up_with_the_weights_is_no_reason_against_them() -> None:
    here = has(serving("n1", of=tiny(disk=400 * GIB), disk=500 * GIB), "n1", OLD)
    here, _ = planned(changed(here))
    assert fetches(here) == [f"n1 {NEW}"]
    disk = here.nodes[NodeId("n1")].facts.host.disks[0]  # type: ignore[union-attr]
    here = hear(here, "n1", Heartbeat(disks=(replace(disk, free_bytes=200 * GIB),)), 2.0)
    here, _ = planned(here)
    assert (fetches(here), dict(here.unplaced)) == ([f"n1 {NEW}"], {})


def test_a_change_that_is_taken_back_brings_nothing_more() -> None:
    here, _ = planned(changed(serving("n1", of=tiny())))
    here, steps = planned(wanted(here, tiny()))
    assert (steps, fetches(here)) == ([], [])


async def test_what_if_says_what_a_fleet_then_does(autojump_clock: trio.testing.MockClock) -> None:
    for surge in (0, 1):
        async with ideal(register("n1", threads=2), register("n2", threads=2), settings=DEFAULT) as made:
            text = """
[[models]]
name = "tiny"
replicas = 2
surge = {surge}
engine = "llamacpp"
source = "{source}"
resources = {{ cpu_threads = 2, disk = "10GiB" }}
"""
            await made.fleet.apply(text.format(source=OLD, surge=surge))
            await trio.sleep(60)
            served = [s for s in made.world.shards.values() if s.state is ShardState.READY]
            assert len(served) == 2
            known = made.world.models[TINY]
            after = after_change(known, replace(known.profile, source=NEW), CLOCK)
            foreseen = what_if(made.world, ApplyModels((after,)), trio.current_time())
            assert foreseen.complete
            await made.fleet.apply(text.format(source=NEW, surge=surge))
            await trio.sleep(300)
            assert placements(foreseen.after) == placements(made.world)
            assert {s.spec.source for s in made.world.shards.values()} == {NEW}


def test_two_changes_do_not_bring_to_one_disk_what_it_cannot_hold() -> None:
    one = tiny(disk=60 * GIB)
    two = replace(one, name=ModelName("vast"))
    here = ready(settle(world(*(register(n, threads=4, disk=100 * GIB) for n in ("n1", "n2")), models=[one, two]))[0])
    for node in ("n1", "n2"):
        here = has(here, node, OLD)
    changed = (after_change(m, replace(m.profile, source=f"hf://org/{m.name}"), CLOCK) for m in here.models.values())
    here, steps = planned(wanted(here, *changed))
    assert (steps, len({node for node, _ in here.ahead}), len(here.ahead)) == ([], 2, 2)
    again, _ = planned(here, 2.0)
    assert again.ahead == here.ahead


def test_where_there_is_room_already_is_looked_up_once_for_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    many = replace(tiny(), replicas=20)
    here = serving(*(f"n{number:02}" for number in range(20)), of=many)
    for node in here.nodes:
        here = has(here, node, OLD)
    here = attrs.evolve(here, nodes=here.nodes.update(serving("x1", "x2", of=tiny()).nodes))
    here = wanted(here, after_change(many, replace(many.profile, args=("--new",)), CLOCK))
    looks: list[tuple[object, ...]] = []
    choose = Rooms.choose

    def counted(rooms: Rooms, *args: Any, **kwargs: Any) -> Choice | None:
        looks.append(args)
        return choose(rooms, *args, **kwargs)

    monkeypatch.setattr(Rooms, "choose", counted)
    for _ in range(2):
        here, _ = planned(here)
        assert fetches(here) == [f"x1 {OLD}"]
    assert len(looks) == 3

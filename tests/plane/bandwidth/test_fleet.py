from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from llmgw.cell import Cell
from llmgw.errors import Conflict
from llmgw.plane.bandwidth import history
from llmgw.plane.bandwidth.fleet import FleetTest, Order, candidates
from llmgw.plane.bandwidth.pair import Runner
from llmgw.plane.store.memory import MemoryStore
from llmgw.plane.world import World
from llmgw.rdma.results import Line, Note, PairResult, Parameters, Progress
from llmgw.wire.facts import NodeId
from tests.plane.bandwidth.lab import GOOD, Lab, node, world
from tests.plane.worlds import status
from tests.rdma.ports import roce

ONE_RAIL = Parameters(seconds=5)


def fleet(count: int) -> World:
    return world(*(node(f"n{at:02d}", at + 1, rails=1) for at in range(count)))


def slow(bad: str, gbps: float = 30.0) -> Callable[[str, str, str], float]:
    return lambda a, b, device: gbps if bad in (a, b) else GOOD


@attrs.define
class Bench:
    world: World
    lab: Lab
    store: MemoryStore = attrs.field(factory=MemoryStore)
    said: list[Line] = attrs.field(factory=list)

    def test(self, order: Order) -> FleetTest:
        return FleetTest(Runner(self.lab, trio.current_time), self.store, Cell(self.world), order, self.said.append)


@pytest.mark.parametrize("count", [2, 5, 6])
async def test_every_pair_is_tested_once_in_rounds_of_disjoint_pairs(count: int, autojump_clock: MockClock) -> None:
    bench = Bench(fleet(count), Lab())
    result = await bench.test(Order(ONE_RAIL)).run()
    pairs = [frozenset((line.a, line.b)) for line in bench.said if isinstance(line, PairResult)]
    assert len(pairs) == len(set(pairs)) == count * (count - 1) // 2 == result.tested
    assert result.rounds == count - 1 + count % 2
    assert result.suspects == ()
    assert bench.lab.running == set()


async def test_progress_counts_up_and_the_time_left_down(autojump_clock: MockClock) -> None:
    bench = Bench(fleet(4), Lab())
    await bench.test(Order(ONE_RAIL)).run()
    steps = [line for line in bench.said if isinstance(line, Progress)]
    assert [step.done for step in steps] == [0, 2, 4, 6]
    assert steps[-1].seconds_left == 0
    left = [step.seconds_left for step in steps]
    assert left == sorted(left, key=lambda seconds: -(seconds or 0))


async def test_the_bad_node_of_a_fleet_is_named_with_its_evidence(autojump_clock: MockClock) -> None:
    bench = Bench(fleet(6), Lab(speed=slow("n03")))
    result = await bench.test(Order(ONE_RAIL)).run()
    assert [suspect.parts for suspect in result.suspects] == [("n03 (adapter, cable or leaf port)",)]
    assert "n03" in result.suspects[0].evidence


async def test_a_search_finds_the_bad_node_in_a_few_rounds(autojump_clock: MockClock) -> None:
    bench = Bench(fleet(16), Lab(speed=slow("n07")))
    result = await bench.test(Order(ONE_RAIL, search=True)).run()
    assert [suspect.parts for suspect in result.suspects] == [("n07 (adapter, cable or leaf port)",)]
    assert result.rounds <= 2 * math.log2(16) + 3
    assert result.settled


async def test_a_test_that_was_cut_short_goes_on_where_it_stopped(autojump_clock: MockClock) -> None:
    bench = Bench(fleet(6), Lab())
    with trio.move_on_after(20):
        await bench.test(Order(ONE_RAIL)).run()
    before = {frozenset((line.a, line.b)) for line in bench.said if isinstance(line, PairResult)}
    assert 0 < len(before) < 15
    bench.said.clear()
    result = await bench.test(Order(ONE_RAIL, resume=True)).run()
    after = {frozenset((line.a, line.b)) for line in bench.said if isinstance(line, PairResult)}
    assert not before & after
    assert len(before | after) == result.tested == 15
    with pytest.raises(Conflict, match="cut short"):
        await bench.test(Order(ONE_RAIL, resume=True)).run()


async def test_a_node_that_is_lost_half_way_costs_its_pairs_and_no_more(autojump_clock: MockClock) -> None:
    lab = Lab()
    bench = Bench(fleet(4), lab)

    async def lose() -> None:
        await trio.sleep(8)
        lab.lost["n02"].set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lose)
        result = await bench.test(Order(ONE_RAIL)).run()
    assert result.tested == 6
    bad = [line for line in bench.said if isinstance(line, PairResult) and line.grade == "failed"]
    assert bad
    assert all("n02" in (line.a, line.b) for line in bad)


async def test_who_takes_no_part_is_told_with_the_reason(autojump_clock: MockClock) -> None:
    made = world(
        node("a", 1, rails=1),
        node("b", 2, rails=1),
        replace(node("busy", 3, rails=1), shards=(status("tiny-0-0"),)),
        replace(node("old", 4, rails=1), features=()),
        node("bare", 5, ports=()),
        node("gone", 6, rails=1),
    )
    gone = attrs.evolve(made.nodes[NodeId("gone")], connected=False)
    made = attrs.evolve(made, nodes=made.nodes.set(NodeId("gone"), gone))
    taken, skipped = candidates(made, Order())
    assert taken == ("a", "b")
    assert {name: skipped[name].split(" ")[0] for name in skipped} == {
        "busy": "it",
        "old": "its",
        "bare": "it",
        "gone": "no",
    }
    assert candidates(made, Order(force=True))[0] == ("a", "b", "busy")
    bench = Bench(made, Lab())
    result = await bench.test(Order(ONE_RAIL)).run()
    assert result.skipped == skipped
    assert sum(isinstance(line, Note) for line in bench.said) >= 4


def test_only_ports_of_the_fabric_that_was_asked_for_count() -> None:
    north = node("a", 1, ports=(roce("mlx5_0", "10.0.0.1", fabric="north"),))
    south = node("b", 2, ports=(roce("mlx5_0", "10.0.0.2", fabric="south"),))
    assert candidates(world(north, south), Order(fabric="north"))[0] == ("a",)


async def test_one_node_is_no_fleet(autojump_clock: MockClock) -> None:
    with pytest.raises(Conflict, match="a test takes two"):
        await Bench(fleet(1), Lab()).test(Order(ONE_RAIL)).run()


async def test_results_are_kept_newest_first_and_only_so_many() -> None:
    store = MemoryStore()
    for at in range(history.KEPT + 5):
        a, b = ("a", "b") if at % 2 else ("b", "a")
        await history.keep(store, PairResult(a=a, b=b, clock=float(at)))
    kept = await history.between(store, "b", "a")
    assert [result.clock for result in kept] == [float(at) for at in range(history.KEPT + 4, 4, -1)]
    assert (await history.latest(store))[("a", "b")].clock == history.KEPT + 4


async def test_two_results_of_one_moment_are_both_kept_and_broken_ones_passed_over() -> None:
    store = MemoryStore()
    await history.keep(store, PairResult(a="a", b="b", clock=1.0))
    await history.keep(store, PairResult(a="a", b="b", clock=1.0))
    await store.commit({f"{history.place('a', 'b')}zzz": b"{not json"})
    assert len(await history.between(store, "a", "b")) == 2

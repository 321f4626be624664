"""Who is told of whom when weights are to be fetched."""

from __future__ import annotations

import random
import time

import attrs
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmgw.plane.whence import NAMED, directed
from llmgw.plane.world import World
from llmgw.wire.agent import Register
from llmgw.wire.control import FetchWeights, StartShard
from llmgw.wire.facts import ModelName, NodeId, ReplicaId, ShardId, ShardSpec, Weights
from tests.plane.worlds import register
from tests.plane.worlds import world as nodes

SOURCE = "hf://org/model"


def holder(
    name: str,
    *,
    complete: bool = False,
    fetching: bool = False,
    share: str = ":7445",
    revision: str = "a",
    **more: object,
) -> Register:
    held = Weights(source=SOURCE, complete=complete, fetching=fetching, revision=revision)
    facts = replace(register(name), share=share, weights=(held,) if complete or fetching else ())
    return replace(facts, **more)


def start(name: str, source: str = SOURCE, engine: str = "vllm", rank: int = 0) -> tuple[NodeId, StartShard]:
    spec = ShardSpec(engine=engine, model=ModelName("m"), source=source, rank=rank)
    order = StartShard(
        shard=ShardId(f"m-{name}-{rank}"), replica=ReplicaId(f"m-{name}"), model=ModelName("m"), generation=1, spec=spec
    )
    return NodeId(name), order


def advice(world: World, *orders: tuple[NodeId, StartShard]) -> dict[str, tuple[tuple[str, ...], tuple[str, ...], str]]:
    found = directed(world, orders)
    assert [node for node, _ in found] == [node for node, _ in orders]
    return {node: (o.weights_from, o.weights_soon, o.weights_revision) for node, o in found}


def test_a_node_is_told_who_has_its_weights_and_which_commit() -> None:
    fleet = nodes(holder("n1", complete=True), holder("n2"), holder("n3", complete=True, share="192.0.2.7:99"))
    assert advice(fleet, start("n2"))["n2"] in (
        (("n1.example:7445", "192.0.2.7:99"), (), "a"),
        (("192.0.2.7:99", "n1.example:7445"), (), "a"),
    )


def test_who_shares_nothing_is_silent_or_is_not_connected_is_not_named() -> None:
    fleet = nodes(holder("n1", complete=True, share=""), holder("n2", complete=True), holder("n4"))
    away = attrs.evolve(fleet.nodes[NodeId("n2")], connected=False)
    fleet = attrs.evolve(fleet, nodes=fleet.nodes.set(away.id, away))
    assert advice(fleet, start("n4"))["n4"] == ((), (), "a")


def test_of_nodes_that_start_together_each_is_told_of_those_before_it() -> None:
    fleet = nodes(holder("n1"), holder("n2", share=""), holder("n3"), holder("n4"))
    told = advice(fleet, *(start(name) for name in ("n4", "n2", "n1", "n3")))
    assert {node: soon for node, (_, soon, _) in told.items()} == {
        "n1": (),
        "n2": ("n1.example:7445",),
        "n3": ("n1.example:7445",),
        "n4": ("n1.example:7445", "n3.example:7445"),
    }


def test_one_that_fetches_already_is_named_whatever_its_name() -> None:
    fleet = nodes(holder("n1"), holder("n9", fetching=True))
    assert advice(fleet, start("n1"))["n1"] == ((), ("n9.example:7445",), "")


def test_a_path_and_members_that_read_no_files_are_told_nothing() -> None:
    fleet = nodes(holder("n1", complete=True), holder("n2"))
    orders = [start("n2", source="/models/x"), start("n2", source="file:///x"), start("n2", engine="llamacpp", rank=1)]
    assert directed(fleet, orders) == tuple(orders)


def test_nearest_first_and_not_all_from_one() -> None:
    near = holder("n7", complete=True, labels={"rack": "b"})
    fleet = nodes(
        *(holder(f"n{n}", complete=True, labels={"rack": "a"}) for n in range(1, 7)),
        near,
        *(holder(f"x{n}", labels={"rack": "b" if n == 0 else "a"}) for n in range(20)),
    )
    told = advice(fleet, *(start(f"x{n}") for n in range(20)))
    assert told["x0"][0][0] == "n7.example:7445"
    assert len({whole[0] for whole, _, _ in told.values()}) > 3


def test_the_commit_of_most_nodes_is_the_fleets_and_a_refresh_is_told_none() -> None:
    fleet = nodes(
        holder("n1", complete=True, revision="b"),
        holder("n2", complete=True, revision="b"),
        holder("n3", complete=True, revision="a"),
        holder("n4"),
    )
    assert advice(fleet, start("n4"))["n4"][2] == "b"
    ((_, order),) = directed(fleet, [(NodeId("n4"), FetchWeights(source=SOURCE, refresh=True))])
    assert (order.weights_revision, len(order.weights_from)) == ("", 3)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=12), st.randoms())
def test_nobody_is_named_to_itself_and_the_order_of_orders_does_not_matter(
    kinds: list[tuple[bool, bool, bool]], chance: random.Random
) -> None:
    fleet = nodes(
        *(
            holder(f"n{n:02}", complete=complete, fetching=fetching, share=":1" if shares else "")
            for n, (complete, fetching, shares) in enumerate(kinds)
        )
    )
    orders = [start(f"n{n:02}") for n in range(len(kinds))]
    told = advice(fleet, *orders)
    assert advice(fleet, *chance.sample(orders, len(orders))) == told
    for node, (whole, soon, _) in told.items():
        assert not kinds[int(node[1:])][0] or not (whole or soon)  # it has it
        assert f"{node}.example:1" not in (*whole, *soon)
        assert not set(whole) & set(soon)
        assert max(len(whole), len(soon)) <= NAMED


def test_in_a_large_fleet_the_nodes_ask_different_ones_of_those_that_are_about_to_have_it() -> None:
    fleet = nodes(*(holder(f"n{n:03}") for n in range(300)))
    told = advice(fleet, *(start(f"n{n:03}") for n in range(300)))
    assert told["n000"][1] == ()
    assert {len(soon) for node, (_, soon, _) in told.items() if node > "n008"} == {NAMED}
    assert all("n000.example:7445" in soon for node, (_, soon, _) in told.items() if node != "n000")
    assert all(name.partition(".")[0] < node for node, (_, soon, _) in told.items() for name in soon)
    assert len({name for _, soon, _ in told.values() for name in soon}) > 150


def test_advice_for_a_thousand_nodes_of_a_thousand_that_have_it_is_quick() -> None:
    labels = {"rack": "r1", "zone": "z"}
    having = (holder(f"h{n:04}", complete=True, labels=labels) for n in range(1000))
    fleet = nodes(*having, *(holder(f"n{n:04}", labels=labels) for n in range(1000)))
    began = time.process_time()
    told = advice(fleet, *(start(f"n{n:04}") for n in range(1000)))
    spent = time.process_time() - began
    assert spent < 2.0, f"{spent:.2f} s"  # a fifth of that on an idle machine
    assert len({whole[0] for whole, _, _ in told.values()}) > 300

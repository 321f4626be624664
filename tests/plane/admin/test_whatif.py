"""What-ifs over the admin API: by name, in a thread, and nothing is changed."""

from __future__ import annotations

import gc
from pathlib import Path
from time import process_time

import attrs
import pytest
import trio
from immutables import Map
from msgspec.structs import replace

from llmgw.errors import NotFound
from llmgw.plane.admin import whatifview
from llmgw.plane.whatif import LoseFabric, LoseNode
from llmgw.plane.world import Shard, World
from llmgw.wire.agent import ShardStatus
from llmgw.wire.facts import NodeId, Port, ShardState
from llmgw.wire.whatifapi import WhatIfReply
from tests.plane.admin.rig import served
from tests.plane.worlds import model, ready, register, settle, world


def small() -> World:
    nodes = (register("n1", threads=1), register("n2", threads=1), register("n3", threads=1))
    return ready(settle(world(*nodes, models=[model("tiny", 2)]))[0])


def railed(name: str, fabric: str) -> World:
    ports = (Port(device="mlx5_0", kind="ib", state="ACTIVE", fabric=fabric),)
    return world(replace(register(name), ports=ports))


@pytest.mark.real
async def test_a_what_if_says_what_would_happen_and_changes_nothing(tmp_path: Path) -> None:
    async with served(tmp_path, small()) as rig, rig.client() as http:
        before = rig.fleet.world.value
        answer = await http.post("/api/v1/what-if", json={"kind": "drain", "name": "n1"})
        assert answer.status_code == 200, answer.text
        assert rig.fleet.world.value is before
    found = answer.json()
    assert found["text"] == "n1 is drained"
    moved = [(f["replica"], f["by"], f["before"], f["after"]) for f in found["replicas"] if f["what"] != "stays"]
    assert moved == [("tiny-0", "tiny-2", ["n1"], ["n3"])]
    assert list(found) == list(WhatIfReply.__struct_fields__)


@pytest.mark.real
@pytest.mark.parametrize(
    ("order", "status", "words"),
    [
        ({"kind": "drain", "name": "n4"}, 404, "there is no node 'n4'"),
        ({"kind": "lose", "name": "n11"}, 404, "did you mean 'n1'"),
        ({"kind": "melt", "name": "n1"}, 400, "use one of drain, lose, apply"),
        ({"kind": "apply", "models": "[[models]]"}, 400, "name"),
        ({"kind": "drain", "node": "n1"}, 400, "node"),
    ],
)
async def test_what_cannot_be_meant_is_refused_in_words(
    tmp_path: Path, order: dict[str, str], status: int, words: str
) -> None:
    async with served(tmp_path, small()) as rig, rig.client() as http:
        answer = await http.post("/api/v1/what-if", json=order)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert words in f"{error['message']}: {error['remedy']}"


def test_a_name_is_a_nodes_first_and_a_fabrics_label_then() -> None:
    assert whatifview.lost(railed("blue", "blue"), None, "blue")[0] == LoseNode(NodeId("blue"))
    supposed, text = whatifview.lost(railed("n1", "blue"), None, "blue")
    assert supposed == LoseFabric("blue", frozenset({(NodeId("n1"), "mlx5_0", 1)}))
    assert text == "the fabric blue is lost (1 ports of 1 node)"
    with pytest.raises(NotFound, match="did you mean 'blue'"):
        whatifview.lost(railed("n1", "blue"), None, "blu")


def thousand() -> World:
    """A full fleet: 1,000 nodes of 8 GPUs with a replica of each of 500 models on two nodes each."""
    from benchmarks.place import fleet, wanted
    from llmgw.plane.plan import plan
    from llmgw.plane.steps import enact

    here = fleet(*(wanted(f"m{n}", 2, 4) for n in range(500)))
    here = enact(here, plan(here, 0.0).steps, 0.0, 0.0)
    nodes = here.nodes.update({id: attrs.evolve(node, connected=True) for id, node in here.nodes.items()})
    return attrs.evolve(here, nodes=nodes, shards=Map({shard.id: _ready(shard) for shard in here.shards.values()}))


def _ready(shard: Shard) -> Shard:
    said = ShardStatus(
        shard=shard.id, replica=shard.replica, model=shard.model, generation=1, state=ShardState.READY, port=1
    )
    return attrs.evolve(shard, status=said, status_at=0.0, ready_at=0.0)


@pytest.mark.real
@pytest.mark.slow
async def test_the_planes_loop_goes_on_while_a_thousand_nodes_are_thought_through(tmp_path: Path) -> None:
    here = thousand()
    victim = min(shard.node for shard in here.shards.values())
    late: list[float] = []  # in seconds that this process had a processor: on a busy machine it has none for a while

    async def watch() -> None:
        while True:
            began = process_time()
            await trio.sleep(0.002)
            late.append(process_time() - began)

    async with served(tmp_path, here) as rig, rig.client() as http, trio.open_nursery() as nursery:
        gc.disable()  # a collection of all that the tests have made would hold up both
        try:
            nursery.start_soon(watch)
            began = process_time()
            answer = await http.post("/api/v1/what-if", json={"kind": "lose", "name": victim})
            took = process_time() - began
        finally:
            gc.enable()
        nursery.cancel_scope.cancel()
    assert answer.status_code == 200, answer.text
    assert answer.json()["complete"]
    late.sort()
    print(f"{took:.2f} s, {len(late)} looks, late by p99 {late[int(0.99 * len(late))]:.4f} s, at most {late[-1]:.4f} s")
    assert took < 5  # a fifth of a second on a machine with nothing else to do
    assert late[len(late) // 2] < 0.02
    assert late[-1] < 0.03 + took / 2  # a loop that waits for the answer is late by all of it

"""Fetching weights by the API: what each node is told, and who is refused."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import trio
from immutables import Map
from msgspec.structs import replace

from llmgw.plane.world import Model, Profile, World
from llmgw.wire.agent import REFRESH
from llmgw.wire.control import FetchWeights
from llmgw.wire.facts import ModelName, NodeId, Weights
from tests.plane.admin.rig import served
from tests.plane.worlds import register, world

pytestmark = pytest.mark.real

SOURCE = "hf://org/tiny"


def fleet(*features: str) -> World:
    """node-a, which is asked, and a node that has the model and shares it."""
    holder = replace(
        register("gpu-01"), share=":7445", weights=(Weights(source=SOURCE, complete=True, revision="abc"),)
    )
    made = world(replace(register("node-a"), features=features), holder)
    model = Model(name=ModelName("tiny"), profile=Profile(engine="vllm", source=SOURCE))
    return attrs.evolve(made, models=Map({model.name: model}))


async def test_a_node_is_told_what_to_fetch_from_whom_and_at_which_commit(tmp_path: Path) -> None:
    async with served(tmp_path, fleet(REFRESH)) as rig, rig.client() as http:
        for asked, text in (
            ({"source": SOURCE, "nodes": ["node-a"], "bytes_per_second": 7}, "node-a will fetch hf://org/tiny"),
            ({"source": "tiny", "nodes": ["node-a"]}, "node-a will fetch hf://org/tiny"),
            ({"source": "tiny", "nodes": ["node-a"], "refresh": True}, "the newest of hf://org/tiny"),
        ):
            answer = await http.post("/api/v1/weights/fetch", json=asked)
            assert answer.status_code == 200, answer.text
            assert text in answer.json()["text"]
        told = [await rig.agent.fetched.receive() for _ in range(3)]
    named = FetchWeights(source=SOURCE, weights_from=("gpu-01.example:7445",), weights_revision="abc")
    assert told == [replace(named, bytes_per_second=7), named, replace(named, weights_revision="", refresh=True)]


async def test_an_agent_that_knows_no_refresh_is_not_asked_for_one(tmp_path: Path) -> None:
    async with served(tmp_path, fleet()) as rig, rig.client() as http:
        asked = {"source": "tiny", "nodes": ["node-a"], "refresh": True}
        answer = await http.post("/api/v1/weights/fetch", json=asked)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "too-old")
        assert "node-a" in answer.json()["error"]["message"]
        with pytest.raises(trio.WouldBlock):
            rig.agent.fetched.receive_nowait()


async def test_a_node_that_is_away_says_where_it_shares_and_different_commits_are_a_warning(tmp_path: Path) -> None:
    other = replace(register("gpu-02"), weights=(Weights(source=SOURCE, complete=True, revision="def"),))
    shown = fleet()
    both = world(other).nodes[NodeId("gpu-02")]
    shown = attrs.evolve(shown, nodes=shown.nodes.set(both.id, both))
    async with served(tmp_path, shown) as rig, rig.client() as http:
        answer = (await http.get("/api/v1/weights", params=[("node", "gpu-01"), ("node", "gpu-02")])).json()
    assert [cache["shared_at"] for cache in answer["nodes"]] == ["gpu-01.example:7445", ""]
    assert all(cache["error"] for cache in answer["nodes"])
    assert len(answer["warnings"]) == 1
    assert "abc on gpu-01; def on gpu-02" in answer["warnings"][0]

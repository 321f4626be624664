"""A replica over several nodes, as an operator has it: real agents, a real plane, llama.cpp with its RPC back end.

Every member is a process of its own node; what happens to one of them happens to the replica.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from llmgw.tinymodel import write_tiny
from tests.e2e.rig import Rig, rig, traffic

pytestmark = [pytest.mark.real, pytest.mark.slow]

WIDE = """
[[models]]
name = "tiny"
replicas = {replicas}
[models.profile]
engine = "llamacpp"
source = "{source}"
nodes = {nodes}
context = 2048
args = ["-np", "4"]
resources = {{ cpu_threads = 1, memory = "256MiB" }}
"""


@asynccontextmanager
async def wide(root: Path, nodes: int, *, members: int = 2, replicas: int = 1, **more: Any) -> AsyncIterator[Rig]:
    """A fleet on which a model over several nodes is ready."""
    async with rig(root, nodes=nodes, **more) as fleet:
        source = root / "wide.gguf"
        write_tiny(source, layers=6)
        await want(fleet, members, replicas)
        await fleet.until(lambda: fleet.ready(replicas), within=60, what="the replica is ready")
        yield fleet


async def want(fleet: Rig, members: int, replicas: int) -> None:
    text = WIDE.format(replicas=replicas, source=fleet.root / "wide.gguf", nodes=members)
    answer = await fleet.api.post("apply", content=text)
    assert answer.status_code == 200, answer.text


async def test_a_replica_of_three_nodes_serves_and_is_one_thing(tmp_path: Path) -> None:
    async with wide(tmp_path, 3, members=3) as fleet:
        shards = await fleet.shards()
        assert sorted(shards) == ["tiny-0-0", "tiny-0-1", "tiny-0-2"]
        assert len({shard["node"] for shard in shards.values()}) == 3
        assert len({shard["generation"] for shard in shards.values()}) == 1
        assert len(fleet.engines()) == 3
        async with httpx.AsyncClient(timeout=30) as client:
            answer = await fleet.chat(client)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"]
        await want(fleet, 3, 0)
        await fleet.until(lambda: _engines(fleet, 0), within=20, what="every member has ended")


@pytest.mark.parametrize("rank", [0, 1])
async def test_any_members_death_restarts_the_whole_replica(tmp_path: Path, rank: int) -> None:
    async with wide(tmp_path, 2) as fleet:
        before = await fleet.shards()
        os.kill(before[f"tiny-0-{rank}"]["pid"], signal.SIGKILL)
        await fleet.until(lambda: _newer(fleet, before), within=20, what="a new generation begins")
        await fleet.until(lambda: fleet.ready(1), within=40, what="the replica is ready again")
        after = await fleet.shards()
        assert len({shard["generation"] for shard in after.values()}) == 1
        assert not {shard["pid"] for shard in after.values()} & {shard["pid"] for shard in before.values()}
        assert len(fleet.engines()) == 2
        async with httpx.AsyncClient(timeout=30) as client:
            assert (await fleet.chat(client)).status_code == 200


async def test_agents_and_planes_may_die_under_it(tmp_path: Path) -> None:
    async with wide(tmp_path, 2, gateways=1) as fleet:
        before = await fleet.shards()
        async with httpx.AsyncClient(timeout=30) as client:
            await fleet.until(lambda: _answers(fleet, client), within=15, what="the gateway has a route")
        async with traffic(fleet) as talk:
            for name in ("n1", "n2"):
                await fleet.kill(fleet.nodes[name])
            assert fleet.plane is not None
            await fleet.kill(fleet.plane)
            await fleet.start_plane()
            for name in ("n1", "n2"):
                await fleet.start_node(name)
            await fleet.until(lambda: fleet.ready(1), within=30, what="it is adopted")
            good = talk.good
            await trio.sleep(4)
            assert talk.good > good
        assert talk.failures == []
        after = await fleet.shards()
        same = {id: (shard["pid"], shard["generation"], shard["node"]) for id, shard in before.items()}
        assert {id: (shard["pid"], shard["generation"], shard["node"]) for id, shard in after.items()} == same


async def test_a_lost_members_node_moves_the_replica_and_nothing_is_twice(tmp_path: Path) -> None:
    async with wide(tmp_path, 3) as fleet:
        before = await fleet.shards()
        victim = before["tiny-0-1"]["node"]
        frozen = fleet.nodes[victim]
        frozen.send_signal(signal.SIGSTOP)
        await fleet.until(lambda: _moved(fleet, victim), within=60, what="the replica moves off the silent node")
        await fleet.until(lambda: fleet.ready(1), within=60, what="it is ready elsewhere")
        async with httpx.AsyncClient(timeout=30) as client:
            assert (await fleet.chat(client)).status_code == 200
        frozen.send_signal(signal.SIGCONT)
        await fleet.until(lambda: _engines(fleet, 2), within=30, what="the old member is stopped")


async def test_a_drained_nodes_replica_goes_elsewhere_without_a_failed_request(tmp_path: Path) -> None:
    async with wide(tmp_path, 3) as fleet:
        before = await fleet.shards()
        leader = before["tiny-0-0"]["node"]
        async with traffic(fleet) as talk:
            await fleet.until(lambda: _good(talk, 5), what="requests are answered")
            answer = await fleet.api.post(f"nodes/{leader}/drain")
            assert answer.status_code == 200, answer.text
            await fleet.until(lambda: _moved(fleet, leader), within=60, what="the replica leaves the node")
            await fleet.until(lambda: fleet.ready(1), within=60, what="it is ready elsewhere")
            good = talk.good
            await fleet.until(lambda: _good(talk, good + 5), what="requests go on")
        assert talk.failures == []


async def _engines(fleet: Rig, count: int) -> bool:
    return len(fleet.engines()) == count


async def _newer(fleet: Rig, before: dict[str, Any]) -> bool:
    now = await fleet.shards()
    return len(now) == len(before) and all(now[id]["generation"] > shard["generation"] for id, shard in before.items())


async def _moved(fleet: Rig, node: str) -> bool:
    shards = await fleet.shards()
    return bool(shards) and all(shard["node"] != node for shard in shards.values())


async def _good(talk: Any, count: int) -> bool:
    return bool(talk.good >= count)


async def _answers(fleet: Rig, client: httpx.AsyncClient) -> bool:
    return (await fleet.chat(client)).status_code == 200

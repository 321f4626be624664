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

import pytest
import trio

from llmgw.demo.processes import call
from llmgw.tinymodel import write_tiny
from tests.e2e.rig import SOON_LOST, Rig, patient, rig, traffic
from tests.leftovers import alive

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
        await fleet.until(lambda: fleet.ready(replicas), what="the replica is ready")
        yield fleet


async def want(fleet: Rig, members: int, replicas: int) -> None:
    text = WIDE.format(replicas=replicas, source=fleet.root / "wide.gguf", nodes=members)
    answer = await fleet.api.post("apply", content=text)
    assert answer.status_code == 200, answer.text


async def members(fleet: Rig) -> list[dict[str, Any]]:
    """The members of the one replica by rank."""
    return sorted((await fleet.shards()).values(), key=lambda shard: str(shard["id"]))


async def up(fleet: Rig, generation: int, count: int) -> bool:
    found = await members(fleet)
    return [(shard["state"], shard["generation"]) for shard in found] == [("ready", generation)] * count


async def test_a_replica_of_three_nodes_serves_begins_again_as_one_and_goes_as_one(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "six.gguf", layers=6)
    async with rig(tmp_path, nodes=3) as fleet, patient() as client:
        answer = await fleet.api.post("apply", content=WIDE.format(source=source, nodes=3, replicas=1))
        assert answer.status_code == 200, answer.text
        await fleet.until(lambda: up(fleet, 1, 3), what="all three members are ready")
        assert (await fleet.chat(client)).status_code == 200
        first = await members(fleet)
        assert {shard["node"] for shard in first} == {"n1", "n2", "n3"}

        # An agent's death is no member's: it adopts its own, and nobody begins again.
        await fleet.kill(fleet.nodes[str(first[1]["node"])])
        await fleet.start_node(str(first[1]["node"]))

        async def adopted() -> bool:
            return bool((await members(fleet))[1].get("adopted")) and await up(fleet, 1, 3)

        await fleet.until(adopted, what="the follower is adopted")
        assert (await fleet.chat(client)).status_code == 200
        assert [shard["pid"] for shard in await members(fleet)] == [shard["pid"] for shard in first]

        # A member's death is everybody's: the whole replica is begun again, at one new generation.
        os.kill(int(first[2]["pid"]), signal.SIGKILL)
        await fleet.until(lambda: up(fleet, 2, 3), what="the whole replica serves again")
        assert (await fleet.chat(client)).status_code == 200
        second = await members(fleet)
        assert {shard["pid"] for shard in first} & {shard["pid"] for shard in second} == set()
        # Each knew of the others' end: one attempt failed, not three.
        assert "RPC: 127.0.0.1:" in await call(
            "llmgw",
            "ctl",
            "--dir",
            str(fleet.directory),
            "replica",
            str((await fleet.replicas())[0]["id"]),
            env=fleet.env,
        )

        assert (await fleet.api.post("apply", content="")).status_code == 200

        async def gone() -> bool:
            return await fleet.replicas() == [] and not fleet.engines()

        await fleet.until(gone, what="nothing is left")
        assert not any(alive(shard["pid"]) for shard in second)


async def test_the_leaders_death_restarts_the_whole_replica(tmp_path: Path) -> None:
    async with wide(tmp_path, 2) as fleet:
        before = await fleet.shards()
        os.kill(before["tiny-0-0"]["pid"], signal.SIGKILL)
        await fleet.until(lambda: _newer(fleet, before), what="a new generation begins")
        await fleet.until(lambda: fleet.ready(1), what="the replica is ready again")
        after = await fleet.shards()
        assert len({shard["generation"] for shard in after.values()}) == 1
        assert not {shard["pid"] for shard in after.values()} & {shard["pid"] for shard in before.values()}
        assert len(fleet.engines()) == 2
        async with patient() as client:
            assert (await fleet.chat(client)).status_code == 200


async def test_agents_and_planes_may_die_under_it(tmp_path: Path) -> None:
    async with wide(tmp_path, 2, gateways=1) as fleet:
        before = await fleet.shards()
        async with patient() as client:
            await fleet.until(lambda: fleet.chats(client), what="the gateway has a route")
        async with traffic(fleet) as talk:
            for name in ("n1", "n2"):
                await fleet.kill(fleet.nodes[name])
            assert fleet.plane is not None
            await fleet.kill(fleet.plane)
            await fleet.start_plane()
            for name in ("n1", "n2"):
                await fleet.start_node(name)
            await fleet.until(lambda: fleet.ready(1), what="it is adopted")
            good = talk.good
            await fleet.until(lambda: talk.reached(good + 20), what="requests go on")
            await trio.sleep(2)
        assert talk.failures == []
        after = await fleet.shards()
        same = {id: (shard["pid"], shard["generation"], shard["node"]) for id, shard in before.items()}
        assert {id: (shard["pid"], shard["generation"], shard["node"]) for id, shard in after.items()} == same


async def test_a_lost_members_node_moves_the_replica_and_nothing_is_twice(tmp_path: Path) -> None:
    async with wide(tmp_path, 3, settings=SOON_LOST) as fleet:
        before = await fleet.shards()
        victim = before["tiny-0-1"]["node"]
        frozen = fleet.nodes[victim]
        frozen.send_signal(signal.SIGSTOP)
        await fleet.until(lambda: _moved(fleet, victim), what="the replica moves off the silent node")
        await fleet.until(lambda: fleet.ready(1), what="it is ready elsewhere")
        async with patient() as client:
            assert (await fleet.chat(client)).status_code == 200
        frozen.send_signal(signal.SIGCONT)
        await fleet.until(lambda: _engines(fleet, 2), what="the old member is stopped")


async def _engines(fleet: Rig, count: int) -> bool:
    return len(fleet.engines()) == count


async def _newer(fleet: Rig, before: dict[str, Any]) -> bool:
    now = await fleet.shards()
    return len(now) == len(before) and all(now[id]["generation"] > shard["generation"] for id, shard in before.items())


async def _moved(fleet: Rig, node: str) -> bool:
    shards = await fleet.shards()
    return bool(shards) and all(shard["node"] != node for shard in shards.values())

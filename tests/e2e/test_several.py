"""A replica of several nodes as an operator has it: a plane and agents as processes, llama.cpp over RPC."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmgw.demo.processes import call
from llmgw.tinymodel import write_tiny
from tests.e2e.rig import Rig, rig

pytestmark = [pytest.mark.real, pytest.mark.slow]

SEVERAL = """
[[models]]
name = "tiny"
replicas = 1
[models.profile]
engine = "llamacpp"
source = "{source}"
context = 512
nodes = {nodes}
args = ["-np", "2"]
resources = {{ cpu_threads = 1, memory = "128MiB" }}
"""


async def members(fleet: Rig) -> list[dict[str, Any]]:
    """The members of the one replica by rank."""
    return sorted((await fleet.shards()).values(), key=lambda shard: str(shard["id"]))


async def up(fleet: Rig, generation: int, count: int) -> bool:
    found = await members(fleet)
    return [(shard["state"], shard["generation"]) for shard in found] == [("ready", generation)] * count


async def test_a_replica_of_three_nodes_serves_begins_again_as_one_and_goes_as_one(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "six.gguf", layers=6)
    async with rig(tmp_path, nodes=3) as fleet, httpx.AsyncClient(timeout=30) as client:
        answer = await fleet.api.post("apply", content=SEVERAL.format(source=source, nodes=3))
        assert answer.status_code == 200, answer.text
        await fleet.until(lambda: up(fleet, 1, 3), within=60, what="all three members are ready")
        assert (await fleet.chat(client)).status_code == 200
        first = await members(fleet)
        assert {shard["node"] for shard in first} == {"n1", "n2", "n3"}

        # An agent's death is no member's: it adopts its own, and nobody begins again.
        await fleet.kill(fleet.nodes[str(first[1]["node"])])
        await fleet.start_node(str(first[1]["node"]))

        async def adopted() -> bool:
            return bool((await members(fleet))[1].get("adopted")) and await up(fleet, 1, 3)

        await fleet.until(adopted, within=20, what="the follower is adopted")
        assert (await fleet.chat(client)).status_code == 200
        assert [shard["pid"] for shard in await members(fleet)] == [shard["pid"] for shard in first]

        # A member's death is everybody's: the whole replica is begun again, at one new generation.
        os.kill(int(first[2]["pid"]), signal.SIGKILL)
        await fleet.until(lambda: up(fleet, 2, 3), within=60, what="the whole replica serves again")
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

        await fleet.until(gone, within=30, what="nothing is left")
        assert not any(_lives(shard) for shard in second)


def _lives(shard: dict[str, Any]) -> bool:
    return Path(f"/proc/{shard['pid']}").exists()

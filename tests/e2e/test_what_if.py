"""`llmgw ctl what-if` against a running fleet: what it foretells is what then happens, over real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmgw.demo.processes import call
from tests.e2e.rig import MODEL, SOON_LOST, Rig, rig
from tests.leftovers import end

pytestmark = [pytest.mark.real, pytest.mark.slow]


async def ctl(fleet: Rig, *args: str) -> str:
    return await call("llmgw", "ctl", "--dir", str(fleet.directory), *args, env=fleet.env)


async def foretold(fleet: Rig, *args: str) -> dict[str, Any]:
    """What would happen, as JSON; the same is printed as a table."""
    found: dict[str, Any] = json.loads(await ctl(fleet, "what-if", *args, "-o", "json"))
    print(await ctl(fleet, "what-if", *args))
    return found


def places(answer: dict[str, Any]) -> dict[str, list[str]]:
    """Where every replica is in the end."""
    return {fate["by"] or fate["replica"]: fate["after"] for fate in answer["replicas"] if fate["after"]}


async def runs(fleet: Rig) -> dict[str, list[str]]:
    return {
        replica["id"]: [shard["node"] for shard in replica["shards"]]
        for replica in await fleet.replicas()
        if replica["state"] == "ready"
    }


async def test_a_drain_does_what_was_foretold(tmp_path: Path) -> None:
    async with rig(tmp_path, nodes=2, replicas=2) as fleet:
        before = await runs(fleet)
        victim = min(node for nodes in before.values() for node in nodes)
        answer = await foretold(fleet, "drain", victim)
        assert await runs(fleet) == before
        assert answer["complete"]
        assert not answer["gaps"]
        assert {fate["what"] for fate in answer["replicas"]} == {"replaced", "stays"}
        await ctl(fleet, "drain", victim)

        async def over() -> bool:
            return await runs(fleet) == places(answer) and len(await fleet.replicas()) == 2

        await fleet.until(over, what=f"the replicas are {places(answer)}")


async def test_a_lost_node_and_an_applied_file_do_what_was_foretold(tmp_path: Path) -> None:
    async with rig(tmp_path, nodes=2, replicas=2, settings=SOON_LOST) as fleet:
        models = tmp_path / "models.toml"
        # Two nodes of one machine differ by what of its memory is free at the moment, which nobody can foretell.
        await ctl(fleet, "label", "n2", "zone=b")
        models.write_text(
            MODEL.format(name="tiny", replicas=1, source=tmp_path / "tiny.gguf")
            + MODEL.format(name="other", replicas=1, source=tmp_path / "tiny.gguf")
            + 'labels = { zone = "b" }\n'
        )
        answer = await foretold(fleet, "apply", str(models))
        await ctl(fleet, "apply", "-f", str(models))

        async def applied() -> bool:
            return await runs(fleet) == places(answer) and len(await fleet.replicas()) == 2

        await fleet.until(applied, what=f"the replicas are {places(answer)}")
        answer = await foretold(fleet, "lose", "n1")
        pids = [shard["pid"] for shard in (await fleet.shards()).values() if shard["node"] == "n1"]
        await fleet.kill(fleet.nodes["n1"])
        end(pids)

        async def lost() -> bool:
            return await runs(fleet) == places(answer)

        await fleet.until(lost, what=f"the replicas are {places(answer)}")

"""Replicas of several nodes in a fleet that is half upgraded: no old agent is given a member of one (A11)."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from llmgw.plane.checks import Need, refusals
from llmgw.plane.rooms import room
from llmgw.tinymodel import write_tiny
from llmgw.wire.agent import GANGS
from llmgw.wire.facts import NodeId
from tests.leftovers import alive
from tests.plane.worlds import model, profile, register, world
from tests.upgrade.releases import PRESENT, previous
from tests.upgrade.rig import Mixed, mixed

SEVERAL = """
[[models]]
name = "wide"
replicas = 1
[models.profile]
engine = "llamacpp"
source = "{source}"
nodes = 2
context = 512
resources = {{ cpu_threads = 1, memory = "128MiB" }}
"""


@pytest.mark.parametrize(("nodes", "expected"), [(1, []), (2, ["agent"])])
def test_the_check_is_called_agent_and_names_the_version(nodes: int, expected: list[str]) -> None:
    old = replace(register("n1"), features=("doctor",), version="0.1.0")
    here = world(old)
    need = Need.of(model(of=profile(nodes=nodes)))
    found = list(refusals(room(here.nodes[NodeId("n1")], (), 10.0), need))
    assert [reason.check for reason in found] == expected
    for reason in found:
        assert (reason.value, reason.needed) == ("0.1.0", GANGS)
        assert "upgrade its agent" in reason.text


@pytest.mark.real
@pytest.mark.slow
async def test_a_replica_of_several_nodes_waits_for_the_agents_that_can_start_it(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "wide.gguf")
    async with mixed(tmp_path, PRESENT, [previous(), PRESENT]) as fleet:
        assert (await fleet.api.post("apply", content=SEVERAL.format(source=source))).status_code == 200

        async def explained() -> bool:
            why = (await fleet.get("why/wide"))["reasons"]
            return [(r["node"], r["value"]) for r in why if r["check"] == "agent"] == [("n1", previous().version)]

        await fleet.until(explained, what="ctl why names the old agent")
        assert fleet.engines() == []
        await fleet.stop_node("n1")
        await fleet.node_of("n1", PRESENT)
        await fleet.until(lambda: whole(fleet), what="both nodes carry it once n1 is upgraded")


async def whole(fleet: Mixed) -> bool:
    shards = list((await fleet.shards()).values())
    return len(shards) == 2 and all(shard["state"] == "ready" for shard in shards)


@pytest.mark.real
@pytest.mark.slow
async def test_a_replica_leaves_a_node_whose_agent_is_taken_back_below_what_it_needs(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "wide.gguf")
    async with mixed(tmp_path, PRESENT, [PRESENT, PRESENT, PRESENT]) as fleet:
        assert (await fleet.api.post("apply", content=SEVERAL.format(source=source))).status_code == 200
        await fleet.until(lambda: whole(fleet), what="two nodes carry it")
        member = next(shard for shard in (await fleet.shards()).values() if shard["id"].endswith("-1"))
        node = member["node"]
        await fleet.stop_node(node)
        await fleet.node_of(node, previous())

        async def elsewhere() -> bool:
            return await whole(fleet) and all(shard["node"] != node for shard in (await fleet.shards()).values())

        await fleet.until(elsewhere, what="the nodes that can carry it do")
        assert {shard["generation"] for shard in (await fleet.shards()).values()} != {member["generation"]}

        async def gone() -> bool:
            await trio.lowlevel.checkpoint()
            return not alive(member["pid"])

        await fleet.until(gone, what="its old member is gone")

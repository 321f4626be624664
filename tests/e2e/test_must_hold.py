"""What must hold when parts of a running fleet die, over real processes: agents, plane, engines, gateways."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import trio

from tests.e2e.rig import SOON_LOST, Rig, patient, rig, traffic

pytestmark = [pytest.mark.real, pytest.mark.slow]


async def test_an_agents_death_touches_no_engine_and_no_request(tmp_path: Path) -> None:
    async with rig(tmp_path, nodes=1, replicas=1) as fleet:
        (before,) = (await fleet.shards()).values()
        engines = fleet.engines()
        assert engines == [before["pid"]]
        async with traffic(fleet) as talk:
            await fleet.kill(fleet.nodes["n1"])
            await fleet.until(lambda: _stage(fleet, "n1", "unreachable"), what="the silence is noticed")
            good = talk.good
            await fleet.until(lambda: talk.reached(good + 10), what="requests go on meanwhile")
            await fleet.start_node("n1")
            await fleet.until(lambda: fleet.adopted(1), what="the replica is adopted")
            await trio.sleep(1)
        (after,) = (await fleet.shards()).values()
        assert (after["pid"], after["generation"], after["restarts"]) == (before["pid"], before["generation"], 0)
        assert fleet.engines() == engines
        assert talk.failures == []
        assert talk.good > good


async def test_the_planes_death_touches_no_engine_and_gateways_relay_on(tmp_path: Path) -> None:
    async with rig(tmp_path, nodes=2, replicas=2, gateways=2) as fleet:
        before = await fleet.shards()
        engines = fleet.engines()
        async with patient() as client:
            await fleet.until(lambda: fleet.chats(client), what="the gateways have routes")
        async with traffic(fleet) as talk:
            await fleet.until(lambda: talk.reached(10), what="requests are answered")
            assert fleet.plane is not None
            await fleet.kill(fleet.plane)
            good = talk.good
            await fleet.until(lambda: talk.reached(good + 20), what="requests go on without a plane")
            await fleet.start_plane()
            await fleet.until(lambda: fleet.ready(2), what="everything is adopted")
            await fleet.until(lambda: _settled(fleet), what="what is missing would be placed now")
            await trio.sleep(2)
        after = await fleet.shards()
        assert {name: (s["pid"], s["generation"], s["node"]) for name, s in after.items()} == {
            name: (s["pid"], s["generation"], s["node"]) for name, s in before.items()
        }
        assert fleet.engines() == engines
        assert talk.failures == []


async def test_an_engines_death_is_told_at_once_and_mended_without_help(tmp_path: Path) -> None:
    async with rig(tmp_path, nodes=2, replicas=2) as fleet:
        before = await fleet.shards()
        victim = sorted(before.values(), key=lambda shard: str(shard["id"]))[0]
        async with traffic(fleet) as talk:
            await fleet.until(lambda: talk.reached(5), what="requests are answered")
            os.kill(victim["pid"], signal.SIGKILL)
            # Whoever only asks an engine how it is would need three vain questions, and five seconds for each.
            await fleet.until(lambda: _failed(fleet, victim["id"]), within=10, what="the failure is told", every=0.02)
            await fleet.until(lambda: fleet.ready(2), what="a new engine is ready")
        after = (await fleet.shards())[victim["id"]]
        assert after["pid"] != victim["pid"]
        assert after["generation"] > victim["generation"]
        assert after["last_failure"]["signal"] == "SIGKILL"
        assert after["last_failure"]["lines"]
        assert len(fleet.engines()) == 2
        # A request whose answer had begun may fail; every other one was retried on the second replica.
        assert len(talk.failures) <= 2
        (event,) = await fleet.events("shard-failed")
        assert "SIGKILL" in event["text"]


async def test_a_node_cut_off_is_unreachable_then_lost_then_replaced_and_its_old_generation_is_stopped(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, nodes=2, replicas=1, settings=SOON_LOST) as fleet:
        (before,) = (await fleet.shards()).values()
        cut = before["node"]
        other = "n2" if cut == "n1" else "n1"
        fleet.nodes[cut].send_signal(signal.SIGSTOP)
        await fleet.until(lambda: _stage(fleet, cut, "unreachable"), what="unreachable")
        await fleet.until(lambda: _stage(fleet, cut, "lost"), what="lost")
        await fleet.until(lambda: _on(fleet, before["id"], other), what="replaced on the other node")
        await fleet.until(lambda: fleet.ready(1), what="the replacement is ready")
        after = (await fleet.shards())[before["id"]]
        assert after["generation"] > before["generation"]
        async with traffic(fleet) as talk:
            fleet.nodes[cut].send_signal(signal.SIGCONT)
            await fleet.until(lambda: _engines(fleet, [after["pid"]]), what="the old generation is stopped")
            await fleet.until(lambda: _stage(fleet, cut, "ready"), what="the node is back")
        assert talk.failures == []
        assert (await fleet.shards())[before["id"]]["pid"] == after["pid"]
        for kind in ("node-unreachable", "node-lost", "node-returned"):
            assert any(event["subject"] == f"node:{cut}" for event in await fleet.events(kind)), kind


async def _stage(fleet: Rig, name: str, stage: str) -> bool:
    return bool((await fleet.node(name))["stage"] == stage)


async def _settled(fleet: Rig) -> bool:
    return bool(await fleet.events("settled"))


async def _failed(fleet: Rig, shard: str) -> bool:
    found = (await fleet.shards()).get(shard)
    return found is not None and found["last_failure"] is not None


async def _on(fleet: Rig, shard: str, node: str) -> bool:
    found = (await fleet.shards()).get(shard)
    return found is not None and found["node"] == node


async def _engines(fleet: Rig, pids: list[int]) -> bool:
    await trio.lowlevel.checkpoint()
    return fleet.engines() == pids

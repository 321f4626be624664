"""A plane and an agent of different versions, as processes: everything that one asks of the other works (A12)."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.rig import patient
from tests.upgrade.releases import ANCIENT, FUTURE, PRESENT, Release, previous
from tests.upgrade.rig import Mixed, mixed

pytestmark = [pytest.mark.real, pytest.mark.slow]

PAIRS = [
    pytest.param(PRESENT, previous(), id="the last release's agent"),
    pytest.param(previous(), PRESENT, id="the last release's plane"),
    pytest.param(PRESENT, FUTURE, id="an agent two versions ahead"),
    pytest.param(FUTURE, PRESENT, id="a plane two versions ahead"),
]


@pytest.mark.parametrize(("plane", "agent"), PAIRS)
async def test_a_plane_and_an_agent_of_different_versions_work_together(
    tmp_path: Path, plane: Release, agent: Release
) -> None:
    async with mixed(tmp_path, plane, [agent], replicas=1) as fleet:
        assert (await fleet.get("status"))["version"] == plane.version
        node = (await fleet.get("nodes/n1"))["node"]
        assert (node["version"], node["stage"]) == (agent.version, "ready")
        (engine,) = fleet.engines()
        async with patient() as client:
            answer = await fleet.chat(client)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"]
        await requests_are_answered(fleet)
        await heartbeats_are_heard(fleet)
        await fleet.apply(2)
        await fleet.until(lambda: fleet.ready(2), what="two replicas")
        assert engine in fleet.engines()
        await fleet.post("nodes/n1/label", {"labels": {"rack": "a7"}})
        assert (await fleet.node("n1"))["labels"] == {"rack": "a7"}
        await fleet.apply(1)  # one is drained and stopped
        await fleet.until(lambda: left(fleet, 1), what="one engine is left")
        # An engine that dies is started again, at the next generation.
        ((_, generation, pid),) = (await fleet.serving()).values()
        os.kill(pid, signal.SIGKILL)

        async def again() -> bool:
            serving = list((await fleet.serving()).values())
            return await fleet.ready(1) and [one[1] for one in serving] == [generation + 1]

        await fleet.until(again, what="the next generation")
        await fleet.apply(0)
        await fleet.until(lambda: left(fleet, 0), what="nothing is wanted and nothing runs")
        # All on one stream: nothing that either side says has ended it.
        assert len(await fleet.events("node-registered")) <= 1, fleet.log("n1")
        assert "Traceback" not in fleet.log("n1", 1000) + fleet.log("plane", 1000)
        for log, other in (("plane", agent), ("n1", plane)):
            strange = fleet.log(log, 1000).count("frames of an unknown kind are ignored")
            assert strange == (1 if other is FUTURE else 0), f"{log}: counted, and said once"


async def left(fleet: Mixed, count: int) -> bool:
    return len(fleet.engines()) == count and await fleet.ready(count)


async def requests_are_answered(fleet: Mixed) -> None:
    log = await fleet.get("logs/n1", lines=400)
    assert any("registered" in line for line in log["lines"])
    assert {source["name"] for source in log["sources"]} == {"agent", *await fleet.shards()}
    for shard in await fleet.shards():
        assert (await fleet.get(f"logs/n1/{shard}", lines=5))["lines"]
    checks = (await fleet.get("doctor/n1"))["findings"]
    assert {"host", "agent"} & {check["check"].split("-")[0] for check in checks} or len(checks) > 5
    weights = await fleet.get("weights")
    assert [row["node"] for row in weights["nodes"]] == ["n1"]
    assert not weights["nodes"][0].get("error"), weights


async def heartbeats_are_heard(fleet: Mixed) -> None:
    before = (await fleet.node("n1"))["heard_age"]

    async def newer() -> bool:
        return bool((await fleet.node("n1"))["heard_age"] < 0.6)

    await fleet.until(newer, what=f"a heartbeat (the last was {before} s ago)")


async def test_what_an_old_agent_cannot_do_is_refused_at_once_with_its_version(tmp_path: Path) -> None:
    async with mixed(tmp_path, PRESENT, [ANCIENT], replicas=1) as fleet:
        began = time.monotonic()
        answer = await fleet.api.get("doctor/n1")
        assert time.monotonic() - began < 30, "it was not asked and waited for"
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["remedy"]) == (409, "too-old", "upgrade its agent")
        assert error["message"] == "n1 cannot answer doctor: its agent is version 0.0.1 and has no feature 'doctor'"
        (row,) = (await fleet.get("weights"))["nodes"]
        assert "version 0.0.1" in row["error"]
        assert (await fleet.get("logs/n1"))["lines"], "what every agent answers is answered"
        assert len(await fleet.events("node-registered")) <= 1

"""A fleet that is upgraded while it serves, and taken back: engines are not touched, nothing that was known is lost."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from llmgw.plane.restored import LEAP
from llmgw.plane.store.backup import copies
from tests.e2e.rig import traffic
from tests.upgrade.releases import FUTURE, PRESENT, Release, previous
from tests.upgrade.rig import Mixed, mixed

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.mark.parametrize("plane", [previous(), PRESENT], ids=["agents first", "plane first"])
async def test_an_agent_that_is_upgraded_and_taken_back_adopts_its_engines(tmp_path: Path, plane: Release) -> None:
    async with mixed(tmp_path, plane, [previous()], replicas=2) as fleet:
        before, engines = await fleet.serving(), fleet.engines()
        assert len(engines) == 2
        async with traffic(fleet) as talk:
            for release, number in ((PRESENT, signal.SIGTERM), (previous(), signal.SIGKILL), (PRESENT, signal.SIGKILL)):
                await fleet.stop_node("n1", number)
                await fleet.node_of("n1", release)
                await fleet.until(lambda: fleet.adopted(2), what=f"{release.version} adopts what runs")
                assert await fleet.serving() == before
                assert fleet.engines() == engines
        assert talk.failures == []
        assert talk.good > 0
        # What another release started is stopped like its own, and what is started now is not taken for it.
        await fleet.apply(1)
        await fleet.until(lambda: fleet.ready(1), what="one replica is left")
        await fleet.until(lambda: running(fleet, 1), what="and one engine")
        await fleet.apply(2)
        await fleet.until(lambda: fleet.ready(2), what="two again")
        assert len(fleet.engines()) == 2


async def running(fleet: Mixed, count: int) -> bool:
    await fleet.api.get("status")
    return len(fleet.engines()) == count


async def known(fleet: Mixed) -> dict[str, Any]:
    """What a plane must not forget, whatever version of it looks."""
    nodes = {row["id"]: (row["labels"], row["cordoned"]) for row in (await fleet.get("nodes"))["nodes"]}
    models = {row["name"]: (row["wanted"], row["revision"]) for row in (await fleet.get("models"))["models"]}
    certificates = {row["name"]: row["serial"] for row in (await fleet.get("certs"))["certs"]}
    tokens = {row["id"] for row in (await fleet.get("tokens"))["tokens"]}
    results = [(row["a"], row["b"]) for row in (await fleet.get("fabric-test")).get("results", ())]
    return {
        "serving": await fleet.serving(),
        "nodes": nodes,
        "models": models,
        "certificates": certificates,
        "tokens": tokens,
        "results": results,
    }


async def happened(fleet: Mixed) -> list[tuple[str, str]]:
    events = (await fleet.get("events", after=0, limit=10000))["events"]
    return [(event["kind"], event["subject"]) for event in events]


#: A bandwidth test's result, as the code that runs this keeps one.
KEEP = """
import sys, trio
from llmgw.plane.bandwidth import history
from llmgw.plane.store.sqlite import SqliteStore
from llmgw.rdma.results import PairResult
async def main():
    async with await SqliteStore.open(sys.argv[1]) as store:
        await history.keep(store, PairResult(a="n1", b="n2", clock=1.0, error="no cable"))
trio.run(main)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
async def test_a_plane_that_is_upgraded_knows_everything_and_goes_back_by_its_copy(
    tmp_path: Path, number: signal.Signals
) -> None:
    old, state = previous(), tmp_path / "plane" / "plane.db"
    async with mixed(tmp_path, old, [old, PRESENT], replicas=2) as fleet:
        await fleet.post("nodes/n1/label", {"labels": {"rack": "a7"}})
        await fleet.post("nodes/n2/cordon")
        await fleet.post("tokens", {"node": "n9", "seconds": 3600})
        await fleet.stop_plane()
        done = await trio.run_process([sys.executable, "-c", KEEP, str(state)], env=fleet.env | old.env, check=False)
        assert done.returncode == 0
        await fleet.plane_of(old)
        await fleet.until(lambda: fleet.ready(2), what="all is as it was")
        events = await happened(fleet)
        await fleet.post("nodes/n1/label", {"labels": {"rack": "a7"}})  # is stored with all that happened before
        before, engines = await known(fleet), fleet.engines()
        assert (len(engines), before["results"]) == (2, [("n1", "n2")])

        await fleet.stop_plane(number)
        await fleet.plane_of(PRESENT)
        await fleet.until(lambda: fleet.ready(2), what="the new plane serves what the old one placed")
        assert await known(fleet) == before
        assert (await happened(fleet))[: len(events)] == events
        assert fleet.engines() == engines
        (copy,) = copies(state)
        assert copy.name.startswith("plane.db.v1-")
        # It goes on: what is wanted now is placed beside what was.
        await fleet.post("nodes/n2/uncordon")
        await fleet.apply(3)
        await fleet.until(lambda: fleet.ready(3), what="three replicas")
        assert set(engines) < set(fleet.engines())

        await fleet.stop_plane(number)
        content = state.read_bytes()
        refused = fleet.ended(old, "llmgw-plane", "run", "--config", str(state.parent / "plane.toml"))
        assert refused.returncode == 1
        assert "was written by a newer llmgw (state version" in refused.stderr
        assert "Traceback" not in refused.stderr
        if number == signal.SIGTERM:
            assert state.read_bytes() == content
        assert len(fleet.engines()) == 3

        restored = fleet.ended(PRESENT, "llmgw-plane", "restore", "--dir", str(state.parent), str(copy))
        assert restored.returncode == 0, restored.stderr
        (epoch,) = re.findall(r"The epoch is (\d+) now", restored.stdout)
        assert int(epoch) > LEAP
        await fleet.plane_of(old)
        await fleet.until(lambda: fleet.ready(2), what="the old plane serves what it knew")
        again = await known(fleet)
        assert again["serving"] == before["serving"]
        # n2 has joined before the copy was made, and was cordoned then.
        assert {key: again[key] for key in again if key != "serving"} == {
            key: before[key] for key in before if key != "serving"
        }
        # What was placed since, nobody wants any more.
        await fleet.until(lambda: running(fleet, 2), what="the third engine is stopped")
        assert fleet.engines() == engines


async def test_this_plane_refuses_the_state_of_a_later_one_by_its_name_and_leaves_it_alone(tmp_path: Path) -> None:
    state = tmp_path / "plane" / "plane.db"
    async with mixed(tmp_path, PRESENT, [PRESENT], replicas=1) as fleet:
        engines, before = fleet.engines(), await known(fleet)
        await fleet.stop_plane()
        await fleet.plane_of(FUTURE)
        await fleet.until(lambda: fleet.ready(1), what="the later plane serves what this one placed")
        assert await known(fleet) == before
        await fleet.stop_plane(signal.SIGKILL)  # what says that it is newer may be in the log alone
        content = {path.name: path.read_bytes() for path in state.parent.glob("plane.db*") if path.suffix != ".lock"}
        refused = fleet.ended(PRESENT, "llmgw-plane", "run", "--config", str(state.parent / "plane.toml"))
        (copy,) = copies(state)
        assert refused.returncode == 1
        assert f"was written by llmgw {FUTURE.version} (state version" in refused.stderr
        assert f"upgrade this plane to {FUTURE.version}, or `llmgw-plane restore {copy}` goes back" in refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1
        shm = {"plane.db-shm"}  # the index of the log, which no reader can do without
        assert {n: d for n, d in content.items() if n not in shm} == {
            path.name: path.read_bytes()
            for path in state.parent.glob("plane.db*")
            if path.suffix != ".lock" and path.name not in shm
        }
        restored = fleet.ended(PRESENT, "llmgw-plane", "restore", "--dir", str(state.parent), str(copy))
        assert restored.returncode == 0, restored.stderr
        await fleet.plane_of(PRESENT)
        await fleet.until(lambda: fleet.ready(1), what="this plane serves again")
        assert await known(fleet) == before
        assert fleet.engines() == engines

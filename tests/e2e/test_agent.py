"""An agent's comings and goings on its own machine: stops, a second one, a disk that is full (C2, C3)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from llmgw.demo.processes import call, command
from llmgw.errors import Conflict
from tests.disks import small_file_system
from tests.e2e.rig import Rig, rig, traffic

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_agent_that_is_stopped_leaves_its_engine_serving_and_the_next_adopts_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    async with rig(tmp_path, nodes=1, replicas=1) as fleet:
        (before,) = (await fleet.shards()).values()
        async with traffic(fleet) as talk:
            await fleet.kill(fleet.nodes["n1"], number)
            assert fleet.nodes["n1"].returncode == 0
            assert fleet.engines() == [before["pid"]]
            await fleet.start_node("n1")
            await fleet.until(lambda: fleet.adopted(1), what="the next agent adopts it")
        (after,) = (await fleet.shards()).values()
        assert (after["pid"], after["generation"]) == (before["pid"], before["generation"])
        assert fleet.engines() == [before["pid"]]
        assert talk.failures == []
        assert "its engines go on" in fleet.log("n1", 400)


async def test_a_second_agent_in_one_directory_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    async with rig(tmp_path, nodes=1, replicas=1) as fleet:
        engines = fleet.engines()
        argv = command("llmgw-node", "run", "--config", str(tmp_path / "n1" / "node.toml"))
        second = await trio.run_process(argv, env=fleet.env, capture_stdout=True, capture_stderr=True, check=False)
        assert second.returncode == Conflict.exit_status
        pid, words = fleet.nodes["n1"].pid, second.stderr.decode()
        assert f"another agent is running in {tmp_path / 'n1'} already (pid {pid})" in words
        assert "Traceback" not in words
        assert await fleet.ready(1)
        assert fleet.engines() == engines


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Where the node's state will be: a file system of its own, of one MiB."""
    with small_file_system(tmp_path / "n1", "1m", "700") as place:
        yield place


async def test_a_full_disk_fails_the_shard_by_name_and_breaks_nothing_else(tmp_path: Path, small_disk: Path) -> None:
    async with rig(tmp_path, nodes=1, replicas=1) as fleet:
        serving = fleet.engines()
        with (small_disk / "ballast").open("wb") as ballast:
            try:
                while True:
                    os.write(ballast.fileno(), b"x" * 4096)
            except OSError:
                pass
        await fleet.apply(2)

        async def said() -> bool:
            failures = [shard["last_failure"] or {} for shard in (await fleet.shards()).values()]
            return any("No space left on device" in str(failure) for failure in failures)

        await fleet.until(said, what="the second replica fails and says why")
        assert fleet.engines() == serving
        # A plane that leads anew has a new epoch, which cannot be written down: the node comes back all the same.
        await restart_plane(fleet)
        assert (await fleet.node("n1"))["connected"]
        assert fleet.engines() == serving
        (small_disk / "ballast").unlink()
        await fleet.until(lambda: fleet.ready(2), within=240, what="both serve once there is room")
        assert fleet.nodes["n1"].poll() is None


async def restart_plane(fleet: Rig) -> None:
    assert fleet.plane is not None
    await fleet.kill(fleet.plane)
    await fleet.start_plane()
    await fleet.until_connected("n1")


async def test_a_plane_made_anew_is_named_and_a_running_agent_follows_once_it_has_joined_again(tmp_path: Path) -> None:
    async with rig(tmp_path, nodes=1, replicas=1) as fleet:
        engines = fleet.engines()
        for _ in range(2):  # so that the new plane's epoch is below what the node has obeyed
            await restart_plane(fleet)
        assert fleet.plane is not None
        await fleet.kill(fleet.plane)
        await fleet.forget_plane()
        await fleet.make_plane()
        await fleet.start_plane()

        async def named() -> bool:
            return "not signed by this fleet's CA: is this the right plane, or was it made anew?" in fleet.log(
                "n1", 400
            )

        await fleet.until(named, what="the agent says what is wrong")
        assert fleet.engines() == engines
        token = (await fleet.api.post("tokens", json={"node": "n1"})).json()["token"]
        url, directory = f"wss://127.0.0.1:{fleet.agents}", str(tmp_path / "n1")
        await call("llmgw-node", "join", url, "--token", token, "--name", "n1", "--dir", directory, "--again",
                   env=fleet.env)  # fmt: skip
        await fleet.until_connected("n1")
        # What nothing claims there is stopped (A7).
        await fleet.until(lambda: gone(fleet), what="the old plane's engine is stopped")


async def gone(fleet: Rig) -> bool:
    await trio.lowlevel.checkpoint()
    return not fleet.engines()

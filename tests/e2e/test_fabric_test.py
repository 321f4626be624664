"""`llmgw ctl fabric-test` along its whole way: ctl, API, plane, stream, node, processes (A11), and back when it ends.

Plane, agents and ctl are processes as they are shipped. The adapters are files and a program stands in ib_write_bw's
place; the same with real verbs is in tests/rigs/roce.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import pytest
import trio

from llmgw.demo.processes import command
from tests.e2e.rig import Rig, rig
from tests.fakes import perftest
from tests.fakes.sysfs import Machine

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = perftest.install(tmp_path / "bin", mlx5_0=97.0, mlx5_1=92.0)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


@asynccontextmanager
async def fleet(root: Path, nodes: int = 2) -> AsyncIterator[Rig]:
    """Agents whose machine has two RoCE rails at 100 Gb/s."""
    async with rig(root, nodes=0) as made:
        for n in range(1, nodes + 1):
            machine = Machine(root / f"machine{n}")
            for rail in range(2):
                address = f"0000:0000:0000:0000:0000:ffff:0a{rail:02x}:00{n:02x}"
                machine.adapter(
                    f"mlx5_{rail}", layer="Ethernet", rate="100 Gb/sec (2X HDR)", netdev=f"eth{rail}", speed=100_000,
                    pci=f"0000:{rail + 1:02x}:00.0", guid=f"946d:ae03:00{n:02x}:000{rail}",
                    gids=((3, address, "RoCE v2", f"eth{rail}"),),
                )  # fmt: skip
            await made.join(f"n{n}")
            config = root / f"n{n}" / "node.toml"
            config.write_text(f'root = "{machine.root}"\n' + config.read_text())
            await made.start_node(f"n{n}")
        await made.until_connected(*(f"n{n}" for n in range(1, nodes + 1)))
        yield made


def programs(made: Rig) -> list[int]:
    """Processes of ib_write_bw that this rig runs now."""
    return [pid for pid, words in made.commands().items() if any(word.endswith(b"ib_write_bw") for word in words)]


def ctl(made: Rig, *args: str) -> list[str]:
    return command("llmgw", "ctl", "--dir", str(made.directory), "fabric-test", *args)


async def run(made: Rig, *args: str) -> tuple[int, str, str]:
    """ctl's exit status and what it printed."""
    with trio.fail_after(300):
        done = await trio.run_process(
            ctl(made, *args), capture_stdout=True, capture_stderr=True, check=False, env=made.env, stdin=DEVNULL
        )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


async def measured(made: Rig, *args: str) -> tuple[int, Any]:
    status, out, err = await run(made, *args, "-o", "json")
    assert out, err
    return status, json.loads(out)


async def both_run(made: Rig) -> bool:
    # Each side is `timeout` and the program below it.
    return len(programs(made)) == 4 and (made.root / "bin" / "connected").exists()


async def test_a_test_walks_the_whole_way_and_is_remembered(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        status, result = await measured(made, "n1", "n2", "--seconds", "1")
        assert [(rail["rail"], rail["gbps"], rail["verdict"]["grade"]) for rail in result["rails"]] == [
            ("0", 97.0, "good"),
            ("1", 92.0, "fair"),
        ]
        assert status == 1
        for rail in result["rails"]:
            assert (rail["a"]["node"], rail["b"]["node"]) == ("n1", "n2")
            assert (rail["a"]["gid_index"], rail["kind"], rail["mtu"]) == (3, "roce", 4096)
            assert rail["a"]["version"] == rail["b"]["version"] == "6.06"
            assert "ib_write_bw" in rail["a"]["command"]
        await made.until(lambda: none_run(made), what="no side runs")

        status, text, _ = await run(made, "--history", "n2", "n1")
        assert status == 0
        for words in ("mlx5_1/1", "92 Gb/s", "fair", "6.06"):
            assert words in text
        _, matrix, _ = await run(made, "--history")
        assert "n1" in matrix
        assert "94%" in matrix

        _, text, _ = await run(made, "n1", "n2", "--seconds", "1", "--rail", "1")
        assert "ceiling 100 Gb/s x 0.980" in text


async def test_ctrl_c_ends_both_processes_on_both_nodes_at_once(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        process = await trio.lowlevel.open_process(
            ctl(made, "n1", "n2", "--seconds", "600"), env=made.env, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
        )
        await made.until(lambda: both_run(made), what="both sides run")
        process.send_signal(signal.SIGINT)
        await made.until(lambda: none_run(made), within=30, what="no side runs")
        with trio.fail_after(60):
            assert await process.wait() == 130
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            await pipe.aclose()


async def none_run(made: Rig) -> bool:
    return not programs(made)


def kill_server(made: Rig) -> None:
    for pid in programs(made):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if words[0] != "timeout" and "127.0.0.1" not in words:
            os.kill(pid, signal.SIGKILL)


async def test_a_killed_server_is_named_with_both_sides_last_lines(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        found: list[tuple[int, str, str]] = []

        async def test() -> None:
            found.append(await run(made, "n1", "n2", "--seconds", "600", "--rail", "0"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(test)
            await made.until(lambda: both_run(made), what="both sides run")
            kill_server(made)
        status, out, _ = found[0]
        assert status == 2
        assert "rail 0 failed: n2: killed by SIGKILL" in out
        assert "Waiting for client" in out
        assert "Couldn't read remote address" in out
        await made.until(lambda: none_run(made), what="no side runs")


async def test_the_loss_of_an_agent_ends_its_test_and_is_named(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        found: list[tuple[int, str, str]] = []

        async def test() -> None:
            found.append(await run(made, "n1", "n2", "--seconds", "600", "--rail", "0"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(test)
            await made.until(lambda: both_run(made), what="both sides run")
            made.nodes["n2"].send_signal(signal.SIGTERM)
        assert "n2" in found[0][1]
        assert "lost its stream" in found[0][1]
        await made.until(lambda: none_run(made), what="no side runs")


async def test_a_fleet_is_tested_pair_by_pair_and_the_bad_rail_is_seen(tmp_path: Path) -> None:
    perftest.install(tmp_path / "bin", mlx5_0=97.0, mlx5_1=40.0)
    async with fleet(tmp_path, nodes=3) as made:
        status, out, _ = await run(made, "--all", "--seconds", "1", "--all-rails-at-once")
        assert status == 2
        assert "3 of 3 pairs of 3 nodes" in out
        assert "rail 1 bad: below 90%" in out
        status, out, _ = await run(made, "--all", "--nodes", "n1, n2", "--seconds", "1", "--rail", "0", "-o", "json")
        lines = [json.loads(line) for line in out.splitlines()]
        assert (status, [line["type"] for line in lines]) == (0, ["pair", "fleet"])


async def test_errors_are_told_before_anything_starts(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        for args, status, words in (
            (("n1", "n9"), 3, "no node is called 'n9'"),
            (("n1", "n1"), 2, "against itself"),
            (("n1", "n2", "--rail", "7"), 4, "the rails are 0, 1"),
            (("n1", "n2", "--perftest-option", "--mmap=/dev/mem"), 2, "may not be added"),
            (("n1",), 2, "name two nodes"),
            (("--history", "n1", "n2"), 3, "no bandwidth test of n1 and n2 is known"),
        ):
            code, _, err = await run(made, *args)
            assert (code, words in err) == (status, True), err


async def test_two_tests_do_not_measure_each_other(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, made, "n1", "n2", "--seconds", "600")
            await made.until(lambda: both_run(made), what="both sides run")
            code, _, err = await run(made, "n2", "n1", "--seconds", "1")
            assert code == 4
            assert "n1, n2 is in another bandwidth test" in err
            nursery.cancel_scope.cancel()
        await made.until(lambda: none_run(made), what="no side runs")

"""The truth about a node along its whole way: a machine of files and a driver library, and processes as shipped.

The machine has eight GPUs and nine ports; what breaks is the driver's word or a file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import attrs
import pytest
import trio

from llmgw.demo.processes import command
from tests.e2e.rig import WITHIN, Rig, rig
from tests.fakes.nvml import Driver
from tests.fakes.sysfs import Machine, hgx

pytestmark = [pytest.mark.real, pytest.mark.slow]

#: What the whole agent may take beside engines, in bytes.
MOST_MEMORY = 60 << 20


@attrs.frozen
class Node:
    """A fleet of one, its machine and its driver."""

    fleet: Rig
    machine: Machine
    driver: Driver

    async def ctl(self, *args: str) -> tuple[int, str, str]:
        """Exit status, and what was printed where."""
        argv = command("llmgw", "ctl", "--dir", str(self.fleet.directory), *args)
        done = await trio.run_process(
            argv, env=self.fleet.env, check=False, capture_stdout=True, capture_stderr=True, stdin=DEVNULL
        )
        assert done.returncode is not None
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    async def shown(self, *args: str) -> str:
        status, out, err = await self.ctl(*args)
        assert (status, err) == (0, ""), out + err
        return out

    async def problems(self) -> dict[str, Any]:
        """Open problems by code."""
        return {problem["code"]: problem for problem in (await self.fleet.get("problems"))["problems"]}

    async def opens(self, code: str, within: float = WITHIN) -> dict[str, Any]:
        async def open_() -> bool:
            return code in await self.problems()

        await self.fleet.until(open_, within=within, what=f"{code} is told")
        found: dict[str, Any] = (await self.problems())[code]
        return found


@asynccontextmanager
async def one_node(root: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    place = root / "machine"
    machine = hgx(place)
    machine.write("proc/sys/kernel/random/boot_id", "first-boot")
    driver = Driver(root, "gpus 8", "links 18")
    for name in ("FAKE_NVML", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, driver.env[name])
    async with rig(root, nodes=0) as fleet:
        await fleet.join("n1")
        config = root / "n1" / "node.toml"
        config.write_text(f'root = "{place}"\nsurvey_every = "0.5s"\n' + config.read_text())
        await fleet.start_node("n1")
        await fleet.until_connected("n1")
        yield Node(fleet, machine, driver)


def memory(pid: int) -> int:
    """What a process holds of memory, in bytes."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0]) * 1024


async def test_doctor_examines_a_node_over_its_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with one_node(tmp_path, monkeypatch) as node:

        async def finds_the_gpus() -> bool:
            # It gives the driver some seconds, which a busy machine may need for starting the process that asks it.
            status, out, err = await node.ctl("doctor", "n1", "-o", "json")
            reply = json.loads(out)
            outcomes = {finding["outcome"] for finding in reply["findings"]}
            assert err == ""
            assert len({finding["check"] for finding in reply["findings"]}) >= 30
            assert status == (2 if "fail" in outcomes else 1 if "warn" in outcomes else 0)
            gpus = [finding for finding in reply["findings"] if finding["check"] == "gpu.count"]
            return [finding["outcome"] for finding in gpus] == ["pass"]

        await node.fleet.until(finds_the_gpus, what="doctor finds the GPUs")

        async def finds_only_them() -> bool:
            status, out, err = await node.ctl("doctor", "n1", "--only", "gpu.count")
            assert err == ""
            assert "gpu.count" in out
            assert "host.kernel" not in out
            return status == 0

        await node.fleet.until(finds_only_them, what="doctor finds the GPUs when asked for them alone")
        status, _, err = await node.ctl("doctor", "n1", "--only", "gpu.cuont")
        assert status != 0
        assert "did you mean gpu.count" in err
        # The agent still watches its node, with its own process for the driver.
        node.driver.says("gpus 8", "links 18", "xid 3 79")
        assert (await node.opens("xid-79"))["grade"] == "bad"


async def test_problems_are_told_acknowledged_and_remembered_over_a_restart_of_the_plane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with one_node(tmp_path, monkeypatch) as node:
        fleet = node.fleet
        told = await fleet.get("nodes/n1")
        assert (len(told["gpus"]), len(told["ports"])) == (8, 9)
        assert sorted(port["rail"] for port in told["ports"] if port["rail"] is not None) == list(range(8))

        async def clock_known() -> bool:
            offset = (await fleet.get("nodes/n1"))["clock_offset"]
            return offset is not None and abs(offset) < 5  # one machine, one clock

        await fleet.until(clock_known, what="the clock's offset is shown")
        node.driver.says("gpus 8", "links 18", "remap 2 0 1 1 0")
        assert (await node.opens("remap-pending"))["grade"] == "bad"
        node.machine.write("sys/class/infiniband/mlx5_4/ports/1/state", "1: DOWN")
        node.machine.write("sys/class/infiniband/mlx5_4/ports/1/phys_state", "2: Polling")
        down = await node.opens("port-down")
        assert down["subject"] == "port:mlx5_4/1"
        assert "seven of its seven peers are up" in down["text"]
        listed = await node.shown("problems")
        assert listed.index("port-down") > 0
        assert "remap-pending" in listed
        await node.shown("ack", "n1", "port:mlx5_4/1", "port-down", "--for", "1h")
        assert "(known, " in await node.shown("problems")
        # The link comes and goes: that is history.
        node.machine.write("sys/class/infiniband/mlx5_4/ports/1/state", "4: ACTIVE")
        screen = ""

        async def back() -> bool:
            nonlocal screen
            screen = await node.shown("node", "n1")
            return "mlx5_4/1: DOWN -> ACTIVE" in screen

        await fleet.until(back, what="the link's return is shown")
        assert "mlx5_4/1: ACTIVE -> DOWN" in screen
        assert "problem-opened" in screen
        events = await node.shown("events", "--node", "n1", "-n", "1000")
        assert "remap-pending" in events
        assert fleet.plane is not None
        before = (await node.problems())["remap-pending"]
        await fleet.kill(fleet.plane)
        await fleet.start_plane()
        await fleet.until_connected("n1")
        after = await node.opens("remap-pending")
        assert after["first_clock"] == before["first_clock"]
        assert after["age"] >= before["age"]
        assert "mlx5_4/1: ACTIVE -> DOWN" in await node.shown("node", "n1")
        opened = [e for e in await fleet.events("problem-opened") if "remap-pending" in e["text"]]
        assert len(opened) == 1


async def test_a_node_that_comes_back_from_a_reboot_with_less_than_confirmed_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with one_node(tmp_path, monkeypatch) as node:
        fleet = node.fleet
        said = await node.shown("node", "expect", "n1")
        assert "8 NVIDIA" in said
        assert "8 fabric ib ports, 8 active at 400 Gb/s or more" in said
        await fleet.kill(fleet.nodes["n1"])
        node.driver.says("gpus 7", "links 18")
        node.machine.write("proc/sys/kernel/random/boot_id", "second-boot")
        (node.machine.root / "sys/bus/pci/devices/0000:22:00.0").unlink()
        shutil.rmtree(node.machine.root / "sys/class/infiniband/mlx5_2")
        await fleet.start_node("n1")
        missing = await node.opens("fewer-gpus")
        assert missing["grade"] == "bad"
        assert "7 NVIDIA" in missing["text"]
        assert "8 confirmed" in missing["text"]
        assert (await node.opens("fewer-ports"))["text"] == "7 fabric ib ports, 8 confirmed"
        assert "7 NVIDIA" in await node.shown("node", "expect", "n1")

        async def expected() -> bool:
            return not {"fewer-gpus", "fewer-ports"} & set(await node.problems())

        await fleet.until(expected, what="what is there is what is expected")


async def test_the_agent_of_a_large_node_takes_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with one_node(tmp_path, monkeypatch) as node:
        await node.ctl("doctor", "n1")
        resident = memory(node.fleet.nodes["n1"].pid)
        print(f"the agent's memory: {resident / 1e6:.1f} MB")
        assert resident < MOST_MEMORY

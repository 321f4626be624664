"""GPUs as the agent watches them: last good values, stalls that outlive a restart, whose process is whose."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from llmgw.node.gpus import Gpus, GpuView, Kept, owned, recall
from llmgw.node.nvml.probe import Probe
from llmgw.node.view import View
from llmgw.wire.facts import GpuProcess
from tests.fakes.nvml import Driver, uuid

pytestmark = pytest.mark.real


async def until(gpus: Gpus, condition: object) -> GpuView:
    assert callable(condition)
    with trio.fail_after(120):
        async for view in gpus.view.values():
            if condition(view):
                return view
    raise AssertionError


def bus(root: Path, count: int) -> None:
    for number in range(count):
        folder = root / f"sys/bus/pci/devices/0000:{0x1B + number:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x10de\n")
        (folder / "class").write_text("0x030200\n")
        (folder / "numa_node").write_text(f"{number // 4}\n")


async def test_a_gpu_that_the_bus_shows_and_the_driver_does_not_is_in_the_list(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    bus(tmp_path, 8)
    gpus = Gpus(View(root=tmp_path, period=0.1), probe=Driver(tmp_path, "gpus 7").probe())
    nursery.start_soon(gpus.run)
    view = await until(gpus, lambda view: view.at is not None)
    assert len(view.gpus) == 8
    assert view.gpus[7].pci == "0000:22:00.0"
    assert view.gpus[7].unreadable
    assert view.gpus[5].numa_node == 1
    nursery.cancel_scope.cancel()


async def test_while_the_driver_hangs_the_last_good_values_stay_and_the_stall_has_a_beginning(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    driver = Driver(tmp_path, "gpus 2")
    gpus = Gpus(View(state=tmp_path, period=0.1), probe=driver.probe(first_within=10, within=0.5))
    nursery.start_soon(gpus.run)
    await until(gpus, lambda view: len(view.loads) == 2)
    driver.says("hang nvmlDeviceGetCount_v2 -1")
    view = await until(gpus, lambda view: view.stalled_since is not None)
    assert len(view.gpus) == len(view.loads) == 2
    assert "did not answer" in view.stalled
    # A new agent of the same boot starts with what the old one knew.
    again = Gpus(View(state=tmp_path))
    assert again.view.value.stalled_since == view.stalled_since
    assert [gpu.uuid for gpu in again.view.value.gpus] == [uuid(0), uuid(1)]
    driver.says("gpus 2")
    recovered = await until(gpus, lambda view: view.stalled_since is None)
    assert recovered.stalled == ""
    nursery.cancel_scope.cancel()


async def test_one_gpu_at_which_the_driver_hangs_is_set_aside_and_the_others_are_watched(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    driver = Driver(tmp_path, "gpus 4")
    gpus = Gpus(View(state=tmp_path, period=0.1), probe=driver.probe(within=5))
    nursery.start_soon(gpus.run)
    await until(gpus, lambda view: len(view.loads) == 4)
    driver.says("gpus 4", "hang nvmlDeviceGetUtilizationRates 2")
    view = await until(gpus, lambda view: len(view.loads) == 3)
    assert view.stalled_since is None
    assert {gpu.uuid: gpu.unreadable for gpu in view.gpus if gpu.unreadable} == {
        uuid(2): "does not answer: the driver hangs at it"
    }
    nursery.cancel_scope.cancel()


async def test_who_asks_which_processes_hold_memory_is_told_of_now(tmp_path: Path, nursery: trio.Nursery) -> None:
    driver = Driver(tmp_path, "gpus 1", "process 0 4242 1048576")
    gpus = Gpus(View(period=3600.0), probe=driver.probe())
    nursery.start_soon(gpus.run)
    await until(gpus, lambda view: len(view.processes) == 1)
    driver.says("gpus 1")
    # The next look is an hour away: this one is made for whoever asks.
    assert (await gpus.fresh(within=60)).processes == ()
    driver.says("hang nvmlDeviceGetCount_v2 -1", "process 0 4242 1048576")
    began = trio.current_time()
    assert (await gpus.fresh(within=0.5)).processes == ()
    assert trio.current_time() - began < 30  # the driver would have 60
    nursery.cancel_scope.cancel()


async def test_a_version_mismatch_is_retried_in_a_new_process(
    tmp_path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmgw.node.gpus.REFUSED_AGAIN", 0.2)
    driver = Driver(tmp_path, "fail nvmlInitWithFlags -1 18")
    gpus = Gpus(View(period=0.1), probe=driver.probe())
    nursery.start_soon(gpus.run)
    view = await until(gpus, lambda view: view.refused == 18)
    assert view.gpus == ()
    assert "differ in version" in view.driver.absent
    driver.says("gpus 4")
    assert len((await until(gpus, lambda view: not view.refused)).gpus) == 4
    nursery.cancel_scope.cancel()


async def test_crashes_are_counted_until_an_answer_comes(tmp_path: Path, nursery: trio.Nursery) -> None:
    driver = Driver(tmp_path, "crash nvmlDeviceGetCount_v2 -1")
    gpus = Gpus(View(period=0.1), probe=driver.probe())
    nursery.start_soon(gpus.run)
    view = await until(gpus, lambda view: view.crashes >= 2)
    assert "SIGSEGV" in view.stalled
    driver.says("gpus 8")
    assert (await until(gpus, lambda view: len(view.gpus) == 8)).crashes == 0
    nursery.cancel_scope.cancel()


def test_what_another_boot_wrote_is_not_believed(tmp_path: Path) -> None:
    file = tmp_path / "gpus.json"
    file.write_text('{"boot": "yesterday", "ghost_pid": 7, "ghost_started": 1}')
    assert recall(file, "today") == Kept(boot="today")
    assert recall(file, "yesterday").ghost_pid == 7
    file.write_text("{half")
    assert recall(file, "today") == Kept(boot="today")
    assert recall(tmp_path / "absent", "today") == Kept(boot="today")


def test_a_process_is_a_shards_or_foreign_and_in_another_pid_namespace_nobody_can_tell() -> None:
    processes = (GpuProcess("GPU-1", 10, "vllm", 5), GpuProcess("GPU-1", 11, "train", 6))
    assert [each.shard for each in owned(processes, {10: "m-0-0"}, True)] == ["m-0-0", ""]
    hidden = owned(processes, {}, False)
    assert [each.shard for each in hidden] == ["?", "?"]
    assert hidden[0].name == "(PID namespace differs)"


async def test_an_agent_that_stops_leaves_no_process(tmp_path: Path) -> None:
    probe: Probe = Driver(tmp_path, "gpus 1").probe()
    gpus = Gpus(View(period=0.1), probe=probe)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(gpus.run)
        await until(gpus, lambda view: view.at is not None)
        process = probe._process
        assert process is not None
        nursery.cancel_scope.cancel()
    assert process.returncode is not None

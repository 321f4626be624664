"""The survey of a node, over the machine the tests run on and over made-up ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from msgspec import structs

from llmgw.node.beats import Beats
from llmgw.node.survey import Survey
from llmgw.node.view import View
from llmgw.wire.agent import Heartbeat, Register
from llmgw.wire.codec import agent_codec, encode
from llmgw.wire.facts import Grade, NodeId, ShardId
from tests.fakes.nvml import Driver, uuid
from tests.fakes.sysfs import hgx

pytestmark = pytest.mark.real


async def running(survey: Survey, nursery: trio.Nursery) -> Register:
    """A survey that has had every answer once."""
    nursery.start_soon(survey.run)
    with trio.fail_after(120):
        await survey.gpus.asked.wait()
        async for view in survey.ports.view.values():
            if view.at is not None and not view.silent:
                return await survey.register()
    raise AssertionError


async def heard(beats: Beats, condition: Callable[[Heartbeat], bool]) -> Heartbeat:
    """The first heartbeat that says something, asked for as a stream would, only faster."""
    with trio.fail_after(120):
        while True:
            beat = await beats.next()
            if condition(beat):
                return beat
            await trio.sleep(0.05)


async def test_a_machine_without_gpus_registers_with_its_host_facts(tmp_path: Path) -> None:
    survey = Survey(View(state=tmp_path, weights=tmp_path / "not-there-yet"), dict)
    register = await survey.register()
    assert register.host.boot_id
    assert register.host.memory_bytes > 0
    assert register.host.cpu.threads >= 1
    assert [disk.purpose for disk in register.host.disks] == ["weights", "state"]
    assert all(disk.free_bytes > 0 for disk in register.host.disks)
    assert register.gpus == ()


async def test_heartbeats_say_only_what_changed(tmp_path: Path) -> None:
    own = {ShardId("m-0-0"): frozenset({os.getpid()})}
    survey = Survey(View(state=tmp_path), lambda: own)
    beats = survey.beats(await survey.register())
    first = await beats.next()
    assert first.load is not None
    assert first.shards is not None
    assert first.shards[0].rss_bytes > 1 << 20
    assert first.disks is None
    assert first.problems is None
    own.clear()
    second = await beats.next()
    assert second.shards == ()
    assert (await beats.next()).shards is None


async def test_a_machine_whose_files_are_all_missing_still_registers(tmp_path: Path) -> None:
    survey = Survey(View(root=tmp_path), dict)
    with trio.fail_after(60):
        register = await survey.register()
    assert register.host.memory_bytes == 0
    assert (await survey.beats(register).next()).load is not None


async def test_a_node_of_eight_gpus_and_nine_ports_registers_whole(tmp_path: Path, nursery: trio.Nursery) -> None:
    hgx(tmp_path)
    view = View(root=tmp_path, state=tmp_path, period=0.2)
    survey = Survey(view, dict, probe=Driver(tmp_path, "gpus 8", f"process 2 {os.getpid()} 1048576").probe())
    register = await running(survey, nursery)
    assert len(register.gpus) == 8
    assert len(register.ports) == 9
    assert register.gpus[0].fabric is not None
    assert register.gpu_driver.version == "570.172.08"
    assert sorted(port.rail for port in register.ports if port.rail is not None) == list(range(8))
    beat = await survey.beats(register).next()
    assert beat.gpus is not None
    assert beat.ports is not None
    assert len(beat.ports[0].counters) == 40
    assert beat.port_facts is None
    assert beat.gpu_fabrics is None
    told = structs.replace(register, node=NodeId("gpu-07"), version="1")
    assert agent_codec.decode(encode(told)) == told
    assert agent_codec.decode(encode(beat)) == beat
    nursery.cancel_scope.cancel()


async def test_shards_are_checked_against_the_fabric_as_it_is_now(tmp_path: Path, nursery: trio.Nursery) -> None:
    """A node registers while its fabric manager still starts; nothing lasting changes when that is done."""
    zeros = "0" * 32
    driver = Driver(tmp_path, "gpus 2", f"fabric 1 0 0 {zeros} 0")
    survey = Survey(View(root=tmp_path, state=tmp_path, period=0.2), dict, probe=driver.probe())
    beats = survey.beats(await running(survey, nursery))
    assert [gpu.fabric and gpu.fabric.state for gpu in survey.snapshot_of_facts().gpus] == ["not-started"] * 2
    driver.says("gpus 2", f"fabric 3 0 0 {zeros} 0")
    await heard(beats, lambda beat: beat.gpu_fabrics is not None)
    assert [gpu.fabric and gpu.fabric.state for gpu in survey.snapshot_of_facts().gpus] == ["completed"] * 2
    assert survey.changed.value == 0
    nursery.cancel_scope.cancel()


async def test_a_foreign_process_is_told_from_a_shards(tmp_path: Path, nursery: trio.Nursery) -> None:
    driver = Driver(tmp_path, "gpus 1", f"process 0 {os.getpid()} 1048576", "process 0 1 2097152")
    survey = Survey(
        View(root=tmp_path, period=0.2), lambda: {ShardId("m-0-0"): frozenset({os.getpid()})}, probe=driver.probe()
    )
    survey._own_pids = True
    beat = await survey.beats(await running(survey, nursery)).next()
    assert beat.gpu_processes is not None
    assert {process.pid: process.shard for process in beat.gpu_processes} == {1: "", os.getpid(): "m-0-0"}
    assert beat.shards is not None
    assert beat.shards[0].gpu_memory_bytes == 1048576
    nursery.cancel_scope.cancel()


async def test_a_gpu_that_falls_off_is_a_problem_in_a_heartbeat_and_a_reason_to_register_again(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    driver = Driver(tmp_path, "gpus 4")
    survey = Survey(View(root=tmp_path, period=0.2), dict, probe=driver.probe())
    register = await running(survey, nursery)
    beats, changed = survey.beats(register), survey.changed.version
    news = survey.news.version
    driver.says("gpus 4", "fail nvmlDeviceGetUtilizationRates 2 15", "xid 2 79")
    beat = await heard(beats, lambda beat: bool(beat.problems and len(beat.problems) == 2))
    assert beat.problems is not None
    assert {(each.subject, each.code, each.grade) for each in beat.problems} == {
        (f"gpu:{uuid(2)}", "gpu-lost", Grade.BAD),
        (f"gpu:{uuid(2)}", "xid-79", Grade.BAD),
    }
    with trio.fail_after(60):
        await survey.changed.next(changed)
        await survey.news.next(news)
    again = await survey.register()
    assert len(again.gpus) == 4
    assert "lost" in again.gpus[2].unreadable
    nursery.cancel_scope.cancel()


async def test_heartbeats_go_on_while_the_driver_hangs_and_say_so(tmp_path: Path, nursery: trio.Nursery) -> None:
    driver = Driver(tmp_path, "gpus 2")
    survey = Survey(View(root=tmp_path, period=0.2), dict, probe=driver.probe(within=2))
    # Told of no problem: a busy machine may make the driver late before it hangs.
    beats = survey.beats(structs.replace(await running(survey, nursery), problems=()))
    driver.says("hang nvmlDeviceGetCount_v2 -1")
    beat = await heard(beats, lambda beat: bool(beat.problems))
    assert beat.problems is not None
    assert [each.code for each in beat.problems] == ["driver-stalled"]
    with trio.fail_after(20):  # a third of what the driver is waited for
        assert (await beats.next()).load is not None
    nursery.cancel_scope.cancel()


async def test_a_port_that_goes_down_is_told_in_load_and_problem(tmp_path: Path, nursery: trio.Nursery) -> None:
    machine = hgx(tmp_path)
    survey = Survey(View(root=tmp_path, period=0.2), dict, probe=Driver(tmp_path, "gpus 0").probe())
    beats = survey.beats(await running(survey, nursery))
    await heard(beats, lambda beat: beat.ports is not None)
    machine.write("sys/class/infiniband/mlx5_4/ports/1/state", "1: DOWN")
    machine.write("sys/class/infiniband/mlx5_4/ports/1/phys_state", "2: Polling")
    beat = await heard(beats, lambda beat: any(each.code == "port-down" for each in beat.problems or ()))
    assert beat.problems is not None
    (problem,) = (each for each in beat.problems if each.code == "port-down")
    assert problem.subject == "port:mlx5_4/1"
    assert problem.grade is Grade.BAD
    nursery.cancel_scope.cancel()


async def test_a_restarted_agent_remembers_what_it_knew(tmp_path: Path) -> None:
    machine = hgx(tmp_path)
    machine.write("proc/sys/kernel/random/boot_id", "boot-1")
    view = View(root=tmp_path, state=tmp_path, period=0.2)
    async with trio.open_nursery() as nursery:
        await running(Survey(view, dict, probe=Driver(tmp_path, "gpus 0").probe()), nursery)
        nursery.cancel_scope.cancel()
    machine.write("sys/class/infiniband/mlx5_4/ports/1/state", "1: DOWN")
    async with trio.open_nursery() as nursery:
        register = await running(Survey(view, dict, probe=Driver(tmp_path, "gpus 0").probe()), nursery)
        nursery.cancel_scope.cancel()
    (problem,) = (each for each in register.problems if each.code == "port-down")
    assert "was up before" in problem.text


async def test_what_was_told_outlives_an_agent_that_is_killed_and_one_that_gets_no_answer(tmp_path: Path) -> None:
    """NV15: the probe stalls under load and its watcher is killed, over and over: the fault stays told."""
    view = View(state=tmp_path, period=0.2)
    async with trio.open_nursery() as nursery:
        survey = Survey(view, dict, probe=Driver(tmp_path, "gpus 1", "ecc 0 1 0 2").probe())
        await running(survey, nursery)
        memory = tmp_path / "problems.json"
        with trio.fail_after(60):
            while not memory.exists() or "ecc-uncorrectable" not in memory.read_text():  # noqa: ASYNC110
                await trio.sleep(0.05)
        written = memory.read_bytes()
        nursery.cancel_scope.cancel()
    memory.write_bytes(written)  # a killed agent writes no more
    async with trio.open_nursery() as nursery:
        stalled = Driver(tmp_path, "hang nvmlInitWithFlags -1").probe(first_within=0.5)
        register = await running(Survey(view, dict, probe=stalled), nursery)
        nursery.cancel_scope.cancel()
    codes = {each.code for each in register.problems}
    assert {"ecc-uncorrectable", "driver-stalled"} <= codes

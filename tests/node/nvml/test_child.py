"""The real NVML process against the library that behaves as told."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from llmgw.node.nvml.probe import Ghost, Probe, Unanswered, started
from llmgw.node.nvml.talk import HUNG, Look, Seen
from tests.fakes.nvml import Driver, uuid

pytestmark = pytest.mark.real

CLUSTER = "123456789abcdef0123456789abcdef0"


async def look(probe: Probe, *, whole: bool = True) -> Seen:
    with trio.fail_after(120):
        return await probe.ask(Look(whole))


@pytest.fixture
async def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path)


async def test_eight_gpus_are_listed_with_their_facts(driver: Driver) -> None:
    probe = driver.probe()
    seen = await look(probe)
    await probe.aclose()
    assert seen.driver.version == "570.172.08"
    assert seen.driver.cuda == "12.8"
    assert seen.gpus is not None
    assert [gpu.uuid for gpu in seen.gpus] == [uuid(number) for number in range(8)]
    first = seen.gpus[0]
    assert first.pci == "0000:1b:00.0"
    assert first.memory_bytes == 85520809984
    assert first.compute_capability == (9, 0)
    assert first.nvlinks == 18
    assert first.topology[uuid(7)] == "NV18"
    assert first.mig_enabled is False
    load = seen.loads[0]
    assert (load.memory_used_bytes, load.temperature_c, load.power_w) == (1 << 30, 41, 112.3)
    assert (load.pcie_gen, load.pcie_width, load.nvlinks_up, load.recovery_action) == (5, 16, 18, 0)
    assert (load.ecc_uncorrected, load.remap_pending, load.sram_uncorrected) == (0, False, 0)
    assert load.retired_pages_pending is None


async def test_a_second_look_is_loads_only_and_keeps_what_is_read_once_a_minute(driver: Driver) -> None:
    driver.says("field 206 -1 3", "sram 2 1 1 4")
    probe = driver.probe()
    await look(probe)
    seen = await look(probe, whole=False)
    await probe.aclose()
    assert seen.gpus is None
    assert seen.loads[0].nvlink_errors == 3 * 18
    assert seen.loads[2].sram_uncorrected == 4


async def test_health_is_read_by_name(driver: Driver) -> None:
    driver.says(
        "ecc 1 1 0 2", "ecc 1 1 1 5", "remap 1 3 4 1 1", "throttle 1 0x48", "temperature 1 91", "pcie 1 3 8",
        "field 230 1 2", "linkdown 1 2",
    )  # fmt: skip
    probe = driver.probe()
    load = (await look(probe)).loads[1]
    await probe.aclose()
    assert (load.ecc_uncorrected, load.ecc_uncorrected_total) == (2, 5)
    assert (load.remapped_rows, load.remapped_uncorrected, load.remap_pending, load.remap_failed) == (7, 4, True, True)
    assert (load.throttle, load.temperature_c, load.pcie_gen, load.pcie_width) == (0x48, 91, 3, 8)
    assert (load.recovery_action, load.nvlinks_up) == (2, 16)


async def test_a_gpu_lost_in_one_call_costs_only_that_gpu(driver: Driver) -> None:
    driver.says("fail nvmlDeviceGetRemappedRows 3 15")
    probe = driver.probe()
    seen = await look(probe)
    await probe.aclose()
    assert len(seen.loads) == 7
    (trouble,) = seen.troubles
    assert (trouble.index, trouble.code, trouble.uuid, trouble.pci) == (3, 15, uuid(3), "0000:1e:00.0")


@pytest.mark.parametrize("call", ["nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetP2PStatus"])
async def test_a_gpu_lost_in_a_call_about_two_is_not_held_against_the_other(driver: Driver, call: str) -> None:
    driver.says(f"fail {call} 3 15", "fail nvmlDeviceGetRemappedRows 3 15")
    probe = driver.probe()
    seen = await look(probe)
    await probe.aclose()
    assert [(trouble.index, trouble.call) for trouble in seen.troubles] == [(3, "nvmlDeviceGetRemappedRows")]
    assert len(seen.loads) == 7


async def test_a_gpu_lost_at_its_handle_is_an_entry_with_an_error(driver: Driver) -> None:
    driver.says("fail nvmlDeviceGetHandleByIndex_v2 3 15")
    probe = driver.probe()
    seen = await look(probe)
    await probe.aclose()
    assert len(seen.loads) == 7
    assert [(trouble.index, trouble.code) for trouble in seen.troubles] == [(3, 15)]


async def test_an_unknown_error_on_a_handle_is_that_gpus_only(driver: Driver) -> None:
    driver.says("fail nvmlDeviceGetHandleByIndex_v2 5 999")
    probe = driver.probe()
    seen = await look(probe)
    await probe.aclose()
    assert [(trouble.index, trouble.code) for trouble in seen.troubles] == [(5, 999)]


async def test_a_gpu_that_falls_off_while_we_look_is_missed_at_the_next_look(driver: Driver) -> None:
    probe = driver.probe()
    await look(probe)
    driver.says("count 7")
    seen = await look(probe, whole=False)
    await probe.aclose()
    assert seen.count == 7
    assert seen.gpus is not None
    assert len(seen.gpus) == 7


async def test_reset_required_is_told_with_its_code(driver: Driver) -> None:
    driver.says("fail nvmlDeviceGetUtilizationRates 2 16")
    probe = driver.probe()
    seen = await look(probe)
    await probe.aclose()
    assert [trouble.code for trouble in seen.troubles] == [16]


@pytest.mark.parametrize("code", [9, 12, 18])
async def test_a_driver_that_cannot_be_asked_is_refused_with_its_code_and_a_new_process_is_started_next_time(
    driver: Driver, code: int
) -> None:
    driver.says(f"fail nvmlInitWithFlags -1 {code}")
    probe = driver.probe()
    assert (await look(probe)).refused == code
    assert probe.pid is None
    driver.says("gpus 2")
    assert len((await look(probe)).loads) == 2
    await probe.aclose()


async def test_a_driver_updated_under_us_is_refused_at_the_next_look(driver: Driver) -> None:
    probe = driver.probe()
    await look(probe)
    driver.says("fail nvmlDeviceGetCount_v2 -1 18")
    assert (await look(probe, whole=False)).refused == 18
    assert probe.pid is None


async def test_a_machine_without_the_library_is_refused_with_twelve(tmp_path: Path) -> None:
    probe = Probe(env={"PATH": "/usr/bin", "LD_LIBRARY_PATH": str(tmp_path)})
    assert (await look(probe)).refused == 12


async def test_unsupported_calls_leave_gaps(driver: Driver) -> None:
    driver.says("fail nvmlDeviceGetPowerUsage -1 3", "fail nvmlDeviceGetTemperatureV -1 3", "links 0")
    probe = driver.probe()
    seen = await look(probe)
    await probe.aclose()
    assert seen.loads[0].power_w is None
    assert seen.loads[0].temperature_c is None
    assert seen.loads[0].nvlinks_up is None
    assert seen.loads[0].utilization_percent == 37


async def test_a_name_that_is_not_text_costs_the_name_only(driver: Driver) -> None:
    driver.says("garbage 4")
    probe = driver.probe()
    seen = await look(probe)
    await probe.aclose()
    assert seen.gpus is not None
    assert len(seen.gpus) == 8
    assert seen.gpus[4].name == ""
    assert seen.gpus[5].name == "NVIDIA H100 80GB HBM3"


async def test_unified_memory_is_the_hosts_and_flagged(driver: Driver) -> None:
    driver.says("gpus 1", "unified", "domain f", "name NVIDIA GB10")
    probe = driver.probe()
    seen = await look(probe)
    await probe.aclose()
    assert seen.gpus is not None
    (gpu,) = seen.gpus
    assert gpu.unified_memory
    assert gpu.memory_bytes is not None
    assert gpu.memory_bytes > 1 << 30
    assert gpu.pci == "000f:1b:00.0"


async def test_a_gpu_that_says_it_has_no_memory_has_the_hosts(driver: Driver) -> None:
    driver.says("gpus 1", "memory 0")
    probe = driver.probe()
    seen = await look(probe)
    await probe.aclose()
    assert seen.gpus is not None
    assert seen.gpus[0].unified_memory
    assert (seen.gpus[0].memory_bytes or 0) > 1 << 30
    assert seen.loads[0].memory_used_bytes is None


async def test_gpus_that_may_not_read_one_another_say_why(driver: Driver) -> None:
    driver.says("gpus 3", "p2p 1 4")
    probe = driver.probe()
    seen = await look(probe)
    await probe.aclose()
    assert seen.gpus is not None
    assert seen.gpus[0].no_peer_access == {}
    assert seen.gpus[1].no_peer_access == dict.fromkeys((uuid(0), uuid(2)), "disabled by a driver setting (regkey)")


async def test_an_old_library_without_memory_version_two_is_asked_by_version_one(driver: Driver) -> None:
    driver.says("fail nvmlDeviceGetMemoryInfo_v2 -1 25")
    probe = driver.probe()
    await look(probe)
    seen = await look(probe)
    await probe.aclose()
    assert seen.gpus is not None
    assert seen.gpus[0].memory_bytes == 85520809984
    assert not seen.gpus[0].unified_memory


async def test_mig_devices_are_known_by_uuid(driver: Driver) -> None:
    driver.says("gpus 2", "mig 1 2")
    probe = driver.probe()
    seen = await look(probe)
    await probe.aclose()
    assert seen.gpus is not None
    assert seen.gpus[1].mig_enabled
    assert [device.profile for device in seen.gpus[1].mig_devices] == ["1g.10gb", "1g.10gb"]
    assert all(device.uuid.startswith("MIG-") for device in seen.gpus[1].mig_devices)


async def test_processes_are_those_of_the_mig_device_they_are_on(driver: Driver) -> None:
    driver.says("gpus 1", "mig 0 2", "process 2000 77 1024")
    probe = driver.probe()
    seen = await look(probe)
    await probe.aclose()
    assert seen.gpus is not None
    assert [(each.gpu, each.pid) for each in seen.processes] == [(seen.gpus[0].mig_devices[1].uuid, 77)]


async def test_a_mig_container_without_permission_reads_its_devices_memory(driver: Driver) -> None:
    driver.says("gpus 1", "mig 0 1", "fail nvmlDeviceGetMemoryInfo 0 4", "fail nvmlDeviceGetMemoryInfo_v2 0 4")
    probe = driver.probe()
    seen = await look(probe)
    await probe.aclose()
    assert seen.gpus is not None
    (gpu,) = seen.gpus
    assert not gpu.unified_memory
    assert gpu.memory_bytes == gpu.mig_devices[0].memory_bytes == 85520809984 // 8


async def test_mig_devices_show_though_the_mode_may_not_be_asked(driver: Driver) -> None:
    driver.says("gpus 1", "mig 0 2", "fail nvmlDeviceGetMigMode 0 4")
    probe = driver.probe()
    seen = await look(probe)
    await probe.aclose()
    assert seen.gpus is not None
    assert (seen.gpus[0].mig_enabled, len(seen.gpus[0].mig_devices)) == (True, 2)


async def test_no_permission_without_mig_leaves_memory_unknown(driver: Driver) -> None:
    driver.says("gpus 1", "fail nvmlDeviceGetMemoryInfo 0 4", "fail nvmlDeviceGetMemoryInfo_v2 0 4")
    probe = driver.probe()
    seen = await look(probe)
    await probe.aclose()
    assert seen.gpus is not None
    assert seen.gpus[0].memory_bytes is None
    assert not seen.gpus[0].unified_memory


async def test_a_rack_scale_tray_names_its_domain(driver: Driver) -> None:
    driver.says("gpus 4", f"fabric 3 0 32766 {CLUSTER} 0x51aa")
    probe = driver.probe()
    seen = await look(probe)
    await probe.aclose()
    fabric = seen.fabrics[uuid(0)]
    assert fabric.domain == "12345678-9abc-def0-1234-56789abcdef0.32766"
    assert fabric.healthy is True


async def test_a_library_that_knows_only_the_older_fabric_is_asked_by_it(driver: Driver) -> None:
    driver.says("gpus 1", "fabric3 0", f"fabric 3 0 1 {CLUSTER} 0x1")
    probe = driver.probe()
    seen = await look(probe)
    await probe.aclose()
    assert seen.fabrics[uuid(0)].faults == ("degraded bandwidth",)


async def test_processes_come_with_pid_and_memory_where_the_driver_tells(driver: Driver) -> None:
    driver.says("gpus 1", "process 0 4242 1048576", "process 0 4243 0")
    probe = driver.probe()
    seen = await look(probe)
    await probe.aclose()
    assert [(each.pid, each.memory_bytes) for each in seen.processes] == [(4242, 1048576), (4243, None)]


async def test_xids_are_told_once(driver: Driver) -> None:
    probe = driver.probe()
    await look(probe)
    driver.says("xid 2 79", "xid 3 13")
    seen = await look(probe, whole=False)
    assert [(event.gpu, event.xid) for event in seen.xids] == [(uuid(2), 79), (uuid(3), 13)]
    assert (await look(probe, whole=False)).xids == ()
    await probe.aclose()


async def test_a_hang_is_a_stall_and_the_process_is_killed(driver: Driver) -> None:
    probe = driver.probe(within=0.5)
    await look(probe)
    pid = probe.pid
    assert pid is not None
    driver.says("hang nvmlDeviceGetCount_v2 -1")
    with pytest.raises(Unanswered) as caught:
        await look(probe)
    assert caught.value.stalled
    assert started(pid) is None
    assert probe.ghost is None
    driver.says("gpus 8")
    assert len((await look(probe)).loads) == 8
    await probe.aclose()


async def test_a_process_that_cannot_be_killed_is_left_behind_and_no_other_is_started(driver: Driver) -> None:
    # A kill without effect stands for a kernel that does not deliver it.
    stuck = Probe(env=driver.env, within=0.5, death_within=0.2, kill=lambda process: None)
    await look(stuck)
    driver.says("hang nvmlDeviceGetCount_v2 -1")
    with pytest.raises(Unanswered):
        await look(stuck)
    ghost = stuck.ghost
    assert ghost is not None
    assert ghost.lives
    driver.says("gpus 8")
    with pytest.raises(Unanswered, match="cannot be killed") as caught:
        await look(stuck)
    assert caught.value.stalled
    assert stuck.pid is None
    # It dies after all: a new process may be started.
    process = stuck._left.pop()
    process.kill()
    await process.wait()
    assert started(ghost.pid) is None
    assert len((await look(stuck)).loads) == 8
    last = stuck._process
    assert last is not None
    await stuck.aclose()
    await last.wait()


async def test_a_crash_is_told_by_its_signal_and_the_next_question_starts_anew(driver: Driver) -> None:
    driver.says("crash nvmlDeviceGetUtilizationRates 4")
    probe = driver.probe()
    with pytest.raises(Unanswered, match="SIGSEGV") as caught:
        await look(probe)
    assert not caught.value.stalled
    assert caught.value.gpu == 4
    driver.says("gpus 8")
    assert len((await look(probe)).loads) == 8
    await probe.aclose()


async def test_a_gpu_that_is_skipped_is_named_and_nothing_is_asked_of_it(driver: Driver) -> None:
    probe = driver.probe(within=3)
    await look(probe)
    driver.says("hang nvmlDeviceGetUUID 2", "hang nvmlDeviceGetHandleByIndex_v2 2")
    with pytest.raises(Unanswered, match="asked about GPU 2") as caught:
        await look(probe)
    assert caught.value.gpu == 2
    with trio.fail_after(120):
        seen = await probe.ask(Look(True, (2,)))
        again = await probe.ask(Look(False, (2,)))
    await probe.aclose()
    assert len(seen.loads) == len(again.loads) == 7
    assert [(trouble.index, trouble.code) for trouble in again.troubles] == [(2, HUNG)]


async def test_a_question_given_up_half_way_does_not_answer_the_next_one(driver: Driver) -> None:
    driver.says("hang nvmlDeviceGetCount_v2 -1")
    probe = driver.probe()
    with trio.move_on_after(0.5) as scope:
        await look(probe)
    assert scope.cancelled_caught
    assert probe.pid is None
    driver.says("gpus 3")
    assert len((await look(probe)).loads) == 3
    await probe.aclose()


def test_a_later_process_with_the_same_pid_is_no_ghost() -> None:
    own = started(1)
    assert own is not None
    assert not Ghost(1, own[0] + 1).lives

"""What is wrong with GPUs."""

from __future__ import annotations

import attrs
import pytest

from llmgw.node.gpus import GpuView
from llmgw.node.kernel import KernelEvent
from llmgw.node.nvml.inventory import UNLISTED, PciGpu
from llmgw.node.problems.memory import Facts, Memory, Verdict
from llmgw.node.problems.verdict import problems
from llmgw.wire.facts import Gpu, GpuDriver, GpuFabric, GpuLoad, Grade, Host, HostLimits, Imex, Problem

CLUSTER = "12345678-9abc-def0-1234-56789abcdef0"
READY = GpuFabric(state="completed", cluster_uuid=CLUSTER, clique=32766, healthy=True)


def gpu(number: int, **more: object) -> Gpu:
    return Gpu(uuid=f"GPU-{number}", index=number, name="H100", pci=f"0000:{0x1B + number:02x}:00.0", **more)  # type: ignore[arg-type]


def load(number: int, **more: object) -> GpuLoad:
    usual = {"pcie_gen": 5, "pcie_width": 16, "nvlinks_up": 18, "temperature_c": 40, "throttle": 0, **more}
    return GpuLoad(uuid=f"GPU-{number}", **usual)  # type: ignore[arg-type]


def view(**odd: dict[int, object]) -> GpuView:
    """Eight GPUs; `odd` gives single ones another reading: temperature_c={3: 95}."""
    loads = tuple(load(n, **{name: values[n] for name, values in odd.items() if n in values}) for n in range(8))
    return GpuView(at=0.0, gpus=tuple(gpu(n) for n in range(8)), loads=loads)


def facts(gpus: GpuView, **more: object) -> Facts:
    return Facts(host=Host(boot_id="boot", memory_bytes=0), gpus=gpus, **more)  # type: ignore[arg-type]


def verdict(*looks: tuple[float, Facts]) -> Verdict:
    memory = Memory()
    result = Verdict((), memory)
    for now, seen in looks:
        result = problems(seen, memory, now)
        memory = result.memory
    return result


def found(seen: Facts, now: float = 1000.0) -> dict[str, Problem]:
    return {f"{each.subject} {each.code}": each for each in verdict((now, seen)).problems}


def test_eight_good_gpus_have_no_problems() -> None:
    assert found(facts(view())) == {}


@pytest.mark.parametrize(
    ("reading", "value", "code", "grade"),
    [
        ("remap_pending", True, "remap-pending", Grade.BAD),
        ("remap_failed", True, "remap-failed", Grade.BAD),
        ("remapped_rows", 512, "remap-full", Grade.BAD),
        ("sram_uncorrected", 1, "sram-uncorrectable", Grade.BAD),
        ("ecc_uncorrected", 1, "ecc-uncorrectable", Grade.WARN),
        ("sram_corrected", 10_001, "sram-corrected", Grade.WARN),
        ("ecc_corrected_total", 20_000_001, "memory-corrected", Grade.WARN),
        ("retired_pages_pending", True, "retirement-pending", Grade.WARN),
        ("recovery_action", 1, "recovery-action", Grade.BAD),
        ("recovery_action", 3, "recovery-action", Grade.WARN),
        ("nvlinks_up", 16, "nvlink-down", Grade.BAD),
        ("pcie_width", 8, "gpu-pcie-width", Grade.WARN),
    ],
)
def test_each_fault_is_named_with_its_gpu_and_its_grade(reading: str, value: object, code: str, grade: Grade) -> None:
    only = found(facts(view(**{reading: {3: value}})))
    assert list(only) == [f"gpu:GPU-3 {code}"]
    (problem,) = only.values()
    assert problem.grade is grade
    assert problem.text.startswith("GPU 3 (0000:1e:00.0)")
    assert problem.remedy


def test_a_gpu_with_less_than_its_peers_is_named_with_both_numbers() -> None:
    (problem,) = found(facts(view(nvlinks_up={3: 16}))).values()
    assert "16 NVLinks up, the other seven 18" in problem.text


def test_what_half_of_the_gpus_have_is_how_they_are_built() -> None:
    assert found(facts(view(pcie_width=dict.fromkeys(range(4), 8)))) == {}


def test_an_idle_gpu_saves_power_and_a_busy_one_that_is_slow_is_named_after_a_minute() -> None:
    assert found(facts(view(pcie_gen={3: 1}))) == {}
    busy = facts(view(pcie_gen={3: 1}, utilization_percent=dict.fromkeys(range(8), 90)))
    assert verdict((0, busy)).problems == ()
    assert [each.code for each in verdict((0, busy), (61, busy)).problems] == ["gpu-pcie-speed"]


def test_clocks_held_down_count_only_when_it_lasts() -> None:
    hot = facts(view(throttle={2: 0x48}, temperature_c={2: 88}))
    assert verdict((0, hot), (30, facts(view())), (70, hot)).problems == ()
    (problem,) = verdict((0, hot), (61, hot)).problems
    assert (problem.code, problem.grade) == ("throttled-hardware", Grade.BAD)
    assert "88 C" in problem.text
    warm = facts(view(throttle={2: 0x20}))
    assert [each.grade for each in verdict((0, warm), (61, warm)).problems] == [Grade.WARN]


def test_a_lost_gpu_is_bad_and_the_others_are_fine() -> None:
    eight = view()
    lost = attrs.evolve(
        eight,
        gpus=(*eight.gpus[:3], gpu(3, unreadable="lost: fallen off the bus (NVML error 15)"), *eight.gpus[4:]),
        loads=(*eight.loads[:3], *eight.loads[4:]),
    )
    only = found(facts(lost))
    assert list(only) == ["gpu:GPU-3 gpu-lost"]
    assert only["gpu:GPU-3 gpu-lost"].grade is Grade.BAD
    assert "0000:1e:00.0" in only["gpu:GPU-3 gpu-lost"].text


def test_a_gpu_that_only_the_bus_shows_is_bad() -> None:
    eight = view()
    missing = Gpu(uuid="pci:0000:22:00.0", pci="0000:22:00.0", unreadable=UNLISTED)
    only = found(facts(attrs.evolve(eight, gpus=(*eight.gpus[:7], missing), loads=eight.loads[:7])))
    assert list(only) == ["gpu:pci:0000:22:00.0 gpu-missing"]
    assert only["gpu:pci:0000:22:00.0 gpu-missing"].grade is Grade.BAD


def test_a_gpu_that_hangs_is_told_apart_from_one_that_is_lost() -> None:
    eight = view()
    hung = attrs.evolve(eight, gpus=(gpu(0, unreadable="does not answer: the driver hangs at it"), *eight.gpus[1:]))
    assert list(found(facts(hung))) == ["gpu:GPU-0 gpu-hangs"]


def test_a_version_mismatch_is_one_problem_of_the_node() -> None:
    gpus = tuple(gpu(n, unreadable="driver") for n in range(8))
    only = found(facts(GpuView(at=0.0, gpus=gpus, refused=18, driver=GpuDriver(absent="mismatch"))))
    assert list(only) == ["node driver-mismatch"]
    assert "those that run go on" in only["node driver-mismatch"].text


def test_no_driver_is_a_problem_only_where_there_are_gpus() -> None:
    assert found(facts(GpuView(at=0.0, refused=12))) == {}
    only = found(facts(GpuView(at=0.0, refused=9, present=(PciGpu("0000:1b:00.0"),))))
    assert list(only) == ["node driver-absent"]


def test_a_driver_that_hangs_is_bad_with_the_time_since_when() -> None:
    (problem,) = found(facts(attrs.evolve(view(), stalled_since=0.0, stalled="did not answer"))).values()
    assert problem.code == "driver-stalled"
    assert "is not answering since 1970-01-01 00:00:00 UTC" in problem.text


def test_one_crash_is_an_accident_and_several_are_a_problem() -> None:
    assert found(facts(attrs.evolve(view(), crashes=1, stalled="ended by SIGSEGV"))) == {}
    (problem,) = found(facts(attrs.evolve(view(), crashes=4, stalled="ended by SIGSEGV"))).values()
    assert (problem.code, problem.grade) == ("driver-crashing", Grade.BAD)


# --- fabric --------------------------------------------------------------------------------------------------


def with_fabric(fabric: GpuFabric, manager: str | None = None) -> Facts:
    gpus = attrs.evolve(view(), fabrics={f"GPU-{n}": fabric for n in range(8)})
    return Facts(host=Host(boot_id="boot", limits=HostLimits(fabric_manager=manager)), gpus=gpus)


def test_a_fabric_in_progress_is_not_ready_for_so_many_seconds() -> None:
    seen = with_fabric(GpuFabric(state="in-progress"))
    result = verdict((0, seen), (120, seen)).problems
    assert {each.code for each in result} == {"fabric-not-ready"}
    assert "fabric not ready (In Progress) for 120 s" in result[0].text
    assert result[0].grade is Grade.WARN  # one GPU by itself may still serve


def test_a_fabric_manager_that_never_started_makes_gpus_unusable_though_they_look_fine() -> None:
    problem = found(with_fabric(GpuFabric(state="not-started"), "inactive"))["gpu:GPU-0 fabric-manager"]
    assert problem.grade is Grade.BAD
    assert "fabric manager" in problem.text
    assert "802" in problem.text
    assert "inactive" in problem.text


def test_a_completed_fabric_is_healthy_though_no_fabric_manager_runs_here() -> None:
    assert found(with_fabric(READY, "inactive")) == {}
    assert found(with_fabric(GpuFabric(state="completed"))) == {}


def test_gpus_of_one_node_in_two_cliques_are_told() -> None:
    seen = with_fabric(READY)
    other = GpuFabric(state="completed", cluster_uuid=CLUSTER, clique=7, healthy=True)
    split = attrs.evolve(seen, gpus=attrs.evolve(seen.gpus, fabrics={**seen.gpus.fabrics, "GPU-7": other}))
    (problem,) = found(split).values()
    assert problem.code == "fabric-split"
    assert f"7 in {CLUSTER}.7" in problem.text


def test_faults_of_the_fabric_are_named_by_weight() -> None:
    light = GpuFabric(state="completed", cluster_uuid=CLUSTER, healthy=False, faults=("degraded bandwidth",))
    assert found(with_fabric(light))["gpu:GPU-0 fabric-unhealthy"].grade is Grade.WARN
    heavy = GpuFabric(state="completed", cluster_uuid=CLUSTER, healthy=False, faults=("route unhealthy",))
    assert found(with_fabric(heavy))["gpu:GPU-0 fabric-unhealthy"].grade is Grade.BAD


def test_imex_counts_only_where_there_is_a_domain() -> None:
    down = Imex(state="DOWN")
    assert found(attrs.evolve(with_fabric(GpuFabric(state="completed")), imex=down)) == {}
    mute = attrs.evolve(with_fabric(READY), imex=Imex(state="runs, cannot be asked: no answer within 10 s"))
    assert [(each.code, each.grade) for each in found(mute).values()] == [("imex-unknown", Grade.NOTE)]
    late = attrs.evolve(with_fabric(READY), imex=down)
    assert [each.code for each in verdict((0, late), (31, late)).problems] == ["imex-not-up"]
    differs = attrs.evolve(with_fabric(READY), imex=Imex(state="DEGRADED", mismatch=("10.0.0.6",)))
    assert "10.0.0.6" in found(differs)["node imex-mismatch"].text


def test_a_restart_while_the_driver_does_not_answer_clears_no_gpus_problem() -> None:
    """NV15: the new agent has the memory of the old one and nothing that it read itself."""
    sick = facts(view(ecc_uncorrected={3: 2}))
    stalled = facts(GpuView(gpus=view().gpus, stalled_since=1e9, stalled="the driver did not answer within 10 s"))
    refused = facts(GpuView(at=1.0, gpus=view().gpus, refused=9))
    for blind in (stalled, refused):
        kept = {f"{each.subject} {each.code}" for each in verdict((0, sick), (5, blind), (4000, blind)).problems}
        assert "gpu:GPU-3 ecc-uncorrectable" in kept
        after = verdict((0, sick), (5, blind), (4000, blind), (4001, facts(view())), (5000, facts(view())))
        assert after.problems == ()


def test_what_gpus_had_that_are_here_no_more_is_over() -> None:
    """A container that is started again without them; the machine did not boot."""
    sick, bare = facts(view(ecc_uncorrected={3: 2})), facts(GpuView(at=1.0, refused=12))
    assert verdict((0, sick), (5, bare), (4000, bare)).problems == ()


def test_pcie_errors_of_a_gpu_are_told() -> None:
    line = "nvidia 0000:1e:00.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Transaction Layer"
    event = KernelEvent(990.0, "pcie-error", line, "0000:1e:00.0")
    (problem,) = found(facts(view(), events=(event,))).values()
    assert (problem.subject, problem.code, problem.grade) == ("gpu:GPU-3", "gpu-pcie-error", Grade.WARN)
    seen, blind = facts(view(), events=(event,)), facts(GpuView(at=1.0, gpus=view().gpus, refused=9))
    codes = [each.code for each in verdict((1000, seen), (5000, blind), (6000, blind)).problems]
    assert codes == ["driver-absent"], "told by the log alone, it ends without the driver"


def test_a_fatal_error_of_an_nvswitch_keeps_gpu_shards_away_for_an_hour() -> None:
    line = "nvidia-nvswitch3: SXid (PCI:0000:c6:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"
    seen = facts(view(), events=(KernelEvent(990.0, "nvswitch-fatal", line, "0000:c6:00.0"),))
    (problem,) = found(seen).values()
    assert (problem.subject, problem.code, problem.grade) == ("node", "gpu-nvswitch-fatal", Grade.BAD)
    assert "20034" in problem.text
    assert found(seen, now=5000.0) == {}


# --- Xids ----------------------------------------------------------------------------------------------------


def xid(number: int, pci: str = "0000:1e:00.0", at: float = 990.0) -> KernelEvent:
    return KernelEvent(at, "xid", f"NVRM: Xid (PCI:{pci}): {number}, ...", pci, number)


@pytest.mark.parametrize("number", [13, 31, 43, 45, 68, 109])
def test_what_programs_did_is_a_note_and_takes_nothing_out(number: int) -> None:
    only = found(facts(view(), events=(xid(number),)))
    assert [each.grade for each in only.values()] == [Grade.NOTE]


def test_an_xid_that_ends_a_gpu_is_bad_with_number_meaning_and_line() -> None:
    (problem,) = found(facts(view(), events=(xid(79),))).values()
    assert (problem.subject, problem.code, problem.grade) == ("gpu:GPU-3", "xid-79", Grade.BAD)
    assert "fallen off the bus" in problem.text
    assert "NVRM" in problem.text


def test_one_xid_told_by_the_driver_and_by_the_kernel_is_one() -> None:
    both = facts(attrs.evolve(view(), xids=((992.0, "GPU-3", 48),)), events=(xid(48),))
    (problem,) = found(both).values()
    assert "times" not in problem.text


def test_xids_of_an_hour_are_counted() -> None:
    events = tuple(xid(31, at=float(at)) for at in (100, 500, 990))
    (problem,) = found(facts(view(), events=events)).values()
    assert "3 times in the last hour" in problem.text


def test_a_gpu_that_is_well_again_is_not_bad_for_ever() -> None:
    seen = facts(view(), events=(xid(79, at=1000.0),))
    assert verdict((1001, seen)).problems
    assert verdict((1001, seen), (1700, seen)).problems  # its window is over; the problem waits out its own
    assert verdict((1001, seen), (1700, seen), (1790, seen)).problems == ()
    action = facts(view(recovery_action={3: 1}), events=(xid(79, at=1000.0),))
    assert "xid-79" in {each.code for each in verdict((1001, seen), (1700, action), (1790, action)).problems}


def test_an_xid_of_a_gpu_that_nobody_lists_is_told_by_its_address() -> None:
    (problem,) = found(facts(view(), events=(xid(79, "0000:b3:00.0"),))).values()
    assert problem.subject == "gpu:pci:0000:b3:00.0"


def test_nvlink_errors_are_judged_by_their_growth_in_an_hour() -> None:
    def at(count: int) -> Facts:
        return facts(view(nvlink_errors={5: count}))

    assert verdict((0, at(100_000)), (600, at(100_050))).problems == ()
    (problem,) = verdict((0, at(100_000)), (600, at(100_200))).problems
    assert problem.code == "nvlink-errors"
    assert "grew by 200 in 10 min" in problem.text
    assert verdict((0, at(100_000)), (600, at(5))).problems == ()

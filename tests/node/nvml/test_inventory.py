"""The list of GPUs that no fault can shorten."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmgw.node.nvml.inventory import PciGpu, merged, refusal, without_driver
from llmgw.node.nvml.talk import Seen, Trouble
from llmgw.wire.facts import Gpu, GpuLoad


def gpu(number: int, **more: str) -> Gpu:
    return Gpu(uuid=f"GPU-{number}", index=number, name="H100", pci=f"0000:{0x1B + number:02x}:00.0", **more)  # type: ignore[arg-type]


def seen(*gpus: Gpu, troubles: tuple[Trouble, ...] = (), whole: bool = True) -> Seen:
    return Seen(gpus=gpus if whole else None, loads=tuple(GpuLoad(each.uuid) for each in gpus), troubles=troubles)


EIGHT = tuple(gpu(number) for number in range(8))
BUS = tuple(PciGpu(each.pci, 0 if each.index and each.index < 4 else 1) for each in EIGHT)


def bad(gpus: tuple[Gpu, ...]) -> dict[str, str]:
    return {each.uuid: each.unreadable for each in gpus if each.unreadable}


def test_eight_good_gpus_are_eight_good_gpus() -> None:
    now = merged((), seen(*EIGHT), BUS)
    assert [each.uuid for each in now] == [each.uuid for each in EIGHT]
    assert bad(now) == {}
    assert now[3].numa_node == 0


def test_a_gpu_lost_by_one_call_is_flagged_with_its_pci_address_and_the_others_stay() -> None:
    trouble = Trouble(3, 15, "GPU-3", "0000:1e:00.0", "nvmlDeviceGetRemappedRows")
    now = merged(EIGHT, seen(*EIGHT[:3], *EIGHT[4:], troubles=(trouble,)), BUS)
    assert len(now) == 8
    assert list(bad(now)) == ["GPU-3"]
    assert "lost" in bad(now)["GPU-3"]
    assert next(each for each in now if each.uuid == "GPU-3").pci == "0000:1e:00.0"


def test_a_gpu_whose_handle_is_lost_from_the_start_is_known_by_the_address_nobody_else_has() -> None:
    trouble = Trouble(3, 15, call="nvmlDeviceGetHandleByIndex_v2")
    now = merged((), seen(*EIGHT[:3], *EIGHT[4:], troubles=(trouble,)), BUS)
    assert len(now) == 8
    assert list(bad(now)) == ["pci:0000:1e:00.0"]


def test_a_gpu_whose_handle_is_lost_later_keeps_its_uuid() -> None:
    trouble = Trouble(3, 15, call="nvmlDeviceGetHandleByIndex_v2")
    now = merged(EIGHT, seen(*EIGHT[:3], *EIGHT[4:], troubles=(trouble,)), ())
    assert list(bad(now)) == ["GPU-3"]


def test_a_gpu_that_pci_shows_and_the_driver_does_not_list_is_named() -> None:
    now = merged((), seen(*EIGHT[:7]), BUS)
    assert bad(now) == {"pci:0000:22:00.0": "not listed by the driver"}


def test_a_gpu_that_is_well_and_does_not_tell_its_address_is_not_missed_as_another() -> None:
    mute = Gpu(uuid="GPU-3", index=3, name="H100")
    now = merged((), seen(*EIGHT[:3], mute, *EIGHT[4:]), BUS)
    assert (len(now), bad(now)) == (8, {})
    now = merged((), seen(*EIGHT[:3], mute, *EIGHT[4:7]), BUS)
    assert (len(now), len(bad(now))) == (8, 1)
    again = merged(EIGHT, seen(*EIGHT[:3], mute, *EIGHT[4:]), BUS)
    assert [each.pci for each in again] == [each.pci for each in EIGHT]


def test_a_gpu_that_dropped_out_shifts_indexes_and_no_identities() -> None:
    shifted = tuple(
        Gpu(uuid=each.uuid, index=index, name="H100", pci=each.pci) for index, each in enumerate(EIGHT[:2] + EIGHT[3:])
    )
    now = merged(EIGHT, seen(*shifted), BUS)
    assert list(bad(now)) == ["GPU-2"]
    assert "missing" in bad(now)["GPU-2"]


def test_a_stand_in_gives_way_to_the_gpu_that_shows_its_name_again() -> None:
    broken = merged((), seen(*EIGHT[:7]), BUS)
    now = merged(broken, seen(*EIGHT), BUS)
    assert bad(now) == {}
    assert len(now) == 8


def test_a_gpu_that_recovers_is_whole_again_without_a_new_list() -> None:
    trouble = Trouble(3, 16, "GPU-3", "0000:1e:00.0", "nvmlDeviceGetPowerUsage")
    broken = merged(EIGHT, seen(*EIGHT[:3], *EIGHT[4:], troubles=(trouble,)), BUS)
    assert "reset required" in bad(broken)["GPU-3"]
    assert bad(merged(broken, seen(*EIGHT, whole=False), BUS)) == {}


def test_a_driver_that_was_updated_leaves_the_gpus_their_names_and_says_why_none_can_be_used() -> None:
    now, driver = without_driver(EIGHT, 18)
    assert "differ in version" in driver.absent
    assert len(bad(now)) == 8
    assert without_driver((), 18)[0] == ()
    assert refusal(12) == "no NVIDIA driver: libnvidia-ml.so.1 is not installed"
    assert "77" in refusal(77)


numbers = st.integers(0, 9)
somes = st.lists(numbers, unique=True, max_size=10)
troubles = st.lists(
    st.builds(
        Trouble,
        numbers,
        st.sampled_from([2, 15, 16, 999, -1]),
        st.sampled_from(["", "GPU-1", "GPU-5"]),
        st.sampled_from(["", "0000:1c:00.0", "0000:20:00.0"]),
    ),
    max_size=4,
)


@given(somes, somes, somes, troubles, st.booleans())
def test_no_gpu_known_or_on_the_bus_is_ever_left_out_and_none_is_there_twice(
    before: list[int], listed: list[int], bus: list[int], wrong: list[Trouble], whole: bool
) -> None:
    known = tuple(gpu(number) for number in before)
    present = tuple(PciGpu(gpu(number).pci) for number in bus)
    now = merged(known, seen(*(gpu(n) for n in listed), troubles=tuple(wrong), whole=whole), present)
    uuids = [each.uuid for each in now]
    assert len(uuids) == len(set(uuids))
    assert {each.uuid for each in known} <= set(uuids)
    assert {each.pci for each in present} <= {each.pci for each in now}

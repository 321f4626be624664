"""A node's GPUs as one list that no fault can shorten: what was seen, what was seen before, what PCI shows.

Pure. Identity is the uuid, and the PCI address while the uuid cannot be read: indexes shift when a GPU drops out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
import msgspec

from llmgw.node.nvml.talk import HUNG, Seen, Trouble
from llmgw.wire.facts import Gpu, GpuDriver

#: Why one GPU cannot be used, by NVML's code.
WORDS = {
    HUNG: "does not answer: the driver hangs at it",
    2: "gone: the driver's list has shrunk",
    4: "no permission to read it",
    6: "not found by the driver",
    8: "without enough power: its power cables are not connected well",
    10: "the driver timed out at it",
    11: "the kernel has no interrupt for it",
    15: "lost: fallen off the bus",
    16: "reset required",
    28: "gone from the driver's list",
    999: "unknown driver error",
}
UNLISTED = "not listed by the driver"
VANISHED = "missing: the driver listed it before and does not any more"

#: Why there is no driver to ask, by NVML's code.
REFUSALS = {
    1: "the NVIDIA driver could not be initialised",
    4: "the NVIDIA driver may not be asked by this process",
    9: "no NVIDIA driver: the kernel module is not loaded",
    12: "no NVIDIA driver: libnvidia-ml.so.1 is not installed",
    18: "NVIDIA driver and library differ in version: the driver was updated under running processes",
}
MISMATCH = 18
NO_DRIVER = frozenset({1, 9, 12})


@attrs.frozen
class PciGpu:
    """An NVIDIA GPU on the PCI bus that should be this process's to use."""

    pci: str
    numa_node: int | None = None


def refusal(code: int) -> str:
    return REFUSALS.get(code) or f"the NVIDIA driver cannot be asked (NVML error {code})"


def unreadable(trouble: Trouble) -> str:
    if trouble.code == HUNG:
        return WORDS[HUNG]
    return f"{WORDS.get(trouble.code, 'unreadable')} (NVML error {trouble.code} from {trouble.call or 'the driver'})"


def merged(before: Iterable[Gpu], seen: Seen, present: Iterable[PciGpu]) -> tuple[Gpu, ...]:
    """Every GPU that was ever seen since boot or that PCI shows, with a reason where it cannot be used."""
    present = tuple(present)
    known = {gpu.uuid: gpu for gpu in before}
    numa = {each.pci: each.numa_node for each in present}
    fresh = known if seen.gpus is None else {gpu.uuid: gpu for gpu in seen.gpus}
    alive = {load.uuid for load in seen.loads}
    result = {uuid: _whole(_placed(gpu, known.get(uuid)), numa) for uuid, gpu in fresh.items() if uuid in alive}
    nameless = []
    for trouble in seen.troubles:
        gpu = known.get(trouble.uuid) or next(
            (each for each in known.values() if trouble.pci and each.pci == trouble.pci), None
        )
        if gpu is None and not trouble.pci:
            nameless.append(trouble)
            continue
        gpu = gpu or Gpu(uuid=trouble.uuid or f"pci:{trouble.pci}", index=trouble.index, pci=trouble.pci)
        result[gpu.uuid] = msgspec.structs.replace(gpu, unreadable=unreadable(trouble))
    absent = [gpu for uuid, gpu in known.items() if uuid not in result]
    claimed = {gpu.pci for gpu in result.values()} | {gpu.pci for gpu in absent}
    unclaimed = [each for each in present if each.pci not in claimed]
    # A GPU that is well and does not tell its address is one of those that nobody claims.
    unclaimed = unclaimed[sum(not gpu.pci and not gpu.unreadable for gpu in result.values()) :]
    for trouble in nameless:
        if absent:
            gpu = absent.pop(0)
        elif unclaimed:
            pci = unclaimed.pop(0).pci
            gpu = Gpu(uuid=f"pci:{pci}", index=trouble.index, pci=pci)
        else:
            gpu = Gpu(uuid=f"index:{trouble.index}", index=trouble.index)
        result[gpu.uuid] = msgspec.structs.replace(gpu, unreadable=unreadable(trouble))
    for gpu in absent:
        # A stand-in for a GPU that has since shown its name must not stay beside it.
        if not gpu.uuid.startswith(("pci:", "index:")) or gpu.pci in numa:
            result[gpu.uuid] = msgspec.structs.replace(gpu, unreadable=VANISHED if gpu.name else UNLISTED)
    for each in unclaimed:
        uuid = f"pci:{each.pci}"
        result[uuid] = Gpu(uuid=uuid, pci=each.pci, numa_node=each.numa_node, unreadable=UNLISTED)
    named = {gpu.pci for gpu in result.values() if gpu.pci and not gpu.uuid.startswith("pci:")}
    kept = (gpu for gpu in result.values() if not (gpu.uuid.startswith("pci:") and gpu.pci in named))
    return tuple(sorted(kept, key=lambda gpu: (gpu.pci, gpu.uuid)))


def _placed(gpu: Gpu, before: Gpu | None) -> Gpu:
    """A GPU that does not tell its address now is where it was."""
    return msgspec.structs.replace(gpu, pci=before.pci) if before is not None and not gpu.pci else gpu


def _whole(gpu: Gpu, numa: Mapping[str, int | None]) -> Gpu:
    node = numa.get(gpu.pci)
    if not gpu.unreadable and gpu.numa_node == node:
        return gpu
    return msgspec.structs.replace(gpu, unreadable="", numa_node=node)


def without_driver(before: Iterable[Gpu], code: int) -> tuple[tuple[Gpu, ...], GpuDriver]:
    """The GPUs while no driver can be asked: those known keep their names and none can be used."""
    reason = refusal(code)
    return tuple(msgspec.structs.replace(gpu, unreadable=reason) for gpu in before), GpuDriver(absent=reason)

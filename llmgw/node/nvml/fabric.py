"""What NVML says of a GPU's place in an NVLink fabric, decoded (nvmlGpuFabricInfo, versions 2 and 3)."""

from __future__ import annotations

from llmgw.wire.facts import GpuFabric

STATES = {0: "not-supported", 1: "not-started", 2: "in-progress", 3: "completed"}

#: (name, shift, the value that is bad): two-bit fields where 0 is "not applicable", 1 true, 2 false.
FLAGS = (
    ("degraded bandwidth", 0, 1),
    ("route recovery in progress", 2, 1),
    ("route unhealthy", 4, 1),
    ("access timeout recovery", 6, 1),
    ("no partition assigned", 12, 2),
    ("global fabric manager not connected", 14, 2),
)
CONFIGURATION_SHIFT = 8
CONFIGURATION = {
    2: "incorrect system GUID",
    3: "incorrect chassis serial number",
    4: "no partition",
    5: "insufficient NVLinks",
    6: "incompatible GPU firmware",
    7: "invalid location",
    8: "invalid GPU state",
}
#: nvmlGpuFabricInfo_v3's healthSummary.
SUMMARY = {1: True, 2: False, 3: False}


def decode(state: int, status: int, clique: int, uuid: bytes, mask: int, summary: int = 0) -> GpuFabric:
    """One GPU's fabric. `status` is an NVML return code and `mask` means something only once completed.

    An all-zero uuid is no domain: an HGX board completes its registration and reaches no other node.
    """
    word = STATES.get(state & 0xFF, "unknown")
    complete = word == "completed"
    found = faults(mask) if complete else ()
    if complete and summary == 3:
        found = (*found, "limited capacity")
    elif complete and summary == 2 and not found:
        found = ("unhealthy",)
    known = summary in SUMMARY or mask != 0
    healthy = (status == 0 and not found and SUMMARY.get(summary, True)) if complete and (known or status) else None
    return GpuFabric(
        state=word,
        status=status if complete else 0,
        cluster_uuid=spelled(uuid),
        clique=clique if any(uuid) else 0,
        healthy=healthy,
        faults=found,
    )


def faults(mask: int) -> tuple[str, ...]:
    """The named faults of a health mask."""
    found = [name for name, shift, bad in FLAGS if mask >> shift & 0b11 == bad]
    configuration = mask >> CONFIGURATION_SHIFT & 0b1111
    if configuration >= 2:
        found.append(CONFIGURATION.get(configuration, f"incorrect configuration ({configuration})"))
    return tuple(found)


def spelled(uuid: bytes) -> str:
    """A uuid in its usual groups; "" when it is all zero."""
    if not any(uuid):
        return ""
    text = uuid.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))

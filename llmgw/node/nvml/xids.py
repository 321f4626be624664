"""What the driver's Xid numbers mean for a node that serves, and what to do about each.

After NVIDIA's "XID Errors" catalogue and what monitors of large fleets do with it. The lists in use disagree
on some (94, 109); here an error that a program made, or that ended one program only, never takes a GPU out.
"""

from __future__ import annotations

import attrs

from llmgw.wire.facts import Grade

RESET = "drain the GPU and reset it (nvidia-smi --gpu-reset -i INDEX), or reboot the node"
REBOOT = "reboot the node; power-cycle it if the GPU does not return; then reseat or replace the GPU"
APPLICATION = "look at the program that used the GPU: its log names the kernel; the GPU itself is fine"
LINK = "check NVLink (nvidia-smi nvlink -e) and the fabric manager; reset the GPU if errors go on"
WATCH = "nothing now; if it comes back often, run dcgmi diag -r 3 when the node is idle"


@attrs.frozen
class Meaning:
    """`grade` bad keeps new shards away until the GPU has been clean for a while; note is for the record."""

    name: str
    grade: Grade
    remedy: str


def _app(name: str) -> Meaning:
    return Meaning(name, Grade.NOTE, APPLICATION)


XIDS: dict[int, Meaning] = {
    8: _app("GPU stopped processing, the program was ended"),
    11: _app("invalid or corrupted push buffer"),
    13: _app("graphics engine exception"),
    25: _app("invalid or illegal push buffer"),
    31: _app("GPU memory page fault"),
    32: _app("invalid or corrupted push buffer"),
    37: Meaning("driver firmware error", Grade.WARN, WATCH),
    38: Meaning("driver firmware error", Grade.WARN, WATCH),
    **{code: _app("copy engine exception") for code in (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136))},
    43: _app("GPU stopped processing"),
    44: Meaning("graphics engine fault during a context switch", Grade.WARN, WATCH),
    45: _app("preemptive cleanup after an earlier error"),
    46: Meaning("GPU stopped processing", Grade.BAD, RESET),
    48: Meaning("double-bit ECC error", Grade.BAD, RESET),
    54: Meaning("auxiliary power is not connected", Grade.BAD, "check the GPU's power cables"),
    56: Meaning("display engine error", Grade.WARN, WATCH),
    57: Meaning("error programming the video memory interface", Grade.BAD, RESET),
    58: Meaning("unstable video memory interface", Grade.BAD, RESET),
    60: _app("video processor exception"),
    61: Meaning("internal micro-controller breakpoint", Grade.BAD, RESET),
    62: Meaning("internal micro-controller halt", Grade.BAD, RESET),
    63: Meaning("row remapping or page retirement recorded", Grade.WARN, "reset the GPU when it is idle"),
    64: Meaning("row remapping or page retirement failed", Grade.BAD, f"{RESET}; replace it if this returns"),
    65: _app("video processor exception"),
    66: _app("illegal access by the driver"),
    67: _app("illegal access by the driver"),
    68: _app("video decoder exception"),
    69: _app("graphics engine class error"),
    74: Meaning("NVLink error", Grade.BAD, LINK),
    78: Meaning("vGPU start error", Grade.WARN, WATCH),
    79: Meaning("GPU has fallen off the bus", Grade.BAD, REBOOT),
    80: _app("corrupted data sent to the GPU"),
    **{code: _app("video or image engine error") for code in (82, 83, 84, 86, 88, 89, *range(96, 106), 139, 142)},
    92: Meaning("high rate of single-bit ECC errors", Grade.WARN, "run dcgmi diag -r 3 when the node is idle"),
    94: Meaning(
        "contained ECC error: one program was ended", Grade.WARN, "restart that engine; reset the GPU when idle"
    ),
    95: Meaning("uncontained ECC error", Grade.BAD, RESET),
    109: _app("context switch timeout"),
    110: Meaning("security fault", Grade.BAD, RESET),
    119: Meaning("the GPU's system processor does not answer (GSP RPC timeout)", Grade.BAD, RESET),
    120: Meaning("the GPU's system processor failed (GSP error)", Grade.BAD, RESET),
    121: Meaning("corrected error on the chip-to-chip link", Grade.WARN, WATCH),
    122: Meaning("SPI read failure", Grade.WARN, WATCH),
    123: Meaning("SPI write failure", Grade.WARN, WATCH),
    136: Meaning("link training failed", Grade.BAD, REBOOT),
    137: _app("NVLink access without permission"),
    140: Meaning("unrecovered ECC error", Grade.BAD, RESET),
    141: _app("CUDA fast path error"),
    143: Meaning("GPU initialisation failed", Grade.BAD, REBOOT),
    **{code: Meaning("NVLink 5 error", Grade.BAD, LINK) for code in range(144, 151)},
    151: Meaning("key rotation error of confidential computing", Grade.WARN, "restart the virtual machine"),
    154: Meaning("the driver asks for a recovery", Grade.WARN, "see the recovery action shown for this GPU"),
    155: Meaning("NVLink 5 link down", Grade.BAD, LINK),
    156: Meaning("resource retired after errors", Grade.WARN, "reset the GPU when it is idle"),
    157: Meaning("resource retirement failed", Grade.BAD, f"{RESET}; replace it if this returns"),
    158: Meaning("GPU fatal timeout", Grade.BAD, RESET),
    159: Meaning("error on the link to the processor", Grade.WARN, WATCH),
    160: Meaning("channel retired after errors", Grade.WARN, WATCH),
    161: Meaning("channel retirement failed", Grade.WARN, WATCH),
    162: Meaning("power smoothing engaged again", Grade.NOTE, WATCH),
    163: Meaning("power smoothing disengaged", Grade.WARN, WATCH),
    164: Meaning("power smoothing is near the end of its life", Grade.WARN, WATCH),
    165: Meaning("power smoothing is at the end of its life", Grade.WARN, "plan to replace the GPU"),
    167: Meaning("PCIe fatal timeout", Grade.BAD, REBOOT),
    168: Meaning("less memory after errors in a protected region", Grade.WARN, "reset the GPU when it is idle"),
    169: Meaning("internal micro-controller halt", Grade.BAD, RESET),
    171: Meaning("uncorrectable memory (DRAM) error, tells more of Xid 48", Grade.WARN, "see Xid 48"),
    172: Meaning("uncorrectable on-chip (SRAM) error, tells more of Xid 48", Grade.WARN, "see Xid 48"),
    173: Meaning("chip-to-chip link failed", Grade.BAD, REBOOT),
}


def meaning(xid: int) -> Meaning:
    """What one number means. One that no list has is shown and watched, and takes nothing out."""
    return XIDS.get(xid) or Meaning("not in the catalogue this agent knows", Grade.WARN, WATCH)

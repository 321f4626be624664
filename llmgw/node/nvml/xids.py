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
    13: _app("graphics engine exception"),
    31: _app("GPU memory page fault"),
    32: Meaning("invalid or corrupted push buffer", Grade.WARN, WATCH),
    38: Meaning("driver firmware error", Grade.WARN, WATCH),
    43: _app("GPU stopped processing"),
    44: Meaning("graphics engine fault during a context switch", Grade.WARN, WATCH),
    45: _app("preemptive cleanup after an earlier error"),
    46: Meaning("GPU stopped processing", Grade.BAD, RESET),
    48: Meaning("double-bit ECC error", Grade.BAD, RESET),
    54: Meaning("auxiliary power is not connected", Grade.BAD, "check the GPU's power cables"),
    56: Meaning("display engine error", Grade.WARN, WATCH),
    57: Meaning("error programming the video memory interface", Grade.BAD, RESET),
    58: Meaning("unstable video memory interface", Grade.BAD, RESET),
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
    143: Meaning("GPU initialisation failed", Grade.BAD, REBOOT),
    **{code: Meaning("NVLink 5 error", Grade.BAD, LINK) for code in range(144, 151)},
    154: Meaning("the driver asks for a recovery", Grade.WARN, "see the recovery action shown for this GPU"),
    155: Meaning("NVLink 5 link down", Grade.BAD, LINK),
    156: Meaning("resource retired after errors", Grade.WARN, "reset the GPU when it is idle"),
    157: Meaning("resource retirement failed", Grade.BAD, f"{RESET}; replace it if this returns"),
}


def meaning(xid: int) -> Meaning:
    """What one number means. One that no list has is shown and watched, and takes nothing out."""
    return XIDS.get(xid) or Meaning("not in the catalogue this agent knows", Grade.WARN, WATCH)

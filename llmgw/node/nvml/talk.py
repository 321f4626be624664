"""What the agent and its NVML process say to each other: one question, one answer, over pipes.

A message is its length in four bytes, then MessagePack. Nothing here loads the library.
"""

from __future__ import annotations

import struct

import msgspec
from msgspec import Struct

from llmgw.wire.facts import Gpu, GpuDriver, GpuFabric, GpuLoad, GpuProcess

LENGTH = struct.Struct("<I")
#: Where the process is, for whoever finds it hanging: the index of the GPU that it asks about, or NOWHERE.
MARK = struct.Struct("<i")
NOWHERE = -1
#: In a Trouble's place for NVML's code: the driver hung at this GPU.
HUNG = -2
#: No answer is longer: 64 GPUs with thousands of processes stay far below.
MOST_BYTES = 16 << 20


class Look(Struct, frozen=True, array_like=True):
    """Look at every GPU. `whole` also lists them anew and reads what is dear and changes slowly.

    `skip` are indexes of GPUs at which the driver hung: nothing is asked of them.
    """

    whole: bool = False
    skip: tuple[int, ...] = ()


class Trouble(Struct, frozen=True, array_like=True):
    """One GPU that could not be read: its index in the library's list, what is known of its identity, NVML's code."""

    index: int
    code: int
    uuid: str = ""
    pci: str = ""
    call: str = ""


class XidEvent(Struct, frozen=True, array_like=True):
    gpu: str
    xid: int


class Seen(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one look saw. `gpus` is None unless the look was whole; `refused` is NVML's code when there is no driver
    to ask, after which the process ends: only a new one can load another library."""

    driver: GpuDriver = GpuDriver()
    refused: int = 0
    count: int = 0
    gpus: tuple[Gpu, ...] | None = None
    loads: tuple[GpuLoad, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    fabrics: dict[str, GpuFabric] = {}
    troubles: tuple[Trouble, ...] = ()
    xids: tuple[XidEvent, ...] = ()


encoder = msgspec.msgpack.Encoder()
looks = msgspec.msgpack.Decoder(Look)
answers = msgspec.msgpack.Decoder(Seen)


def framed(message: object) -> bytes:
    data = encoder.encode(message)
    return LENGTH.pack(len(data)) + data

"""What the kernel's log says of GPUs, adapters and memory: read from /dev/kmsg, understood line by line.

Some faults are told nowhere else: a GPU that falls off the bus may leave no Xid, only three lines. The kernel keeps
its log since boot, so a restarted agent reads again what an earlier one saw.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator

import attrs
import trio

from llmgw.node.view import View

MOST_RECORD = 8192
#: Lines of one message that the driver spread over several come within this many seconds of one another.
TOGETHER = 2.0
#: The driver tells in several lines, with and without a number, that one GPU fell off the bus.
ONE_FALL = 60.0
#: Before the reader of a log that ended (a pipe in a test, a log that was rotated) looks again.
PAUSE = 1.0


@attrs.frozen
class Line:
    """One record of the kernel's log. `at` is in seconds on the monotonic clock."""

    at: float
    text: str


@attrs.frozen
class KernelEvent:
    """Something in the log that matters here. `kind` is a stable word; `pci` is "" where it is the node's."""

    at: float
    kind: str
    text: str
    pci: str = ""
    xid: int = 0


_address = r"(?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)"
OFF_THE_BUS = 79
#: On a GPU that is partitioned the address is followed by the instance ("GPU-I:05").
_xid = re.compile(rf"NVRM: Xid \({_address}(?: [^()]{{1,20}})?\): (\d{{1,4}})\b")
_nvrm_gpu = re.compile(rf"NVRM: .*?\bGPU (?:at )?{_address}")
_off_the_bus = re.compile(r"fallen off the bus", re.IGNORECASE)
_nvswitch = re.compile(rf"nvidia-nvswitch\S*: SXid \({_address}\): \d+, (Non-fatal|Fatal)", re.IGNORECASE)
_init_failed = re.compile(r"NVRM: .*RmInitAdapter failed")
_mlx5 = re.compile(rf"mlx5_core {_address}(?: \S+)?: (.*)")
_mlx5_health = re.compile(
    r"health compromised|Health issue observed|device's health|fatal error|mlx5_health_try_recover|"
    r"FW fatal|assert_exit_ptr|synd 0x(?!0\b)|wait vital counter",
    re.IGNORECASE,
)
_mlx5_module = re.compile(r"Port module event\S*: module (\d+), (.*)")
_aer = re.compile(
    rf"(?:nvidia|mlx5_core|pcieport) {_address}: .*\b(Uncorrect\w+|device recovery failed)", re.IGNORECASE
)
#: A bridge tells of the device behind it.
_aer_of = re.compile(rf"AER: .*\breceived(?: from)?:? {_address}")
_oom = re.compile(r"(?:Out of memory|Memory cgroup out of memory): Killed process (\d+) \(([^)]*)\)")
_machine_check = re.compile(r"mce: \[Hardware Error\]|EDAC .*\bUE\b|Machine check events logged")


def lines(record: bytes) -> Iterator[Line]:
    """The lines of what one read gave: `priority,sequence,microseconds,flags;text`. Continuations are left out."""
    for raw in record.decode(errors="replace").split("\n"):
        head, mark, text = raw.partition(";")
        fields = head.split(",")
        if mark and len(fields) >= 3 and fields[2].isascii() and fields[2].isdecimal() and len(fields[2]) < 20:
            yield Line(int(fields[2]) / 1e6, text)


def normal_pci(address: str) -> str:
    """`0000:B3:00` as sysfs spells a device: `0000:b3:00.0`; eight-digit domains lose their leading zeros."""
    domain, _, rest = address.lower().partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}" + ("" if "." in rest else ".0")


class Reader:
    """Understands lines in order. Remembers the GPU that the driver was just talking about."""

    def __init__(self) -> None:
        self._subject: tuple[float, str] | None = None
        self._fallen: dict[str, float] = {}

    def events(self, line: Line) -> tuple[KernelEvent, ...]:
        """What one line says, mostly nothing."""
        at, text = line.at, line.text
        if "NVRM:" in text or (self._of_the_gpu_before(at) and _off_the_bus.search(text)):
            return self._nvidia(at, text)
        if found := _nvswitch.search(text):
            kind = "nvswitch-fatal" if found[2].lower() == "fatal" else "nvswitch-error"
            return (KernelEvent(at, kind, text, normal_pci(found[1])),)
        if found := _mlx5.search(text):
            pci, words = normal_pci(found[1]), found[2]
            if module := _mlx5_module.search(words):
                unplugged = "unplugged" in module[2].lower()
                if "plugged" in module[2].lower() and not unplugged:
                    return ()
                return (KernelEvent(at, "cable-unplugged" if unplugged else "module-error", text, pci),)
            if _mlx5_health.search(words):
                return (KernelEvent(at, "mlx5-health", text, pci),)
        if found := _aer.search(text):
            behind = _aer_of.search(text) or found
            return (KernelEvent(at, "pcie-error", text, normal_pci(behind[1])),)
        if found := _oom.search(text):
            return (KernelEvent(at, "oom-kill", text),)
        if _machine_check.search(text):
            return (KernelEvent(at, "machine-check", text),)
        return ()

    def _nvidia(self, at: float, text: str) -> tuple[KernelEvent, ...]:
        if found := _xid.search(text):
            pci, xid = normal_pci(found[1]), int(found[2])
            return self._fell(at, text, pci) if xid == OFF_THE_BUS else (KernelEvent(at, "xid", text, pci, xid),)
        if found := _nvrm_gpu.search(text):
            self._subject = (at, normal_pci(found[1]))
        pci = self._of_the_gpu_before(at)
        if _off_the_bus.search(text):
            return self._fell(at, text, pci)
        if _init_failed.search(text):
            return (KernelEvent(at, "gpu-init-failed", text, pci),)
        return ()

    def _of_the_gpu_before(self, at: float) -> str:
        """The GPU that a line without an address is about; "" when none was named just before."""
        return self._subject[1] if self._subject and 0 <= at - self._subject[0] <= TOGETHER else ""

    def _fell(self, at: float, text: str, pci: str) -> tuple[KernelEvent, ...]:
        before = self._fallen.get(pci)
        self._fallen[pci] = at
        if pci and before is not None and 0 <= at - before <= ONE_FALL:
            return ()
        return (KernelEvent(at, "xid", text, pci, OFF_THE_BUS),)


def so_far(view: View) -> tuple[KernelEvent, ...] | None:
    """What the log holds now; None when it may not be read."""
    reader, found = Reader(), list[KernelEvent]()
    try:
        descriptor = os.open(view.at("dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        while True:
            try:
                record = os.read(descriptor, MOST_RECORD)
            except BrokenPipeError:
                continue
            except OSError as error:
                return tuple(found) if isinstance(error, BlockingIOError) else None
            if not record:
                return tuple(found)
            for line in lines(record):
                found.extend(reader.events(line))
    finally:
        os.close(descriptor)


class Kernel:
    """Follows the log and tells each event to `heard`. `readable` is None until it is known."""

    def __init__(self, view: View, heard: Callable[[KernelEvent], None]) -> None:
        self._path = view.at("dev/kmsg")
        self._heard = heard
        self._reader = Reader()
        self.readable: bool | None = None

    async def run(self) -> None:
        """Read until cancelled. A log that may not be read is not an error: doctor says so."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            self.readable = False
            return
        try:
            await self._follow(descriptor)
        finally:
            os.close(descriptor)

    async def _follow(self, descriptor: int) -> None:
        for count in itertools.count():
            if count % 64 == 0:  # at the start there may be tens of thousands of records
                await trio.lowlevel.checkpoint()
            try:
                record = os.read(descriptor, MOST_RECORD)
            except BlockingIOError:
                self.readable = True
                await trio.lowlevel.wait_readable(descriptor)
                continue
            except BrokenPipeError:
                continue  # records were overwritten before we came to them
            except OSError:
                self.readable = False
                return
            self.readable = True
            if not record:
                await trio.sleep(PAUSE)
                continue
            for line in lines(record):
                for event in self._reader.events(line):
                    self._heard(event)

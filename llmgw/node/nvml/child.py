"""The process that asks NVML: `python -m llmgw.node.nvml.child`.

It answers questions from standard input until that ends. It may hang in the driver or be ended by it; the
agent then goes on without it. An alarm that nothing catches ends a process whose agent is gone too.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import BinaryIO

import pynvml

from llmgw.node.nvml.boundary import Calls, Lost, Refused
from llmgw.node.nvml.gpu import Device
from llmgw.node.nvml.talk import (
    HUNG,
    LENGTH,
    MARK,
    MOST_BYTES,
    NOWHERE,
    Look,
    Seen,
    Trouble,
    XidEvent,
    framed,
    looks,
)
from llmgw.wire.facts import Gpu, GpuDriver, GpuFabric, GpuLoad, GpuProcess

#: Seconds after which a question that did not return ends this process, agent or no agent.
ALARM = 120
XID = 0x8  # nvmlEventTypeXidCriticalError
MOST_EVENTS = 256


class Library:
    """The loaded library. Raises Refused when there is no driver to ask. `mark` tells where we are before each step."""

    def __init__(self, mark: Callable[[int], None]) -> None:
        self._mark = mark
        self._calls = Calls()
        # NVML_INIT_FLAG_NO_GPUS: a driver whose GPUs are all gone is to be asked, not an error.
        try:
            pynvml.nvmlInitWithFlags(1)
        except pynvml.NVMLError as error:
            raise Refused(error.value) from None
        self._devices: tuple[Device, ...] = ()
        self._troubles: tuple[Trouble, ...] = ()
        self._events: object | None = None
        self.driver = self._driver()

    def _driver(self) -> GpuDriver:
        version = self._calls(pynvml.nvmlSystemGetDriverVersion)
        cuda = self._calls(pynvml.nvmlSystemGetCudaDriverVersion_v2)
        return GpuDriver(version=version or "", cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "")

    def look(self, whole: bool, skip: tuple[int, ...] = ()) -> Seen:
        self._mark(NOWHERE)
        count = self._calls(pynvml.nvmlDeviceGetCount) or 0
        skipped = {trouble.index for trouble in self._troubles if trouble.code == HUNG}
        if whole or count != len(self._devices) + len(self._troubles) or skipped != {*skip} & {*range(count)}:
            whole = True
            self._scan(count, skip)
        troubles = list(self._troubles)
        gpus: list[Gpu] = []
        loads: list[GpuLoad] = []
        processes: list[GpuProcess] = []
        fabrics: dict[str, GpuFabric] = {}
        ram = _ram() if whole else None
        for device in self._devices:
            self._mark(device.index)
            try:
                if whole:
                    gpus.append(device.facts(ram, self._devices))
                loads.append(device.load(whole))
                processes.extend(device.processes())
                if (fabric := device.fabric()) is not None:
                    fabrics[device.uuid] = fabric
            except Lost as lost:
                troubles.append(Trouble(device.index, lost.code, device.uuid, device.pci, lost.call))
        self._mark(NOWHERE)
        return Seen(
            driver=self.driver,
            count=count,
            gpus=tuple(gpus) if whole else None,
            loads=tuple(loads),
            processes=tuple(processes),
            fabrics=fabrics,
            troubles=tuple(troubles),
            xids=self._xids(),
        )

    def _scan(self, count: int, skip: tuple[int, ...]) -> None:
        """Find every GPU anew. Indexes shift when one drops out: uuids and PCI addresses are the identity."""
        known = {device.uuid: device for device in self._devices}
        devices, troubles = [], []
        for index in range(count):
            device = Device(index)
            if index in skip:
                before = next((each for each in self._devices if each.index == index), device)
                troubles.append(Trouble(index, HUNG, before.uuid, before.pci))
                continue
            self._mark(index)
            try:
                device.open()
            except Lost as lost:
                troubles.append(Trouble(index, lost.code, device.uuid, device.pci, lost.call))
                continue
            same = known.get(device.uuid)
            devices.append(same if same is not None and same.index == index else device)
        if {device.uuid for device in devices} != set(known):
            self._listen(devices)
        self._devices, self._troubles = tuple(devices), tuple(troubles)

    def _listen(self, devices: list[Device]) -> None:
        if self._events is not None:
            self._calls(pynvml.nvmlEventSetFree, self._events)
        self._events = self._calls(pynvml.nvmlEventSetCreate)
        for device in devices:
            if self._events is not None:
                try:
                    Calls()(pynvml.nvmlDeviceRegisterEvents, device.handle, XID, self._events)
                except Lost:
                    continue

    def _xids(self) -> tuple[XidEvent, ...]:
        """What the driver raised since the last look; it keeps events until they are asked for."""
        found: list[XidEvent] = []
        while self._events is not None and len(found) < MOST_EVENTS:
            try:
                event = Calls()(pynvml.nvmlEventSetWait_v2, self._events, 0)
                if event is None:
                    break
                uuid = Calls()(pynvml.nvmlDeviceGetUUID, event.device) or ""
            except Lost:
                break
            if event.eventType == XID:
                found.append(XidEvent(uuid, int(event.eventData)))
        return tuple(found)


def _ram() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _read(source: BinaryIO, length: int) -> bytes | None:
    data = source.read(length)
    return data if len(data) == length else None


def answer(source: BinaryIO, sink: BinaryIO, mark: Callable[[int], None]) -> None:
    """Answer until the source ends or the driver refuses."""
    library: Library | None = None
    while (head := _read(source, LENGTH.size)) is not None:
        (length,) = LENGTH.unpack(head)
        data = _read(source, length) if length <= MOST_BYTES else None
        if data is None:
            return
        look: Look = looks.decode(data)
        signal.alarm(ALARM)
        try:
            mark(NOWHERE)
            library = library or Library(mark)
            seen = library.look(look.whole, look.skip)
        except Refused as refused:
            seen = Seen(refused=refused.code)
        signal.alarm(0)
        sink.write(framed(seen))
        sink.flush()
        if seen.refused:
            return


def main() -> None:
    # The library may print: its words must not get between our frames.
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    marks = int(sys.argv[1]) if len(sys.argv) > 1 else -1

    def mark(index: int) -> None:
        if marks >= 0:
            os.pwrite(marks, MARK.pack(index), 0)

    try:
        answer(sys.stdin.buffer, sink, mark)
    except BrokenPipeError:
        return


if __name__ == "__main__":
    main()

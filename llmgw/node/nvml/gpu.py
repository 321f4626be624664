"""One GPU as the library shows it: lasting facts, and what it does now."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pynvml

from llmgw.node.nvml import fabric
from llmgw.node.nvml.boundary import NO_PERMISSION, NOT_SUPPORTED, Calls, Lost, must
from llmgw.wire.facts import Gpu, GpuFabric, GpuLoad, GpuProcess, MigDevice

#: NVLink error counts: malformed packets, overruns, receive, remote, general, local integrity, discards.
NVLINK_ERRORS = tuple(range(206, 213))
NVLINK_RECOVERIES = (213, 214)
RECOVERY_ACTION = 230
SRAM = 7  # nvmlMemoryLocation_t
CORRECTED, UNCORRECTED = 0, 1
VOLATILE, AGGREGATE = 0, 1
MOST_NVLINKS = 36
NO_VALUE = (1 << 64) - 1
SWITCH = 2  # nvmlIntNvLinkDeviceType_t

#: nvmlGpuP2PStatus_t, but for 0, which is well. The binding's own name for "reads" is no number (a tuple), so: 0.
NO_PEER_ACCESS = {
    1: "the chipset does not support it",
    2: "the GPU does not support it",
    3: "the I/O hub does not support it",
    4: "disabled by a driver setting (regkey)",
    5: "not supported",
}
PEER_READS = 0
#: nvmlGpuTopologyLevel_t.
LEVELS = {0: "SELF", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


class Handle(ctypes.c_void_p):
    """An nvmlDevice_t. The binding gives its own pointer type; this is only a name for it."""


class Device:
    """A GPU with its handle, and what is known not to change while this process lives."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.calls = Calls()
        self.pci = ""
        self.uuid = ""
        self._links: int | None = None
        self._slow = _Slow()
        self._migs: tuple[tuple[str, Handle], ...] = ()
        # Each step may raise Lost; what was learned before it stays for whoever reports this GPU.
        self.handle: Handle | None = None

    def open(self) -> None:
        """Find the GPU. Raises Lost."""
        call = self.calls
        self.handle = must(call(pynvml.nvmlDeviceGetHandleByIndex, self.index), call, "nvmlDeviceGetHandleByIndex_v2")
        if (pci := call(pynvml.nvmlDeviceGetPciInfo, self.handle)) is not None:
            # From the numbers: the text beside them may be garbled, and reading it then raises.
            self.pci = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"
        self.uuid = must(call(pynvml.nvmlDeviceGetUUID, self.handle), call, "nvmlDeviceGetUUID")

    # --- lasting ---------------------------------------------------------------------------------------

    def facts(self, ram_bytes: int | None, others: tuple[Device, ...]) -> Gpu:
        call, handle = self.calls, self.handle
        capability = call(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
        mode = call(pynvml.nvmlDeviceGetMigMode, handle)
        self._migs = ()
        # A container may hold MIG devices and not the right to ask whether MIG is on.
        mig = self._mig() if mode is None or mode[0] else ()
        total, _, unified = self._memory(ram_bytes)
        if total is None and mig:
            total = sum(device.memory_bytes or 0 for device in mig) or None
        name = call(pynvml.nvmlDeviceGetName, handle)
        return Gpu(
            uuid=self.uuid,
            index=self.index,
            name=name or "",
            pci=self.pci,
            serial=call(pynvml.nvmlDeviceGetSerial, handle) or "",
            memory_bytes=total,
            unified_memory=unified,
            compute_capability=(capability[0], capability[1]) if capability else None,
            mig_enabled=bool(mode[0]) if mode else True if mig else None,
            mig_devices=mig,
            pcie_gen_max=call(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
            pcie_width_max=call(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
            nvlinks=self._nvlinks()[0],
            fabric=self.fabric(),
            topology=self._topology(others),
            no_peer_access=self._no_peer_access(others),
        )

    def _mig(self) -> tuple[MigDevice, ...]:
        """The MIG devices that this process may see; slots in between may be empty."""
        call, found, handles = Calls(), list[MigDevice](), list[tuple[str, Handle]]()
        for index in range(self.calls(pynvml.nvmlDeviceGetMaxMigDeviceCount, self.handle) or 0):
            handle = call(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, self.handle, index)
            if handle is None or (uuid := call(pynvml.nvmlDeviceGetUUID, handle)) is None:
                continue
            memory = call(pynvml.nvmlDeviceGetMemoryInfo, handle)
            _, _, profile = (call(pynvml.nvmlDeviceGetName, handle) or "").partition(" MIG ")
            handles.append((uuid, handle))
            found.append(MigDevice(uuid=uuid, profile=profile, memory_bytes=int(memory.total) if memory else None))
        self._migs = tuple(handles)
        return tuple(found)

    def _memory(self, ram_bytes: int | None) -> tuple[int | None, int | None, bool]:
        """(total, used, unified): by version 2, else version 1, else the host's RAM where both are not supported."""
        call = self.calls
        memory = call(pynvml.nvmlDeviceGetMemoryInfo, self.handle, version=pynvml.nvmlMemory_v2)
        second = call.last_code
        if memory is None:
            # The name is the same for both versions, so one that is muted must not silence the other.
            memory = _unmuted(call, self.handle)
        if memory is not None and memory.total:
            return int(memory.total), int(memory.used), False
        # A GPU that has no memory of its own says that it cannot tell, or that it has none (NV08).
        if memory is not None or (call.last_code == NOT_SUPPORTED and second != NO_PERMISSION):
            return ram_bytes, None, True
        return None, None, False

    def _topology(self, others: tuple[Device, ...]) -> dict[str, str]:
        call, found = Calls(), {}
        links, up = self._nvlinks()
        switched = bool(links) and call(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, self.handle, 0) == SWITCH
        for other in others:
            if other is self or other.handle is None:
                continue
            level = _between(call, pynvml.nvmlDeviceGetTopologyCommonAncestor, self.handle, other.handle)
            if switched and up:
                found[other.uuid] = f"NV{up}"
            elif level is not None:
                found[other.uuid] = LEVELS.get(level, "")
        return found

    def _no_peer_access(self, others: tuple[Device, ...]) -> dict[str, str]:
        """Why other GPUs cannot be read from here; what the driver does not tell is not held against them."""
        call, found = Calls(), {}
        for other in others:
            if other is not self and other.handle is not None:
                status = _between(call, pynvml.nvmlDeviceGetP2PStatus, self.handle, other.handle, PEER_READS)
                if status in NO_PEER_ACCESS:
                    found[other.uuid] = NO_PEER_ACCESS[status]
        return found

    # --- now -------------------------------------------------------------------------------------------

    def load(self, whole: bool) -> GpuLoad:
        call, handle = self.calls, self.handle
        _, used, _ = self._memory(None)
        use = call(pynvml.nvmlDeviceGetUtilizationRates, handle)
        temperature = call(pynvml.nvmlDeviceGetTemperatureV, handle, 0)
        if temperature is None:
            temperature = call(pynvml.nvmlDeviceGetTemperature, handle, 0)
        power = call(pynvml.nvmlDeviceGetPowerUsage, handle)
        throttle = call(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        if throttle is None:
            throttle = call(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        remapped = call(pynvml.nvmlDeviceGetRemappedRows, handle)
        retired = None if remapped else call(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
        if whole:
            self._slow = self._read_slow()
        slow = self._slow
        return GpuLoad(
            uuid=self.uuid,
            memory_used_bytes=used,
            utilization_percent=int(use.gpu) if use else None,
            temperature_c=temperature,
            power_w=round(power / 1000, 1) if power is not None else None,
            throttle=throttle,
            pcie_gen=call(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
            pcie_width=call(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
            ecc_uncorrected=call(pynvml.nvmlDeviceGetTotalEccErrors, handle, UNCORRECTED, VOLATILE),
            ecc_corrected=call(pynvml.nvmlDeviceGetTotalEccErrors, handle, CORRECTED, VOLATILE),
            ecc_uncorrected_total=call(pynvml.nvmlDeviceGetTotalEccErrors, handle, UNCORRECTED, AGGREGATE),
            ecc_corrected_total=call(pynvml.nvmlDeviceGetTotalEccErrors, handle, CORRECTED, AGGREGATE),
            remapped_rows=remapped[0] + remapped[1] if remapped else None,
            remap_pending=bool(remapped[2]) if remapped else None,
            remap_failed=bool(remapped[3]) if remapped else None,
            retired_pages_pending=bool(retired) if retired is not None else None,
            recovery_action=self._field(RECOVERY_ACTION),
            nvlinks_up=self._nvlinks()[1],
            nvlink_errors=slow.nvlink_errors,
            sram_uncorrected=slow.sram_uncorrected,
            sram_corrected=slow.sram_corrected,
            remapped_uncorrected=remapped[1] if remapped else None,
            nvlink_recoveries=slow.nvlink_recoveries,
        )

    def processes(self) -> tuple[GpuProcess, ...]:
        """Who holds this GPU, or each of its MIG devices."""
        if not self._migs:
            return _running(self.calls, self.uuid, self.handle)
        call = Calls()
        return tuple(process for uuid, handle in self._migs for process in _running(call, uuid, handle))

    def fabric(self) -> GpuFabric | None:
        """By version 3, else 2 (an older library calls 3 a version mismatch); None where there is no such thing."""
        info = pynvml.c_nvmlGpuFabricInfo_v3_t()
        if Calls()(pynvml.nvmlDeviceGetGpuFabricInfoV, self.handle, ctypes.byref(info)) is None:
            info = pynvml.c_nvmlGpuFabricInfo_v2_t()
            if self.calls(pynvml.nvmlDeviceGetGpuFabricInfoV, self.handle, ctypes.byref(info)) is None:
                return None
        uuid = bytes(info.clusterUuid)
        summary = int(getattr(info, "healthSummary", 0))
        return fabric.decode(info.state, info.status, info.cliqueId, uuid, info.healthMask, summary)

    def _nvlinks(self) -> tuple[int | None, int | None]:
        """(links there are, links that are up)."""
        up, call = 0, Calls()
        most = MOST_NVLINKS if self._links is None else self._links
        for link in range(most):
            state = call(pynvml.nvmlDeviceGetNvLinkState, self.handle, link)
            if state is None:
                most = link
                break
            up += bool(state)
        if self._links is None:
            self._links = most
        return (self._links, up) if self._links else (None, None)

    def _field(self, field: int) -> int | None:
        values = self.calls(pynvml.nvmlDeviceGetFieldValues, self.handle, [field])
        return _value(values[0]) if values is not None else None

    def _read_slow(self) -> _Slow:
        call = self.calls
        slow = _Slow()
        for which in (UNCORRECTED, CORRECTED):
            counts = [call(pynvml.nvmlDeviceGetMemoryErrorCounter, self.handle, which, c, SRAM) for c in (0, 1)]
            known = [count for count in counts if count is not None]
            if known and which == UNCORRECTED:
                slow.sram_uncorrected = max(known)
            elif known:
                slow.sram_corrected = max(known)
        if self._links:
            slow.nvlink_errors = self._summed(NVLINK_ERRORS)
            slow.nvlink_recoveries = self._summed(NVLINK_RECOVERIES)
        return slow

    def _summed(self, fields: tuple[int, ...]) -> int | None:
        asked = [(field, link) for field in fields for link in range(self._links or 0)]
        values = self.calls(pynvml.nvmlDeviceGetFieldValues, self.handle, asked)
        known = [value for each in values or () if (value := _value(each)) is not None]
        return sum(known) if known else None


def _running(call: Calls, uuid: str, handle: Handle | None) -> tuple[GpuProcess, ...]:
    """A process that computes and draws is one process."""
    found: dict[int, int | None] = {}
    for function in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        for process in call(function, handle) or ():
            memory, pid = process.usedGpuMemory, int(process.pid)
            held = None if memory is None or memory == NO_VALUE else int(memory)
            found[pid] = max(held, found.get(pid) or 0) if held is not None else found.get(pid)
    return tuple(GpuProcess(uuid, pid, "", memory) for pid, memory in sorted(found.items()))


def _between(call: Calls, function: Callable[..., int], *handles: object) -> int | None:
    """A value about two GPUs. One that is lost shows by what is asked of it alone; the other is not blamed."""
    try:
        return call(function, *handles)
    except Lost:
        return None


class _Slow:
    """What is read once a minute."""

    nvlink_errors: int | None = None
    nvlink_recoveries: int | None = None
    sram_uncorrected: int | None = None
    sram_corrected: int | None = None


def _unmuted(call: Calls, handle: Handle | None) -> pynvml.c_nvmlMemory_t | None:
    fresh = Calls()
    memory = fresh(pynvml.nvmlDeviceGetMemoryInfo, handle)
    call.last_code = fresh.last_code
    return memory


def _value(field: pynvml.c_nvmlFieldValue_t) -> int | None:
    """A field's value by its own type; None when that field alone is not supported."""
    if field.nvmlReturn != 0:
        return None
    kinds = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
    name = kinds.get(field.valueType)
    return int(getattr(field.value, name)) if name else None

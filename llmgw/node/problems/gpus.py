"""What is wrong with GPUs, their driver, their NVLinks and IMEX."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator

from llmgw.node.imex import RUNS
from llmgw.node.kernel import KernelEvent
from llmgw.node.nvml.inventory import MISMATCH, NO_DRIVER, UNLISTED, VANISHED, WORDS, refusal
from llmgw.node.nvml.talk import HUNG
from llmgw.node.nvml.xids import LINK, RESET, meaning
from llmgw.node.problems import fabricmanager
from llmgw.node.problems.memory import AGE, Facts, GpuPast, Symptom
from llmgw.node.problems.peers import below, figure
from llmgw.wire.facts import Gpu, GpuFabric, GpuLoad, Grade, Problem

HOUR, MINUTE = 3600.0, 60.0

#: Clocks-event reasons (NVML) that a healthy, well cooled GPU does not have.
HARDWARE_SLOWDOWN, SOFTWARE_THERMAL, HARDWARE_THERMAL, POWER_BRAKE = 0x8, 0x20, 0x40, 0x80
HOT_C = 90
#: Limits that operators of H100 fleets use for corrected errors over a GPU's life.
SRAM_CORRECTED, DRAM_CORRECTED = 10_000, 20_000_000
#: Rows that can be remapped before a GPU is exchanged.
MOST_REMAPPED = 512
NVLINK_ERRORS_PER_HOUR = 100
#: How long an Xid of each grade is kept, in seconds without another one.
XID_WINDOW = {Grade.NOTE: 10 * MINUTE, Grade.WARN: 30 * MINUTE, Grade.BAD: 10 * MINUTE}
#: Two sources tell of one Xid; within this many seconds it is the same.
SAME = 10.0

#: Field 230 of NVML: what the driver wants done with a GPU.
RECOVERY = {
    1: ("reset", Grade.BAD, RESET),
    2: ("reboot", Grade.BAD, "reboot the node"),
    3: ("drain peer-to-peer traffic", Grade.WARN, "drain the engines that span several GPUs"),
    4: ("drain and reset", Grade.BAD, RESET),
    5: ("recover the IMEX domain", Grade.WARN, "restart nvidia-imex on every node of the domain"),
    6: ("reset the bus", Grade.BAD, "reboot the node"),
    7: ("reboot the system", Grade.BAD, "reboot the node"),
}


def subject(gpu: str) -> str:
    return f"gpu:{gpu}"


def name_of(gpu: Gpu) -> str:
    """What a person calls a GPU: its index and where it is."""
    where = f" ({gpu.pci})" if gpu.pci else ""
    return f"GPU {gpu.index}{where}" if gpu.index is not None else f"GPU at {gpu.pci or gpu.uuid}"


def driver(facts: Facts) -> Iterator[Symptom]:
    """Whether the driver answers at all."""
    view = facts.gpus
    if view.refused == MISMATCH:
        yield node(
            "driver-mismatch",
            Grade.BAD,
            f"{refusal(MISMATCH)}: no GPU can be used by a new engine; those that run go on",
            "reboot the node, or stop every GPU process and reload the nvidia modules",
        )
    elif view.refused and (view.present or view.gpus):
        yield node(
            "driver-absent",
            Grade.BAD,
            f"{len(view.present) or len(view.gpus)} NVIDIA GPUs are on the PCI bus, but: {refusal(view.refused)}",
            "install the driver, or load it: modprobe nvidia; dmesg | grep -i nvrm says why it does not load"
            if view.refused in NO_DRIVER
            else "compare with nvidia-smi; dmesg | grep -i nvrm; in a container, pass the GPUs' device files in",
        )
    if view.stalled_since is not None:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(view.stalled_since))
        yield node(
            "driver-stalled",
            Grade.BAD,
            f"the NVIDIA driver is not answering since {since} UTC ({view.stalled}); GPU facts are from before",
            "look for processes in state D (ps axo pid,stat,wchan,comm | grep ' D'); a reboot is likely needed",
        )
    elif view.crashes >= 2:
        yield node(
            "driver-crashing",
            Grade.BAD if view.crashes >= 4 else Grade.WARN,
            f"{view.crashes} times in a row {view.stalled}",
            "compare the versions of libnvidia-ml.so.1 and the kernel module; reinstall the driver",
        )


def node(code: str, grade: Grade, text: str, remedy: str, *, after: float = 0.0, clear: float = 60.0) -> Symptom:
    return Symptom(Problem(subject="node", code=code, grade=grade, text=text, remedy=remedy), after, clear)


def gpus(facts: Facts, past: dict[str, GpuPast], now: float) -> Iterator[Symptom]:
    """Everything about single GPUs; `past` is what was remembered of them."""
    view = facts.gpus
    loads = {load.uuid: load for load in view.loads}
    for gpu in view.gpus:
        fabric = view.fabrics.get(gpu.uuid, gpu.fabric)
        if gpu.unreadable and not view.refused:
            yield _unreadable(gpu)
        elif not gpu.unreadable:
            if fabric is not None:
                yield from _fabric(gpu, fabric, facts, now)
            if fabricmanager.missed(fabric, facts.host):
                yield _bad(gpu, "fabric-manager", fabricmanager.MISSED, "systemctl enable --now nvidia-fabricmanager")
            if (load := loads.get(gpu.uuid)) is not None:
                yield from _load(gpu, load)
                yield from _nvlink_errors(gpu, load, past.get(gpu.uuid), now)
    yield from _against_peers(facts)
    yield from _split(facts)
    if fabricmanager.gone(facts.gpus.fabrics.values(), facts.host):
        remedy = "systemctl restart nvidia-fabricmanager"
        yield node("fabric-manager-down", Grade.WARN, fabricmanager.GONE, remedy, after=MINUTE)


def _split(facts: Facts) -> Iterator[Symptom]:
    """GPUs of one node in several NVLink domains reach one another through PCIe at best."""
    domains: dict[str, list[str]] = defaultdict(list)
    for gpu in facts.gpus.gpus:
        fabric = facts.gpus.fabrics.get(gpu.uuid)
        if not gpu.unreadable and fabric is not None and fabric.domain is not None:
            domains[fabric.domain].append(str(gpu.index) if gpu.index is not None else gpu.pci)
    if len(domains) > 1:
        parts = "; ".join(f"{', '.join(indexes)} in {domain}" for domain, indexes in sorted(domains.items()))
        text = f"the GPUs of this node are in {len(domains)} NVLink domains: {parts}"
        yield node("fabric-split", Grade.WARN, text, "compare the partitions that the fabric manager defines")


def _bad(gpu: Gpu, code: str, text: str, remedy: str, grade: Grade = Grade.BAD, **times: float) -> Symptom:
    found = Problem(subject=subject(gpu.uuid), code=code, grade=grade, text=f"{name_of(gpu)}: {text}", remedy=remedy)
    return Symptom(found, **times)


def _unreadable(gpu: Gpu) -> Symptom:
    if gpu.unreadable in (UNLISTED, VANISHED):
        text = f"missing: it is on the PCI bus and {gpu.unreadable}" if gpu.unreadable == UNLISTED else gpu.unreadable
        return _bad(gpu, "gpu-missing", text, "look at dmesg | grep -i nvrm; power-cycle the node, reseat the GPU")
    if gpu.unreadable == WORDS[HUNG]:
        remedy = "drain the node and reboot it; Xid 119 or 120 in dmesg means that the GPU's own processor is gone"
        return _bad(gpu, "gpu-hangs", gpu.unreadable, remedy)
    code = "gpu-reset-required" if "reset required" in gpu.unreadable else "gpu-lost"
    remedy = RESET if code == "gpu-reset-required" else "reboot the node; power-cycle it if the GPU stays lost"
    return _bad(gpu, code, gpu.unreadable, remedy)


def _fabric(gpu: Gpu, fabric: GpuFabric, facts: Facts, now: float) -> Iterator[Symptom]:
    manager = facts.host.limits.fabric_manager
    said = f" (nvidia-fabricmanager: {manager})" if manager else ""
    if fabric.state == "not-started":
        yield _bad(
            gpu,
            "fabric-manager",
            f"the fabric manager has not started its NVLink fabric{said}: CUDA fails with error 802 though memory "
            "and clocks look fine",
            "systemctl restart nvidia-fabricmanager; journalctl -u nvidia-fabricmanager",
        )
    elif fabric.state == "in-progress":
        yield _bad(
            gpu,
            "fabric-not-ready",
            f"fabric not ready (In Progress) for {AGE}{said}: engines over several GPUs cannot start",
            "wait some minutes after boot; then look at the fabric manager's log on this node and on the switches",
            Grade.WARN,
        )
    elif fabric.state == "completed" and fabric.status:
        yield _bad(
            gpu,
            "fabric-failed",
            f"its fabric registration ended with NVML error {fabric.status}",
            "look at the fabric manager's log; nvidia-smi -q shows the fabric's state",
        )
    elif fabric.faults:
        light = {"degraded bandwidth", "route recovery in progress", "access timeout recovery", "limited capacity"}
        grade = Grade.WARN if {*fabric.faults} <= light else Grade.BAD
        text = f"NVLink fabric: {', '.join(fabric.faults)}"
        yield _bad(gpu, "fabric-unhealthy", text, "look at the fabric manager and the NVLink switches", grade)


def _load(gpu: Gpu, load: GpuLoad) -> Iterator[Symptom]:
    if load.sram_uncorrected:
        text = f"{load.sram_uncorrected} uncorrectable SRAM errors"
        yield _bad(gpu, "sram-uncorrectable", text, f"{RESET}; replace it if the count grows", clear=10 * MINUTE)
    if load.ecc_uncorrected:
        text = f"{load.ecc_uncorrected} uncorrectable memory errors since the driver was loaded"
        yield _bad(gpu, "ecc-uncorrectable", text, "reset the GPU when it is idle", Grade.WARN, clear=10 * MINUTE)
    for count, most, what in (
        (load.sram_corrected, SRAM_CORRECTED, "SRAM"),
        (load.ecc_corrected_total, DRAM_CORRECTED, "memory"),
    ):
        if count is not None and count > most:
            text = f"{count} corrected {what} errors over its life, more than {most}"
            yield _bad(gpu, f"{what.lower()}-corrected", text, "run dcgmi diag -r 3 when it is idle", Grade.WARN)
    if load.remap_failed:
        yield _bad(gpu, "remap-failed", "remapping a memory row failed: no spare row is left", "replace the GPU")
    if load.remap_pending:
        yield _bad(gpu, "remap-pending", "a memory row waits to be remapped", RESET)
    if load.remapped_rows is not None and load.remapped_rows >= MOST_REMAPPED:
        yield _bad(gpu, "remap-full", f"{load.remapped_rows} rows are remapped, of {MOST_REMAPPED}", "replace the GPU")
    if load.retired_pages_pending:
        yield _bad(gpu, "retirement-pending", "memory pages wait to be retired", RESET, Grade.WARN)
    if load.recovery_action:
        what, grade, remedy = RECOVERY.get(load.recovery_action, (f"action {load.recovery_action}", Grade.WARN, RESET))
        yield _bad(gpu, "recovery-action", f"the driver asks to {what}", remedy, grade)
    yield from _throttle(gpu, load)


def _throttle(gpu: Gpu, load: GpuLoad) -> Iterator[Symptom]:
    bits = load.throttle or 0
    warmth = f" at {load.temperature_c} C" if load.temperature_c is not None else ""
    power = f", {load.power_w} W" if load.power_w is not None else ""
    hard = [
        word
        for bit, word in (
            (HARDWARE_THERMAL, "hardware thermal slowdown"),
            (POWER_BRAKE, "power brake"),
            (HARDWARE_SLOWDOWN, "hardware slowdown"),
        )
        if bits & bit
    ]
    if hard:
        text = f"clocks held down: {', '.join(hard)}{warmth}{power} (reasons 0x{bits:x})"
        remedy = "check the node's fans, inlet temperature and power supplies"
        yield _bad(gpu, "throttled-hardware", text, remedy, after=MINUTE, clear=5 * MINUTE)
    elif bits & SOFTWARE_THERMAL:
        text = f"clocks held down by the driver because of heat{warmth}{power}"
        yield _bad(gpu, "throttled-thermal", text, "check cooling", Grade.WARN, after=MINUTE, clear=5 * MINUTE)
    if load.temperature_c is not None and load.temperature_c >= HOT_C:
        text = f"{load.temperature_c} C"
        yield _bad(gpu, "gpu-hot", text, "check cooling", Grade.WARN, after=30.0, clear=5 * MINUTE)


def _nvlink_errors(gpu: Gpu, load: GpuLoad, past: GpuPast | None, now: float) -> Iterator[Symptom]:
    if load.nvlink_errors is None or past is None or not past.nvlink_errors:
        return
    at, first = past.nvlink_errors[0]
    grown = load.nvlink_errors - first
    if grown > NVLINK_ERRORS_PER_HOUR:
        text = f"NVLink errors grew by {grown} in {max(1, round((now - at) / MINUTE))} min"
        yield _bad(gpu, "nvlink-errors", text, "nvidia-smi nvlink -e shows which link", Grade.WARN, clear=10 * MINUTE)


def remembered(facts: Facts, past: dict[str, GpuPast], now: float) -> dict[str, GpuPast]:
    """NVLink counts of the last hour, one every few minutes; a count that fell was reset and begins anew."""
    found = {}
    for load in facts.gpus.loads:
        if load.nvlink_errors is None:
            continue
        kept = tuple(each for each in past.get(load.uuid, GpuPast()).nvlink_errors if now - each[0] <= HOUR)
        if kept and load.nvlink_errors < kept[-1][1]:
            kept = ()
        if not kept or now - kept[-1][0] >= 5 * MINUTE:
            kept = (*kept, (now, load.nvlink_errors))
        found[load.uuid] = GpuPast(nvlink_errors=kept)
    return found


def _against_peers(facts: Facts) -> Iterator[Symptom]:
    """GPUs of one model that have less than the others: a card slot, a riser or a link has a fault."""
    loads = {load.uuid: load for load in facts.gpus.loads}
    kinds: dict[str, list[Gpu]] = defaultdict(list)
    for gpu in facts.gpus.gpus:
        if not gpu.unreadable:
            kinds[gpu.name].append(gpu)
    for peers in kinds.values():
        by_uuid = {gpu.uuid: gpu for gpu in peers}
        found = {uuid: loads[uuid] for uuid in by_uuid if uuid in loads}
        up = {uuid: float(load.nvlinks_up) for uuid, load in found.items() if load.nvlinks_up is not None}
        for uuid, value, common in below(up):
            text = f"{figure(value)} NVLinks up, {common.others} {figure(common.value)}"
            yield _bad(by_uuid[uuid], "nvlink-down", text, "nvidia-smi nvlink -s -i INDEX; reset the GPU when idle")
        width = {uuid: float(load.pcie_width) for uuid, load in found.items() if load.pcie_width}
        for uuid, value, common in below(width):
            text = f"PCIe x{figure(value)}, {common.others} x{figure(common.value)}"
            yield _bad(by_uuid[uuid], "gpu-pcie-width", text, "reseat the GPU or its riser", Grade.WARN)
        # An idle GPU lowers its link's speed to save power: only a busy one shows what it can.
        busy = {
            uuid: float(load.pcie_gen)
            for uuid, load in found.items()
            if load.pcie_gen and (load.utilization_percent or 0) >= 20
        }
        for uuid, value, common in below(busy):
            text = f"PCIe generation {figure(value)} under load, {common.others} {figure(common.value)}"
            yield _bad(by_uuid[uuid], "gpu-pcie-speed", text, "reseat the GPU", Grade.WARN, after=MINUTE)
        memory = {gpu.uuid: float(gpu.memory_bytes) for gpu in peers if gpu.memory_bytes and not gpu.mig_enabled}
        for uuid, value, common in below(memory):
            text = f"{value / 2**30:.1f} GiB of memory, {common.others} {common.value / 2**30:.1f}"
            yield _bad(by_uuid[uuid], "gpu-memory", text, "run dcgmi diag -r 3 when it is idle", Grade.WARN)


def unseen(facts: Facts, problem: Problem) -> bool:
    """Whether a problem is one of those that only the driver could clear, and it has not answered in this agent's life
    or refuses to (NV15). What the kernel's log tells ends by itself, and what GPUs had that are here no more."""
    view = facts.gpus
    blind = view.at is None or (view.refused and (view.present or view.gpus))
    told_by_log = problem.code.startswith(("xid-", "gpu-init-", "gpu-pcie-error"))
    return bool(blind) and problem.subject.startswith("gpu:") and not told_by_log


def xids(facts: Facts, now: float) -> Iterator[Symptom]:
    """Xids of both sources as one: the driver's events and the kernel's lines.

    One that takes a GPU out is over when none came for a while and the GPU is looked at again and found well (NV22).
    """
    by_pci = {gpu.pci: gpu for gpu in facts.gpus.gpus if gpu.pci}
    by_uuid = {gpu.uuid: gpu for gpu in facts.gpus.gpus}
    loads = {load.uuid: load for load in facts.gpus.loads}
    seen: dict[tuple[str, int], list[tuple[float, str]]] = defaultdict(list)
    for event in facts.events:
        if event.kind == "xid":
            gpu = _by_pci(by_pci, event.pci)
            uuid = gpu.uuid if gpu else f"pci:{event.pci}" if event.pci else ""
            seen[uuid, event.xid].append((event.at, event.text))
    for at, uuid, xid in facts.gpus.xids:
        known = seen[uuid, xid]
        if not any(abs(at - other) <= SAME for other, _ in known):
            known.append((at, ""))
    for (uuid, xid), times in sorted(seen.items()):
        what = meaning(xid)
        last, line = max(times)
        gpu, load = by_uuid.get(uuid), loads.get(uuid)
        well = gpu is not None and not gpu.unreadable and load is not None and not load.recovery_action
        if now - last > XID_WINDOW[what.grade] and (what.grade is not Grade.BAD or well or now - last > 24 * HOUR):
            continue
        recent = sum(now - at <= HOUR for at, _ in times)
        often = f", {recent} times in the last hour" if recent > 1 else ""
        whom = f"{name_of(gpu)}: " if gpu else f"GPU at {uuid.removeprefix('pci:')}: " if uuid else ""
        text = f"{whom}Xid {xid}, {what.name}{often}" + (f" [{line[:200]}]" if line else "")
        found = Problem(
            subject=subject(uuid) if uuid else "node",
            code=f"xid-{xid}",
            grade=what.grade,
            text=text,
            remedy=what.remedy,
        )
        yield Symptom(found, clear=MINUTE)


def _by_pci(known: dict[str, Gpu], pci: str) -> Gpu | None:
    """The kernel names the device's function 0, or none."""
    return known.get(pci) or known.get(pci.rpartition(".")[0] + ".0")


def kernel(facts: Facts, now: float) -> Iterator[Symptom]:
    """Other lines of the kernel about GPUs."""
    by_pci = {gpu.pci: gpu for gpu in facts.gpus.gpus if gpu.pci}
    for event in _recent(facts.events, "gpu-init-failed", now):
        gpu = _by_pci(by_pci, event.pci)
        if gpu is not None and not gpu.unreadable:
            continue
        whom = subject(gpu.uuid) if gpu else subject(f"pci:{event.pci}") if event.pci else "node"
        text = f"the driver could not initialise a GPU [{event.text[:200]}]"
        found = Problem(subject=whom, code="gpu-init-failed", grade=Grade.BAD, text=text, remedy="reboot the node")
        yield Symptom(found, clear=MINUTE)

    for event in _recent(facts.events, "pcie-error", now):
        if (gpu := _by_pci(by_pci, event.pci)) is not None:
            text, remedy = f"PCIe errors [{event.text[:200]}]", "reseat the GPU; check its slot and riser"
            yield _bad(gpu, "gpu-pcie-error", text, remedy, Grade.WARN, clear=10 * MINUTE)
    for kind, grade in (("nvswitch-fatal", Grade.BAD), ("nvswitch-error", Grade.NOTE)):
        if latest := next(_recent(facts.events, kind, now), None):
            text = f"an NVSwitch reports {'a fatal' if grade is Grade.BAD else 'an'} error [{latest.text[:200]}]"
            remedy = (
                "drain the node and reset all its GPUs together, or reboot it; then look at the fabric manager's log"
            )
            yield node(f"gpu-{kind}", grade, text, remedy if grade is Grade.BAD else LINK)


def _recent(events: tuple[KernelEvent, ...], kind: str, now: float, window: float = HOUR) -> Iterator[KernelEvent]:
    return (event for event in reversed(events) if event.kind == kind and now - event.at <= window)


def imex(facts: Facts) -> Iterator[Symptom]:
    """IMEX matters where GPUs are in an NVLink domain; elsewhere its state is only shown."""
    domains = {fabric.domain for fabric in facts.gpus.fabrics.values()} - {None}
    state = facts.imex
    if state is None or not domains or state.state == "UP":
        return
    if state.state.startswith(RUNS):
        text = f"IMEX {state.state}: whether it connects the nodes of the domain is not known"
        yield node("imex-unknown", Grade.NOTE, text, "set IMEX_CMD_ENABLED=1 in /etc/nvidia-imex/config.cfg")
        return
    if state.mismatch:
        yield node(
            "imex-mismatch",
            Grade.WARN,
            f"IMEX differs in node list or version from {', '.join(state.mismatch[:8])}",
            "make /etc/nvidia-imex/nodes_config.cfg and the driver the same on all nodes; restart nvidia-imex",
        )
        return
    away = f"; not connected to {', '.join(state.disconnected[:8])}" if state.disconnected else ""
    yield node(
        "imex-not-up",
        Grade.WARN,
        f"IMEX is {state.state}{away}: engines over several nodes of NVLink domain "
        f"{min(filter(None, domains))} cannot share memory",
        "systemctl status nvidia-imex; nvidia-imex-ctl -N",
        after=30.0,
    )

"""Checks of GPUs, their driver, NVLink and IMEX."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

from llmgw.node import files
from llmgw.node.doctor.check import check, fail, ok, skipped, warn
from llmgw.node.doctor.judged import judged
from llmgw.node.doctor.patient import Patient
from llmgw.node.nvml.inventory import MISMATCH
from llmgw.wire.control import Finding

NO_GPUS = "there are no NVIDIA GPUs here"


def absent(patient: Patient) -> bool:
    view = patient.facts.gpus
    return not view.gpus and not view.present


def unseen(patient: Patient) -> str:
    """Why no GPU can be looked at, or ""."""
    if absent(patient):
        return NO_GPUS
    view = patient.facts.gpus
    if view.refused or view.stalled_since is not None or "gpus" in patient.missed or view.crashes:
        return "the driver does not answer: see gpu.driver"
    return ""


def _all(patient: Patient, codes: tuple[str, ...], fine: str) -> Iterator[Finding]:
    if reason := unseen(patient):
        return iter([skipped(reason)])
    return judged(patient, codes, fine, gpus=len(patient.facts.gpus.gpus))


@check("gpu.driver")
def driver(patient: Patient) -> Iterator[Finding]:
    view = patient.facts.gpus
    if view.crashes:
        yield fail(view.stalled, "compare libnvidia-ml.so.1 with the kernel module; reinstall the driver")
    elif view.refused == MISMATCH or view.stalled_since is not None or (view.refused and view.present):
        yield from judged(patient, ("driver-",), view.driver.absent or "the driver does not answer")
    elif view.refused:
        yield skipped(f"{NO_GPUS}: {view.driver.absent}")
    elif "gpus" in patient.missed:
        yield fail("the driver did not answer in time", "nvidia-smi; start nvidia-persistenced to keep GPUs awake")
    else:
        text = f"driver {view.driver.version}, CUDA {view.driver.cuda}"
        yield ok(text, driver=view.driver.version, cuda=view.driver.cuda)


@check("gpu.count")
def count(patient: Patient) -> Iterator[Finding]:
    if reason := unseen(patient):
        yield skipped(reason)
        return
    view = patient.facts.gpus
    listed = sum(not gpu.unreadable for gpu in view.gpus)
    fine = f"{listed} GPUs usable, {len(view.present)} on the PCI bus"
    codes = ("gpu-missing", "gpu-lost", "gpu-hangs", "gpu-reset-required", "gpu-init-failed")
    known = len(view.gpus)
    yield from judged(patient, codes, fine, usable=listed, on_the_bus=len(view.present), known=known)


@check("gpu.ecc")
def ecc(patient: Patient) -> Iterator[Finding]:
    codes = ("sram-uncorrectable", "ecc-uncorrectable", "sram-corrected", "memory-corrected")
    return _all(patient, codes, "no memory errors that matter")


@check("gpu.remap")
def remap(patient: Patient) -> Iterator[Finding]:
    codes = ("remap-pending", "remap-failed", "remap-full", "retirement-pending")
    return _all(patient, codes, "no rows wait to be remapped, and none failed")


@check("gpu.recovery")
def recovery(patient: Patient) -> Iterator[Finding]:
    return _all(patient, ("recovery-action",), "the driver asks for no recovery")


@check("gpu.xid")
def xid(patient: Patient) -> Iterator[Finding]:
    if absent(patient):
        return iter([skipped(NO_GPUS)])
    if not patient.log_readable:
        return iter([skipped("the kernel's log cannot be read: see host.log")])
    return judged(patient, ("xid-", "gpu-nvswitch-"), "no Xids that matter in the kernel's log")


@check("gpu.clocks")
def clocks(patient: Patient) -> Iterator[Finding]:
    hottest = max((load.temperature_c or 0 for load in patient.facts.gpus.loads), default=0)
    codes = ("throttled-hardware", "throttled-thermal", "gpu-hot")
    return _all(patient, codes, f"no GPU is held down; the hottest has {hottest} C")


@check("gpu.pcie")
def pcie(patient: Patient) -> Iterator[Finding]:
    return _all(
        patient, ("gpu-pcie-width", "gpu-pcie-speed", "gpu-pcie-error"), "all PCIe links are as wide as their peers'"
    )


@check("gpu.memory")
def memory(patient: Patient) -> Iterator[Finding]:
    return _all(patient, ("gpu-memory",), "GPUs of one model have the same memory")


@check("gpu.nvlink")
def nvlink(patient: Patient) -> Iterator[Finding]:
    links = [load.nvlinks_up for load in patient.facts.gpus.loads if load.nvlinks_up is not None]
    if not unseen(patient) and not links:
        return iter([skipped("these GPUs have no NVLink")])
    told = f"{min(links)} to {max(links)} NVLinks up" if links else ""
    return _all(patient, ("nvlink-down", "nvlink-errors"), told)


@check("gpu.peer-access")
def peer_access(patient: Patient) -> Iterator[Finding]:
    gpus = [gpu for gpu in patient.facts.gpus.gpus if not gpu.unreadable]
    if reason := unseen(patient):
        yield skipped(reason)
    elif len(gpus) < 2:
        yield skipped("it takes two GPUs")
    else:
        reasons = Counter(why for gpu in gpus for why in gpu.no_peer_access.values())
        shut = reasons.total() // 2 or reasons.total()
        if "disabled by a driver setting (regkey)" in reasons:
            text = f"{shut} pairs of GPUs may not read each other's memory: disabled by a driver setting"
            yield warn(
                text, "look for NVreg_RegistryDwords in /etc/modprobe.d and remove what disables P2P", pairs=shut
            )
        else:
            why = f": {reasons.most_common(1)[0][0]}" if reasons else ""
            yield ok(f"{shut} pairs of GPUs without peer access{why}", pairs=shut)


@check("gpu.fabric")
def fabric(patient: Patient) -> Iterator[Finding]:
    fabrics = patient.facts.gpus.fabrics.values()
    known = {each.state for each in fabrics} - {"not-supported"}
    if not unseen(patient) and not known:
        return iter([skipped("these GPUs are in no NVLink fabric")])
    domains = sorted({each.domain for each in fabrics if each.domain is not None})
    told = f"NVLink domain {', '.join(domains)}" if domains else "registered; no domain beyond this node"
    return _all(patient, ("fabric-",), told)


@check("gpu.fabric-manager")
def fabric_manager(patient: Patient) -> Iterator[Finding]:
    state = patient.host.limits.fabric_manager
    if reason := unseen(patient):
        yield skipped(reason)
    elif state is None:
        yield skipped("nvidia-fabricmanager is not installed")
    elif state != "active" and any(each.state == "not-started" for each in patient.facts.gpus.fabrics.values()):
        yield fail("nvidia-fabricmanager does not run", "systemctl enable --now nvidia-fabricmanager", state=state)
    else:
        # On rack-scale systems it runs on the switches: the GPUs' own fabric state decides.
        told = f"nvidia-fabricmanager: {state}; the GPUs' own state decides"
        yield from judged(patient, ("fabric-manager", "fabric-manager-down"), told, state=state)


@check("gpu.imex")
def imex(patient: Patient) -> Iterator[Finding]:
    state = patient.facts.imex
    if state is None:
        return iter([skipped("IMEX is not installed")])
    domains = {each.domain for each in patient.facts.gpus.fabrics.values()} - {None}
    if not domains:
        return iter([ok(f"IMEX: {state.state}; no GPU here is in an NVLink domain, so it is not needed")])
    return judged(patient, ("imex-",), f"IMEX: {state.state}, {len(state.nodes)} nodes", channels=state.channels)


@check("gpu.imex-channels")
def imex_channels(patient: Patient) -> Iterator[Finding]:
    domains = {each.domain for each in patient.facts.gpus.fabrics.values()} - {None}
    channels = patient.facts.imex.channels if patient.facts.imex else 0
    if not domains:
        yield skipped("no GPU here is in an NVLink domain")
    elif not channels:
        remedy = "nvidia-modprobe -c 0, or set NVreg_CreateImexChannel0=1 for the nvidia module"
        yield fail("there is no IMEX channel (/dev/nvidia-caps-imex-channels)", remedy, channels=0)
    else:
        yield ok(f"{channels} IMEX channels", channels=channels)


@check("gpu.persistence")
def persistence(patient: Patient) -> Iterator[Finding]:
    running = patient.host.limits.persistence_daemon
    if absent(patient) or running is None:
        yield skipped(NO_GPUS if absent(patient) else "there is no NVIDIA driver")
    elif running:
        yield ok("nvidia-persistenced runs")
    else:
        text = "nvidia-persistenced does not run: GPUs fall asleep, and every first use waits seconds for them"
        yield warn(text, "systemctl enable --now nvidia-persistenced")


@check("gpu.device-files")
def device_files(patient: Patient) -> Iterator[Finding]:
    if absent(patient):
        yield skipped(NO_GPUS)
        return
    dev = patient.view.at("dev")
    wanted = ("nvidiactl", "nvidia-uvm")
    missing = [name for name in wanted if not (dev / name).exists()]
    shut = [name for name in wanted if (dev / name).exists() and not os.access(dev / name, os.R_OK | os.W_OK)]
    gpus = sum(name.removeprefix("nvidia").isdecimal() for name in files.names(dev) if name.startswith("nvidia"))
    if missing:
        remedy = "nvidia-modprobe -u -c 0; in a container, run with --gpus all"
        yield fail(f"missing: {', '.join(f'/dev/{name}' for name in missing)}", remedy, gpus=gpus)
    elif shut:
        yield fail(
            f"not permitted: {', '.join(f'/dev/{name}' for name in shut)}", "add the user to group video", gpus=gpus
        )
    else:
        yield ok(f"/dev/nvidiactl, /dev/nvidia-uvm and {gpus} GPUs", gpus=gpus)


@check("gpu.mig")
def mig(patient: Patient) -> Iterator[Finding]:
    if reason := unseen(patient):
        yield skipped(reason)
        return
    parted = [gpu for gpu in patient.facts.gpus.gpus if gpu.mig_enabled]
    empty = [gpu for gpu in parted if not gpu.mig_devices]
    if empty:
        text = f"MIG is on for {len(empty)} GPUs without a single MIG device: nothing can run there"
        yield warn(text, "nvidia-smi mig -cgi PROFILE -C, or nvidia-smi -mig 0", mig=len(parted), empty=len(empty))
    else:
        devices = sum(len(gpu.mig_devices) for gpu in parted)
        yield ok(f"{len(parted)} GPUs with MIG, {devices} devices" if parted else "MIG is off", mig=len(parted))


@check("gpu.processes")
def processes(patient: Patient) -> Iterator[Finding]:
    if reason := unseen(patient):
        yield skipped(reason)
        return
    running = patient.facts.gpus.processes
    if running and not patient.own_pids:
        yield ok(f"{len(running)} processes; whose they are cannot be told: PID namespace differs", count=len(running))
        return
    names = ", ".join(sorted({f"{each.name or '?'} ({each.pid})" for each in running})[:6])
    yield ok(f"{len(running)} processes on GPUs: {names}" if running else "no process on any GPU", count=len(running))

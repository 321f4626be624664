"""Checks of the host."""

from __future__ import annotations

import ctypes
import os
import resource
from collections import Counter
from collections.abc import Iterator

from llmgw.node import files
from llmgw.node.cgroups import share
from llmgw.node.doctor.check import Number, check, fail, ok, skipped, warn
from llmgw.node.doctor.judged import judged
from llmgw.node.doctor.patient import Patient
from llmgw.node.limits import release
from llmgw.wire.control import Finding

GIB = 1 << 30
OLDEST_KERNEL = (5, 4)
#: Shared memory that engines with several processes need; containers have 64 MiB unless told otherwise.
SHARED_MEMORY = 8 * GIB
FILES = 65536
UNSYNCHRONISED = 5  # adjtimex: TIME_ERROR


def accelerated(patient: Patient) -> bool:
    return bool(patient.facts.gpus.gpus or patient.facts.ports.ports)


@check("host.kernel")
def kernel(patient: Patient) -> Iterator[Finding]:
    version = patient.host.kernel
    if release(version) < OLDEST_KERNEL:
        yield warn(f"Linux {version} is older than 5.4", "upgrade the operating system", kernel=version)
    else:
        yield ok(f"Linux {version}, {patient.host.os or 'unknown distribution'}", kernel=version)


@check("host.answers")
def answers(patient: Patient) -> Iterator[Finding]:
    if patient.missed:
        names = ", ".join(patient.missed)
        yield fail(f"no answer in time from: {names}", "look for processes in state D: ps axo pid,stat,wchan,comm")
    else:
        yield ok("every part of the machine answered in time")


@check("host.memory")
def memory(patient: Patient) -> Iterator[Finding]:
    total, available = patient.host.memory_bytes, patient.facts.load.memory_available_bytes
    fine = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available"
    return judged(patient, ("memory-low",), fine, total_bytes=total, available_bytes=available)


@check("host.oom")
def oom(patient: Patient) -> Iterator[Finding]:
    if not patient.log_readable:
        return iter([skipped("the kernel's log cannot be read")])
    return judged(patient, ("oom-kill",), "nothing was ended for want of memory in the last hour")


@check("host.machine-check")
def machine_check(patient: Patient) -> Iterator[Finding]:
    if not patient.log_readable:
        return iter([skipped("the kernel's log cannot be read")])
    return judged(patient, ("machine-check",), "no hardware errors of processor or memory in the log")


@check("host.log")
def log(patient: Patient) -> Iterator[Finding]:
    if patient.log_readable:
        yield ok("the kernel's log can be read: Xids and adapter faults are seen")
    else:
        yield warn(
            "/dev/kmsg cannot be read: faults that only the kernel tells of stay unseen",
            "run as root, or with CAP_SYSLOG; in a container, pass /dev/kmsg in",
        )


@check("host.memlock")
def memlock(patient: Patient) -> Iterator[Finding]:
    limit = patient.host.limits.memlock_bytes
    told = "unlimited" if limit == -1 else f"{(limit or 0) >> 20} MiB"
    return judged(patient, ("memlock",), f"locked memory: {told}", memlock_bytes=-1 if limit is None else limit)


@check("host.files")
def open_files(patient: Patient) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES:
        yield warn(
            f"at most {hard} open files per process", "set LimitNOFILE=1048576 in the unit", soft=soft, hard=hard
        )
    else:
        yield ok(f"open files: {soft} now, up to {hard}", soft=soft, hard=hard)


@check("host.shared-memory")
def shared_memory(patient: Patient) -> Iterator[Finding]:
    try:
        room = os.statvfs(patient.view.at("dev/shm"))
    except OSError:
        yield skipped("there is no /dev/shm")
        return
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    text = f"/dev/shm has {total / GIB:.1f} GiB, {free / GIB:.1f} free"
    if total < min(SHARED_MEMORY, patient.host.memory_bytes // 4 or SHARED_MEMORY):
        remedy = "mount -o remount,size=50% /dev/shm; in a container: --shm-size=16g, or an emptyDir of medium Memory"
        yield warn(f"{text}: engines with several processes need more", remedy, total_bytes=total, free_bytes=free)
    else:
        yield ok(text, total_bytes=total, free_bytes=free)


@check("host.hugepages")
def hugepages(patient: Patient) -> Iterator[Finding]:
    limits = patient.host.limits
    if limits.hugepages_total is None or limits.hugepage_bytes is None:
        yield skipped("the kernel has no huge pages")
        return
    reserved = limits.hugepages_total * limits.hugepage_bytes
    numbers: dict[str, Number] = {"pages": limits.hugepages_total, "page_bytes": limits.hugepage_bytes}
    if reserved > patient.host.memory_bytes / 2 > 0:
        text = f"{reserved / GIB:.0f} GiB are reserved as huge pages and lost to everything else"
        yield warn(text, "sysctl vm.nr_hugepages=0", **numbers)
    else:
        yield ok(f"{limits.hugepages_total} huge pages of {limits.hugepage_bytes >> 20} MiB", **numbers)


@check("host.governor")
def governor(patient: Patient) -> Iterator[Finding]:
    folder = patient.view.at("sys/devices/system/cpu")
    found = Counter(
        word
        for name in files.names(folder)
        if name.startswith("cpu") and (word := files.text(folder / name / "cpufreq/scaling_governor"))
    )
    if not found:
        yield skipped("the processor's clock is not the kernel's to govern (a virtual machine, mostly)")
    elif found.get("powersave") and accelerated(patient):
        text = f"{found['powersave']} of {found.total()} processors are governed to save power"
        yield warn(text, "cpupower frequency-set -g performance", powersave=found["powersave"], all=found.total())
    else:
        yield ok(", ".join(f"{count} processors: {word}" for word, count in sorted(found.items())))


@check("host.numa-balancing")
def numa_balancing(patient: Patient) -> Iterator[Finding]:
    state = files.number(patient.view.at("proc/sys/kernel/numa_balancing"))
    if state is None:
        yield skipped("this kernel does not balance memory between NUMA nodes")
    elif state and accelerated(patient) and (patient.host.cpu.numa_nodes or 1) > 1:
        text = "the kernel moves memory between NUMA nodes behind the engines' backs"
        yield warn(text, "sysctl kernel.numa_balancing=0", numa_balancing=state)
    else:
        yield ok(f"NUMA balancing: {state}", numa_balancing=state)


@check("host.clock")
def clock(patient: Patient) -> Iterator[Finding]:
    # struct timex is 208 bytes; with modes 0 (its first word) the call only reads, and returns the clock's state.
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(256))
    if state == UNSYNCHRONISED:
        text = "the clock is not synchronised: certificates and logs of this node may disagree with others"
        yield warn(text, "systemctl enable --now chronyd, or systemd-timesyncd", state=state)
    elif state < 0:
        yield skipped("the clock's state cannot be asked for")
    else:
        yield ok("the clock is synchronised", state=state)


@check("host.iommu")
def iommu(patient: Patient) -> Iterator[Finding]:
    mode = patient.host.limits.iommu
    if mode is None:
        yield skipped("sysfs does not tell")
    elif mode == "translated" and patient.facts.gpus.gpus and patient.facts.ports.ports:
        text = "the IOMMU translates every access of devices: GPU and adapter talk slower, or not at all"
        yield warn(text, "boot with iommu=pt (and intel_iommu=on or amd_iommu=on)", iommu=mode)
    else:
        yield ok(f"IOMMU: {mode}", iommu=mode)


@check("host.acs")
def acs(patient: Patient) -> Iterator[Finding]:
    bridges = patient.host.limits.acs_redirect
    if bridges is None:
        return iter([skipped("PCI configuration can be read by root only")])
    return judged(patient, ("acs-redirect",), "no PCI bridge redirects peer traffic", bridges=len(bridges))


@check("host.container")
def container(patient: Patient) -> Iterator[Finding]:
    own = share(patient.view)
    limits = []
    if own.cpus is not None:
        limits.append(f"{own.cpus:g} CPUs")
    if own.memory_bytes is not None:
        limits.append(f"{own.memory_bytes / GIB:.1f} GiB of memory")
    cpus, memory = own.cpus or 0.0, own.memory_bytes or 0
    yield ok(f"limited to {' and '.join(limits)}" if limits else "no limits by cgroup", cpus=cpus, memory_bytes=memory)


@check("host.disk-weights")
def disk_weights(patient: Patient) -> Iterator[Finding]:
    return _disk(patient, "weights")


@check("host.disk-state")
def disk_state(patient: Patient) -> Iterator[Finding]:
    return _disk(patient, "state")


def _disk(patient: Patient, purpose: str) -> Iterator[Finding]:
    disk = next((each for each in patient.host.disks if each.purpose == purpose), None)
    if disk is None:
        yield skipped(f"no folder for {purpose} is set")
        return
    if os.path.exists(disk.path) and not os.access(disk.path, os.W_OK | os.X_OK):
        yield fail(f"{disk.path} cannot be written", f"chown it to the agent's user: chown -R $USER {disk.path}")
        return
    told = f"{disk.free_bytes / GIB:.1f} of {disk.total_bytes / GIB:.1f} GiB free on {disk.mount} ({disk.filesystem})"
    codes = (f"disk-full-{purpose}",)
    yield from judged(patient, codes, told, free_bytes=disk.free_bytes, total_bytes=disk.total_bytes)

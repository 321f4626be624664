"""Settings of the host that decide whether RDMA and engines can work, read without starting a process."""

from __future__ import annotations

import os
import resource
import struct

from llmgw.node import files, pci
from llmgw.node.view import View
from llmgw.wire.facts import HostLimits

#: PCI Express extended capability: Access Control Services (PCIe base specification, 7.7.8).
ACS = 0x000D
#: Its control bits for peer-to-peer requests and completions being sent to the root complex.
REDIRECT = 0x4 | 0x8

#: dma-buf export of GPU memory needs the open kernel modules and RDMA core's importer (Linux 5.12).
DMA_BUF_SINCE = (5, 12)


def limits(view: View) -> HostLimits:
    memory = files.fields(files.text(view.at("proc/meminfo")))
    rdma = files.names(view.at("dev/infiniband"))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostLimits(
        memlock_bytes=-1 if soft == resource.RLIM_INFINITY else soft,
        hugepages_total=files.integer(memory.get("HugePages_Total")),
        hugepage_bytes=files.kilobytes(memory.get("Hugepagesize")),
        iommu=iommu(view),
        acs_redirect=acs_redirect(view),
        peer_memory=peer_memory(view),
        persistence_daemon=persistence_daemon(view),
        fabric_manager=fabric_manager(view),
        umad=any(name.startswith("umad") for name in rdma),
        uverbs=any(name.startswith("uverbs") for name in rdma),
        nvswitches=pci.nvswitches(view),
    )


def iommu(view: View) -> str | None:
    """What the IOMMU does: "off", "passthrough" (devices see physical addresses), "translated"; None without sysfs."""
    if not view.at("sys/kernel").is_dir():
        return None
    groups = view.at("sys/kernel/iommu_groups")
    kinds = {files.text(groups / name / "type") for name in files.names(groups)}
    if not kinds:
        return "off"
    return "passthrough" if kinds <= {"identity"} else "translated"


def acs_redirect(view: View) -> tuple[str, ...] | None:
    """PCI bridges that send peer-to-peer traffic up to the root complex; None when it takes root to know."""
    devices = view.at("sys/bus/pci/devices")
    found, hidden = [], False
    for name in files.names(devices):
        if not (files.text(devices / name / "class") or "").startswith("0x0604"):
            continue
        try:
            config = (devices / name / "config").read_bytes()
        except OSError:
            hidden = True
            continue
        if len(config) < 256:  # without root the kernel shows the first 64 bytes only
            hidden = True
        elif redirects(config):
            found.append(name)
    return None if hidden and not found else tuple(found)


def redirects(config: bytes) -> bool:
    """Whether a bridge's 4 KiB of configuration space have ACS redirection on."""
    at, seen = 0x100, set[int]()
    while 0x100 <= at <= len(config) - 8 and at not in seen:
        seen.add(at)
        (header,) = struct.unpack_from("<I", config, at)
        if header in (0, 0xFFFFFFFF):
            return False
        if header & 0xFFFF == ACS:
            (control,) = struct.unpack_from("<H", config, at + 6)
            return bool(control & REDIRECT)
        at = header >> 20
    return False


def peer_memory(view: View) -> tuple[str, ...] | None:
    """The ways an adapter can reach a GPU's memory; None where there is no NVIDIA driver."""
    driver = files.text(view.at("proc/driver/nvidia/version"))
    if driver is None:
        return None
    modules = {line.split(" ")[0] for line in (files.text(view.at("proc/modules")) or "").splitlines()}
    ways: list[str] = [name for name in ("nvidia_peermem", "nv_peer_mem") if name in modules]
    kernel = files.text(view.at("proc/sys/kernel/osrelease")) or os.uname().release
    if "Open Kernel Module" in driver and release(kernel) >= DMA_BUF_SINCE:
        ways.append("dma-buf")
    return tuple(ways)


def release(kernel: str) -> tuple[int, ...]:
    """(major, minor) of a kernel's release; (0, 0) for words that are none."""
    parts = [files.integer("".join(filter(str.isdigit, part))) or 0 for part in kernel.split("-")[0].split(".")[:2]]
    return tuple(parts) if len(parts) == 2 else (0, 0)


def persistence_daemon(view: View) -> bool | None:
    if not view.at("proc/driver/nvidia").is_dir():
        return None
    run = view.at("run/nvidia-persistenced")
    return (run / "socket").exists() or (run / "nvidia-persistenced.pid").exists()


def fabric_manager(view: View) -> str | None:
    return unit_state(view, "nvidia-fabricmanager.service")


def unit_state(view: View, unit: str) -> str | None:
    """Whether a systemd unit has processes ("active"), is only installed ("inactive"), or is not even that (None)."""
    folders = ("etc/systemd/system", "lib/systemd/system", "usr/lib/systemd/system", "run/systemd/system")
    if not any((view.at(folder) / unit).exists() for folder in folders):
        return None
    cgroups = ("sys/fs/cgroup", "sys/fs/cgroup/systemd", "sys/fs/cgroup/unified")
    running = any(files.text(view.at(root) / "system.slice" / unit / "cgroup.procs") for root in cgroups)
    return "active" if running else "inactive"

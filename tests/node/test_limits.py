"""Settings of the host that decide whether RDMA and engines can work."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.node.limits import acs_redirect, iommu, limits, peer_memory, redirects, release, unit_state
from llmgw.node.view import View


def write(root: Path, path: str, text: str = "") -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def config(control: int) -> bytes:
    """A bridge's configuration space with one capability before ACS."""
    space = bytearray(4096)
    struct.pack_into("<I", space, 0x100, 0x1 | 1 << 16 | 0x148 << 20)
    struct.pack_into("<IHH", space, 0x148, 0xD | 1 << 16, 0, control)
    return bytes(space)


def test_redirection_is_read_from_the_acs_capability() -> None:
    assert redirects(config(0x1D))
    assert not redirects(config(0x1))
    assert not redirects(bytes(4096))
    assert not redirects(b"\xff" * 4096)


def test_a_chain_of_capabilities_that_runs_in_circles_ends() -> None:
    space = bytearray(4096)
    struct.pack_into("<I", space, 0x100, 0x1 | 1 << 16 | 0x100 << 20)
    assert not redirects(bytes(space))


@given(st.binary(max_size=600))
def test_any_configuration_space_is_read(space: bytes) -> None:
    redirects(space)
    redirects(bytes(256) + space)


def test_bridges_are_named_and_without_root_nothing_is_known(tmp_path: Path) -> None:
    for name, control in (("0000:00:01.0", 0x1D), ("0000:00:02.0", 0)):
        write(tmp_path, f"sys/bus/pci/devices/{name}/class", "0x060400")
        (tmp_path / f"sys/bus/pci/devices/{name}/config").write_bytes(config(control))
    assert acs_redirect(View(root=tmp_path)) == ("0000:00:01.0",)
    for name in ("0000:00:01.0", "0000:00:02.0"):
        (tmp_path / f"sys/bus/pci/devices/{name}/config").write_bytes(bytes(64))
    assert acs_redirect(View(root=tmp_path)) is None
    assert acs_redirect(View(root=tmp_path / "empty")) == ()


def test_the_iommu_is_off_passthrough_or_translating(tmp_path: Path) -> None:
    view = View(root=tmp_path)
    assert iommu(view) is None
    (tmp_path / "sys/kernel").mkdir(parents=True)
    assert iommu(view) == "off"
    write(tmp_path, "sys/kernel/iommu_groups/0/type", "identity")
    assert iommu(view) == "passthrough"
    write(tmp_path, "sys/kernel/iommu_groups/1/type", "DMA-FQ")
    assert iommu(view) == "translated"


def test_the_ways_to_gpu_memory_depend_on_modules_driver_and_kernel(tmp_path: Path) -> None:
    view = View(root=tmp_path)
    assert peer_memory(view) is None
    write(tmp_path, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01")
    write(tmp_path, "proc/sys/kernel/osrelease", "6.8.0-45-generic")
    assert peer_memory(view) == ()
    write(tmp_path, "proc/modules", "nvidia_peermem 16384 0 - Live 0x0\nnvidia 1 1 - Live 0x0")
    assert peer_memory(view) == ("nvidia_peermem",)
    write(tmp_path, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.172.08")
    assert peer_memory(view) == ("nvidia_peermem", "dma-buf")
    write(tmp_path, "proc/sys/kernel/osrelease", "5.4.0-150-generic")
    assert peer_memory(view) == ("nvidia_peermem",)


@pytest.mark.parametrize(
    ("words", "version"), [("6.8.0-45-generic", (6, 8)), ("5.15", (5, 15)), ("junk", (0, 0)), ("", (0, 0))]
)
def test_a_kernels_release_is_two_numbers(words: str, version: tuple[int, int]) -> None:
    assert release(words) == version


def test_a_unit_runs_when_its_control_group_has_processes(tmp_path: Path) -> None:
    view, unit = View(root=tmp_path), "nvidia-fabricmanager.service"
    assert unit_state(view, unit) is None
    write(tmp_path, f"usr/lib/systemd/system/{unit}")
    assert unit_state(view, unit) == "inactive"
    write(tmp_path, f"sys/fs/cgroup/system.slice/{unit}/cgroup.procs", "4711")
    assert unit_state(view, unit) == "active"


def test_rdma_device_files_are_looked_for_by_kind(tmp_path: Path) -> None:
    write(tmp_path, "dev/infiniband/uverbs0")
    found = limits(View(root=tmp_path))
    assert (found.uverbs, found.umad) == (True, False)


def test_the_nvswitches_of_this_machine_are_counted_on_its_bus(tmp_path: Path) -> None:
    for number, (vendor, kind) in enumerate(
        (("0x10de", "0x068000"),) * 6 + (("0x10de", "0x030200"), ("0x8086", "0x068000"))
    ):
        write(tmp_path, f"sys/bus/pci/devices/0000:0{number}:00.0/vendor", vendor)
        write(tmp_path, f"sys/bus/pci/devices/0000:0{number}:00.0/class", kind)
    assert limits(View(root=tmp_path)).nvswitches == 6
    assert limits(View(root=tmp_path / "none")).nvswitches == 0

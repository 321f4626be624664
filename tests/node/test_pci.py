"""Which GPUs should be in the driver's list."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.node.nvml.inventory import PciGpu
from llmgw.node.pci import gpus
from llmgw.node.view import View
from tests.fakes.sysfs import Machine


def test_nvidia_gpus_are_found_with_their_numa_nodes(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.gpu("0000:1b:00.0", numa=1)
    machine.gpu("000F:01:00.0", numa=-1)
    machine.adapter("mlx5_0", pci="0000:18:00.0")
    machine.write("sys/bus/pci/devices/0000:1b:00.1/vendor", "0x10de")
    machine.write("sys/bus/pci/devices/0000:1b:00.1/class", "0x040300")  # its sound device
    assert gpus(View(root=tmp_path)) == (PciGpu("0000:1b:00.0", 1), PciGpu("000f:01:00.0", None))


def test_a_gpu_that_was_given_to_a_virtual_machine_is_not_missed(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.gpu("0000:1b:00.0")
    machine.gpu("0000:1c:00.0")
    for pci, driver in (("0000:1b:00.0", "vfio-pci"), ("0000:1c:00.0", "nvidia")):
        (tmp_path / "sys/bus/pci/drivers" / driver).mkdir(parents=True)
        (tmp_path / f"sys/bus/pci/devices/{pci}/driver").symlink_to(tmp_path / "sys/bus/pci/drivers" / driver)
    assert [gpu.pci for gpu in gpus(View(root=tmp_path))] == ["0000:1c:00.0"]


def test_a_container_misses_only_the_gpus_it_was_given(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for minor, pci in enumerate(("0000:1b:00.0", "0000:1c:00.0")):
        machine.gpu(pci)
        machine.write(f"proc/driver/nvidia/gpus/{pci}/information", f"Model: H100\nDevice Minor: \t {minor}")
    machine.write("dev/nvidia1", "")
    assert [gpu.pci for gpu in gpus(View(root=tmp_path))] == ["0000:1c:00.0"]


def test_a_containers_own_list_of_gpus_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The container's runtime mounts its list of given ones over the driver's; on a whole machine it has a hole."""
    machine = Machine(tmp_path)
    for pci in ("0000:1b:00.0", "0000:1c:00.0"):
        machine.gpu(pci)
    machine.write("proc/driver/nvidia/gpus/0000:1c:00.0/information", "Device Minor: \t 1")
    machine.write("dev/nvidia1", "")
    assert len(gpus(View(root=tmp_path))) == 2
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "proc/driver/nvidia")
    assert [gpu.pci for gpu in gpus(View(root=tmp_path))] == ["0000:1c:00.0"]


def test_virtual_functions_of_a_gpu_are_not_missed(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for pci in ("0000:1b:00.0", "0000:1b:00.4"):
        machine.gpu(pci)
    (tmp_path / "sys/bus/pci/devices/0000:1b:00.4/physfn").symlink_to(tmp_path / "sys/bus/pci/devices/0000:1b:00.0")
    assert [gpu.pci for gpu in gpus(View(root=tmp_path))] == ["0000:1b:00.0"]

"""What PCI says of devices: addresses in order, paths, link speeds, and which GPUs should be there."""

from __future__ import annotations

from llmgw.node import files
from llmgw.node.nvml.inventory import PciGpu
from llmgw.node.view import View

NVIDIA = "0x10de"
DISPLAY, ACCELERATOR_3D = "0x0300", "0x0302"


def gpus(view: View) -> tuple[PciGpu, ...]:
    """NVIDIA GPUs on the bus that this process should find in the driver's list.

    One that another driver holds (vfio-pci: given to a virtual machine) is somebody else's, and so is one
    whose device file is not in this container.
    """
    devices = view.at("sys/bus/pci/devices")
    found = []
    for name in files.names(devices):
        folder = devices / name
        if files.text(folder / "vendor") != NVIDIA:
            continue
        if not (files.text(folder / "class") or "").startswith((DISPLAY, ACCELERATOR_3D)):
            continue
        driver = files.real(folder / "driver")
        if driver is not None and driver.name != "nvidia":
            continue
        if not _given(view, name):
            continue
        node = files.number(folder / "numa_node")
        found.append(PciGpu(name.lower(), node if node is not None and node >= 0 else None))
    return tuple(found)


def _given(view: View, name: str) -> bool:
    """Whether the device file of a GPU is here; a driver that says nothing of it counts as yes."""
    folder = view.at("proc/driver/nvidia/gpus") / name
    minor = files.fields(files.text(folder / "information")).get("Device Minor", "")
    return not minor.isdigit() or view.at(f"dev/nvidia{minor}").exists()

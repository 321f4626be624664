"""What PCI says of devices: addresses in order, paths, link speeds, and which GPUs should be there."""

from __future__ import annotations

from llmgw.node import files
from llmgw.node.nvml.inventory import PciGpu
from llmgw.node.view import View

NVIDIA = "0x10de"
DISPLAY, ACCELERATOR_3D = "0x0300", "0x0302"
OTHER_BRIDGE = "0x0680"


def gpus(view: View) -> tuple[PciGpu, ...]:
    """NVIDIA GPUs on the bus that this process should find in the driver's list.

    One that another driver holds (vfio-pci: given to a virtual machine) is somebody else's, and so is one
    whose device file is not in this container. A virtual function is its GPU's, to be given to virtual machines.
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
        if (driver is not None and driver.name != "nvidia") or (folder / "physfn").exists():
            continue
        if not _given(view, name):
            continue
        node = files.number(folder / "numa_node")
        found.append(PciGpu(name.lower(), node if node is not None and node >= 0 else None))
    return tuple(found)


def nvswitches(view: View) -> int:
    """NVSwitches on the bus. None where they are another machine's: a virtual machine's host's, a rack's trays'."""
    devices = view.at("sys/bus/pci/devices")
    return sum(
        files.text(devices / name / "vendor") == NVIDIA
        and (files.text(devices / name / "class") or "").startswith(OTHER_BRIDGE)
        for name in files.names(devices)
    )


def _given(view: View, name: str) -> bool:
    """Whether a GPU is this process's: its device file is here. One of which the driver says nothing counts as given,
    but not in a container that has the driver's list mounted over: that holds only what the container was given."""
    said = view.at("proc/driver/nvidia")
    minor = files.fields(files.text(said / "gpus" / name / "information")).get("Device Minor", "")
    return view.at(f"dev/nvidia{minor}").exists() if minor.isdigit() else not said.is_mount()

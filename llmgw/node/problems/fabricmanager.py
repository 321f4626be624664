"""Whether nvidia-fabricmanager is missed. Pure.

It sets up the NVSwitches of a machine. Where GPUs tell of their fabric, that decides; it says nothing of a manager that
has ended since. A fabric that spans nodes is managed on its switches, and none runs on the nodes (FA03). Nor does one
run where no NVSwitch is on the bus, even if it is installed: it finds nothing to do there and ends. Those GPUs have no
NVSwitches, or these are managed elsewhere (by the host of a virtual machine).
"""

from __future__ import annotations

from collections.abc import Iterable

from llmgw.wire.facts import GpuFabric, Host

#: GPUs of a generation without a fabric state (A100) whose NVSwitches nobody sets up.
MISSED = (
    "nvidia-fabricmanager does not run, and GPUs of this generation do not tell of their fabric: "
    "CUDA fails with error 802 though memory and clocks look fine"
)
GONE = (
    "nvidia-fabricmanager does not run: the NVLink fabric that it made works, but a GPU that is reset will not join it "
    "again, and no NVLink error is mended"
)


def missed(fabric: GpuFabric | None, host: Host) -> bool:
    """Whether GPUs cannot work without it, and do not say so themselves."""
    return _ended(host) and (fabric is None or fabric.state == "not-supported")


def gone(fabrics: Iterable[GpuFabric], host: Host) -> bool:
    """Whether it made a fabric within this node and runs no more."""
    made = [fabric for fabric in fabrics if fabric.state == "completed"]
    return _ended(host) and bool(made) and not any(fabric.cluster_uuid for fabric in made)


def _ended(host: Host) -> bool:
    return host.limits.fabric_manager == "inactive" and bool(host.limits.nvswitches)

"""Whether nvidia-fabricmanager is missed. Pure.

It sets up the NVSwitches of a machine. Where GPUs tell of their fabric, that decides; it says nothing of a manager that
has ended since. A fabric that spans nodes is managed on its switches, and none runs on the nodes (FA03).
"""

from __future__ import annotations

from collections.abc import Iterable

from llmgw.wire.facts import Gpu, GpuFabric, Host

#: GPUs of a generation without a fabric state (A100) whose NVSwitches nobody sets up.
MISSED = (
    "nvidia-fabricmanager does not run, and GPUs of this generation do not tell of their fabric: "
    "CUDA fails with error 802 though memory and clocks look fine"
)
GONE = (
    "nvidia-fabricmanager does not run: the NVLink fabric that it made works, but a GPU that is reset will not join it "
    "again, and no NVLink error is mended"
)


def missed(gpu: Gpu, fabric: GpuFabric | None, host: Host) -> bool:
    """Whether a GPU cannot work without it, and does not say so itself.

    NVLinks that nobody set up are no way to a peer: then only the switches on the bus tell of them.
    """
    switched = bool(host.limits.nvswitches) or any(way.startswith("NV") for way in gpu.topology.values())
    silent = fabric is None or fabric.state == "not-supported"
    return switched and silent and host.limits.fabric_manager == "inactive"


def gone(fabrics: Iterable[GpuFabric], host: Host) -> bool:
    """Whether it made a fabric within this node and runs no more."""
    made = [fabric for fabric in fabrics if fabric.state == "completed"]
    return host.limits.fabric_manager == "inactive" and bool(made) and not any(fabric.cluster_uuid for fabric in made)

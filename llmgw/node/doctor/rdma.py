"""Checks of RDMA adapters and of what lets programs use them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from llmgw.node import files
from llmgw.node.doctor.check import PASS, WARN, Number, check, fail, ok, skipped, warn
from llmgw.node.doctor.judged import judged
from llmgw.node.doctor.patient import Patient
from llmgw.node.problems.peers import figure
from llmgw.wire.control import Finding

NONE = "there are no RDMA adapters here"
UNKNOWN = "the RDMA adapters do not answer: see rdma.adapters"


def _all(patient: Patient, codes: tuple[str, ...], fine: str, *, note: str = PASS) -> Iterator[Finding]:
    if not patient.facts.ports.ports:
        return iter([skipped(UNKNOWN if patient.facts.ports.silent else NONE)])
    return judged(patient, codes, fine, note=note, ports=len(patient.facts.ports.ports))


@check("rdma.adapters")
def adapters(patient: Patient) -> Iterator[Finding]:
    ports = patient.facts.ports.ports
    if not ports and not patient.facts.ports.silent:
        yield skipped(NONE)
        return
    for device in sorted(patient.facts.ports.silent):
        text = f"{device}: its files do not answer: the driver or the adapter hangs"
        yield fail(text, "look at dmesg; a reboot is likely needed")
    rails = sum(port.rail is not None for port in ports)
    told = f"{len(ports)} ports, {rails} of them rails: " + ", ".join(sorted({port.kind for port in ports}))
    if ports:
        yield from judged(patient, ("port-missing", "port-unreadable"), told, ports=len(ports), rails=rails)


@check("rdma.state")
def state(patient: Patient) -> Iterator[Finding]:
    up = sum(load.state.startswith("ACTIVE") for load in patient.facts.ports.loads)
    codes = ("port-down", "port-disabled", "port-no-manager", "port-no-lid")
    unknown = sorted(patient.facts.ports.silent)
    told = f"{up} of {len(patient.facts.ports.loads)} ports are active" + (
        f"; not known of {', '.join(unknown)}: see rdma.adapters" if unknown else ""
    )
    # Alone, without a history, nobody can tell a port that was never used from one that lost its cable.
    return _all(patient, codes, told, note=WARN)


@check("rdma.rate")
def rate(patient: Patient) -> Iterator[Finding]:
    rates = sorted({load.rate_gbps for load in patient.facts.ports.loads if load.rate_gbps})
    told = f"rates: {', '.join(map(figure, rates))} Gb/s, equal among peers" if rates else "no rate is known"
    return _all(patient, ("port-slow",), told)


@check("rdma.pcie")
def pcie(patient: Patient) -> Iterator[Finding]:
    return _all(patient, ("port-pcie-width", "port-pcie-speed", "pcie-error"), "PCIe links are equal among peers")


@check("rdma.errors")
def errors(patient: Patient) -> Iterator[Finding]:
    return _all(patient, ("port-errors", "port-counters-full"), "no error counter grows beyond its limit")


@check("rdma.flaps")
def flaps(patient: Patient) -> Iterator[Finding]:
    return _all(patient, ("port-flapping",), "no link comes and goes")


@check("rdma.health")
def health(patient: Patient) -> Iterator[Finding]:
    if patient.facts.ports.ports and not patient.log_readable:
        return iter([skipped("the kernel's log cannot be read: see host.log")])
    return _all(patient, ("mlx5-health", "module-error"), "the kernel reports no fault of adapter or transceiver")


@check("rdma.gid")
def gid(patient: Patient) -> Iterator[Finding]:
    if not any(port.kind == "roce" for port in patient.facts.ports.ports):
        return iter([skipped("there are no RoCE ports here")])
    return _all(patient, ("port-no-gid", "port-link-local"), "every active RoCE rail has a usable GID", note=WARN)


@check("rdma.mtu")
def mtu(patient: Patient) -> Iterator[Finding]:
    known = sorted({port.mtu for port in patient.facts.ports.ports if port.mtu})
    told = f"RDMA MTU: {', '.join(map(str, known))}" if known else "the MTU is not known (ibv_devinfo is not installed)"
    return _all(patient, ("port-odd-mtu", "port-small-mtu"), told)


@check("rdma.firmware")
def firmware(patient: Patient) -> Iterator[Finding]:
    versions = sorted({port.firmware for port in patient.facts.ports.ports if port.firmware})
    return _all(patient, ("port-odd-firmware",), f"firmware: {', '.join(versions) or 'not told'}")


@check("rdma.verbs")
def verbs(patient: Patient) -> Iterator[Finding]:
    if not patient.facts.ports.ports:
        yield skipped(NONE)
        return
    folder = patient.view.at("dev/infiniband")
    found = [name for name in files.names(folder) if name.startswith("uverbs")]
    shut = [name for name in found if not os.access(folder / name, os.R_OK | os.W_OK)]
    if not found:
        remedy = "modprobe ib_uverbs; in a container, pass /dev/infiniband in"
        yield fail("no /dev/infiniband/uverbs*: no program here can use the adapters", remedy, devices=0)
    elif shut:
        yield fail(f"not permitted: {', '.join(shut)}", "chmod 666 /dev/infiniband/uverbs*", devices=len(found))
    else:
        yield ok(f"{len(found)} verbs devices", devices=len(found))


@check("rdma.umad")
def umad(patient: Patient) -> Iterator[Finding]:
    if not any(port.kind == "ib" for port in patient.facts.ports.ports):
        yield skipped("there are no InfiniBand ports here")
        return
    folder = patient.view.at("dev/infiniband")
    found = [name for name in files.names(folder) if name.startswith("umad")]
    if not found:
        text = "cannot ask the subnet manager: there is no /dev/infiniband/umad*"
        yield warn(text, "modprobe ib_umad; in a container, pass /dev/infiniband in", devices=0)
    elif not all(os.access(folder / name, os.R_OK | os.W_OK) for name in found):
        yield warn(
            "cannot ask the subnet manager: umad devices need more rights", "run the agent as root", devices=len(found)
        )
    else:
        yield ok(f"{len(found)} management devices: fabric scans can run", devices=len(found))


@check("rdma.tools")
def tools(patient: Patient) -> Iterator[Finding]:
    if not patient.facts.ports.ports:
        yield skipped(NONE)
        return
    wanted = ["ib_write_bw"]
    if any(port.kind == "ib" for port in patient.facts.ports.ports):
        wanted += ["ibnetdiscover", "sminfo"]
    missing = [name for name in wanted if shutil.which(name) is None]
    if missing:
        text = f"not installed: {', '.join(missing)} (tests and scans of the fabric need them)"
        yield warn(text, "apt-get install perftest infiniband-diags, or dnf install them", missing=len(missing))
    else:
        yield ok(f"installed: {', '.join(wanted)}", missing=0)


@check("rdma.peer-memory")
def peer_memory(patient: Patient) -> Iterator[Finding]:
    ways = patient.host.limits.peer_memory
    if ways is None or not patient.facts.ports.ports:
        return iter([skipped("it takes GPUs and adapters")])
    return judged(patient, ("peer-memory",), f"GPU memory is reached by {', '.join(ways)}", ways=len(ways))


@check("rdma.affinity")
def affinity(patient: Patient) -> Iterator[Finding]:
    gpus = [gpu for gpu in patient.facts.gpus.gpus if not gpu.unreadable]
    rails = [port for port in patient.facts.ports.ports if port.rail is not None]
    if not gpus or not rails:
        yield skipped("it takes GPUs and rails")
        return
    near = {uuid for port in rails for uuid in port.nearest_gpus}
    far = [gpu for gpu in gpus if gpu.uuid not in near]
    numbers: dict[str, Number] = {"gpus": len(gpus), "rails": len(rails), "without": len(far)}
    if far and len(rails) >= len(gpus):
        names = ", ".join(f"GPU {gpu.index}" for gpu in far)
        yield warn(
            f"no adapter is near {names}", "compare slots with the vendor's topology; check NUMA settings", **numbers
        )
    else:
        yield ok(f"{len(gpus)} GPUs, {len(rails)} rails; {len(gpus) - len(far)} GPUs have one near", **numbers)


@check("rdma.labels")
def labels(patient: Patient) -> Iterator[Finding]:
    rails = [port for port in patient.facts.ports.ports if port.rail is not None]
    plain = [port.device for port in rails if port.kind == "roce" and not port.fabric]
    if not rails:
        yield skipped("there are no rails here")
    elif plain:
        text = f"{len(plain)} RoCE rails have no fabric label: nothing on the wire tells two fabrics apart"
        yield warn(text, 'set [fabrics] in node.toml, for example "mlx5_*" = "compute"', without=len(plain))
    else:
        yield ok(f"{len(rails)} rails; InfiniBand is grouped by its subnet manager, RoCE by label", rails=len(rails))

"""Which of a node's ports are rails, which serve storage or management, and which rail each one is (C10).

Configuration comes first. Without it the largest group of adapters of one kind and model is the fabric, since
a node has many rails and one or two of anything else. Virtual functions are never rails, and a bond is one only
where all are bonds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

import msgspec

from llmgw.wire.facts import Port

T = TypeVar("T")

#: Kinds that the rails of a fabric can be.
RAIL_KINDS = frozenset({"ib", "roce"})
#: A RoCE port beside the fabric that is at least this fast is taken for storage, a slower one for management.
STORAGE_GBPS = 50

_digits = re.compile(r"(\d+)")


def pci_order(port: Port) -> tuple[bool, tuple[int, ...], tuple[object, ...], int]:
    """Ports in the order of their PCI addresses as numbers, as NCCL orders them; soft ones by name after them."""
    parts = tuple(int(part, 16) for part in re.split(r"[:.]", port.pci)) if port.pci else ()
    name = tuple(int(part) if part.isdecimal() else part for part in _digits.split(port.device))
    return (not parts, parts, name, port.number)


def said(port: Port, table: Mapping[str, T]) -> T | None:
    """What a table says of a port, by device, device/number or netdev: an exact name before a pattern."""
    names = (f"{port.device}/{port.number}", port.device, port.netdev)
    for name in names:
        if name and name in table:
            return table[name]
    for pattern, value in table.items():
        if any(name and fnmatchcase(name, pattern) for name in names):
            return value
    return None


def assigned(
    ports: Iterable[Port],
    *,
    roles: Mapping[str, str] | None = None,
    rails: Mapping[str, int] | None = None,
    fabrics: Mapping[str, str] | None = None,
) -> tuple[Port, ...]:
    """Ports in PCI order with role, rail and fabric label."""
    ordered = sorted(ports, key=pci_order)
    chosen = [said(port, roles or {}) for port in ordered]
    usual = _usual(ordered)
    labelled = [
        msgspec.structs.replace(port, role=role or guess, fabric=said(port, fabrics or {}) or "")
        for port, role, guess in zip(ordered, chosen, usual, strict=True)
    ]
    numbers = _numbered(labelled, rails or {})
    return tuple(msgspec.structs.replace(port, rail=number) for port, number in zip(labelled, numbers, strict=True))


def _usual(ports: Sequence[Port]) -> list[str]:
    """The role each port has when nobody says otherwise."""
    twins = Counter(port.port_guid for port in ports if port.port_guid)

    def management_twin(port: Port) -> bool:
        # XDR adapters show a second device for subnet management beside the one that carries traffic.
        return port.device.startswith("smi") and twins[port.port_guid] > 1

    plain = [port for port in ports if port.kind in RAIL_KINDS and not port.vf and not management_twin(port)]
    if any(not port.bond for port in plain):
        plain = [port for port in plain if not port.bond]
    groups = Counter((port.kind, port.hca_type) for port in plain)
    most = max(groups.values(), default=0)
    usual = []
    for port in ports:
        size = groups[port.kind, port.hca_type]
        if port.vf:
            usual.append("vf")
        elif management_twin(port):
            usual.append("management")
        elif port.kind not in RAIL_KINDS or (port in plain and not (size < most and 2 * size <= most)):
            usual.append("fabric")
        else:
            rate = port.rate_gbps or (port.netdev_speed_mbps or 0) / 1000
            usual.append("storage" if port.bond or rate >= STORAGE_GBPS else "management")
    return usual


def _numbered(ports: Sequence[Port], rails: Mapping[str, int]) -> list[int | None]:
    """Rails by label, the others in PCI order on the numbers left over."""
    eligible = [port.role == "fabric" and port.kind in RAIL_KINDS for port in ports]
    given = [said(port, rails) if able else None for port, able in zip(ports, eligible, strict=True)]
    taken = {number for number in given if number is not None}
    free = (number for number in range(len(ports) + len(taken)) if number not in taken)
    return [
        number if number is not None else next(free) if able else None
        for number, able in zip(given, eligible, strict=True)
    ]


def nearest(path: str, numa_node: int | None, gpus: Iterable[tuple[str, str, int | None]]) -> tuple[str, ...]:
    """The GPUs nearest to an adapter. `path` is the adapter's real place below /sys/devices; each GPU is
    (uuid, path, numa node). A shared PCIe switch is nearer than a shared root complex, that than a shared
    NUMA node; none of these is no nearness."""
    scored = []
    for uuid, where, node in gpus:
        common = 0
        for mine, theirs in zip(path.strip("/").split("/"), where.strip("/").split("/"), strict=False):
            if mine != theirs:
                break
            common += 1
        # "sys/devices/pci0000:00" are three; every further common step is a bridge both are behind.
        depth = common - 2 if common >= 3 and path and where else 0
        if depth == 0 and numa_node is not None and node == numa_node:
            scored.append((0.5, uuid))
        elif depth > 0:
            scored.append((float(depth), uuid))
    best = max((score for score, _ in scored), default=0.0)
    return tuple(uuid for score, uuid in scored if score == best)

"""Which adapter of one node talks to which of the other, as NCCL pairs them.

By rail label where an operator gave one; else by the GPU an adapter is next to and by PCI order, never by name and
never by position in a list: an extra adapter on one node shifts both (RA01). What has no partner is said, and where
nothing but a guess would pair them, the answer is a refusal. Pure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import attrs

from llmgw.rdma import gids
from llmgw.wire.facts import Gpu, Port

K = TypeVar("K", bound=Hashable)


@attrs.frozen
class Rail:
    """One pair of ports. `by` says what paired them: "label", "gpu", "subnet" or "pci"."""

    name: str
    a: Port
    b: Port
    by: str


@attrs.frozen
class Pairing:
    """The rails between two nodes; `notes` are what an operator should know; `refusal` why there are none."""

    rails: tuple[Rail, ...] = ()
    notes: tuple[str, ...] = ()
    refusal: str = ""


@attrs.frozen
class Side:
    """One node as pairing sees it."""

    name: str
    ports: Sequence[Port]
    gpus: Sequence[Gpu] = ()


def pci_key(pci: str) -> tuple[int, ...]:
    """A PCI address as numbers: `0000:0a:00.1` stands before `0000:1a:00.0`. Unknown ones stand last."""
    found = re.fullmatch(r"(?:([0-9a-fA-F]{1,8}):)?([0-9a-fA-F]{1,2}):([0-9a-fA-F]{1,2})\.([0-7])", pci)
    return tuple(int(part or "0", 16) for part in found.groups()) if found else (1 << 33,)


def order(port: Port) -> tuple[object, ...]:
    """NCCL's order: by PCI address as a number, then by port."""
    return (pci_key(port.pci), port.number, _natural(port.device))


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    return tuple((1, int(p), "") if p.isdecimal() else (0, 0, p) for p in re.split(r"([0-9]+)", name)[:20] if p)


def usable(side: Side) -> tuple[list[Port], list[str]]:
    """The ports that can be rails, in NCCL's order, and why others are not."""
    kept, notes = [], []
    for port in sorted(side.ports, key=order):
        name = f"{side.name} {port.device}/{port.number}"
        if port.vf or port.role == "vf":
            notes.append(f"{name} is a virtual function: not a rail")
        elif port.role != "fabric":
            notes.append(f"{name} is a {port.role} port: not a rail")
        elif port.kind not in ("ib", "roce"):
            what = "EFA, which perftest's ib_ programs cannot test" if port.kind == "efa" else f"of kind {port.kind!r}"
            notes.append(f"{name} is {what}: not a rail")
        else:
            kept.append(port)
    return kept, notes


def pair(a: Side, b: Side) -> Pairing:
    """Pair two nodes' adapters. InfiniBand pairs with InfiniBand and RoCE with RoCE."""
    mine, notes_a = usable(a)
    theirs, notes_b = usable(b)
    notes = notes_a + notes_b
    if not mine or not theirs:
        empty = [side.name for side, ports in ((a, mine), (b, theirs)) if not ports]
        return Pairing((), tuple(notes), f"no RDMA port that could be a rail on {' and '.join(empty)}")
    rails: list[Rail] = []
    refusals: list[str] = []
    for kind in ("ib", "roce"):
        left = [port for port in mine if port.kind == kind]
        right = [port for port in theirs if port.kind == kind]
        words = {"ib": "InfiniBand", "roce": "RoCE"}[kind]
        if left and right:
            found, said, refusal = _pair_kind(a, left, b, right, words)
            rails += found
            notes += said
            refusals += [refusal] if refusal else []
        elif left or right:
            have, lack = (a, b) if left else (b, a)
            notes.append(f"{have.name} has {len(left or right)} {words} port(s), {lack.name} has none")
    if not rails and not refusals:
        refusals.append(f"{a.name} and {b.name} have no port of the same kind")
    return Pairing(tuple(rails), tuple(notes), "" if rails else "; ".join(refusals))


def _pair_kind(a: Side, left: list[Port], b: Side, right: list[Port], words: str) -> tuple[list[Rail], list[str], str]:
    labelled = [port for port in (*left, *right) if port.rail is not None]
    notes: list[str] = []
    if labelled:
        bare = [(s, p) for s, ports in ((a, left), (b, right)) for p in ports if p.rail is None]
        notes += [f"{s.name} {p.device}/{p.number} has no rail label while others have: left out" for s, p in bare]
        rails = _match(a, _labelled(left), b, _labelled(right), "label", "rail", notes)
        return rails, notes, "" if rails else f"{a.name} and {b.name} have no rail label in common"
    near_a, near_b = near(a, left), near(b, right)
    if near_a and near_b:
        for side, ports, groups in ((a, left, near_a), (b, right, near_b)):
            for port in ports:
                if port.device not in {p.device for group in groups.values() for p in group}:
                    notes.append(f"{side.name} {port.device}/{port.number} is near no GPU: not taken for a rail")
        doubt = _doubtful(a, near_a, b, near_b)
        rails = _match(a, near_a, b, near_b, "gpu", "GPU", notes)
        return rails, notes + doubt, "" if rails else "; ".join(doubt)
    if len(left) != len(right):
        counts = f"{a.name} has {len(left)} {words} ports and {b.name} has {len(right)}"
        nets_a, nets_b = _subnets(left), _subnets(right)
        if nets_a and nets_b and set(nets_a) & set(nets_b):
            notes.append(f"{counts}: paired by subnet")
            return _match(a, nets_a, b, nets_b, "subnet", "subnet", notes), notes, ""
        ask = "which belong together cannot be told without a guess: set rail labels in both nodes' configuration"
        return [], notes, f"{counts}; {ask}"
    return [Rail(str(at), x, y, "pci") for at, (x, y) in enumerate(zip(left, right, strict=True))], notes, ""


def _labelled(ports: Iterable[Port]) -> dict[int, list[Port]]:
    groups: dict[int, list[Port]] = {}
    for port in ports:
        if port.rail is not None:
            groups.setdefault(port.rail, []).append(port)
    return groups


def near(side: Side, ports: Sequence[Port]) -> dict[int, list[Port]]:
    """Ports by the position of the first GPU they are next to; empty when no affinity is known."""
    ordered = sorted(side.gpus, key=lambda gpu: (pci_key(gpu.pci), gpu.index or 0))
    position = {gpu.uuid: at for at, gpu in enumerate(ordered)}
    groups: dict[int, list[Port]] = {}
    for port in ports:
        near = [position[uuid] for uuid in port.nearest_gpus if uuid in position]
        # Next to every GPU is next to none: a single PCIe root tells rails apart no more than nothing does.
        if near and (len(near) < len(ordered) or len(ordered) == 1):
            groups.setdefault(min(near), []).append(port)
    return groups


def _doubtful(a: Side, left: dict[int, list[Port]], b: Side, right: dict[int, list[Port]]) -> list[str]:
    """Takes out of both what nothing but a guess would pair: next to one GPU, alike, and not as many on both nodes.

    What is unlike everything on the other node has no partner, whatever its place (a storage adapter next to a GPU).
    """
    notes: list[str] = []
    for place in [place for place in left if len(left[place]) != len(right.get(place, left[place]))]:
        ours, theirs = Counter(map(_kind, left[place])), Counter(map(_kind, right[place]))
        doubt = {kind for kind in ours & theirs if ours[kind] != theirs[kind]}
        if doubt:
            names = " and ".join(
                f"{side.name} {', '.join(port.device for port in ports[place] if _kind(port) in doubt)}"
                for side, ports in ((a, left), (b, right))
            )
            notes.append(f"which of {names} (GPU {place}) are one rail cannot be told: set rail labels")
        for ports, others in ((left, theirs), (right, ours)):
            # In one order of kinds on both nodes, those first that the other one has as well.
            known = sorted((port for port in ports[place] if _kind(port) not in doubt), key=_kind)
            ports[place] = sorted(known, key=lambda port: _kind(port) not in others)
    return notes


def _kind(port: Port) -> tuple[str, str]:
    return port.hca_type, port.board


def _subnets(ports: Sequence[Port]) -> dict[str, list[Port]]:
    """RoCE ports by the subnet of their best GID, where that tells every port from the others."""
    groups: dict[str, list[Port]] = {}
    for port in ports:
        best = next(iter(gids.rows(port)), None)
        if best is not None and not best.link_local:
            groups.setdefault(str(best.network), []).append(port)
    return groups if all(len(group) == 1 for group in groups.values()) else {}


def _match(
    a: Side, left: Mapping[K, list[Port]], b: Side, right: Mapping[K, list[Port]], by: str, word: str, notes: list[str]
) -> list[Rail]:
    """Pair group by group; within a group in PCI order. Whoever stays alone is noted."""
    rails: list[Rail] = []
    for key in [*left, *(key for key in right if key not in left)]:
        ours, theirs = left.get(key, []), right.get(key, [])
        for at, (x, y) in enumerate(zip(ours, theirs, strict=False)):
            name = str(key) if by != "gpu" else f"{len(rails)}"
            rails.append(Rail(f"{name}.{at}" if at and by != "gpu" else name, x, y, by))
        for side, other, alone in ((a, b, ours[len(theirs) :]), (b, a, theirs[len(ours) :])):
            notes += [
                f"{side.name} {port.device}/{port.number} ({word} {key}) has no partner on {other.name}: not tested"
                for port in alone
            ]
    return rails


def narrow(pairing: Pairing, names: Sequence[str]) -> Pairing:
    """Only the rails asked for, by name or by device; a refusal that lists the names when one does not exist."""
    if not names:
        return pairing
    known = [rail.name for rail in pairing.rails]
    kept = [r for r in pairing.rails if {r.name, r.a.device, r.b.device} & set(names)]
    unknown = [n for n in names if not any(n in (r.name, r.a.device, r.b.device) for r in pairing.rails)]
    if unknown and not pairing.refusal:
        return Pairing((), pairing.notes, f"no rail {', '.join(unknown)}; the rails are {', '.join(known)}")
    return attrs.evolve(pairing, rails=tuple(kept))


def nccl_ib_hca(ports: Iterable[Port]) -> str:
    """NCCL_IB_HCA for exactly these ports: without "=" a name also matches every longer one (RA02)."""
    named = ",".join(f"{port.device}:{port.number}" for port in ports)
    return f"={named}" if named else ""

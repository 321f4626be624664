"""The wires of one node over which a replica could reach others: its rails, and what is wrong with each (D6). Pure.

A rail is a port of role "fabric"; virtual functions, storage and management ports are none. Which rails of two nodes
belong together is told as `rdma.rails` pairs them: by label, else by the GPU that an adapter is next to, else by the
subnet that only it is in (RoCE) or its place in PCI order among as many; never by name (RA01). InfiniBand and RoCE do
not mix, and RoCE over IPv4 and over IPv6 are two ways, since NCCL looks for GIDs of one family (NCCL_IB_ADDR_FAMILY).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from llmgw.plane.world import Node, OpenProblem
from llmgw.rdma import gids
from llmgw.rdma.rails import Side, near, usable
from llmgw.wire.agent import Register
from llmgw.wire.facts import Grade, NodeId, Port

#: What rails of several nodes are called the same by: how they were told apart, and the place.
Key = tuple[str, int, int]

#: Problems of a port that grade less than bad and still say that the rail is not at its full rate.
SLOW = ("port-slow", "port-pcie-width", "port-pcie-speed")


@attrs.frozen
class Rail:
    """A rail that is up. `fabric` is what it is on by its label or its subnet; `sees` the managers of an unlabelled
    InfiniBand port, by which its fabric is told (C10)."""

    key: Key
    port: Port
    fabric: str = ""
    sees: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """As NCCL names it."""
        return f"{self.port.device}:{self.port.number}"


@attrs.frozen
class Fault:
    """A rail that cannot be used, and why in a few words. `since` is when it was found; None: with the facts."""

    device: str
    words: str
    since: float | None = None

    def __str__(self) -> str:
        return f"{self.device}: {self.words}"


@attrs.frozen
class Wiring:
    """One way in which a node reaches others: its good rails in order, and the faults of the rest."""

    family: str  # "ib", "roce4" or "roce6"
    rails: tuple[Rail, ...] = ()
    faults: tuple[Fault, ...] = ()


def wirings(node: Node) -> tuple[Wiring, ...]:
    """The ways of a node that has registered, InfiniBand first. Kept until it says something new of its ports."""
    facts = node.facts
    if facts is None or not facts.ports:
        return ()
    kept = _kept.get(node.id)
    seen = (facts, node.problems, node.masters, node.expected)
    if kept is not None and all(one is other for one, other in zip(kept[0], seen, strict=True)):
        return kept[1]
    found = tuple(_wirings(node, facts))
    if len(_kept) >= _KEPT:
        _kept.clear()
    _kept[node.id] = (seen, found)
    return found


#: The last answer by node, and what it was made of: these are values, so the same ones have the same wires.
_kept: dict[NodeId, tuple[tuple[object, ...], tuple[Wiring, ...]]] = {}
_KEPT = 20_000


def _wirings(node: Node, facts: Register) -> Iterable[Wiring]:
    ports, _ = usable(Side(node.id, facts.ports, facts.gpus))
    gone = _gone(node, facts)
    if ib := [port for port in ports if port.kind == "ib"]:
        yield _wiring(node, facts, "ib", ib, {}, gone)
    roce = [port for port in ports if port.kind == "roce"]
    if not roce:
        if gone and not ib:
            yield Wiring("ib", (), gone)
        return
    rows = {(port.device, port.number): gids.rows(port, facts.host.interfaces) for port in roce}
    for family, version in (("roce4", 4), ("roce6", 6)):
        best: dict[tuple[str, int], gids.Row] = {}
        for at, found in rows.items():
            row = next((r for r in found if r.address.version == version and not r.link_local), None)
            if row is not None:
                best[at] = row
        if best or family == "roce4":
            yield _wiring(node, facts, family, roce, best, gone)


def _wiring(
    node: Node,
    facts: Register,
    family: str,
    ports: list[Port],
    rows: Mapping[tuple[str, int], gids.Row],
    gone: tuple[Fault, ...],
) -> Wiring:
    faults = [*gone, *_fewer(node, ports, len(gone))]
    usual = _usual(node, ports)
    ports, keys = _keys(node.id, facts, ports, rows)
    rails: list[Rail] = []
    for port in ports:
        at = (port.device, port.number)
        row = rows.get(at)
        fault = _fault(node, port, usual)
        if fault is None and family != "ib" and row is None:
            fault = Fault(port.device, "no GID to use")
        if fault is not None:
            faults.append(fault)
        elif port.fabric:
            rails.append(Rail(keys[at], port, f"fabric {port.fabric}"))
        elif family == "ib":
            sees = _sees(node, facts, port)
            if sees:
                rails.append(Rail(keys[at], port, "", sees))
            else:
                faults.append(Fault(port.device, "on an unknown fabric: no subnet manager answered, and no label"))
        elif row is not None:
            rails.append(Rail(keys[at], port, f"subnet {row.network}"))
    return Wiring(family, tuple(sorted(rails, key=lambda rail: rail.key)), tuple(faults))


def _keys(
    node: NodeId, facts: Register, ports: list[Port], rows: Mapping[tuple[str, int], gids.Row]
) -> tuple[list[Port], dict[tuple[str, int], Key]]:
    """The ports that are rails, and what each is called across nodes. Where others have a label or are next to a GPU,
    one that is not is no rail; where subnets name them, one without an address is a rail that has lost its name."""
    groups: Mapping[int, list[Port]]
    if any(port.rail is not None for port in ports):
        by = "label"
        labelled: dict[int, list[Port]] = {}
        for port in ports:
            if port.rail is not None:
                labelled.setdefault(port.rail, []).append(port)
        groups = labelled
    else:
        by, groups = "gpu", near(Side(node, ports, facts.gpus), ports)
    if groups:
        # Where one node has more next to a GPU than another, nothing tells which of them is the rail: never the same.
        keys = {
            (port.device, port.number): (
                by if by == "label" or len(there) == 1 else f"gpu, one of {len(there)}",
                place,
                at,
            )
            for place, there in groups.items()
            for at, port in enumerate(there)
        }
        return [port for port in ports if (port.device, port.number) in keys], keys
    subnets = {row.network for row in rows.values()}
    # On a labelled fabric every port may have a subnet of its own (/31), which then names nothing across nodes.
    if rows and len(subnets) == len(rows) and len(ports) > 1 and not any(port.fabric for port in ports):
        return ports, {
            at: (f"subnet{row.network.version}", int(row.network.network_address), row.network.prefixlen)
            for at, row in rows.items()
        }
    return ports, {(port.device, port.number): (f"pci of {len(ports)}", at, 0) for at, port in enumerate(ports)}


def _usual(node: Node, ports: Iterable[Port]) -> dict[tuple[str, str], float]:
    """What the adapters of one kind in this node carry at best, in Gb/s, or should as an operator confirmed."""
    confirmed = node.expected.slowest if node.expected is not None else {}
    best: dict[tuple[str, str], float] = {}
    for port in ports:
        kind = (port.hca_type, port.board)
        rate = max(port.rate_gbps or 0.0, confirmed.get(f"{port.role} {port.kind}", 0.0))
        if rate:
            best[kind] = max(best.get(kind, 0.0), rate)
    return best


def _fewer(node: Node, ports: list[Port], gone: int) -> Iterable[Fault]:
    """Ports that an operator confirmed and that are not there, beyond those that the node itself says are gone."""
    if node.expected is None or _accepted(node, "fewer-ports"):
        return
    group = f"{ports[0].role} {ports[0].kind}"
    count = node.expected.ports.get(group, 0)
    if len(ports) + gone < count:
        yield Fault("ports", f"{len(ports)} of {count} ({group}) are there")


def _accepted(node: Node, code: str) -> bool:
    """Whether an operator acknowledged this problem of the node."""
    open_ = node.problems.get(("node", code))
    return open_ is not None and open_.acknowledged_until is not None


def _fault(node: Node, port: Port, usual: Mapping[tuple[str, str], float]) -> Fault | None:
    state = port.state.rpartition(":")[2].strip().upper()
    if not state:
        return Fault(port.device, "its state cannot be read")
    if state != "ACTIVE":
        physical = port.physical_state.rpartition(":")[2].strip().lower()
        words = state.lower() if state != "DOWN" or physical in ("", "linkup") else f"down ({physical})"
        return Fault(port.device, "down" if words == "down (polling)" else words)
    unread = any("lid" in file for file in port.unreadable)
    if port.kind == "ib" and port.lid is None and port.sm_lid is None and not unread:
        return Fault(port.device, "no subnet manager configured it")
    if node.facts is not None and node.facts.host.limits.uverbs is False:
        return Fault(port.device, "no /dev/infiniband/uverbs* to open it by")
    if port.shut:
        return Fault(port.device, f"cannot be opened: {port.shut}")
    subject = f"port:{port.device}/{port.number}"
    known = _accepted(node, "ports-slower")
    for (about, code), open_ in node.problems.items():
        if about != subject:
            continue
        if open_.acknowledged_until is not None:
            known = known or code in SLOW
        elif open_.problem.grade is Grade.BAD or (code in SLOW and open_.problem.grade is Grade.WARN):
            return Fault(port.device, _problem(port, code, open_, usual), open_.first_at)
    best = usual.get((port.hca_type, port.board))
    if best is not None and port.rate_gbps is not None and port.rate_gbps < best and not known:
        return Fault(port.device, f"{port.rate_gbps:g} of {best:g} Gb/s")
    return None


def _problem(port: Port, code: str, open_: OpenProblem, usual: Mapping[tuple[str, str], float]) -> str:
    best = usual.get((port.hca_type, port.board))
    if code == "port-slow" and best and port.rate_gbps and port.rate_gbps < best:
        return f"{port.rate_gbps:g} of {best:g} Gb/s"
    return f"{code}: {open_.problem.text}"


def _gone(node: Node, facts: Register) -> tuple[Fault, ...]:
    """Ports that were there and are not listed any more: a rail that is missing is no rail less to wait for."""
    if not node.problems:
        return ()
    listed = {f"port:{port.device}/{port.number}" for port in facts.ports}
    return tuple(
        Fault(about.removeprefix("port:").partition("/")[0], "missing", open_.first_at)
        for (about, code), open_ in sorted(node.problems.items(), key=lambda item: item[0])
        if about.startswith("port:")
        and about not in listed
        and open_.problem.grade is Grade.BAD
        and open_.acknowledged_until is None
    )


def _sees(node: Node, facts: Register, port: Port) -> frozenset[str]:
    """The managers of the subnet that a port is on; the last master known where nobody answers now."""
    for report in facts.managers:
        if (report.device, report.number) == (port.device, port.number):
            answered = (one for one in (report.master, *report.others) if one is not None and one.guid)
            found = frozenset(one.guid for one in answered if not one.error)
            if found:
                return found
    master = node.masters.get((port.device, port.number), "")
    return frozenset({master}) if master else frozenset()


def fabrics(nodes: Iterable[Node]) -> dict[str, str]:
    """The canonical manager of each manager's fabric: the smallest GUID of all that ports of one set report (C10)."""
    sets = {rail.sees for node in nodes for wiring in wirings(node) for rail in wiring.rails if rail.sees}
    parent: dict[str, str] = {}

    def root(guid: str) -> str:
        while parent.setdefault(guid, guid) != guid:
            guid = parent[guid]
        return guid

    for one in sets:
        first, *rest = sorted(one)
        for other in rest:
            a, b = sorted((root(first), root(other)))
            parent[b] = a
        root(first)
    return {guid: root(guid) for guid in tuple(parent)}


def fabric_of(rail: Rail, canonical: Mapping[str, str]) -> str:
    """The name of the fabric that a rail is on; "" where nothing tells it."""
    if rail.fabric or not rail.sees:
        return rail.fabric
    return f"SM {canonical[min(rail.sees)]}"

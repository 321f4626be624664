"""One agreed link between two ports, from both nodes' tables, before anything is started (E2).

Device, port, GID index of each side, and the MTU that both can carry: everything is chosen here and passed to both
sides, because every tool guesses differently when it is not told. What cannot work is refused with its reason
instead of being tried until it times out. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from llmgw.rdma import gids
from llmgw.wire.facts import Interface, Port


@attrs.frozen
class End:
    """One side of a link, with what grading needs to know of it."""

    node: str
    device: str
    number: int
    gid_index: int | None = None
    address: str = ""  # the GID as an IP address, to be shown
    pcie_gen: int | None = None
    pcie_width: int | None = None
    pcie_gen_max: int | None = None
    pcie_width_max: int | None = None
    nearest_gpus: tuple[str, ...] = ()
    sharing: int = 1  # how many ports in one slot, this one included, carry traffic at once

    @property
    def name(self) -> str:
        return f"{self.node} {self.device}/{self.number}"


@attrs.frozen
class Link:
    """What both sides are told. `rate_gbps` is the slower end's, None while neither is known."""

    a: End
    b: End
    kind: str  # "ib" or "roce"
    mtu: int | None
    rate_gbps: float | None
    vlan: bool = False
    ipv6: bool = False
    reason: str = ""
    warnings: tuple[str, ...] = ()


@attrs.frozen
class Refusal:
    """Why a link cannot work, with a stable word for programs, and what would change that."""

    code: str
    reason: str
    remedy: str = ""


@attrs.frozen
class Side:
    """A node's port with the interfaces that tell its subnets' true prefix lengths."""

    node: str
    port: Port
    interfaces: Sequence[Interface] = ()

    @property
    def name(self) -> str:
        return f"{self.node} {self.port.device}/{self.port.number}"


def agree(a: Side, b: Side, *, routed: bool = False) -> Link | Refusal:
    """The link between two ports, or why there is none. `routed`: the fabric routes between RoCE subnets."""
    for side in (a, b):
        if refused := unfit(side):
            return refused
    x, y = a.port, b.port
    if x.kind != y.kind:
        return Refusal("kinds", f"{a.name} is {_kind(x)} and {b.name} is {_kind(y)}: they are on different fabrics")
    if x.fabric and y.fabric and x.fabric != y.fabric:
        return Refusal(
            "fabrics",
            f"{a.name} is on fabric {x.fabric!r} and {b.name} on {y.fabric!r}",
            "test pairs of one fabric, or correct the labels",
        )
    chosen = gids.choose_pair(x, y, interfaces_a=a.interfaces, interfaces_b=b.interfaces)
    if isinstance(chosen, gids.Refusal):
        return Refusal("no-gid", f"{a.name} and {b.name}: {chosen.reason}", chosen.remedy)
    row_a, row_b = _row(a, chosen.a), _row(b, chosen.b)
    if row_a and row_b and not row_a.link_local and not routed:
        apart = row_a.address not in row_b.network or row_b.address not in row_a.network
        if apart:
            return Refusal(
                "no-common-subnet",
                f"{a.name} is in {row_a.network} and {b.name} in {row_b.network}: ports of different rails, or a "
                "routed fabric; on networks that keep rails apart this fails as expected",
                "pair ports of the same rail; where the fabric routes between subnets, test with --routed",
            )
    warnings = list(chosen.warnings)
    if x.mtu and y.mtu and x.mtu != y.mtu:
        warnings.append(f"RDMA MTU is {x.mtu} on {a.name} and {y.mtu} on {b.name}: the smaller is used")
    return Link(
        _end(a, row_a),
        _end(b, row_b),
        x.kind,
        min((mtu for mtu in (x.mtu, y.mtu) if mtu), default=None),
        min((rate for rate in (_rate(x), _rate(y)) if rate), default=None),
        vlan=any(row is not None and _is_vlan(row.gid.netdev) for row in (row_a, row_b)),
        ipv6=row_a is not None and row_a.address.version == 6,
        reason=chosen.reason,
        warnings=tuple(warnings),
    )


def unfit(side: Side) -> Refusal | None:
    """Why one port can carry no test at all now."""
    port, name = side.port, side.name
    if port.kind == "efa":
        return Refusal(
            "efa",
            f"{name} is an EFA adapter: it has no reliable connections, so perftest's ib_ programs cannot use it",
            "test it with fi_rma_bw of libfabric",
        )
    if port.kind not in ("ib", "roce"):
        return Refusal("kind", f"{name} is of kind {port.kind!r}, neither InfiniBand nor RoCE")
    if port.shut:
        return Refusal("shut", f"{name} cannot be opened there: {port.shut}", "pass the device into the container")
    state, physical = _word(port.state), _word(port.physical_state)
    if state == "ACTIVE" or not state:
        unread = any("lid" in file for file in port.unreadable)
        if port.kind == "ib" and port.lid is None and port.sm_lid is None and state and not unread:
            return Refusal("no-sm", f"{name} is active without a LID: no subnet manager configured it", _SM)
        return None
    if state in ("INIT", "INITIALIZING", "ARMED"):
        if port.kind == "ib":
            return Refusal("no-sm", f"{name} is {port.state}: the cable is good, no subnet manager configured it", _SM)
        return Refusal("port-down", f"{name} is {port.state}, not ACTIVE")
    if physical == "DISABLED":
        netdev = f" ({port.netdev})" if port.netdev else ""
        return Refusal(
            "port-disabled",
            f"{name}{netdev} is down: disabled by administration",
            f"ip link set {port.netdev} up" if port.netdev else "enable the port",
        )
    if physical == "POLLING":
        return Refusal(
            "port-polling",
            f"{name} is down and polling: it sees no partner",
            "check that the cable is plugged in at both ends and that the switch port is on",
        )
    more = f" ({port.physical_state})" if port.physical_state else ""
    return Refusal("port-down", f"{name} is {port.state}{more}", "look at the cable and the switch port")


_SM = "start opensm, or look why the fabric's subnet manager does not see this port"


def _word(text: str) -> str:
    """ "4: ACTIVE" and "Active" are the same state."""
    return text.rpartition(":")[2].strip().upper().replace("_", "").replace(" ", "")


def _kind(port: Port) -> str:
    return "InfiniBand" if port.kind == "ib" else "RoCE"


def _rate(port: Port) -> float | None:
    """What the port carries, in Gb/s. Soft-RoCE rounds its rate up to a name, so its interface's speed counts too."""
    wire = port.netdev_speed_mbps / 1000 if port.kind == "roce" and port.netdev_speed_mbps else None
    return min((rate for rate in (port.rate_gbps, wire) if rate and rate > 0), default=None)


def _row(side: Side, gid: object) -> gids.Row | None:
    return next((row for row in gids.rows(side.port, side.interfaces) if row.gid is gid or row.gid == gid), None)


def _is_vlan(netdev: str) -> bool:
    return "." in netdev or netdev.startswith("vlan")


def _end(side: Side, row: gids.Row | None) -> End:
    port = side.port
    return End(
        side.node,
        port.device,
        port.number,
        row.gid.index if row else None,
        str(row.address) if row else "",
        port.pcie_gen,
        port.pcie_width,
        port.pcie_gen_max,
        port.pcie_width_max,
        port.nearest_gpus,
    )

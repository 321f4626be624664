"""Which row of each port's GID table two adapters should talk through.

On RoCE a connection is made from one GID to another, and every tool guesses differently when it is not
told. The rule here is the union of what NCCL, perftest and UCX look for: RoCE v2 only; both ends in one
family; both ends in one subnet; rows of the port's own netdev before those of VLANs on top of it; IPv4
before routable IPv6; link-local only when there is nothing else. Each end gets its own index: the same
address is rarely at the same place in two tables (GI09). On InfiniBand no GID is chosen at all.

Pure: tables in, a choice with its reason out.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from functools import lru_cache

import attrs

from llmgw.wire.facts import Gid, Interface, Port

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

#: What a subnet is taken to be when the interface's own prefix length is not known.
PREFIX_V4, PREFIX_V6 = 24, 64

V2 = "RoCE v2"


@attrs.frozen
class Pair:
    """The GID of each end. Both None on InfiniBand, where tools are called without a GID index."""

    a: Gid | None
    b: Gid | None
    reason: str
    warnings: tuple[str, ...] = ()


@attrs.frozen
class Refusal:
    """Why two ports cannot talk RDMA over reliable connections, and what would change that."""

    reason: str
    remedy: str = ""


@attrs.frozen
class Row:
    """A GID that could be used, with what it means as an address. Smaller `rank` is better."""

    gid: Gid
    address: Address
    network: Network
    own_netdev: bool

    @property
    def link_local(self) -> bool:
        return self.address.is_link_local

    @property
    def rank(self) -> tuple[bool, bool, bool, int]:
        return (self.link_local, not self.own_netdev, self.address.version == 6, self.gid.index)


def address_of(gid: str) -> Address | None:
    """A GID as the IP address that it was made from; None when it is none that another node could reach."""
    try:
        whole = ipaddress.IPv6Address(gid.strip())
    except ValueError:
        return None
    address = whole.ipv4_mapped or whole
    return None if int(address) == 0 or address.is_multicast or address.is_loopback else address


@lru_cache(maxsize=1 << 16)
def _interface(text: str) -> ipaddress.IPv4Interface | ipaddress.IPv6Interface | None:
    """An address in CIDR form. Kept, as every GID of a node is compared with every address of it."""
    try:
        return ipaddress.ip_interface(text)
    except ValueError:
        return None


def _network(address: Address, netdev: str, interfaces: Iterable[Interface]) -> Network:
    """The subnet an address is in: by the interface that has it, else by the usual prefix lengths."""
    for interface in interfaces:
        if netdev and interface.name != netdev:
            continue
        for text in interface.addresses:
            known = _interface(text)
            if known is not None and known.ip == address:
                return known.network
    return ipaddress.ip_network((address, PREFIX_V4 if address.version == 4 else PREFIX_V6), strict=False)


def rows(port: Port, interfaces: Sequence[Interface] = ()) -> tuple[Row, ...]:
    """The usable rows of a RoCE port, best first. A row whose type cannot be read is not this namespace's (GI03)."""
    usable = []
    for gid in port.gids:
        address = address_of(gid.gid) if gid.type == V2 else None
        if address is not None:
            own = not port.netdev or not gid.netdev or gid.netdev in (port.netdev, port.bond)
            usable.append(Row(gid, address, _network(address, gid.netdev, interfaces), own))
    return tuple(sorted(usable, key=lambda row: row.rank))


def named(port: Port) -> str:
    return f"{port.device}/{port.number}"


def _unusable(port: Port) -> Refusal | None:
    """Why a port can carry no reliable connection at all, whatever its table says."""
    if port.kind == "efa":
        return Refusal(
            f"{named(port)} is an EFA adapter: it has no reliable connections (RC), so the ib_* tests cannot use it",
            "test it with libfabric's fi_rma_bw over the efa provider",
        )
    if port.kind not in ("ib", "roce"):
        layer = port.link_layer or "of an unknown link layer"
        return Refusal(f"{named(port)} ({port.driver or port.kind}, {layer}) is neither InfiniBand nor RoCE")
    if port.state and not port.state.startswith("ACTIVE"):
        why = f", {port.physical_state}" if port.physical_state else ""
        return Refusal(
            f"{named(port)} is {port.state}{why}", "bring the link up first: llmgw-node doctor names the cause"
        )
    return None


def _no_rows(port: Port) -> Refusal:
    """Why a RoCE port has no usable row: each cause has another cure."""
    netdev = port.netdev or "its network interface"
    if any(gid.type and gid.type != V2 and address_of(gid.gid) is not None for gid in port.gids):
        return Refusal(
            f"no usable GID on {named(port)}: only RoCE v1 entries",
            f"enable RoCE v2 (cma_roce_mode, or the driver's default) and give {netdev} an address",
        )
    return Refusal(
        f"no usable GID on {named(port)}: no IP on {netdev} in this namespace",
        f"ip addr add ADDRESS/PREFIX dev {port.netdev or 'IFACE'}; in a pod, ask for the RDMA device's own network",
    )


def choose_pair(
    a: Port,
    b: Port,
    *,
    interfaces_a: Sequence[Interface] = (),
    interfaces_b: Sequence[Interface] = (),
    pinned_a: int | None = None,
    pinned_b: int | None = None,
) -> Pair | Refusal:
    """The GID for each end, or why there is none.

    The interfaces of both nodes, where known, give the true prefix lengths of subnets. An index that
    somebody pinned is kept unless it cannot work or is link-local while a routable pair exists (GI06).
    """
    for port in (a, b):
        if refused := _unusable(port):
            return refused
    if a.kind != b.kind:
        return Refusal(f"{named(a)} is {_layer(a)} and {named(b)} is {_layer(b)}: they are on different fabrics")
    if a.kind == "ib":
        return Pair(None, None, "InfiniBand: the tools choose the GID themselves")
    mine, theirs = rows(a, interfaces_a), rows(b, interfaces_b)
    for port, usable in ((a, mine), (b, theirs)):
        if not usable:
            return _no_rows(port)
    couples = [
        (x, y) for x in mine for y in theirs if x.address.version == y.address.version and x.link_local == y.link_local
    ]
    if not couples:
        return Refusal(
            f"no common address family: {named(a)} has {_families(mine)}, {named(b)} has {_families(theirs)}",
            "give both interfaces addresses of one family in one subnet",
        )
    best = min(couples, key=_preference)
    warnings: list[str] = []
    if pinned_a is not None or pinned_b is not None:
        best = _pinned(best, couples, (a, b), (pinned_a, pinned_b), warnings)
    x, y = best
    if x.link_local:
        warnings.append(
            f"only link-local addresses on both ends ({x.address}, {y.address}): "
            "it works on one Ethernet segment at most; give both interfaces routable addresses"
        )
    elif not _same_subnet(x, y):
        warnings.append(
            f"{x.address} and {y.address} are in different subnets: RoCE traffic must be routed between them"
        )
    if x.address == y.address:
        warnings.append(f"both ends have the address {x.address}: what is sent there stays at home; give each its own")
    for port, row in ((a, x), (b, y)):
        if not row.own_netdev:
            warnings.append(f"{named(port)} is used through {row.gid.netdev}, not its own interface {port.netdev}")
    where = f"in {x.network}" if _same_subnet(x, y) and not x.link_local else "as nothing better is common"
    reason = f"RoCE v2 {_family(x)} {where}: index {x.gid.index} ({x.address}) and {y.gid.index} ({y.address})"
    return Pair(x.gid, y.gid, reason, tuple(warnings))


def choose(mine: Port, theirs: Port | None = None, *, interfaces: Sequence[Interface] = ()) -> tuple[Gid | None, str]:
    """The GID this end should use, and why; against a peer's table when there is one.

    None with a reason also where no GID is needed (InfiniBand) or none can be used.
    """
    if theirs is not None:
        match choose_pair(mine, theirs, interfaces_a=interfaces):
            case Refusal(reason=reason):
                return None, reason
            case Pair(a=gid, reason=reason):
                return gid, reason
    if mine.kind == "ib":
        return None, "InfiniBand: the tools choose the GID themselves"
    if mine.kind != "roce":
        refused = _unusable(mine)
        return None, refused.reason if refused else "not a RoCE port"
    usable = rows(mine, interfaces)
    if not usable:
        return None, _no_rows(mine).reason
    best = usable[0]
    return best.gid, f"RoCE v2 {_family(best)} {best.address} at index {best.gid.index}"


def _same_subnet(x: Row, y: Row) -> bool:
    return x.link_local or (x.address in y.network and y.address in x.network)


def _preference(couple: tuple[Row, Row]) -> tuple[bool, bool, bool, int, bool, int, int]:
    x, y = couple
    strangers = (not x.own_netdev) + (not y.own_netdev)
    return (
        x.link_local,
        not _same_subnet(x, y),
        x.address == y.address,
        strangers,
        x.address.version == 6,
        x.gid.index,
        y.gid.index,
    )


def _pinned(
    best: tuple[Row, Row],
    couples: Sequence[tuple[Row, Row]],
    ports: tuple[Port, Port],
    pins: tuple[int | None, int | None],
    warnings: list[str],
) -> tuple[Row, Row]:
    """The best couple that has the pinned rows; pins that cannot work, or are link-local for nothing, are named."""
    held = [c for c in couples if all(pin is None or row.gid.index == pin for row, pin in zip(c, pins, strict=True))]
    wanted = min(held, key=_preference, default=None)
    said = ", ".join(f"index {pin} of {named(port)}" for port, pin in zip(ports, pins, strict=True) if pin is not None)
    if wanted is None:
        warnings.append(f"the pinned {said} cannot reach the other end with RoCE v2: another pair was chosen")
        return best
    if wanted[0].link_local and not best[0].link_local:
        warnings.append(f"the pinned {said} is link-local while routable addresses exist: another pair was chosen")
        return best
    return wanted


def _layer(port: Port) -> str:
    return "InfiniBand" if port.kind == "ib" else "RoCE"


def _family(row: Row) -> str:
    return f"IPv{row.address.version}" + (" link-local" if row.link_local else "")


def _families(usable: Sequence[Row]) -> str:
    return " and ".join(dict.fromkeys(_family(row) for row in usable))

"""Over which address the client of a bandwidth test finds the server: the management network, not the rail (E2).

perftest exchanges its parameters over TCP. When that runs over the rail under test, a cut link hangs both sides
instead of failing them, so any other way between the nodes is better. Pure.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

import attrs

from llmgw.wire.agent import Register

_Interface = ipaddress.IPv4Interface | ipaddress.IPv6Interface


@attrs.frozen
class Meeting:
    """The server's address as its client reaches it, and how it was found; `over_rail` warns of the last resort."""

    address: str
    reason: str
    over_rail: bool = False


def meeting(client: Register, server: Register, server_peer: str, *, rail_netdev: str = "") -> Meeting | None:
    """The best address; None when no common network is known.

    `server_peer` is where the plane sees the server's stream come from, `rail_netdev` the server's interface of the
    rail under test. Addresses that both nodes have (bridges of container runtimes) lead nowhere.
    """
    if server.address:
        return Meeting(server.address, "the address in the server's settings")
    ours = {str(found.ip) for _, found in _addresses(client)}
    theirs = list(_addresses(server))
    peer = server_peer.strip("[]")
    if any(str(found.ip) == peer for _, found in theirs) and peer not in ours:
        return Meeting(peer, "where the server's stream comes from")
    rails = {port.netdev for port in server.ports if port.netdev}
    dead_here, dead_there = _dead(client), _dead(server)
    networks = [found.network for name, found in _addresses(client) if _base(name) not in dead_here]
    shared = [
        (name, found)
        for name, found in theirs
        if str(found.ip) not in ours
        and _base(name) not in dead_there
        and any(found.ip in network for network in networks)
    ]
    # The rail under test last; IPv4 first, because older perftest knows nothing else; then interfaces before rails.
    shared.sort(key=lambda at: (_base(at[0]) == rail_netdev, at[1].version, _base(at[0]) in rails))
    if shared:
        name, found = shared[0]
        return Meeting(str(found.ip), f"both nodes are on {found.network}", over_rail=_base(name) == rail_netdev)
    if _routable(peer):
        return Meeting(peer, "where the server's stream comes from")
    same = client.host.boot_id and client.host.boot_id == server.host.boot_id
    return Meeting("127.0.0.1", "both agents run on one machine") if same else None


def _addresses(node: Register) -> Iterator[tuple[str, _Interface]]:
    for interface in node.host.interfaces:
        for text in interface.addresses:
            try:
                found = ipaddress.ip_interface(text)
            except ValueError:
                continue
            narrow = found.ip.is_loopback or found.ip.is_link_local or (found.version == 6 and found.ip.is_site_local)
            if interface.up and not narrow:
                yield interface.name, found


def _dead(node: Register) -> set[str]:
    """Interfaces whose RDMA port is down: heartbeats tell that before a Register tells of the interface."""
    return {port.netdev for port in node.ports if port.netdev and port.state and not port.state.startswith("ACTIVE")}


def _base(netdev: str) -> str:
    """A VLAN's interface without its tag: both use one cable."""
    return netdev.partition(".")[0]


def _routable(address: str) -> bool:
    try:
        return not ipaddress.ip_address(address).is_loopback
    except ValueError:
        return bool(address) and address != "localhost"

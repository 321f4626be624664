"""The host's network interfaces: addresses with prefix lengths, speed, MTU, whether the link is up."""

from __future__ import annotations

import ipaddress
import socket

import psutil

from llmgw.node import files
from llmgw.node.view import View
from llmgw.wire.facts import Interface


def interfaces(view: View) -> tuple[Interface, ...]:
    """Every interface that is a device or has an address; loopback and idle virtual ones are left out."""
    addresses = _addresses()
    net = view.at("sys/class/net")
    found = []
    for name in sorted({*files.names(net), *addresses}):
        folder = net / name
        # A bridge's or a pod's veth without an address of its own says nothing; a node may have hundreds.
        if name == "lo" or not (addresses.get(name) or (folder / "device").exists()):
            continue
        speed = files.number(folder / "speed")
        found.append(
            Interface(
                name=name,
                addresses=tuple(sorted(addresses.get(name, ()))),
                mac=files.text(folder / "address") or "",
                mtu=files.number(folder / "mtu"),
                # -1 (or 2^32-1) is the kernel's "unknown"; an interface that is down cannot be read at all.
                speed_mbps=speed if speed is not None and 0 < speed < 0xFFFFFFFF else None,
                up=files.text(folder / "operstate") == "up" or files.text(folder / "carrier") == "1",
            )
        )
    return tuple(found)


def _addresses() -> dict[str, list[str]]:
    try:
        known = psutil.net_if_addrs()
    except (OSError, psutil.Error):
        return {}
    return {
        name: [text for each in entries if (text := cidr(each.family, each.address, each.netmask))]
        for name, entries in known.items()
    }


def cidr(family: int, address: str, netmask: str | None) -> str | None:
    """`10.0.0.1/24`; None for what is no IP address. A missing netmask makes the address its own network."""
    if family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
        length = ip.max_prefixlen if not netmask else int(ipaddress.ip_address(netmask)).bit_count()
    except ValueError:
        return None
    return f"{ip}/{length}"

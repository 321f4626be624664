"""Where the members of a replica find one another, and the environment that the wires between them ask for. Pure.

Facts, from the sources of NCCL 2.30 and the wheels of vLLM 0.32 and SGLang 0.5:

- NCCL_SOCKET_IFNAME is a list of prefixes, "=" makes it exact; GLOO_SOCKET_IFNAME is one exact name without "=". Both
  are needed where a node has several networks. vLLM announces VLLM_HOST_IP to its workers, SGLang SGLANG_HOST_IP.
- NCCL_IB_HCA is a list of prefixes, too, so mlx5_1 also takes mlx5_10 (RA02). Channel i of a node talks to channel i of
  the next: the order must name the same rail on all. NCCL_IB_DISABLE=1 keeps it to sockets.
- NCCL looks for the first RoCE v2 GID of NCCL_IB_ADDR_FAMILY (AF_INET by default) on each port for itself. An index
  (NCCL_IB_GID_INDEX) is taken unchecked for every adapter of every node, where it is rarely the same: never given.
- NCCL_CROSS_NIC=0 keeps a ring on its rail; else it may pair rails between which there is no link (RA05).
- NCCL_MNNVL_ENABLE=1 fails at init where NVLink between nodes is impossible, instead of falling back; it needs
  NCCL_CUMEM_ENABLE=1, which engines switch off unless it is given.
- NCCL_DEBUG=INFO with INIT,NET makes it say which network it uses: without it a fall back to sockets is silent.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from functools import lru_cache

import attrs

from llmgw.plane.groups import Way
from llmgw.plane.wires import Rail
from llmgw.plane.world import Node
from llmgw.rdma.rails import nccl_ib_hca

_Interface = ipaddress.IPv4Interface | ipaddress.IPv6Interface
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network

#: Where engines announce themselves to the others of their replica.
HOST_IP = {"vllm": "VLLM_HOST_IP", "sglang": "SGLANG_HOST_IP"}


@attrs.frozen
class End:
    """A member's address, and the interface that has it; "" where none is common to all members."""

    address: str
    interface: str = ""


@lru_cache(maxsize=1 << 16)
def loopback(address: str) -> bool:
    """Whether an address reaches only its own machine."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False


def site(node: Node) -> str:
    """The machine that a node's address is good on; "" for an address that others reach as well."""
    if not loopback(node.address):
        return ""
    return f"loopback of {node.facts.host.boot_id if node.facts is not None else ''}"


def ends(nodes: Sequence[Node], *, ipv4: bool = False) -> tuple[End, ...]:
    """Where each of these reaches the others: in the subnet of the addresses that they are reached at, where that is
    one for all; else in another subnet that all are in, IPv4 first; else the addresses alone, which are routed.

    `ipv4`: in a subnet of IPv6 only where there is none of IPv4 (llama.cpp's RPC knows no other addresses).
    """
    reached = tuple(node.address.strip("[]") for node in nodes)
    if all(loopback(address) for address in reached):
        return tuple(End(address, "lo") for address in reached)
    homes = [_home(node, address) for node, address in zip(nodes, reached, strict=True)]
    same = {home[1].network if home is not None else None for home in homes}
    if len(same) == 1 and None not in same and not (ipv4 and any(home and home[1].version == 6 for home in homes)):
        return tuple(End(address, home[0] if home else "") for address, home in zip(reached, homes, strict=True))
    known = [list(_addresses(node)) for node in nodes]
    for network in _common(nodes, known):
        return tuple(
            next(End(str(found.ip), name) for name, found in there if found.network == network) for there in known
        )
    return tuple(End(address) for address in reached)


def _common(nodes: Sequence[Node], known: Sequence[Sequence[tuple[str, _Interface]]]) -> Iterator[_Network]:
    """Subnets that all are in, best first: IPv4, then those that are no rail's. A bridge of a container runtime has
    one address on every machine, so it leads nowhere."""
    rails = [{port.netdev for port in node.facts.ports if port.netdev} if node.facts else set() for node in nodes]
    shared = set.intersection(*({found.network for _, found in there} for there in known))
    ranked: list[tuple[int, int, int, int, _Network]] = []
    for network in shared:
        here = [next((name, found) for name, found in there if found.network == network) for there in known]
        machines = {node.facts.host.boot_id or node.id if node.facts else node.id for node in nodes}
        if len({found.ip for _, found in here}) < len(machines):
            continue
        on_rails = sum(name.partition(".")[0] in there for (name, _), there in zip(here, rails, strict=True))
        ranked.append((network.version, on_rails, int(network.network_address), network.prefixlen, network))
    for *_, network in sorted(ranked, key=lambda one: one[:4]):
        yield network


def _home(node: Node, address: str) -> tuple[str, _Interface] | None:
    """The interface that has an address."""
    for interface in node.facts.host.interfaces if node.facts is not None else ():
        for text in interface.addresses if interface.up else ():
            if text.partition("/")[0] == address and (found := _parsed(text)) is not None:
                return interface.name, found
    if ":" not in address:
        return None
    return next(((name, found) for name, found in _addresses(node) if found.ip == _ip(address)), None)


def _addresses(node: Node) -> Iterator[tuple[str, _Interface]]:
    for interface in node.facts.host.interfaces if node.facts is not None else ():
        for text in interface.addresses if interface.up else ():
            found = _parsed(text)
            if found is not None:
                yield interface.name, found


@lru_cache(maxsize=1 << 16)
def _parsed(text: str) -> _Interface | None:
    """An interface's address; None for one that leads to no other machine, or is none."""
    try:
        found = ipaddress.ip_interface(text)
    except ValueError:
        return None
    return None if found.ip.is_loopback or found.ip.is_link_local else found


def environment(engine: str, gpus: int, way: Way, end: End, rails: Sequence[Rail]) -> dict[str, str]:
    """What one member's engine is to know of the wires. llama.cpp asks for nothing: its RPC is plain TCP to the
    addresses it is given. Without GPUs there is no NCCL."""
    if engine == "llamacpp":
        return {}
    made: dict[str, str] = {}
    if end.interface:
        made["GLOO_SOCKET_IFNAME"] = end.interface
    if engine in HOST_IP and _ip(end.address) is not None:
        made[HOST_IP[engine]] = end.address
    if not gpus:
        return made
    if end.interface:
        made["NCCL_SOCKET_IFNAME"] = f"={end.interface}"
    if way.network == "nvlink":
        made |= {"NCCL_MNNVL_ENABLE": "1", "NCCL_CUMEM_ENABLE": "1"}
    elif way.network == "tcp":
        made["NCCL_IB_DISABLE"] = "1"
    else:
        made |= {"NCCL_IB_DISABLE": "0", "NCCL_IB_HCA": nccl_ib_hca(rail.port for rail in rails)}
        if way.over != "ib":
            made["NCCL_IB_ROCE_VERSION_NUM"] = "2"
            made["NCCL_IB_ADDR_FAMILY"] = "AF_INET6" if way.over == "roce6" else "AF_INET"
        if len(rails) > 1 and len({fabric for _, fabric in way.rails}) == len(rails):
            made["NCCL_CROSS_NIC"] = "0"
    return {**made, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address)
    except ValueError:
        return None

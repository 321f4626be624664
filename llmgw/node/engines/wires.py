"""What the members of a replica really talk over, from an engine's log and its connections. Pure.

NCCL falls back to sockets without a word to anybody but its log, and then serves at a tenth of the speed. Spellings
are those of NCCL 2.4 to 2.31 and RCCL, and of PyTorch's gloo. llama.cpp leaves out a member that it cannot reach; its
log names the devices in use only where it also writes some kilobytes for each request, so its connections are looked
at: it holds one to each peer that has a part of the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence

import attrs

from llmgw.node.engines.flags import given
from llmgw.wire.facts import ShardSpec

#: What makes NCCL say in its log which network it chose. At the start only: neither part speaks while it works.
NCCL_TELLS = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}


@attrs.frozen
class Wires:
    """`network` in words for `ShardStatus`; "" while nothing tells. `missing`: peers that were left out."""

    network: str = ""
    warning: str = ""
    missing: tuple[str, ...] = ()


_TELLING = re.compile(r"NET/(?:IB|Socket)\b|Using network |NET plugin |via (?:NET/|P2P/MNNVL)|libibverbs|backend=gloo")
_IB = re.compile(r"NET/IB ?: ?Using(?P<rest>.*)")
_NO_IB = re.compile(r"NET/IB ?: ?No device found")
_SOCKET = re.compile(r"NET/Socket ?: ?Using(?P<rest>.*)")
_NETWORK = re.compile(r"Using network (?P<name>\S.*?)\s*$|Assigned NET plugin (?P<plugin>\S.*?) to comm")
_CHANNEL = re.compile(r"via NET/(?P<name>[^/]+)/\d")
_NVLINK = re.compile(r"via P2P/MNNVL")
_HCA = re.compile(r"(?P<device>[A-Za-z][\w.-]*):(?P<port>\d+)/(?:IB|RoCE)")
_INTERFACE = re.compile(r"(?:\[\d+\]\s*|^\s*)(?P<name>[A-Za-z][\w.@-]*):(?=[\da-fA-F:])")
_VERBS = re.compile(r"(?:Failed|failed|Could not|Unable) to (?:open|load|dlopen) \S*libibverbs")
#: Options of llama.cpp by which a profile says itself what goes where.
_LAID_OUT = (
    "-ts",
    "--tensor-split",
    "-dev",
    "--device",
    "-ngl",
    "--gpu-layers",
    "--n-gpu-layers",
    "-sm",
    "--split-mode",
)
_FABRIC_TEST = "measure the ports with `llmgw ctl fabric-test`"


def telling(line: str) -> bool:
    """Whether a line may say something of the network: the rest of a log need not be kept."""
    return _TELLING.search(line) is not None


def rpc_peers(spec: ShardSpec) -> tuple[str, ...]:
    """Where a leader of llama.cpp meets its followers."""
    if spec.engine != "llamacpp" or spec.rank or len(spec.peers) < 2 or len(spec.peer_ports) < len(spec.peers):
        return ()
    return tuple(
        f"{peer}:{ports['rpc']}"
        for peer, ports in zip(spec.peers[1:], spec.peer_ports[1:], strict=False)
        if "rpc" in ports
    )


def read(spec: ShardSpec, lines: Sequence[str]) -> Wires:
    """What the log of one member says so far. Of a shard without peers it is nothing."""
    if len(spec.peers) < 2 or spec.engine == "llamacpp":
        return Wires()
    found = _nccl(spec, lines)
    return found if found.network else _gloo(spec, lines)


def rpc(spec: ShardSpec, connected: Collection[str]) -> Wires:
    """What a serving leader of llama.cpp is connected to, of the peers that it should use."""
    due = rpc_peers(spec)
    used = [peer for peer in due if peer in connected]
    missing = tuple(peer for peer in due if peer not in connected)
    network = f"RPC: {', '.join(used)}" if used else ""
    if missing and given(spec.args, *_LAID_OUT):
        words = f"{', '.join(missing)} has no part of the model, as the profile's arguments lay it out"
        return Wires(network, f"{words}: give it one (-ts), or use fewer nodes")
    return Wires(network, missing=missing)


def _gloo(spec: ShardSpec, lines: Sequence[str]) -> Wires:
    if not any("backend=gloo" in line for line in lines):
        return Wires()
    name = _set(spec, "GLOO_SOCKET_IFNAME")
    return Wires(f"gloo over {name}" if name else "gloo")


def _nccl(spec: ShardSpec, lines: Sequence[str]) -> Wires:
    networks = list(
        dict.fromkeys(
            name
            for line in lines
            for pattern in (_NETWORK, _CHANNEL)
            if (found := pattern.search(line))
            if (name := next(filter(None, found.groups()), ""))
        )
    )
    hcas = _each(_IB, _HCA, lines, lambda found: f"{found['device']}:{found['port']}")
    interfaces = _each(_SOCKET, _INTERFACE, lines, lambda found: found["name"])
    if not networks:
        # Older ones named the network only by what it uses. Sockets count first: one such member slows all.
        networks = ["Socket"] if interfaces else ["IB"] if hcas else []
    nvlink = any(map(_NVLINK.search, lines))
    if not networks:
        return Wires("NVLink" if nvlink else "")
    sockets = "Socket" in networks
    name = "Socket" if sockets else networks[0]
    over = interfaces if sockets else hcas if name.startswith("IB") else []
    network = (f"{name}: {', '.join(over)}" if over else name) + (" and NVLink" if nvlink else "")
    if not spec.rdma:
        return Wires(network)
    if sockets:
        return Wires(network, _fell_back(spec, lines, interfaces))
    return Wires(network, _other_ports(spec, hcas) if hcas else "")


def _fell_back(spec: ShardSpec, lines: Sequence[str], interfaces: Sequence[str]) -> str:
    """Sockets where RDMA was meant, the probable cause, and what to do."""
    meant = ", ".join(spec.rdma)
    what = f"NCCL uses sockets{' on ' + ', '.join(interfaces) if interfaces else ''} and not {meant}, so it is slow"
    env = spec.env
    if env.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        return f"{what}: the profile's env sets NCCL_IB_DISABLE={env['NCCL_IB_DISABLE']}; take it out"
    if env.get("NCCL_NET", "").lower() == "socket":
        return f"{what}: the profile's env sets NCCL_NET=Socket; take it out"
    if any(map(_VERBS.search, lines)):
        return f"{what}: libibverbs is not installed on this node; install it (libibverbs1 on Debian and Ubuntu)"
    if any(map(_NO_IB.search, lines)):
        if "NCCL_IB_HCA" in env:
            return (
                f"{what}: it found no RDMA device by NCCL_IB_HCA={env['NCCL_IB_HCA']} of the profile's env; take it out"
            )
        return (
            f"{what}: it found no RDMA device that it may use; look whether these ports are ACTIVE "
            "(`llmgw-node doctor`) and whether the engine may open /dev/infiniband (a container needs the devices "
            "and an unlimited memlock)"
        )
    return f"{what}; set NCCL_DEBUG_SUBSYS=ALL in the profile's env and look at the log for why"


def _other_ports(spec: ShardSpec, hcas: Sequence[str]) -> str:
    absent = [port for port in spec.rdma if port not in hcas]
    others = [port for port in hcas if port not in spec.rdma]
    if not absent and not others:
        return ""
    words = []
    if absent:
        words.append(f"NCCL uses {len(spec.rdma) - len(absent)} of {len(spec.rdma)} ports, and {', '.join(absent)} not")
    if others:
        words.append(f"NCCL uses {', '.join(others)}, which the replica is not meant to use")
    if "NCCL_IB_HCA" in spec.env:
        return f"{'; '.join(words)}: the profile's env sets NCCL_IB_HCA={spec.env['NCCL_IB_HCA']}; take it out"
    remedy = f"look whether they are ACTIVE (`llmgw-node doctor`) and {_FABRIC_TEST}" if absent else _FABRIC_TEST
    return f"{'; '.join(words)}: {remedy}"


def _set(spec: ShardSpec, name: str) -> str:
    return spec.env.get(name) or spec.network.get(name, "")


def _each(
    head: re.Pattern[str], item: re.Pattern[str], lines: Iterable[str], name: Callable[[re.Match[str]], str]
) -> list[str]:
    """Every item behind the head of a line, once, in the order of the first line that has it."""
    rests = (found["rest"].partition("; OOB")[0] for line in lines if (found := head.search(line)))
    return list(dict.fromkeys(name(found) for rest in rests for found in item.finditer(rest)))

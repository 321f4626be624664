"""IMEX, the daemon through which GPUs of several nodes share memory over NVLink: what `nvidia-imex-ctl` says.

That IMEX is up does not make an NVLink domain: only the GPUs' own fabric state does (FA09).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping

import msgspec

from llmgw.node import files
from llmgw.node.limits import unit_state
from llmgw.node.run import NotStarted, run
from llmgw.node.view import View
from llmgw.wire.facts import Imex, Interface

WITHIN = 10.0
CHANNELS = "dev/nvidia-caps-imex-channels"
CONFIG = "etc/nvidia-imex/nodes_config.cfg"
UNIT = "nvidia-imex.service"
#: How a state begins that says no more than that the daemon runs.
RUNS = "runs"

#: The cells of the text's matrix that are not a connection, in words.
MISMATCHES = frozenset({"!V!", "!M!"})
CELLS = frozenset({"C", "I", "N", "R", "D", "A", *MISMATCHES})

_node = re.compile(r"Node\s*#(\d+)\s*-\s*(\S+)\s*-\s*([A-Z_]+)")
_domain = re.compile(r"Domain State:\s*([A-Z_]+)")


class _Connection(msgspec.Struct):
    host: str = ""
    status: str = ""


class _Node(msgspec.Struct, rename={"host_name": "hostName"}):
    status: str = ""
    host: str = ""
    host_name: str = ""
    connections: dict[str, _Connection] = {}


class _Domain(msgspec.Struct):
    nodes: dict[str, _Node] = {}
    status: str = ""


def own_addresses(interfaces: Iterable[Interface], hostname: str = "") -> frozenset[str]:
    """What this node may be called in IMEX's list of nodes, which has addresses or names, with their domain or not."""
    addresses = (text.partition("/")[0] for each in interfaces for text in each.addresses)
    return frozenset(filter(None, (*addresses, *_names(hostname))))


def _names(host: str) -> tuple[str, ...]:
    """A host by its whole name and by its first label; an address as it is."""
    name = host.lower()
    return (name,) if ":" in name or name.replace(".", "").isdecimal() else (name, name.partition(".")[0])


def parse(text: str, own: frozenset[str], channels: int = 0) -> Imex | None:
    """What either form of output says; None when it is neither. `own` are this node's addresses and names."""
    return parse_json(text, own, channels) or parse_table(text, own, channels)


def parse_json(text: str, own: frozenset[str], channels: int = 0) -> Imex | None:
    """`nvidia-imex-ctl -N -j`. Connections name their peer by number and address only."""
    try:
        domain = msgspec.json.decode(text[text.index("{") :], type=_Domain)
    except (ValueError, msgspec.MsgspecError, RecursionError):
        return None
    if not domain.nodes and not domain.status:
        return None
    names = {number: node.host or node.host_name or f"node {number}" for number, node in domain.nodes.items()}
    rows = {
        number: {
            to: connection.status.upper()
            for to, connection in node.connections.items()
        }
        for number, node in domain.nodes.items()
    }  # fmt: skip
    mine = [number for number, node in domain.nodes.items() if own & {*_names(node.host), *_names(node.host_name)}]
    hosts = {
        to: connection.host for node in domain.nodes.values() for to, connection in node.connections.items()
    }  # fmt: skip
    names = {**{to: host for to, host in hosts.items() if host}, **names}
    return _imex(
        domain.status.upper(),
        [(names[number], node.status) for number, node in domain.nodes.items()],
        names,
        rows,
        mine,
        connected="CONNECTED",
        channels=channels,
    )


def parse_table(text: str, own: frozenset[str], channels: int = 0) -> Imex | None:
    """`nvidia-imex-ctl -N`: a legend, a list of nodes, a matrix, and the domain's state."""
    found = _domain.search(text)
    nodes = [(match[1], match[2], match[3]) for match in _node.finditer(text)]
    if found is None and not nodes:
        return None
    names = {number: address for number, address, _ in nodes}
    rows: dict[str, dict[str, str]] = {}
    columns: list[str] = []
    for line in text.splitlines():
        words = line.split()
        if "From\\To" in line:
            columns = [word for word in words if word.isdecimal()]
        elif len(words) >= 2 and words[0].isdecimal() and all(word in CELLS for word in words[1:]):
            order = columns or [str(index) for index in range(len(words) - 1)]
            rows[words[0]] = dict(zip(order, words[1:], strict=False))
    mine = [number for number, address, _ in nodes if own.intersection(_names(address))]
    return _imex(
        found[1] if found else "",
        [(address, status) for _, address, status in nodes],
        names,
        rows,
        mine,
        connected="C",
        channels=channels,
    )


def _imex(
    state: str,
    nodes: list[tuple[str, str]],
    names: Mapping[str, str],
    rows: Mapping[str, Mapping[str, str]],
    mine: list[str],
    *,
    connected: str,
    channels: int,
) -> Imex:
    """The domain is up for this node only if it is up and this node's own row is connected throughout. Where none of
    the rows can be told to be ours, all count."""
    away, differing = list[str](), list[str]()
    for row in mine or rows:
        for to, cell in rows.get(row, {}).items():
            if cell == connected:
                continue
            name = names.get(to, f"node {to}")
            (differing if cell in MISMATCHES or "MISMATCH" in cell else away).append(name)
    broken = bool(away or differing) or any(status != "READY" for _, status in nodes)
    return Imex(
        state="DEGRADED" if state == "UP" and broken else state or "unknown",
        nodes=tuple(nodes),
        disconnected=tuple(dict.fromkeys(away)),
        mismatch=tuple(dict.fromkeys(differing)),
        channels=channels,
    )


async def imex(view: View, own: frozenset[str]) -> Imex | None:
    """Ask the daemon; None where IMEX is not installed. Takes no longer than `WITHIN`."""
    tool = shutil.which(view.imex)
    if tool is None:
        return None
    # As it comes it answers no questions (IMEX_CMD_ENABLED=0): that it runs is then all that can be known.
    runs = f"{RUNS}, " if unit_state(view, UNIT) == "active" else ""
    channels = sum(name.startswith("channel") for name in files.names(view.at(CHANNELS)))
    said = ""
    for options in (["-N", "-j"], ["-N"]):
        try:
            ran = await run([tool, *options], limit=WITHIN)
        except NotStarted as error:
            return Imex(state=f"{runs}cannot be asked: {error}", channels=channels)
        if ran.cut_short:
            return Imex(state=f"{runs}cannot be asked: no answer within {WITHIN:.0f} s", channels=channels)
        if (found := parse(ran.stdout, own, channels)) is not None:
            return found
        words = (line.strip() for line in (ran.stderr + "\n" + ran.stdout).splitlines())
        said = next(filter(None, words), said)
    return Imex(state=f"{runs}cannot be asked: {said or 'the daemon is not running'}"[:300], channels=channels)

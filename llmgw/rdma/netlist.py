"""The lists of the discovery tools: one line a port (`ibnetdiscover -p`), or one a node (`-l`, `ibhosts`).

The map comes from `netdiscover`; these forms are read where an operator brings one. Descriptions that hold a quote
make the `-p` form ambiguous, so nothing here is keyed by them. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import attrs

_PORT = re.compile(
    r"(?P<kind>SW|CA|RT)\s+(?P<lid>\d+)\s+(?P<port>\d+)\s+0x(?P<guid>[0-9a-fA-F]{1,16})\s+(?P<width>\d+|\?\?)x?\s*(?P<speed>\S+)"
    r"(?:\s+-\s+(?P<peer_kind>SW|CA|RT)\s+(?P<peer_lid>\d+)\s+(?P<peer_port>\d+)\s+0x(?P<peer_guid>[0-9a-fA-F]{1,16})"
    r"\s+\(\s+'(?P<names>.*)'\s+\)|\s+'(?P<name>.*)')\s*$"
)
_NODE = re.compile(
    r"(?P<word>Ca|Hca|Switch|Router|Rt)\s*:\s*0x(?P<guid>[0-9a-fA-F]{1,16}) ports (?P<ports>\d+)"
    r'(?: devid 0x(?P<device>[0-9a-fA-F]+) vendid 0x(?P<vendor>[0-9a-fA-F]+))? "(?P<name>.*)"'
    r"(?: (?:enhanced |base )?port 0 lid (?P<lid>\d+) lmc \d+)?\s*$"
)


@attrs.frozen
class ListedPort:
    """A line of `ibnetdiscover -p`. GUIDs are port GUIDs (a switch's is the same for each of its ports).

    Width and speed of a port without a peer are leftovers, so they are 0 and "" here.
    """

    kind: str
    guid: int
    port: int
    lid: int
    width: int = 0
    speed: str = ""
    peer_guid: int | None = None
    peer_port: int | None = None
    names: str = ""


@attrs.frozen
class ListedNode:
    """A line of `ibnetdiscover -l`, `ibhosts`, `ibswitches` or `ibnodes`."""

    kind: str
    guid: int
    ports: int
    name: str
    vendor: int = 0
    device: int = 0
    lid: int = 0


def ports(lines: Iterable[str]) -> tuple[tuple[ListedPort, ...], tuple[str, ...]]:
    """The ports of `ibnetdiscover -p`, and the lines that are of no known form."""
    found: list[ListedPort] = []
    strange: list[str] = []
    for line in lines:
        match = _PORT.match(line)
        if match is None:
            strange.extend([line] if line.strip() else [])
            continue
        linked = match["peer_guid"] is not None
        found.append(
            ListedPort(
                kind=match["kind"],
                guid=int(match["guid"], 16),
                port=int(match["port"]),
                lid=int(match["lid"]),
                width=int(match["width"]) if linked and match["width"] != "??" else 0,
                speed=match["speed"] if linked and match["speed"] != "???" else "",
                peer_guid=int(match["peer_guid"], 16) if linked else None,
                peer_port=int(match["peer_port"]) if linked else None,
                names=match["names"] if linked else match["name"],
            )
        )
    return tuple(found), tuple(strange)


def nodes(lines: Iterable[str]) -> tuple[tuple[ListedNode, ...], tuple[str, ...]]:
    """The nodes of a list, and the lines that are of no known form."""
    kinds = {"Switch": "switch", "Router": "router", "Rt": "router"}
    found: list[ListedNode] = []
    strange: list[str] = []
    for line in lines:
        match = _NODE.match(line)
        if match is None:
            strange.extend([line] if line.strip() else [])
            continue
        found.append(
            ListedNode(
                kind=kinds.get(match["word"], "adapter"),
                guid=int(match["guid"], 16),
                ports=int(match["ports"]),
                name=match["name"],
                vendor=int(match["vendor"] or "0", 16),
                device=int(match["device"] or "0", 16),
                lid=int(match["lid"] or 0),
            )
        )
    return tuple(found), tuple(strange)

"""What `iblinkinfo` prints: every port of every switch, also those that are down or whose peer keeps silent.

It knows two things that `ibnetdiscover` does not: a cable that is up but whose far end does not answer ("Port not
available"), and a port's own state, so that a fabric without a subnet manager (all `Initialize`) shows. Both the
default form and `-l`, with or without `-p`. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import attrs

_HEADER = re.compile(r"(?P<kind>Switch|CA|Router): (?:0x(?P<guid>[0-9a-fA-F]{1,16}) )?(?P<name>.*):\s*$")
_PORT = re.compile(
    r'\s*(?:0x(?P<guid>[0-9a-fA-F]{1,16})\s+)?(?:"(?P<name>.*?)"\s+)?(?P<lid>\d+)\s+(?P<port>\d+)\[(?P<ext>[ \d]*)\] '
    r"==\((?P<link>.*?)/(?P<physical>[^/()]*)\)(?P<queues> \(HOQ:\d+ VL_Stall:\d+\))?==>\s*(?P<peer>.*)$"
)
_PEER = re.compile(
    r"(?:0x(?P<guid>[0-9a-fA-F]{1,16})\s+)?(?:(?P<lid>\d+)\s+(?P<port>\d+))?\s*\[[ \d]*\] "
    r'"(?P<name>.*)" \((?P<could>[^()]*)\)\s*$'
)
_PACE = re.compile(r"\s*(?P<width>\d+)X\s+(?P<lane>\S+) Gbps(?: \(FDR10\))?\s+(?P<state>\w+)\s*$")

#: Names of lane rates as the tool prints them, in Gb/s.
LANES = {
    "2.5": "SDR", "5.0": "DDR", "10.0": "QDR", "14.0625": "FDR", "25.78125": "EDR", "53.125": "HDR",
    "106.25": "NDR", "212.5": "XDR",
}  # fmt: skip


@attrs.frozen
class LinkLine:
    """One port. `unavailable`: the link is up and the peer did not answer. `unknown`: its own state was lost.

    `could` are the "Could be" words: reliable on hardware, always there under the simulator.
    """

    guid: int
    port: int
    lid: int
    name: str
    width: int = 0
    speed: str = ""
    state: str = ""
    physical: str = ""
    peer_guid: int = 0
    peer_lid: int = 0
    peer_port: int = 0
    peer_name: str = ""
    unavailable: bool = False
    unknown: bool = False
    could: str = ""


def parse(lines: Iterable[str]) -> tuple[tuple[LinkLine, ...], tuple[str, ...]]:
    """The ports, and the lines that are of no known form. Never raises, whatever the text."""
    found: list[LinkLine] = []
    strange: list[str] = []
    guid, owner = 0, ""
    for raw in lines:
        line = raw.rstrip("\r\n")
        if not line.strip():
            continue
        header = _HEADER.match(line)
        if header and "==(" not in line:
            guid, owner = int(header["guid"] or "0", 16), header["name"]
            continue
        one = _port(line, guid, owner)
        if one is None:
            strange.append(line[:200])
        else:
            found.append(one)
    return tuple(found), tuple(strange)


def _port(line: str, guid: int, owner: str) -> LinkLine | None:
    match = _PORT.match(line)
    if match is None:
        return None
    pace = _PACE.match(match["link"])
    speed = ""
    if pace:
        speed = "FDR10" if "(FDR10)" in match["link"] else LANES.get(pace["lane"], "")
    state = pace["state"] if pace else match["link"].strip()
    unknown = not pace and state not in ("Down", "Initialize", "Armed", "Active")
    tail = match["peer"].strip()
    unavailable = tail == '"Port not available"'
    peer = None if unavailable else _PEER.match(tail)
    if not unavailable and peer is None:
        return None
    return LinkLine(
        guid=int(match["guid"], 16) if match["guid"] else guid,
        port=int(match["port"]),
        lid=int(match["lid"]),
        name=(match["name"] or owner).strip(),
        width=int(pace["width"]) if pace else 0,
        speed=speed,
        state="" if unknown else state,
        physical="" if unknown else match["physical"].strip(),
        peer_guid=int(peer["guid"], 16) if peer and peer["guid"] else 0,
        peer_lid=int(peer["lid"]) if peer and peer["lid"] else 0,
        peer_port=int(peer["port"]) if peer and peer["port"] else 0,
        peer_name=peer["name"] if peer else "",
        unavailable=unavailable,
        unknown=unknown,
        could=" ".join(peer["could"].split()) if peer else "",
    )

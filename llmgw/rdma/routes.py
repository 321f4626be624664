"""Forwarding tables of switches (`dump_fts`, `ibroute`), and which cables a pair of ports therefore uses.

A table says, per destination LID, the port a packet leaves by. With all tables of a fabric and its map the way from
one port to another is known, link by link, each direction on its own. Pure.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping

import attrs
import msgspec

from llmgw.rdma.fabric import MOST_BYTES, Link, Map, Unreadable

_TABLE = re.compile(
    r"Unicast lids \[(?P<low>0x[0-9a-fA-F]+)-(?P<high>0x[0-9a-fA-F]+)\] of switch (?P<address>.*?) "
    r"guid 0x(?P<guid>[0-9a-fA-F]{1,16}) \((?P<name>.*)\):\s*$"
)
_ENTRY = re.compile(r"(?P<lid>0x[0-9a-fA-F]{1,4}) (?P<port>\d+|\?+)\s*(?::.*)?$")
_NOISE = re.compile(
    r"\s+Lid\s+Out|\s+Port\s+Info|\d+ (?:valid )?(?:m?lids|lids) dumped|\s*$|Multicast mlids|dump_fts:|ibroute:"
)
_HOP = re.compile(
    r"\[(?P<leave>\d+)\] -> (?P<kind>switch|ca|router) port \{0x(?P<guid>[0-9a-fA-F]{1,16})\}\[(?P<port>\d+)\] "
    r'lid (?P<lid>\d+)-\d+ "(?P<name>.*)"\s*$'
)

#: No way there, in a packed table.
NOWHERE = 255


@attrs.frozen
class Tables:
    """Ports by LID for each switch's GUID, and the lines of no known form."""

    switches: Mapping[int, Mapping[int, int]]
    strange: tuple[str, ...] = ()


def parse(lines: Iterable[str]) -> Tables:
    """What `dump_fts` or `ibroute` printed. Never raises."""
    switches: dict[int, dict[int, int]] = {}
    here: dict[int, int] | None = None
    strange: list[str] = []
    for line in lines:
        if match := _ENTRY.match(line):
            if here is None:
                strange.append(line[:200])
            elif match["port"].isdecimal():
                here[int(match["lid"], 16)] = min(int(match["port"]), NOWHERE)
        elif match := _TABLE.match(line):
            here = switches.setdefault(int(match["guid"], 16), {})
        elif not _NOISE.match(line):
            strange.append(line[:200])
    return Tables(switches, tuple(strange))


def pack(tables: Tables) -> bytes:
    """Tables as they cross the stream: one byte a LID, compressed."""
    packed: dict[str, bytes] = {}
    for guid, ports in tables.switches.items():
        row = bytearray([NOWHERE]) * (max(ports, default=-1) + 1)
        for lid, port in ports.items():
            row[lid] = port
        packed[f"{guid:x}"] = bytes(row)
    return zlib.compress(msgspec.msgpack.encode(packed), 6)


def unpack(data: bytes) -> Tables:
    """The tables again. Raises Unreadable for anything that `pack` did not make."""
    try:
        inflate = zlib.decompressobj()
        plain = inflate.decompress(data, MOST_BYTES)
        if not inflate.eof:
            raise Unreadable("the packed tables are cut off or too large")
        packed = msgspec.msgpack.decode(plain, type=dict[str, bytes])
        return Tables(
            {
                int(guid, 16): {lid: port for lid, port in enumerate(row) if port != NOWHERE}
                for guid, row in packed.items()
            }
        )
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise Unreadable(f"not packed tables: {error}") from None


@attrs.frozen
class Way:
    """The links from one port to another, in order. `broken` says where it ends when it does not arrive."""

    links: tuple[Link, ...]
    broken: str = ""


def way(fabric: Map, tables: Tables, start: int, end: int) -> Way:
    """Which cables a packet from port GUID `start` to port GUID `end` takes.

    Both are ports of adapters on the map. At most 64 hops: a longer way is a loop.
    """
    owners = {one.guid: (node, one) for node in fabric.nodes for one in node.ends if one.guid}
    nodes, ends = fabric.by_guid(), fabric.by_end()
    if start not in owners or end not in owners:
        missing = start if start not in owners else end
        return Way((), f"the port {missing:#018x} is not on the map")
    (node, own), (target, last) = owners[start], owners[end]
    here, leave = node.guid, own.number
    if not last.lid:
        return Way((), f"{target.label} has no LID: no subnet manager gave it one")
    links: list[Link] = []
    while len(links) < 64:
        link = ends.get((here, leave))
        if link is None:
            return Way(tuple(links), f"no cable at {fabric.where(here, leave, nodes)}")
        links.append(link)
        here, arrived = link.other(here, leave)
        if (here, arrived) == (target.guid, last.number):
            return Way(tuple(links))
        table = tables.switches.get(here)
        if table is None:
            label = nodes[here].label if here in nodes else hex(here)
            return Way(tuple(links), f"the forwarding table of {label} is not known")
        port = table.get(last.lid)
        if port is None or port == 0:
            return Way(
                tuple(links), f"{nodes[here].label if here in nodes else hex(here)} has no way to LID {last.lid}"
            )
        leave = port
    return Way(tuple(links), "the way goes in circles")


@attrs.frozen
class Hop:
    """A step of `ibtracert`: leaving by `leave`, arriving at `port` of the node or port `guid`."""

    leave: int
    guid: int
    port: int
    kind: str
    lid: int
    name: str


def traced(lines: Iterable[str]) -> tuple[Hop, ...]:
    """The hops that `ibtracert` printed."""
    return tuple(
        Hop(int(m["leave"]), int(m["guid"], 16), int(m["port"]), m["kind"], int(m["lid"]), m["name"])
        for line in lines
        if (m := _HOP.match(line))
    )

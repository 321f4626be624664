"""A fabric as one port of it sees it: switches, hosts and the cables between them, keyed by GUID.

Names are hints (duplicates, factory texts and empty ones are common); nothing is ever looked up by them. What a
scan could not see is said in `holes`, and a map with holes proves the absence of nothing. Pure.
"""

from __future__ import annotations

import re
import zlib
from collections import deque
from collections.abc import Iterable, Iterator

import msgspec
from msgspec import Struct

from llmgw.rdma.guids import shown

#: Lanes times speed says how fast a link is; from the slowest to the fastest, in Gb/s a lane.
SPEEDS: dict[str, float] = {
    "SDR": 2.5, "DDR": 5.0, "QDR": 10.0, "FDR10": 10.3125, "FDR": 14.0625, "EDR": 25.78125,
    "HDR": 53.125, "NDR": 106.25, "XDR": 212.5,
}  # fmt: skip

AGGREGATION_NAME = "Mellanox Technologies Aggregation Node"
AGGREGATION_DEVICE = 0xCF09
_UFM = re.compile(r"(?:^|[^a-z0-9])c?ufm(?![a-z])", re.IGNORECASE)
_FACTORY = re.compile(r"^(?:MT\d+\b.*|Quantum\b.*)?Mellanox Technologies$|^MT\d{4,}\b", re.IGNORECASE)
_HOST_AND_DEVICE = re.compile(r"^(?P<host>\S+) (?P<device>(?:mlx\d+_\w+|HCA-\d+|ib\w+|\w+_\d+))$")


class End(Struct, frozen=True, array_like=True):
    """One port of a host's adapter (or router): its number, its own GUID and its LID (0: none given)."""

    number: int
    guid: int
    lid: int = 0


class Node(Struct, frozen=True, array_like=True):
    """A switch or an adapter. `kind`: "switch", "host", "aggregation", "router" or "ufm".

    Only hosts are hosts: an aggregation node is a part of its switch, a UFM appliance and a router are neither.
    `ports` counts what the node has, cabled or not. `system` is 0 where it was not printed.
    """

    guid: int
    kind: str
    ports: int
    name: str = ""
    vendor: int = 0
    device: int = 0
    system: int = 0
    lid: int = 0
    ends: tuple[End, ...] = ()
    listed: bool = True  # False: only seen as another's peer, its own record is missing

    @property
    def switch(self) -> bool:
        return self.kind == "switch"

    @property
    def model(self) -> tuple[int, int]:
        return (self.vendor, self.device)

    @property
    def label(self) -> str:
        """The name for a person; an unset or factory name is shown with the GUID."""
        if not self.name.strip():
            return f"unnamed {shown(self.guid)}"
        if _FACTORY.match(self.name) and self.kind != "aggregation":
            return f"{' '.join(self.name.split())} {shown(self.guid)}"
        return self.name.strip()

    @property
    def host_and_device(self) -> tuple[str, str] | None:
        """What the description claims by the convention "<hostname> <device>"; a hint, None without it."""
        if self.kind != "host":
            return None
        found = _HOST_AND_DEVICE.match(self.name.strip())
        if not found or found["host"] in ("localhost", "ubuntu", "localhost.localdomain"):
            return None
        return found["host"], found["device"]


class Link(Struct, frozen=True, array_like=True):
    """A cable, once: `a` is the end with the smaller (GUID, port). Width 0 and speed "" are unknown, never slow."""

    a: int
    a_port: int
    b: int
    b_port: int
    width: int = 0
    speed: str = ""

    @property
    def ends(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return (self.a, self.a_port), (self.b, self.b_port)

    @property
    def rate(self) -> float | None:
        """Signalling rate in Gb/s, None while width or speed is unknown to the tool."""
        lane = SPEEDS.get(self.speed)
        return None if lane is None or not self.width else lane * self.width

    @property
    def pace(self) -> str:
        """As the tools write it: 4xHDR, or 4x??? with an older tool."""
        return f"{self.width or '?'}x{self.speed or '???'}"

    def other(self, guid: int, port: int) -> tuple[int, int]:
        return (self.b, self.b_port) if (self.a, self.a_port) == (guid, port) else (self.a, self.a_port)


class PortState(Struct, frozen=True, array_like=True):
    """What a port says of its own link (PortInfo): active, supported and enabled widths (lanes) and speeds (names)."""

    guid: int
    port: int
    width: int = 0
    speed: str = ""
    widths: tuple[int, ...] = ()
    speeds: tuple[str, ...] = ()
    enabled_widths: tuple[int, ...] = ()
    enabled_speeds: tuple[str, ...] = ()
    state: str = ""
    physical: str = ""
    mtu: int | None = None


class PortCounters(Struct, frozen=True, array_like=True):
    """A port's counters as they stood; they only ever grow until somebody resets them, and stick at their maximum."""

    guid: int
    port: int
    counters: dict[str, int] = {}


class Map(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A fabric seen from one port. Nodes by GUID and links by end, both sorted, so that equal fabrics are equal.

    `origin` and `origin_port` are the GUIDs of the adapter and port that looked. `holes` are sentences about
    what could not be seen; the map is `complete` when there are none and it shows a fabric at all. `states` are
    the PortInfo of links that looked slow, from both ends; `counters` what the ports counted, None: not asked.
    """

    origin: int = 0
    origin_port: int = 0
    nodes: tuple[Node, ...] = ()
    links: tuple[Link, ...] = ()
    complete: bool = False
    holes: tuple[str, ...] = ()
    states: tuple[PortState, ...] = ()
    counters: tuple[PortCounters, ...] | None = None
    counters_at: float | None = None  # Unix seconds on the node: only differences of one node's are used

    def by_guid(self) -> dict[int, Node]:
        return {node.guid: node for node in self.nodes}

    def by_end(self) -> dict[tuple[int, int], Link]:
        return {end: link for link in self.links for end in link.ends}

    def port_guids(self) -> frozenset[int]:
        """The GUIDs of all ports of hosts and the like: two ports are on one fabric iff one's map shows the other's."""
        return frozenset(end.guid for node in self.nodes for end in node.ends if end.guid)

    @property
    def hosts(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.kind == "host")

    @property
    def switches(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.switch)

    def where(self, guid: int, port: int, nodes: dict[int, Node] | None = None) -> str:
        """A port for a person: "port 5 of leaf-3", or a host's name (with its port when it has several)."""
        node = (nodes if nodes is not None else self.by_guid()).get(guid)
        return f"port {port} of {shown(guid)}" if node is None else place(node, port)


def place(node: Node, port: int) -> str:
    """A port for a person: "port 5 of leaf-3", or a host's name (with the port's number when it has several)."""
    if node.kind == "host":
        return node.label if node.ports < 2 else f"{node.label} port {port}"
    return f"port {port} of {node.label}"


def kind_of(letter: str, device: int, name: str) -> str:
    """What a record is, from its letter (S, H, R), its device id and, for UFM only, its name."""
    if letter == "S":
        return "switch"
    if letter == "R":
        return "router"
    if device == AGGREGATION_DEVICE or name.strip() == AGGREGATION_NAME:
        return "aggregation"
    return "ufm" if _UFM.search(name) else "host"


def neighbours(links: Iterable[Link]) -> dict[int, list[Link]]:
    """The links of each node, by GUID."""
    found: dict[int, list[Link]] = {}
    for link in links:
        found.setdefault(link.a, []).append(link)
        if link.b != link.a:
            found.setdefault(link.b, []).append(link)
    return found


def directed(fabric: Map) -> dict[int, tuple[int, ...]]:
    """The way to each node as a directed route: the port to leave by, hop after hop, from the map's origin.

    Routes do not pass through adapters: an SMP ends there. The origin's own route is (0,), as the tools write it.
    """
    nodes, links = fabric.by_guid(), neighbours(fabric.links)
    ways: dict[int, tuple[int, ...]] = {fabric.origin: (0,)}
    queue = deque([fabric.origin])
    while queue:
        here = queue.popleft()
        node = nodes.get(here)
        if node is None or not (node.switch or here == fabric.origin):
            continue
        for link in sorted(links.get(here, ()), key=lambda link: link.ends):
            leaves = link.a_port if link.a == here else link.b_port
            there = link.b if link.a == here else link.a
            if here == fabric.origin and not node.switch and _port_guid(node, leaves) != fabric.origin_port:
                continue
            if there not in ways:
                ways[there] = (*ways[here], leaves)
                queue.append(there)
    return ways


def _port_guid(node: Node, number: int) -> int | None:
    return next((end.guid for end in node.ends if end.number == number), None)


def walk(fabric: Map, route: tuple[int, ...]) -> tuple[int, int] | None:
    """Where a directed route leads: the last node on it that the map shows, and the port that leaves it.

    For a route whose last hop nobody answered this is the port behind which the silence is. None: unknown way.
    """
    ends, here, leave = fabric.by_end(), fabric.origin, 0
    hops = [hop for index, hop in enumerate(route) if index or hop]
    for index, hop in enumerate(hops):
        leave = hop
        if index == len(hops) - 1:
            break
        link = ends.get((here, hop))
        if link is None:
            return None
        here = link.other(here, hop)[0]
    return (here, leave) if hops else None


def components(nodes: Iterable[int], links: Iterable[Link]) -> Iterator[tuple[int, ...]]:
    """The parts of a graph that hang together, each sorted; largest first."""
    wanted = set(nodes)
    near = neighbours(link for link in links if link.a in wanted and link.b in wanted)
    parts: list[tuple[int, ...]] = []
    left = set(wanted)
    while left:
        start = left.pop()
        part, queue = [start], [start]
        while queue:
            here = queue.pop()
            for link in near.get(here, ()):
                there = link.b if link.a == here else link.a
                if there in left:
                    left.discard(there)
                    part.append(there)
                    queue.append(there)
        parts.append(tuple(sorted(part)))
    yield from sorted(parts, key=lambda part: (-len(part), part))


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Map)

#: The largest map that is unpacked, in bytes before compression: ten times the largest fabric that can exist.
MOST_BYTES = 256 << 20


class Unreadable(ValueError):
    """Bytes that are not a packed map."""


def pack(fabric: Map) -> bytes:
    """A map as it crosses the stream and lies in the store: MessagePack, compressed."""
    return zlib.compress(_encoder.encode(fabric), 6)


def unpack(data: bytes) -> Map:
    """The map again. Raises Unreadable for anything that `pack` did not make."""
    try:
        inflate = zlib.decompressobj()
        plain = inflate.decompress(data, MOST_BYTES)
        if not inflate.eof:
            raise Unreadable("the packed map is cut off or too large")
        return _decoder.decode(plain)
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Unreadable(f"not a packed map: {error}") from None

"""What `ibnetdiscover` prints, line for line, and the map that it makes.

Grammar: rdma-core infiniband-diags/ibnetdiscover.c (v23 to v56), checked against recordings. Old and new forms:
`Ca` and the older `Hca`; adapter lines with and without their own port's GUID; `-f` (` s= w= v= e=` at the end),
`-g` (chassis comments, `[ext N]`), `-m` (more header lines); blanks where a copy lost its tabs. A description
is raw bytes of a stranger: it may be empty or hold quotes, brackets and `#`, so it is taken greedily up to the last
`" lid `. Any text gives a map, with what was not understood listed. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import attrs
from msgspec.structs import replace

from llmgw.rdma.fabric import SPEEDS, End, Link, Map, Node, kind_of, place, walk
from llmgw.rdma.ran import Ran, Trouble, trouble, unanswered

_PORT = re.compile(
    r"\[(?P<port>\d+)\](?:\[ext \d+\])?\s*(?:\((?P<own>[0-9a-fA-F]{1,16})\))?(?:\[ext \d+\])?\s*"
    r'"(?P<kind>[SHR])-(?P<peer>[0-9a-fA-F]{1,16})"\[(?P<peer_port>\d+)\](?:\[ext \d+\])?\s*'
    r"(?:\((?P<peer_own>[0-9a-fA-F]{1,16})\))?(?:\[ext \d+\])?\s*(?:#\s?(?P<rest>.*))?$"
)
_REST = re.compile(
    r'\s*(?:lid (?P<lid>\d+) lmc \d+ )?"(?P<name>.*)"'
    r"(?: lid (?P<peer_lid>\d+)(?: (?P<width>\d+x|\?\?)(?P<speed>[A-Z]+[0-9]*|\?\?\?)(?P<more>(?: \w+=\S+)*))?)?\s*$"
)
_RECORD = re.compile(
    r'(?P<word>Switch|Ca|Hca|Rt)\s+(?P<ports>\d+)\s+"(?P<kind>[SHR])-(?P<guid>[0-9a-fA-F]{1,16})"\s*'
    r'(?:#\s?"(?P<name>.*)"(?:\s+(?:enhanced |base )?port 0 lid (?P<lid>\d+)(?: lmc \d+)?)?)?\s*$'
)
_HEADER = re.compile(
    r"(?P<key>vendid|devid|sysimgguid|switchguid|caguid|rtguid)=0x(?P<value>[0-9a-fA-F]{1,16})"
    r"(?:\((?P<second>[0-9a-fA-F]{1,16})\))?\s*(?:#.*)?$"
)
_ORIGIN = re.compile(r"# Initiated from node (?P<node>[0-9a-fA-F]{1,16}) port (?P<port>[0-9a-fA-F]{1,16})")
_IGNORED = re.compile(r"#|Chassis \d+|Non-Chassis Nodes|\s*$")
_SILENCE = re.compile(
    r"\((?:DR path slid \d+; dlid \d+; (?P<route>\d+(?:,\d+)*)|Lid (?P<lid>\d+))[^)]*?"
    r"(?: Attr (?P<attribute>0x[0-9a-fA-F]+))?(?::(?P<modifier>\d+))?\) bad status (?P<status>\d+)"
)
_ATTRIBUTES = {0x10: "its description", 0x11: "", 0x12: "its switch data", 0x15: "the state of its port"}

#: How many holes are named one by one.
MOST_HOLES = 40


@attrs.frozen
class Topology:
    """What a text says: nodes and links by key, who looked, and the lines that no known version prints."""

    nodes: dict[int, Node]
    links: dict[tuple[tuple[int, int], tuple[int, int]], Link]
    origin: int = 0
    origin_port: int = 0
    strange: tuple[tuple[int, str], ...] = ()  # (line number, line), the first few
    strange_count: int = 0


class _Reader:
    """One pass over the lines; everything it has seen so far."""

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {}
        self.links: dict[tuple[tuple[int, int], tuple[int, int]], Link] = {}
        self.ends: dict[int, dict[int, End]] = {}
        self.peers: dict[int, tuple[str, str]] = {}  # GUID -> letter and name, as others call it
        self.header: dict[str, int] = {}
        self.here: tuple[int, str] | None = None  # GUID and letter of the record the port lines belong to
        self.origin = self.origin_port = 0
        self.strange: list[tuple[int, str]] = []
        self.strange_count = 0

    def line(self, number: int, line: str) -> None:
        if line.startswith("["):
            match = _PORT.match(line)
            if match and self.here and self.port(match):
                return
        elif match := _RECORD.match(line):
            if self.record(match):
                return
        elif match := _HEADER.match(line):
            if match["key"] == "vendid":
                self.here, self.header = None, {}
            self.header[match["key"]] = int(match["value"], 16)
            return
        elif match := _ORIGIN.match(line):
            self.origin, self.origin_port = int(match["node"], 16), int(match["port"], 16)
            return
        elif _IGNORED.match(line):
            return
        self.strange_count += 1
        if len(self.strange) < 20:
            self.strange.append((number, line[:200]))

    def record(self, match: re.Match[str]) -> bool:
        letter, guid = match["kind"], int(match["guid"], 16)
        if not guid or (match["word"] == "Switch") != (letter == "S") or len(match["ports"]) > 4:
            return False
        device = self.header.get("devid", 0)
        name = match["name"] or ""
        self.nodes[guid] = Node(
            guid=guid,
            kind=kind_of(letter, device, name),
            ports=int(match["ports"]),
            name=name,
            vendor=self.header.get("vendid", 0),
            device=device,
            system=self.header.get("sysimgguid", 0),
            lid=_lid(match["lid"]),
        )
        self.here, self.header = (guid, letter), {}
        return True

    def port(self, match: re.Match[str]) -> bool:
        assert self.here is not None
        here, letter = self.here
        peer = int(match["peer"], 16)
        rest = _REST.match(match["rest"] or '""')
        if rest is None or not peer or len(match["port"]) > 4 or len(match["peer_port"]) > 4:
            return False
        port, peer_port = int(match["port"]), int(match["peer_port"])
        if letter != "S":
            self.end(here, port, match["own"], rest["lid"])
        if match["kind"] != "S":
            self.end(peer, peer_port, match["peer_own"], rest["peer_lid"])
        known = self.peers.get(peer)
        if known is None or not known[1]:
            self.peers[peer] = (match["kind"], rest["name"])
        width = 0 if not rest["width"] or rest["width"] == "??" else int(rest["width"][:-1][:3])
        speed = rest["speed"] if rest["speed"] in SPEEDS else ""
        ends = sorted(((here, port), (peer, peer_port)))
        key = (ends[0], ends[1])
        seen = self.links.get(key)
        self.links[key] = _merged(seen, Link(*ends[0], *ends[1], width, speed))
        return True

    def end(self, node: int, number: int, guid: str | None, lid: str | None) -> None:
        ends = self.ends.setdefault(node, {})
        known = ends.get(number, End(number, 0, 0))
        ends[number] = End(number, int(guid, 16) if guid else known.guid, _lid(lid) or known.lid)

    def topology(self) -> Topology:
        for guid, (letter, name) in self.peers.items():
            if guid not in self.nodes:
                self.nodes[guid] = Node(guid, kind_of(letter, 0, name), 0, name, listed=False)
            elif not self.nodes[guid].name and name:
                self.nodes[guid] = replace(self.nodes[guid], name=name)
        for guid, ends in self.ends.items():
            node = self.nodes.get(guid)
            if node is not None and not node.switch:
                self.nodes[guid] = replace(node, ends=tuple(ends[number] for number in sorted(ends)))
        return Topology(self.nodes, self.links, self.origin, self.origin_port, tuple(self.strange), self.strange_count)


def _lid(text: str | None) -> int:
    value = int(text) if text and len(text) < 6 else 0
    return value if 0 < value < 0xC000 else 0


def _merged(one: Link | None, other: Link) -> Link:
    """One cable told from both ends: what one end knows counts, and of two different rates the lower."""
    if one is None:
        return other
    if one.rate is not None and other.rate is not None:
        return one if one.rate <= other.rate else other
    return Link(one.a, one.a_port, one.b, one.b_port, one.width or other.width, one.speed or other.speed)


def parse(lines: Iterable[str]) -> Topology:
    """Everything that a text of `ibnetdiscover` says. Never raises, whatever the text."""
    reader = _Reader()
    for number, line in enumerate(lines, 1):
        reader.line(number, line.rstrip("\r\n"))
    return reader.topology()


def scan(ran: Ran, *, lines: Iterable[str] | None = None) -> Map | Trouble:
    """The map that a run of `ibnetdiscover` made, or why there is none.

    It is complete only if the tool ended with 0, nobody kept silent, every line was understood, the port that
    looked is linked, and it shows a switch (or the one adapter at the other end of a cable between two hosts).
    """
    failure = trouble(ran)
    topology = parse(ran.out.splitlines() if lines is None else lines)
    if failure is not None and (failure.code not in ("timed-out", "crashed", "failed") or not topology.nodes):
        return failure
    fabric = Map(
        origin=topology.origin,
        origin_port=topology.origin_port,
        nodes=tuple(topology.nodes[guid] for guid in sorted(topology.nodes)),
        links=tuple(topology.links[key] for key in sorted(topology.links)),
    )
    holes = tuple(_holes(ran, topology, fabric, failure))
    return replace(fabric, complete=not holes, holes=holes)


def _holes(ran: Ran, topology: Topology, fabric: Map, failure: Trouble | None) -> Iterable[str]:
    if failure is not None:
        yield failure.text
    yield from _silences(ran, fabric)
    for number, line in topology.strange[:5]:
        yield f"line {number} is of no known form: {line!r}"
    if topology.strange_count > 5:
        yield f"{topology.strange_count - 5} more lines of no known form"
    origin = topology.nodes.get(topology.origin)
    if origin is None:
        yield "the text does not say which port looked"
        return
    own = next((end.number for end in origin.ends if end.guid == topology.origin_port), None)
    mine = [link for link in fabric.links if topology.origin in (link.a, link.b)]
    if not origin.switch:
        mine = [link for link in mine if own is not None and (topology.origin, own) in link.ends]
    if not mine:
        yield f"the port that looked ({place(origin, own or 1)}) is not linked"
    elif not any(node.switch for node in fabric.nodes) and len(fabric.nodes) != 2:
        yield "no switch is to be seen"
    unlisted = [node for node in fabric.nodes if not node.listed]
    for node in unlisted[:5]:
        yield f"{node.label} is named as a peer but its own record is missing"


def _silences(ran: Ran, fabric: Map) -> Iterable[str]:
    """Each place that did not answer, once, in words."""
    if not unanswered(ran):
        return
    nodes, more = fabric.by_guid(), 0
    said: set[str] = set()
    for line in ran.err.splitlines():
        match = _SILENCE.search(line)
        if match is None:
            continue
        route = match["route"]
        at = walk(fabric, tuple(int(hop) for hop in route.split(","))) if route else None
        what = _ATTRIBUTES.get(int(match["attribute"], 16), "an attribute") if match["attribute"] else ""
        if at is None:
            sentence = f"no answer along the route {route}" if route else f"no answer from LID {match['lid']}"
        else:
            sentence = f"no answer behind {fabric.where(*at, nodes)}"
        sentence += f" for {what}" if what else ""
        if sentence in said:
            continue
        if len(said) < MOST_HOLES:
            yield sentence
        else:
            more += 1
        said.add(sentence)
    if more:
        yield f"{more} more places without an answer"
    if not said:
        yield "something on the fabric did not answer"

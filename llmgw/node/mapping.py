"""Turns what the tools printed into a packed map: the part of a scan that is computed, in a process of its own.

Imports nothing that is slow to start.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from llmgw.rdma import degraded, fabric, netdiscover, portinfo, queryerrors, routes
from llmgw.rdma.fabric import Map, PortCounters
from llmgw.rdma.ran import Ran, Trouble

#: How many slow links are asked about in one scan; when more are slow at once, the first say enough.
MOST_SUSPECTS = 16


class Asked(Struct, frozen=True, kw_only=True):
    """One run of a tool: its outcome, and the files with what it printed."""

    tool: str
    exit: int | None = None
    seconds: float = 0.0
    timed_out: bool = False
    out: str = ""
    err: str = ""
    clock: float = 0.0

    def ran(self, out: str | None = None) -> Ran:
        return Ran(
            self.tool, self.exit, Path(self.out).read_text("utf-8", "replace") if out is None else out,
            Path(self.err).read_text("utf-8", "replace"), self.seconds, self.timed_out,
        )  # fmt: skip


class Suspect(Struct, frozen=True, array_like=True):
    """A port to be asked for its PortInfo: by the directed route to its node."""

    guid: int
    port: int
    route: str


class Mapped(Struct, frozen=True, kw_only=True):
    """A map, or why there is none, and the ports that should be asked."""

    map: bytes = b""
    complete: bool = False
    holes: tuple[str, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    trouble: str = ""
    code: str = ""


class State(Struct, frozen=True, array_like=True):
    """What one suspect answered."""

    guid: int
    port: int
    text: str


def mapped(discovery: bytes, counting: bytes) -> bytes:
    """The map from the files of `ibnetdiscover` and (b"" without) of `ibqueryerrors`; all as MessagePack."""
    asked = msgspec.msgpack.decode(discovery, type=Asked)
    with open(asked.out, encoding="utf-8", errors="replace") as lines:
        found = netdiscover.scan(asked.ran(""), lines=lines)
    if isinstance(found, Trouble):
        return msgspec.msgpack.encode(Mapped(trouble=str(found), code=found.code))
    if counting:
        found = _counted(found, msgspec.msgpack.decode(counting, type=Asked))
    slow = degraded.suspects(found)[:MOST_SUSPECTS]
    ways = fabric.directed(found) if slow else {}
    suspects = tuple(
        Suspect(guid, port, ",".join(map(str, ways[guid])))
        for one in slow
        for guid, port in one.link.ends
        if guid in ways
    )
    return msgspec.msgpack.encode(
        Mapped(map=fabric.pack(found), complete=found.complete, holes=found.holes, suspects=suspects)
    )


def confirmed(packed: bytes, states: bytes) -> bytes:
    """The packed map again, with what the suspects answered (a list of State with the tool's text)."""
    answers = msgspec.msgpack.decode(states, type=list[State])
    said = (portinfo.portinfo(Ran("smpquery", 0, one.text), one.guid, one.port) for one in answers)
    found = fabric.unpack(packed)
    return fabric.pack(replace(found, states=tuple(one for one in said if not isinstance(one, Trouble))))


def tabled(asked: bytes) -> bytes:
    """Forwarding tables from the file of `dump_fts` or the files of several `ibroute`."""
    switches: dict[int, dict[int, int]] = {}
    for one in msgspec.msgpack.decode(asked, type=list[Asked]):
        for guid, ports in routes.parse(Path(one.out).read_text("utf-8", "replace").splitlines()).switches.items():
            switches.setdefault(guid, {}).update(ports)
    return routes.pack(routes.Tables(switches))


def _counted(found: Map, asked: Asked) -> Map:
    """The map with error counters; the tool names an adapter now by its node's GUID, now by its port's."""
    counts = queryerrors.counted(asked.ran())
    if isinstance(counts, Trouble):
        return found
    nodes = found.by_guid()
    owner = {end.guid: (node.guid, end.number) for node in found.nodes for end in node.ends}
    owner |= {(node.guid): (node.guid, 0) for node in found.nodes if node.switch}
    ports: dict[tuple[int, int], dict[str, int]] = {}
    for one in counts.ports:
        guid = one.guid if one.guid in nodes else owner.get(one.guid, (one.guid, 0))[0]
        ports.setdefault((guid, one.port), {}).update(one.counters)
    return replace(
        found,
        counters=tuple(PortCounters(guid, port, ports[guid, port]) for guid, port in sorted(ports)),
        counters_at=asked.clock,
    )

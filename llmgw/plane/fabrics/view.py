"""Maps as operators see them: made to run in a process of its own, from packed maps to JSON. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Struct

from llmgw.plane.fabrics.verdict import Difference, Fault, Told, owners_of
from llmgw.rdma import fabric, leaves, routes
from llmgw.rdma.fabric import Link, Map, Node
from llmgw.rdma.guids import written
from llmgw.rdma.leaves import Owner
from llmgw.rdma.tiers import tiers
from llmgw.wire.fabricapi import ChangeView, EndView, FaultView, LinkReply, Moment, RouteReply, SwitchView


class Dated(Struct, frozen=True, kw_only=True):
    """A kept map, with its scan's number and time."""

    id: int
    clock: float
    complete: bool
    map: bytes


def switches(packed: bytes, names: bytes, faults: bytes) -> bytes:
    """The switches of a map as SwitchView, leaves first, each tier by name."""
    found = fabric.unpack(packed)
    wrong = msgspec.msgpack.decode(faults, type=tuple[Fault, ...])
    nodes, near = found.by_guid(), fabric.neighbours(found.links)
    rail = leaves.rails([found], owners_of(msgspec.msgpack.decode(names, type=tuple[bytes, ...]))).rails
    count = Counter(guid for fault in wrong for guid in {guid for guid, _ in fault.ports})
    tier = tiers(found)
    rows = [
        SwitchView(
            guid=written(node.guid),
            name=node.label,
            tier=tier[node.guid],
            rail=rail.get((0, node.guid), ""),
            ports=node.ports,
            adapters=sum(_peer(nodes, link, node.guid).kind == "host" for link in near.get(node.guid, ())),
            links=sum(_peer(nodes, link, node.guid).switch for link in near.get(node.guid, ())),
            faults=count[node.guid],
        )
        for node in found.switches
    ]
    return msgspec.json.encode(sorted(rows, key=lambda row: (row.tier, row.name, row.guid)))


def link(end: bytes, kept: bytes, names: bytes, faults: bytes) -> bytes:
    """A LinkReply on the cable at an end ("guid/port"), by the newest map and all that are kept, oldest first."""
    guid_text, _, port_text = end.decode().partition("/")
    at = (int(guid_text, 16), int(port_text))
    owners = owners_of(msgspec.msgpack.decode(names, type=tuple[bytes, ...]))
    wrong = msgspec.msgpack.decode(faults, type=tuple[Fault, ...])
    history: list[Moment] = []
    newest: Map | None = None
    for dated in msgspec.msgpack.decode(kept, type=list[Dated]):
        newest = fabric.unpack(dated.map)
        history.append(_moment(newest, at, dated))
    if newest is None:
        return msgspec.json.encode(LinkReply())
    cable = newest.by_end().get(at)
    return msgspec.json.encode(
        LinkReply(
            pace=cable.pace if cable else "",
            rate_gbps=cable.rate if cable else None,
            ends=tuple(_end(newest, one, owners) for one in (cable.ends if cable else (at,))),
            faults=tuple(fault_view(fault) for fault in wrong if at in fault.ports),
            history=tuple(history),
        )
    )


def route(packed: bytes, tables: bytes, ends: bytes) -> bytes:
    """A RouteReply on the way between two port GUIDs."""
    found, known = fabric.unpack(packed), routes.unpack(tables)
    start, end = (int(text, 16) for text in ends.decode().split())
    way = routes.way(found, known, start, end)
    nodes = found.by_guid()
    return msgspec.json.encode(
        RouteReply(
            hops=tuple(f"{_where(nodes, one.ends)} {one.pace}" for one in way.links),
            ports=tuple((port_text(one.ends[0]), port_text(one.ends[1])) for one in way.links),
            broken=way.broken,
        )
    )


def change_views(difference: Difference) -> tuple[ChangeView, ...]:
    return tuple(_change(one) for one in difference.changes)


def fault_view(fault: Fault) -> FaultView:
    return FaultView(
        kind=fault.kind,
        grade=fault.grade,
        text=fault.text,
        ports=tuple(port_text(port) for port in fault.ports),
        nodes=fault.touched.nodes,
        rails=fault.touched.rails,
        replicas=fault.touched.replicas,
    )


def port_text(port: tuple[int, int]) -> str:
    """GUID/PORT, as links of the page and the API have it."""
    return f"{port[0]:016x}/{port[1]}"


def _change(one: Told) -> ChangeView:
    return ChangeView(
        kind=one.change.kind,
        text=one.change.text,
        ports=tuple(port_text(port) for port in one.change.ports),
        before=one.change.before,
        after=one.change.after,
        nodes=one.touched.nodes,
        rails=one.touched.rails,
        replicas=one.touched.replicas,
        everyone=one.touched.everyone,
    )


def _moment(found: Map, at: tuple[int, int], dated: Dated) -> Moment:
    cable = found.by_end().get(at)
    return Moment(
        scan=dated.id,
        clock=dated.clock,
        complete=dated.complete,
        pace=cable.pace if cable else "",
        peer=port_text(cable.other(*at)) if cable else "",
        counters=_counters(found, cable.ends if cable else (at,)),
    )


def _counters(found: Map, ends: Iterable[tuple[int, int]]) -> dict[str, int]:
    wanted = set(ends)
    total: Counter[str] = Counter()
    for one in found.counters or ():
        if (one.guid, one.port) in wanted:
            total.update(one.counters)
    return dict(total)


def _end(found: Map, end: tuple[int, int], owners: Mapping[int, Owner]) -> EndView:
    guid, port = end
    node = found.by_guid().get(guid)
    state = next((one for one in found.states if (one.guid, one.port) == end), None)
    own = next((one.guid for one in node.ends if one.number == port), 0) if node else 0
    owner = owners.get(own)
    return EndView(
        guid=written(guid),
        port=port,
        name=node.label if node else "",
        kind=node.kind if node else "",
        owner=f"{owner.host} {owner.device}" if owner else "",
        counters=_counters(found, (end,)),
        width=f"{state.width}x of {_list(state.widths)}, enabled {_list(state.enabled_widths)}" if state else "",
        speed=f"{state.speed} of {_list(state.speeds)}, enabled {_list(state.enabled_speeds)}" if state else "",
    )


def _list(values: Iterable[object]) -> str:
    return " ".join(map(str, values)) or "?"


def _where(nodes: Mapping[int, Node], ends: Iterable[tuple[int, int]]) -> str:
    return " - ".join(fabric.place(nodes[guid], port) if guid in nodes else f"{guid:x}/{port}" for guid, port in ends)


def _peer(nodes: Mapping[int, Node], one: Link, guid: int) -> Node:
    there = one.b if one.a == guid else one.a
    return nodes.get(there) or Node(there, "unknown", 0)

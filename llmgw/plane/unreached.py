"""Why nodes that pass by themselves make no replica of several nodes: a reason for each, by check (D7). Pure.

The checks, in the order in which they are met: "fabric", "rails" and "nvlink" of one node's wires; "nodes", where too
few are left; "fabric" or "nvlink" between nodes; "engine-match"; "evidence"; "ports".
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

import attrs

from llmgw.plane.checks import Need, installed_versions
from llmgw.plane.groups import Way, together
from llmgw.plane.reach import Reach, imex
from llmgw.plane.reserve import RANGE, purposes, reserve
from llmgw.plane.rooms import Room
from llmgw.plane.wires import wirings
from llmgw.plane.world import Evidence, Node, Reason
from llmgw.wire.facts import NodeId

_Reached = Sequence[tuple[Room, tuple[Way, ...]]]


def refusals(reach: Reach, passing: Sequence[Room], need: Need, taken: Callable[[Node], set[int]]) -> Iterator[Reason]:
    """What keeps the nodes in `passing` apart. `taken` gives the port numbers that are held on a node's machine."""
    reached: list[tuple[Room, tuple[Way, ...]]] = []
    for room in passing:
        ways = reach.ways(room, need)
        if ways:
            reached.append((room, ways))
        else:
            yield from _wireless(reach, room, need)
    told: set[NodeId] = set()
    for reason in _apart(reach, reached, need, taken):
        told.add(reason.node)
        yield reason
    for room, _ in reached:
        if room.node.id not in told:
            text = f"passes, and reaches no {need.nodes - 1} others with which nothing is wrong"
            yield _no(room, "nodes", f"fewer than {need.nodes} nodes", f"{need.nodes} nodes", text)


def _apart(reach: Reach, reached: _Reached, need: Need, taken: Callable[[Node], set[int]]) -> Iterator[Reason]:
    """What is wrong between nodes that reach others at all."""
    if len(reached) < need.nodes:
        yield from _too_few(reached, need)
        return
    wires = _groups(reached, plain=True)
    enough = {way: rooms for way, rooms in wires.items() if len(rooms) >= need.nodes}
    for room, ways in reached:
        if not any(_plain(way) in enough for way in ways):
            yield _alone(reach, room, ways, wires, need)
    exact = {way: rooms for way, rooms in _groups(reached).items() if len(rooms) >= need.nodes}
    told: set[tuple[NodeId, str]] = set()
    for way, rooms in sorted(enough.items(), key=_largest):
        same = [found for found in sorted(exact.items(), key=_largest) if _plain(found[0]) == way]
        reasons = (reason for one, there in same for reason in _between(reach, one, there, need, taken))
        for reason in reasons if same else _versions(rooms, need):
            if (reason.node, reason.value) not in told:
                told.add((reason.node, reason.value))
                yield reason


def _largest(group: tuple[Way, list[Room]]) -> tuple[int, tuple[object, ...]]:
    return -len(group[1]), group[0].order


def _plain(way: Way) -> Way:
    return attrs.evolve(way, version="")


def _groups(reached: _Reached, *, plain: bool = False) -> dict[Way, list[Room]]:
    found: dict[Way, list[Room]] = defaultdict(list)
    for room, ways in reached:
        for way in dict.fromkeys(_plain(way) if plain else way for way in ways):
            found[way].append(room)
    return found


def _no(room: Room, check: str, value: str, needed: str, text: str, age: float | None = None) -> Reason:
    return Reason(room.node.id, check, value, needed, age, f"{room.node.id}: {text}")


def _wireless(reach: Reach, room: Room, need: Need) -> Iterator[Reason]:
    """Why a node reaches nobody at all."""
    node, age = room.node, room.facts_age
    wired = "rdma" in need.network and bool(wirings(node))
    domained = any(gpu.fabric is not None and gpu.fabric.domain for gpu in node.facts.gpus) if node.facts else False
    if "nvlink" in need.network and (domained or not wired):
        nothing = "no NVLink domain"
        if "rdma" in need.network and not domained:
            yield _no(room, "fabric", "no rail", "a rail", f"has no rail (RDMA port of a fabric) and {nothing}", age)
            return
        counts = Counter(unit.domain for unit in room.units if unit.domain)
        best = max(counts.values(), default=0)
        unready = next((unit.apart for unit in room.units if unit.apart and not best), "")
        value = imex(node) or unready or (f"{best} of {need.resources.gpus} GPUs in one domain" if best else nothing)
        text = f"reaches no other node by NVLink: {value}"
        if best and not imex(node) and best >= need.resources.gpus:
            value = "too few GPUs of one domain free"
            text = f"has {value}, {need.resources.gpus} needed"
        yield _no(room, "nvlink", value, _gpus(need), text, room.heard_age)
        return
    if not wired:
        yield _no(room, "fabric", "no rail", "a rail", "has no rail (RDMA port of a fabric)", age)
        return
    faults = reach.faults(node)
    for fault in faults:
        since = age if fault.since is None else max(0.0, reach.now - fault.since)
        yield _no(room, "rails", str(fault), "up at full rate", f"its rail {fault}", since)
    if not faults:
        most = max((len(wiring.rails) for wiring in wirings(node)), default=0)
        if need.rails > most:
            text = f"has {most} rails, {need.rails} needed"
            yield _no(room, "rails", f"{most} rails", f"{need.rails} rails", text, age)
        else:
            text = f"has no {need.rails} rails in common with any node"
            yield _no(room, "rails", "not in common", f"{need.rails} rails in common", text, age)


def _gpus(need: Need) -> str:
    return "a GPU in one domain" if need.resources.gpus == 1 else f"{need.resources.gpus} GPUs in one domain"


def _too_few(reached: _Reached, need: Need) -> Iterator[Reason]:
    count = len(reached)
    for room, _ in reached:
        others = f"{count - 1} other{'' if count == 2 else 's'}" if count > 1 else "no other"
        text = f"passes, and {others}: a replica takes {need.nodes} nodes"
        yield _no(room, "nodes", f"{count} node{'' if count == 1 else 's'}", f"{need.nodes} nodes", text)


def _alone(reach: Reach, room: Room, ways: tuple[Way, ...], wires: dict[Way, list[Room]], need: Need) -> Reason:
    """A node that reaches others, but too few that pass."""
    best = max((_plain(way) for way in ways), key=lambda way: (len(wires[way]), [-part for part in way.rank]))
    count = len(wires[best]) - 1
    if others := [way for way in wires if _unlike(best, way)]:
        more = min(others, key=lambda way: (-len(wires[way]), way.order))
        value, needed = _rails(best), f"{_rails(more)} as on {wires[more][0].node.id}"
        text = f"has {value}, {wires[more][0].node.id} {_rails(more)} on the same fabric, which must be as many; or say"
        text += " in the profile how many `rails` are needed, and in the nodes' configuration which are the same"
        return _no(room, "rails", value, needed, text, room.facts_age)
    others_pass = f"{count or 'no'} other{'' if count == 1 else 's'} that pass{'es' if count == 1 else ''}"
    where, check = _where(best)
    text = f"reaches {others_pass} ({where}): a replica takes {need.nodes} nodes"
    return _no(room, check, where, f"{need.nodes} nodes that reach one another", text, room.facts_age)


def _unlike(way: Way, other: Way) -> bool:
    """Whether two ways are over one fabric and yet have no rails in common, since they are not as many."""
    if "rdma" not in (way.network, other.network) or (way.over, way.site) != (other.over, other.site):
        return False
    return len(way.rails) != len(other.rails) and bool({f for _, f in way.rails} & {f for _, f in other.rails})


def _rails(way: Way) -> str:
    return f"{len(way.rails)} rail{'' if len(way.rails) == 1 else 's'}"


def _where(way: Way) -> tuple[str, str]:
    if way.network == "nvlink":
        return f"NVLink domain {way.over}", "nvlink"
    if way.network == "tcp":
        return way.site or "TCP", "fabric"
    on = sorted({fabric for _, fabric in way.rails})
    names = ", ".join(on[:3]) + (f" and {len(on) - 3} more" if len(on) > 3 else "")
    return f"{_rails(way)} on {names}", "fabric"


def _versions(rooms: Sequence[Room], need: Need) -> Iterator[Reason]:
    """Nodes that reach one another and have different versions of the engine."""
    counts = Counter(version for room in rooms for version in installed_versions(room.node, need))
    usual = min(counts, key=lambda version: (version == "", -counts[version], version))
    wanted = f"{need.engine} {usual}".strip()
    for room in rooms:
        have = installed_versions(room.node, need)
        if usual not in have:
            value = ", ".join(have).strip() or "not installed"
            text = f"has {need.engine} {value}, others have {usual or 'another version'}: all members need the same"
            yield _no(room, "engine-match", value, wanted, text, room.facts_age)
        else:
            count = counts[usual]
            text = f"has {wanted} as {count - 1} others that it reaches: a replica takes {need.nodes} nodes"
            yield _no(room, "engine-match", usual, f"{need.nodes} nodes with {wanted}", text, room.facts_age)


def _between(
    reach: Reach, way: Way, rooms: list[Room], need: Need, taken: Callable[[Node], set[int]]
) -> Iterator[Reason]:
    """What is wrong in a group that is large enough."""
    names = [room.node.id for room in rooms]
    foes = reach.foes(way)
    if together(names, need.nodes, foes, {}) is None:
        for room in rooms:
            mine = sorted(foes.get(room.node.id, frozenset()) & set(names))
            for foe in mine[:1]:
                test = _test(reach, room.node.id, foe)
                if test is not None:
                    pair = (min(room.node.id, foe), max(room.node.id, foe))
                    bad = reach.bad(pair, test, way)
                    age = reach.age(test, bad[0])
                    figure = next((test.figures[end] for end in bad if end in test.figures), "bad")
                    value = figure if age is None else f"{figure}, tested {_long(age)} ago"
                    more = f"; and {len(mine) - 1} more pairs" if len(mine) > 1 else ""
                    text = f"was tested bad with {foe}: {test.text or value}{more}"
                    yield _no(room, "evidence", value, "a good test", text, age)
        return
    wanted = [name for rank in range(2) for name in purposes(need.engine, rank)]
    for room in rooms:
        allowed = room.node.facts.engine_ports if room.node.facts is not None else None
        if wanted and reserve(tuple(wanted[:1]), allowed, taken(room.node)) is None:
            first, last = allowed or RANGE
            text = f"has no port free for {wanted[0].rstrip('+')} between {first} and {last}"
            yield _no(room, "ports", "none free", f"{first} to {last}", text, room.facts_age)


def _test(reach: Reach, a: NodeId, b: NodeId) -> Evidence | None:
    return reach.evidence().get((min(a, b), max(a, b))) or reach.evidence().get((max(a, b), min(a, b)))


def _long(seconds: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"

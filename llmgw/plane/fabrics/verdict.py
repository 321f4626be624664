"""What one scan means: the part that looks into maps, made to run in a process of its own.

Packed maps and names come in, a verdict of sentences goes out, so that the plane's loop never holds a map. Imports
nothing that is slow to start. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from llmgw.rdma import degraded, diff, fabric, leaves, queryerrors
from llmgw.rdma.diff import Change
from llmgw.rdma.fabric import Map, Unreadable, place
from llmgw.rdma.leaves import Owner
from llmgw.rdma.touches import Touched, touched

#: How many changes of one scan are told one by one; a fabric that was rebuilt is one sentence more.
MOST_CHANGES = 200


class Named(Struct, frozen=True, array_like=True):
    """Whose port a GUID is, by a node's own Register."""

    guid: int
    node: str
    device: str
    rail: int | None = None


class Fault(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something wrong with a cable for as long as it is seen. `key` is its identity from scan to scan.

    `kind`: "link-slow", "link-errors", "cable-misplaced". `grade` as a problem's: "bad" or "warn".
    """

    kind: str
    key: str
    text: str
    grade: str = "bad"
    ports: tuple[tuple[int, int], ...] = ()
    touched: Touched = Touched()


class Told(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A change, and what it touches."""

    change: Change
    touched: Touched = Touched()


class Counts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a map shows. `hosts` are machines by name where names tell, `adapters` their adapters."""

    switches: int = 0
    adapters: int = 0
    hosts: int = 0
    links: int = 0
    others: int = 0  # aggregation nodes, routers, UFM appliances


class Question(Struct, frozen=True, kw_only=True):
    """A scan to be judged. `base` is the last complete map, `counted` the last one with counters; b"": none."""

    new: bytes
    base: bytes = b""
    counted: bytes = b""
    names: tuple[bytes, ...] = ()  # lists of Named, encoded
    replicas: dict[str, tuple[str, ...]] = {}  # by node: those of several nodes
    strangers: tuple[int, ...] = ()  # port GUIDs of which the fabric is not known


class Verdict(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a scan means. `known` are those of the strangers that this map shows."""

    complete: bool = False
    holes: tuple[str, ...] = ()
    counts: Counts = Counts()
    changes: tuple[Told, ...] = ()
    more_changes: int = 0
    faults: tuple[Fault, ...] = ()
    known: tuple[int, ...] = ()
    switches: tuple[int, ...] = ()  # GUIDs, sorted: what tells a fabric without a manager
    unreadable: str = ""


class Misplacement(Struct, frozen=True, array_like=True):
    """A cable in the wrong leaf, and of which of the given maps."""

    index: int
    fault: Fault


class Difference(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of `compared`."""

    changes: tuple[Told, ...] = ()
    blind: tuple[str, ...] = ()


def judged(question: bytes) -> bytes:
    """The Verdict on a Question; both as MessagePack."""
    asked = msgspec.msgpack.decode(question, type=Question)
    try:
        new = fabric.unpack(asked.new)
    except Unreadable as error:
        return msgspec.msgpack.encode(Verdict(unreadable=str(error)))
    owners = owners_of(asked.names)
    base = _maybe(asked.base)
    faults = [*_slow(new, owners, asked.replicas), *_errors(new, _maybe(asked.counted), owners, asked.replicas)]
    changes = diff.compare(base, new).changes if base is not None and new.complete else ()
    told = tuple(
        Told(change=change, touched=touched(change, (base, new) if base else (new,), owners, asked.replicas))
        for change in changes[:MOST_CHANGES]
    )
    shown = new.port_guids()
    return msgspec.msgpack.encode(
        Verdict(
            complete=new.complete,
            holes=new.holes,
            counts=counts(new, owners),
            changes=told,
            more_changes=len(changes) - len(told),
            faults=tuple(faults),
            known=tuple(guid for guid in asked.strangers if guid in shown),
            switches=tuple(node.guid for node in new.switches),
        )
    )


def misplaced(maps: bytes, names: bytes) -> bytes:
    """Every cable in the wrong leaf, over all maps together (they may be planes of the same hosts)."""
    owners = owners_of(msgspec.msgpack.decode(names, type=tuple[bytes, ...]))
    given = [_maybe(data) or Map() for data in msgspec.msgpack.decode(maps, type=list[bytes])]
    out: list[Misplacement] = []
    for wrong in leaves.rails(given, owners).misplaced:
        berth = wrong.berth
        owner = berth.owner
        out.append(
            Misplacement(
                berth.fabric,
                Fault(
                    kind="cable-misplaced",
                    key=f"{berth.guid:x}/{berth.number}",
                    text=wrong.text,
                    grade="warn",
                    ports=((berth.guid, berth.number), (berth.leaf, berth.leaf_port)),
                    touched=Touched(nodes=(owner.host,), rails=(owner.device,)) if owner else Touched(),
                ),
            )
        )
    return msgspec.msgpack.encode(out)


def compared(old: bytes, new: bytes, names: bytes, replicas: bytes) -> bytes:
    """What changed between any two maps kept, with what it touches."""
    before, after = fabric.unpack(old), fabric.unpack(new)
    owners = owners_of(msgspec.msgpack.decode(names, type=tuple[bytes, ...]))
    over = msgspec.msgpack.decode(replicas, type=dict[str, tuple[str, ...]])
    found = diff.compare(before, after)
    told = tuple(Told(change=one, touched=touched(one, (before, after), owners, over)) for one in found.changes)
    return msgspec.msgpack.encode(Difference(changes=told, blind=found.blind))


def owners_of(names: Iterable[bytes]) -> dict[int, Owner]:
    return {
        one.guid: Owner(one.node, one.device, one.rail)
        for part in names
        for one in msgspec.msgpack.decode(part, type=list[Named])
    }


def counts(found: Map, owners: Mapping[int, Owner]) -> Counts:
    hosts: set[object] = set()
    for node in found.hosts:
        owner = next((owners[end.guid] for end in node.ends if end.guid in owners), None)
        hint = node.host_and_device
        hosts.add(owner.host if owner else hint[0] if hint else node.system or node.guid)
    switches, adapters = len(found.switches), len(found.hosts)
    return Counts(
        switches=switches,
        adapters=adapters,
        hosts=len(hosts),
        links=len(found.links),
        others=len(found.nodes) - switches - adapters,
    )


def _maybe(data: bytes) -> Map | None:
    try:
        return fabric.unpack(data) if data else None
    except Unreadable:
        return None


def _slow(new: Map, owners: Mapping[int, Owner], replicas: Mapping[str, Iterable[str]]) -> Iterable[Fault]:
    for one in degraded.faults(degraded.suspects(new)):
        about = Change(kind="link-slower", text="", nodes=(one.link.a, one.link.b), ports=one.link.ends)
        yield Fault(
            kind="link-slow",
            key=_link_key(one.link.ends),
            text=one.text,
            grade="warn" if one.cause == "limited" else "bad",
            ports=one.link.ends,
            touched=touched(about, (new,), owners, replicas),
        )


def _errors(
    new: Map, before: Map | None, owners: Mapping[int, Owner], replicas: Mapping[str, Iterable[str]]
) -> Iterable[Fault]:
    """Ports whose error counters grew since the last reading, or can grow no more."""
    if new.counters is None or new.counters_at is None:
        return
    nodes, ends = new.by_guid(), new.by_end()
    old_ends = before.by_end() if before is not None else {}
    earlier = before is not None and before.counters is not None and before.counters_at is not None
    was = {(one.guid, one.port): one for one in (before.counters or ()) if before} if before is not None else {}
    seconds = new.counters_at - (before.counters_at or 0.0) if before is not None and earlier else 0.0
    # Cables that were moved or cut meanwhile make switches elsewhere drop what was on its way there.
    rewired = before is not None and {link.ends for link in before.links} != {link.ends for link in new.links}
    ignored = queryerrors.OF_CHANGE if rewired else frozenset[str]()
    for one in new.counters:
        node, link = nodes.get(one.guid), ends.get((one.guid, one.port))
        # Counters of a port without a cable, or of an aggregation node, are nobody's fault.
        if node is None or link is None or node.kind not in ("switch", "host"):
            continue
        rate = queryerrors.compare(was.get((one.guid, one.port)), one, link.rate, seconds, ignored)
        there = old_ends.get((one.guid, one.port))
        # Over a time in which the cable was out, counters tell of that and not of the cable.
        if not earlier or there is None or there.ends != link.ends:
            rate = queryerrors.compare(one, one, link.rate, 0.0, ignored)  # only what stands at its maximum
        if rate.grade == "good":
            continue
        about = Change(kind="", text="", nodes=(link.a, link.b), ports=link.ends)
        yield Fault(
            kind="link-errors",
            key=f"{one.guid:x}/{one.port}",
            text=f"{place(node, one.port)}: {_words(rate)}",
            grade=rate.grade,
            ports=link.ends,
            touched=touched(about, (new,), owners, replicas),
        )


def _words(rate: queryerrors.ErrorRate) -> str:
    """ "SymbolErrorCounter +120 in 300 s (1440/h); bit error rate 2.0e-12 over 6.0e+13 bits"."""
    parts = [
        f"{name} +{count} in {rate.seconds:.0f} s ({rate.per_hour[name]:.0f}/h)"
        for name, count in sorted(rate.grown.items())
    ]
    if rate.bits is not None and rate.bits.errors:
        parts.append(
            f"bit error rate {rate.bits.rate:.1e} over {rate.bits.bits:.1e} bits, {queryerrors.ALLOWED:.0e} is allowed"
        )
    if rate.stuck:
        parts.append(f"{', '.join(rate.stuck)} at the maximum: reset it to see whether it still grows (perfquery -R)")
    return "; ".join(parts)


def _link_key(ends: tuple[tuple[int, int], tuple[int, int]]) -> str:
    return "-".join(f"{guid:x}/{port}" for guid, port in ends)


def without_details(fault: Fault) -> Fault:
    """A fault as it is kept in the list of scans: what it touches is told by its event."""
    return replace(fault, touched=Touched())

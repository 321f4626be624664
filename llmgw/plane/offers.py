"""What nodes could offer to a replica of several: with these changes one passes its own checks and reaches others in
these ways; and the groups whose members cost the least. Pure.

Every offer stands as a node of its own in one world that is made up for this, so that the same code tells who reaches
whom that places replicas (reach.py).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import attrs
from immutables import Map
from msgspec.structs import replace

from llmgw.plane import changes
from llmgw.plane.alone import Going, on_node, only
from llmgw.plane.changes import BOUGHT, Change, applied, effort
from llmgw.plane.checks import Need, installed_versions, refusals
from llmgw.plane.groups import Way
from llmgw.plane.nearest import machine
from llmgw.plane.reach import Reach, imex
from llmgw.plane.rooms import Room, room
from llmgw.plane.wires import wirings
from llmgw.plane.world import Evidence, Node, Settings, World
from llmgw.wire.facts import ModelName, NodeId

#: Ways to make one node pass, and to mend its wires, that are followed.
_OWN, _WIRES = 3, 12
#: Members of a group that are considered beside as many as are needed, and steps of the search in one group.
_SPARE, _STEPS = 16, 4_000
#: Groups that are tried before nothing is said.
_TRIED = 12


@attrs.frozen
class Offer:
    """A node with some changes made; `ways` are how it then reaches others."""

    node: NodeId
    changes: tuple[Change, ...]
    after: Node = attrs.field(eq=False)
    ways: tuple[Way, ...] = ()


@attrs.frozen
class Group:
    """Nodes that make a replica once all of these changes are made; `bought` are not there yet."""

    nodes: tuple[NodeId, ...]
    changes: tuple[Change, ...]
    bought: tuple[NodeId, ...] = ()


def made(
    world: World,
    need: Need,
    model: ModelName,
    now: float,
    passing: Sequence[NodeId],
    close: Sequence[NodeId],
    going: Going,
    settings: Settings,
) -> tuple[Reach, tuple[Offer, ...]]:
    """All offers of these nodes, and who reaches whom in the world of them. Nodes in `passing` pass as they are."""
    versions, dear = _versions(world, need), set(close)
    found: list[tuple[Offer, Room]] = []
    for id in (*passing, *close):
        here = only(world, id, going)
        ways = on_node(world, world.nodes[id], need, model, now, going) if id in dear else iter(((),))
        for own in itertools.islice(ways, _OWN):
            mine = applied(here, own)
            if own and next(refusals(room(mine.nodes[id], mine.shards.values(), now), need), None) is not None:
                continue
            for wires in _wires(mine.nodes[id], need, versions):
                both = _once(own, wires)
                after = applied(here, both)
                # The first goes by the node's own name, under which its wires are known already.
                name = id if not own and not wires else NodeId(f"{id}\N{SECTION SIGN}{len(found)}")
                node = attrs.evolve(after.nodes[id], id=name)
                found.append((Offer(id, both, node), room(node, after.shards.values(), now)))
    reach = Reach(_made_up(world, [offer for offer, _ in found]), now, settings)
    return reach, tuple(attrs.evolve(offer, ways=reach.ways(there, need)) for offer, there in found)


def _versions(world: World, need: Need) -> tuple[str, ...]:
    """The versions of the engine that are in the fleet: any of them could be what all members have."""
    if need.version:
        return ()
    nodes = (node for node in world.nodes.values() if node.facts is not None)
    return tuple(sorted({version for node in nodes for version in installed_versions(node, need) if version}))


def _wires(node: Node, need: Need, versions: Sequence[str]) -> Iterator[tuple[Change, ...]]:
    """Sets of changes to how a node reaches others, none first."""
    mends: list[list[tuple[Change, ...]]] = []
    if "rdma" in need.network:
        faults = dict.fromkeys(f for wiring in wirings(node) for f in wiring.faults if changes.mendable(node, f))
        each = [changes.mend_rail(node, fault) for fault in faults]
        some = [(), *(part for size in range(1, len(each)) for part in itertools.combinations(each, size)), tuple(each)]
        few = some if need.rails and len(each) <= 3 else [(), tuple(each)]
        mends.append(list(dict.fromkeys(few)))
    if "nvlink" in need.network:
        daemon: list[tuple[Change, ...]] = [()]
        if words := imex(node):
            daemon.append((changes.mend_imex(node.id, words),))
        mends.append(daemon)
        gpus = node.facts.gpus if node.facts is not None else ()
        down = [
            g.fabric.state for g in gpus if g.fabric is not None and g.fabric.state in ("not-started", "in-progress")
        ]
        mends.append([(), (changes.mend_fabric(node.id, f"its fabric is {down[0]}"),)] if down else [()])
    have = installed_versions(node, need)
    known = ", ".join(version for version in have if version)
    there = f"has {known}" if known else "not installed"
    others = [version for version in versions if version not in have]
    mends.append([(), *((changes.install(node.id, need.engine, version, there),) for version in others)])
    every = (tuple(itertools.chain(*parts)) for parts in itertools.product(*mends))
    yield from sorted(every, key=lambda part: (effort(part), len(part)))[:_WIRES]


def _once(own: Sequence[Change], wires: Sequence[Change]) -> tuple[Change, ...]:
    """Both sets of changes; an engine that is to have one version is not told a second time to be had at any."""
    exact = {change.key[:3] for change in wires if change.key[0] == "install"}
    return (*(change for change in own if change.key[0] != "install" or change.key[:3] not in exact), *wires)


def _made_up(world: World, found: Sequence[Offer]) -> World:
    """A world in which every offer is a node, with the tests of the node that makes it."""
    of: dict[NodeId, list[NodeId]] = {}
    for offer in found:
        of.setdefault(offer.node, []).append(offer.after.id)
    evidence: dict[tuple[NodeId, NodeId], Evidence] = {}
    for (a, b), test in world.evidence.items():
        for one, other in itertools.product(of.get(a, ()), of.get(b, ())):
            evidence[one, other] = _renamed(test, {a: one, b: other})
    nodes = Map({offer.after.id: offer.after for offer in found})
    return attrs.evolve(world, nodes=nodes, evidence=Map(evidence))


def _renamed(test: Evidence, names: Mapping[NodeId, NodeId]) -> Evidence:
    def end(words: str) -> str:
        node, _, port = words.partition(" ")
        return f"{names.get(NodeId(node), node)} {port}"

    return replace(
        test,
        bad=tuple(map(end, test.bad)),
        good=tuple(map(end, test.good)),
        figures={end(key): value for key, value in test.figures.items()},
    )


# Several replicas --------------------------------------------------------------------------------------------


@attrs.frozen
class Places:
    """A node that takes so many replicas once these changes are made."""

    node: NodeId
    count: int
    changes: tuple[Change, ...]


def filled(places: Sequence[Places], count: int, limit: int) -> Iterator[tuple[tuple[NodeId, ...], tuple[Change, ...]]]:
    """Nodes for so many replicas and all of their changes, the least effort first, below a limit."""
    order = sorted(places, key=lambda p: (effort(p.changes) / p.count, -p.count, p.node, len(p.changes)))
    found: list[tuple[int, int, tuple[NodeId, ...], tuple[Change, ...]]] = []
    best, steps = limit, _STEPS
    stack: list[tuple[int, int, tuple[NodeId, ...], tuple[Change, ...]]] = [(0, count, (), ())]
    while stack and steps:
        steps -= 1
        at, left, among, all_ = stack.pop()
        if effort(all_) >= best:
            continue
        if left <= 0:
            best = effort(all_)
            found.append((best, len(all_), tuple(sorted(among)), all_))
            continue
        if at == len(order):
            continue
        stack.append((at + 1, left, among, all_))
        if (here := order[at]).node not in among:
            stack.append((at + 1, left - here.count, (*among, here.node), merged((*all_, *here.changes))))
    yield from ((among, all_) for *_, among, all_ in sorted(found, key=lambda entry: entry[:3])[:_TRIED])


# Groups ------------------------------------------------------------------------------------------------------


def groups(
    world: World,
    need: Need,
    model: ModelName,
    now: float,
    passing: Sequence[NodeId],
    close: Sequence[NodeId],
    going: Going,
    settings: Settings,
) -> Iterator[Group]:
    """Groups of enough nodes, the least effort first; where none costs less than a machine, one with what to add."""
    reach, offered = made(world, need, model, now, passing, close, going, settings)
    by_way: dict[Way, list[Offer]] = {}
    for offer in sorted(offered, key=_price):
        for way in offer.ways:
            by_way.setdefault(way, []).append(offer)
    found: list[tuple[int, int, tuple[object, ...], Group]] = []
    for way, there in by_way.items():
        if len({offer.node for offer in there}) < need.nodes:
            continue
        for chosen, all_ in _search(there, need.nodes, reach.foes(way), BOUGHT):
            group = Group(tuple(sorted(offer.node for offer in chosen)), all_)
            found.append((effort(all_), len(all_), (group.nodes, way.order), group))
    yield from (entry[-1] for entry in heapq.nsmallest(_TRIED, found, key=lambda entry: entry[:3]))
    yield from _bought(by_way, reach, need)


def _price(offer: Offer) -> tuple[int, int, NodeId]:
    return effort(offer.changes), len(offer.changes), offer.node


def _search(
    there: Sequence[Offer], count: int, foes: Mapping[NodeId, Collection[NodeId]], limit: int
) -> Iterator[tuple[tuple[Offer, ...], tuple[Change, ...]]]:
    """Cheaper and cheaper ways to have so many of these nodes, by depth first over the cheapest."""
    kept: dict[NodeId, int] = {}
    order: list[Offer] = []
    for offer in there:
        if offer.node in kept or len(kept) < count + _SPARE:
            kept[offer.node] = kept.get(offer.node, 0) + 1
            order.append(offer)
    best, steps = limit, _STEPS
    stack: list[tuple[int, tuple[Offer, ...], tuple[Change, ...]]] = [(0, (), ())]
    while stack and steps:
        steps -= 1
        at, chosen, all_ = stack.pop()
        if effort(all_) >= best:
            continue
        if len(chosen) == count:
            best = effort(all_)
            yield chosen, all_
            continue
        if at == len(order):
            continue
        stack.append((at + 1, chosen, all_))
        offer = order[at]
        if all(offer.node != other.node for other in chosen):
            again = [_retest(offer, other) for other in chosen if other.after.id in foes.get(offer.after.id, ())]
            stack.append((at + 1, (*chosen, offer), merged((*all_, *offer.changes, *again))))


def _retest(one: Offer, other: Offer) -> Change:
    return changes.tested_again(min(one.node, other.node), max(one.node, other.node))


def merged(all_: Iterable[Change]) -> tuple[Change, ...]:
    """Every change once; of a model that is scaled down twice, the further one."""
    found: dict[tuple[str, ...], Change] = {}
    for change in all_:
        key = change.key[:2] if change.key[0] == "scale" else change.key
        known = found.get(key)
        if known is None or (change.key[0] == "scale" and int(change.key[2]) < int(known.key[2])):
            found[key] = change
    return tuple(found.values())


def _bought(by_way: Mapping[Way, Sequence[Offer]], reach: Reach, need: Need) -> Iterator[Group]:
    """The most nodes that can be had together, and the machines that are missing beside them."""
    found: list[tuple[int, int, tuple[object, ...], Group]] = []
    for way, there in by_way.items():
        count = min(need.nodes - 1, len({offer.node for offer in there}))
        names, missing = changes.new_names(need.nodes - count), need.nodes - count
        for chosen, all_ in _search(there, count, reach.foes(way), BOUGHT):
            beside = tuple(sorted(offer.node for offer in chosen))
            more = changes.buy(chosen[0].after, missing, machine(need), beside, _where(way))
            group = Group(beside, (*all_, more), names)
            found.append((effort(group.changes), len(all_), (beside, way.order), group))
    yield from (entry[-1] for entry in heapq.nsmallest(_TRIED, found, key=lambda entry: entry[:3]))


def _where(way: Way) -> str:
    if way.network == "nvlink":
        return f"in NVLink domain {way.over}"
    if way.network == "tcp":
        return "over TCP"
    on = sorted({fabric for _, fabric in way.rails})
    names = ", ".join(on[:3]) + (f" and {len(on) - 3} more" if len(on) > 3 else "")
    return f"by {len(way.rails)} rail{'' if len(way.rails) == 1 else 's'} on {names}"

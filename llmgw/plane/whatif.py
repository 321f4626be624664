"""What would happen: a change is made on a copy of the world, which then takes its course (course.py). Pure.

An engine that would fail on its new node, or hardware that breaks meanwhile, is not foreseen.
"""

from __future__ import annotations

from collections.abc import Collection

import attrs
from msgspec.structs import replace

from llmgw.convert import near
from llmgw.errors import NotFound
from llmgw.plane import operate
from llmgw.plane.course import Course, Gap, Moment
from llmgw.plane.event import Event
from llmgw.plane.fold import fold
from llmgw.plane.models import revised
from llmgw.plane.plan import plan
from llmgw.plane.why import why
from llmgw.plane.world import DEFAULT, Model, Node, Reason, Settings, Shard, Stage, Want, World, seen
from llmgw.wire.agent import Heartbeat
from llmgw.wire.facts import ModelName, NodeId, PortLoad, ReplicaId, ShardState

#: Rounds that are followed at most; a rolling change of a hundred replicas takes about five each.
ROUNDS = 1_000

#: Nodes that are named where a replica finds no other place.
REASONS = 3

#: A port of a node: the node, the device, its number.
PortName = tuple[NodeId, str, int]


# The changes ---------------------------------------------------------------------------------------------------


@attrs.frozen
class DrainNode:
    """`ctl drain NODE`; what leaves may finish for `within` seconds, None: as long as anywhere."""

    node: NodeId
    within: float | None = None


@attrs.frozen
class LoseNode:
    """A machine stops without a word, with all that runs on it."""

    node: NodeId


@attrs.frozen
class LoseFabric:
    """Every port of a fabric goes down, and with them the replicas whose members talk over it."""

    fabric: str
    ports: frozenset[PortName]


@attrs.frozen
class ApplyModels:
    """`ctl apply FILE`: these models, and no others."""

    models: tuple[Model, ...]


Supposition = DrainNode | LoseNode | LoseFabric | ApplyModels


# The answer ----------------------------------------------------------------------------------------------------


@attrs.frozen
class Fate:
    """What becomes of one replica: "stays", "restarts", "moves", "replaced" (by `by`), "starts", "stops", "unplaced".

    `before` and `after` are its nodes by rank, `at` the seconds until the first step of it. One that "stays" has a
    `why` where it was to leave and cannot.
    """

    model: ModelName
    replica: ReplicaId
    what: str
    before: tuple[NodeId, ...] = ()
    after: tuple[NodeId, ...] = ()
    by: str = ""
    at: float | None = None
    why: str = ""


@attrs.frozen
class Short:
    """A model that ends up with fewer replicas than wanted, and fewer than it has now."""

    model: ModelName
    wanted: int
    before: int
    after: int
    reasons: tuple[Reason, ...] = ()
    smallest_change: str = ""


@attrs.frozen
class WhatIf:
    """All of it. `after` is the world at the end; `complete`: it was followed to the end.

    `restless`: the fleet is on its way now already, so that some of this happens anyway.
    """

    fates: tuple[Fate, ...]
    short: tuple[Short, ...]
    gaps: tuple[Gap, ...]
    moments: tuple[Moment, ...]
    after: World
    seconds: float
    complete: bool
    restless: bool


def what_if(
    world: World, change: Supposition, now: float, settings: Settings = DEFAULT, *, rounds: int = ROUNDS
) -> WhatIf:
    """What a change would do. Raises NotFound for a node that nobody knows."""
    course = Course(world, now, settings)
    suppose(course, change)
    complete = course.follow(rounds)
    return WhatIf(
        fates=_fates(world, course),
        short=_short(world, course),
        gaps=tuple(course.gaps()),
        moments=tuple(course.moments),
        after=course.world,
        seconds=course.now - now,
        complete=complete,
        restless=_restless(world, now, settings),
    )


def suppose(course: Course, change: Supposition) -> None:
    """The change itself, at the moment in which the course begins."""
    world = course.world
    match change:
        case DrainNode(node=node, within=within):
            course.world, events = operate.drain(world, node, True, 0.0, within)
        case LoseNode(node=node):
            known = _known(world, node)
            gone = attrs.evolve(known, connected=False)  # its silence has begun with the last word that was heard
            course.world = attrs.evolve(world, nodes=world.nodes.set(node, gone), version=world.version + 1)
            course.living.discard(node)
            course.dead.add(node)
            text = f"{node} is heard no more, and nothing on it answers"
            events = (Event(kind="node-gone", subject=f"node:{node}", text=text, clock=0.0),)
        case LoseFabric(fabric=fabric, ports=ports):
            text = f"{fabric} is gone: {len(ports)} ports are down"
            events = (Event(kind="fabric-gone", subject=f"fabric:{fabric}", text=text, clock=0.0),)
            _lose(course, ports)
        case ApplyModels(models=models):
            course.world, events = operate.want(world, revised(world.models, models, 0.0), 0.0)
    for event in events:
        course.say(event)
    course.watch()


def _known(world: World, id: NodeId) -> Node:
    known = world.nodes.get(id)
    if known is None:
        meant = near(id, world.nodes)
        remedy = f"did you mean {meant!r}?" if meant else "`llmgw ctl nodes` lists them"
        raise NotFound(f"there is no node {id!r}", remedy=remedy)
    return known


def _lose(course: Course, ports: Collection[PortName]) -> None:
    by_node: dict[NodeId, set[tuple[str, int]]] = {}
    for node, device, number in ports:
        by_node.setdefault(node, set()).add((device, number))
    for id in sorted(by_node):
        known = course.world.nodes.get(id)
        if known is not None and id in course.living:
            course.world, _ = fold(course.world, id, ports_down(known, by_node[id]), course.now, 0.0, course.settings)
    names = {(id, f"{device}:{number}") for id, there in by_node.items() for device, number in there}
    for shard in sorted(course.world.shards.values(), key=lambda s: s.id):
        talks = any((shard.node, name) in names for name in shard.spec.rdma)
        if talks and shard.status is not None and shard.state.alive and shard.node in course.living:
            course.tell(shard.node, replace(shard.status, state=ShardState.FAILED, cause="its fabric is gone"))


def ports_down(node: Node, lost: Collection[tuple[str, int]]) -> Heartbeat:
    """What a node says when these of its ports have gone down."""
    loads: list[PortLoad] = []
    for port in node.facts.ports if node.facts is not None else ():
        if (port.device, port.number) in lost:
            loads.append(PortLoad(port.device, port.number, "DOWN", "Disabled"))
        else:
            load = PortLoad(port.device, port.number, port.state, port.physical_state, port.rate_gbps, port.sm_lid)
            loads.append(load)
    return Heartbeat(ports=tuple(loads))


def _fates(before: World, course: Course) -> tuple[Fate, ...]:
    """What became of every replica, those of a model in pairs where one takes another's place."""
    old, new = _replicas(before), _replicas(course.world)
    found: list[Fate] = []
    starts: dict[ModelName, list[ReplicaId]] = {}
    for id in sorted(new.keys() - old.keys(), key=_order):
        starts.setdefault(new[id][0].model, []).append(id)
    for id in sorted(old, key=_order):
        model, at = old[id][0].model, course.first.get(id, (None, ""))
        was = tuple(shard.node for shard in old[id])
        fate = Fate(model, id, "stays", was, was)
        now_is = new.get(id)
        if now_is is None:
            heirs = starts.get(model)
            fate = attrs.evolve(fate, what="stops", after=(), at=at[0], why=at[1])
            if heirs:
                by = heirs.pop(0)
                nodes = tuple(shard.node for shard in new[by])
                fate = attrs.evolve(fate, what="replaced", by=by, after=nodes, at=course.first.get(by, at)[0])
        else:
            nodes = tuple(shard.node for shard in now_is)
            if not _stands(now_is, course):
                fate = attrs.evolve(fate, what="unplaced", after=(), at=at[0], why=at[1])
            elif nodes != was:
                fate = attrs.evolve(fate, what="moves", after=nodes, at=at[0], why=at[1])
            elif now_is[0].generation != old[id][0].generation:
                fate = attrs.evolve(fate, what="restarts", at=at[0], why=at[1])
            else:
                fate = attrs.evolve(fate, why=_stuck(now_is, course))
        found.append(fate)
    for model, heirs in starts.items():
        for id in heirs:
            first = course.first.get(id, (None, ""))
            nodes = tuple(shard.node for shard in new[id])
            found.append(Fate(model, id, "starts", (), nodes, at=first[0], why=first[1]))
    return tuple(sorted(found, key=lambda fate: (fate.model, _order(fate.replica))))


def _stuck(shards: tuple[Shard, ...], course: Course) -> str:
    """Why a replica stays on a node that is to be empty; "" for one that may stay."""
    leaving = [shard.node for shard in shards if course.world.nodes[shard.node].draining]
    held = course.unplaced.get(shards[0].model)
    if not leaving or held is None:
        return ""
    said = [reason.text for reason in held.reasons if reason.node not in leaving and reason.text]
    more = f", and {len(said) - REASONS} more" if len(said) > REASONS else ""
    there = f": {'; '.join(said[:REASONS])}{more}" if said else ""
    return f"{', '.join(leaving)} is not emptied: there is no room for its replacement{there}"


def _replicas(world: World) -> dict[ReplicaId, tuple[Shard, ...]]:
    """The replicas that are to run, with their members by rank."""
    found: dict[ReplicaId, list[Shard]] = {}
    for shard in world.shards.values():
        if shard.want is Want.RUN:
            found.setdefault(shard.replica, []).append(shard)
    return {id: tuple(sorted(shards, key=lambda s: s.rank)) for id, shards in found.items()}


def _order(id: ReplicaId) -> tuple[str, int]:
    name, _, number = id.rpartition("-")
    return name, int(number) if number.isdecimal() else 0


def _stands(shards: tuple[Shard, ...], course: Course) -> bool:
    return all(
        shard.node not in course.dead
        and seen(shard, course.world.nodes.get(shard.node)) not in (ShardState.UNKNOWN, ShardState.FAILED)
        for shard in shards
    )


def _short(before: World, course: Course) -> tuple[Short, ...]:
    """The models that have fewer ready replicas at the end than are wanted, and than they have now."""
    after = attrs.evolve(course.world, unplaced=course.unplaced)
    had, has = course.had, course.ready()
    found: list[Short] = []
    for name, model in sorted(after.models.items()):
        ready, wanted = has.get(name, 0), model.replicas
        known = before.models.get(name)
        less = ready < had.get(name, 0) or known is None or known.replicas < wanted
        if ready < wanted and less and name in course.unplaced:
            said = why(after, name, course.now)
            held = course.unplaced[name]
            reasons, change = said.reasons or held.reasons, said.smallest_change or held.smallest_change
            found.append(Short(name, wanted, had.get(name, 0), ready, reasons, change))
    return tuple(found)


def _restless(world: World, now: float, settings: Settings) -> bool:
    """Whether anything is on its way already."""
    if plan(world, now, settings).steps or world.strays or world.settling_until is not None:
        return True
    return any(
        shard.want is not Want.RUN or seen(shard, world.nodes.get(shard.node)) is not ShardState.READY
        for shard in world.shards.values()
    ) or any(node.stage is Stage.UNREACHABLE for node in world.nodes.values())

"""The set of changes with the least effort after which one more replica of a model fits (D7). Pure.

Nodes are looked at in the order of what they cost at least, so that a large fleet is seldom looked at whole. For a
replica of several nodes each node has some offers (with these changes it passes, and reaches others in these ways), and
of every group the cheapest members are sought. The answer is proved before it is given: after all of its changes the
replica fits.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs
from immutables import Map

from llmgw.plane import changes, offers
from llmgw.plane.alone import BETWEEN, Going, at_least, on_node
from llmgw.plane.changes import BOUGHT, Change, applied, effort
from llmgw.plane.checks import Need
from llmgw.plane.nearest import by_node, machine
from llmgw.plane.offers import Places
from llmgw.plane.place import Rooms
from llmgw.plane.world import DEFAULT, Reason, Settings, Shard, World
from llmgw.wire.facts import ModelName, NodeId, ReplicaId, ShardId, ShardSpec

#: So many nodes are looked at closely, the nearest first. More are never needed to be right where the nearest are
#: as near as they look.
_MOST_NODES = 256
#: The same where several replicas are to be placed, and so many of them.
_MOST_SHARED, MOST = 48, 8
#: And where several make one replica; those that pass as they are come on top.
_MOST_CLOSE = 128


def cheapest(
    world: World,
    need: Need,
    model: ModelName,
    now: float,
    rooms: Rooms,
    reasons: Iterable[Reason],
    settings: Settings = DEFAULT,
    missing: int = 1,
) -> tuple[Change, ...]:
    """The changes, () where none are known that are less than another machine.

    `reasons` are those of every node and `rooms` what they were found in. With `missing`, up to MOST, room is made for
    so many replicas of one node each.
    """
    found = by_node(reasons)
    whole = rooms.whole(need)  # with what the world adds to it: memory by estimate, models that stay apart
    going = Going(world, now)
    bounds = {node: at_least(found.get(node, ()), rooms.room(node), whole, model, going) for node in world.nodes}
    if need.nodes > 1:
        return _together(world, need, whole, model, now, bounds, found, going, settings)
    if missing > 1:
        return _several(world, need, whole, model, now, bounds, going, settings, missing)
    best: tuple[Change, ...] = ()
    for bound, node in sorted((bound, node) for node, bound in bounds.items())[:_MOST_NODES]:
        if bound >= BOUGHT or (best and bound >= effort(best)):
            break
        limit = effort(best) if best else BOUGHT
        for answer in on_node(world, world.nodes[node], whole, model, now, going, limit=limit):
            if effort(answer) >= limit:
                break
            if fits(applied(world, answer), need, model, now, [node], settings):
                best = answer
                break
    return best


def fits(
    world: World,
    need: Need,
    model: ModelName,
    now: float,
    among: Collection[NodeId],
    settings: Settings = DEFAULT,
    times: int = 1,
) -> bool:
    """Whether so many replicas more fit on some of these nodes, one after the other."""
    nodes = Map({id: world.nodes[id] for id in among if id in world.nodes})
    shards = Map({id: shard for id, shard in world.shards.items() if shard.node in nodes})
    rooms = Rooms(attrs.evolve(world, nodes=nodes, shards=shards), now, settings)
    for number in range(times):
        choice = rooms.choose(need, model)
        if choice is None:
            return False
        for rank, member in enumerate(choice.members):
            spec = ShardSpec(
                engine=need.engine, model=model, source=need.source, resources=need.resources, gpus=member.gpus
            )
            id = f"\N{HORIZONTAL ELLIPSIS}{number}"
            rooms.hold(
                Shard(
                    id=ShardId(f"{id}-{rank}"),
                    replica=ReplicaId(id),
                    model=model,
                    rank=rank,
                    node=member.node,
                    generation=1,
                    spec=spec,
                    revision=1,
                )
            )
    return True


def _several(
    world: World,
    need: Need,
    whole: Need,
    model: ModelName,
    now: float,
    bounds: Mapping[NodeId, int],
    going: Going,
    settings: Settings,
    missing: int,
) -> tuple[Change, ...]:
    """The same for several replicas: some of them may share a node, and what frees one may free another."""
    near = sorted((bound, node) for node, bound in bounds.items() if bound < BOUGHT)[:_MOST_SHARED]
    places: list[Places] = []
    for _, node in near:
        for times in range(1, missing + 1):
            ways = list(itertools.islice(on_node(world, world.nodes[node], whole, model, now, going, times), 3))
            good = [way for way in ways if fits(applied(world, way), need, model, now, [node], settings, times)]
            places += (Places(node, times, way) for way in good)
            if not ways:
                break
    for count in range(missing, 0, -1):
        # What there is no room for, however much is changed, takes machines.
        more = (changes.buy_for(need, missing - count, machine(need)),) if count < missing else ()
        for among, answer in offers.filled(places, count, BOUGHT * count):
            every = [*among, *changes.new_names(missing - count)]
            if fits(applied(world, (*answer, *more)), need, model, now, every, settings, missing):
                return (*answer, *more)
    return ()


def _together(
    world: World,
    need: Need,
    whole: Need,
    model: ModelName,
    now: float,
    bounds: Mapping[NodeId, int],
    found: Mapping[NodeId, Sequence[Reason]],
    going: Going,
    settings: Settings,
) -> tuple[Change, ...]:
    """The same for a replica of several nodes; a machine more is named with the nodes that it would join."""
    near = sorted((bound, node) for node, bound in bounds.items() if bound < BOUGHT)
    passing = [node for _, node in near if not found.get(node) or not _own(found[node])]
    pass_ = set(passing)
    close = [node for _, node in near if node not in pass_][:_MOST_CLOSE]
    for group in offers.groups(world, whole, model, now, passing, close, going, settings):
        among = {*group.nodes, *group.bought}
        if fits(applied(world, group.changes), need, model, now, sorted(among), settings):
            return group.changes
    return ()


def _own(reasons: Sequence[Reason]) -> bool:
    return any(reason.check not in BETWEEN for reason in reasons)

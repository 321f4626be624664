"""What operators do to the world, as pure changes: the next world and what happened.

Each raises NotFound for a node or a model that nobody knows, `expect` Conflict for a node that cannot be looked at.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from immutables import Map
from msgspec import structs

from llmgw.convert import near
from llmgw.errors import BadInput, Conflict, NotFound
from llmgw.plane import expect as expected_state
from llmgw.plane.drains import drained, left
from llmgw.plane.event import Event
from llmgw.plane.health import cleared
from llmgw.plane.models import MOST_REPLICAS
from llmgw.plane.profiles import differences
from llmgw.plane.rollout import rolled_back
from llmgw.plane.world import Ack, Model, Node, Stage, World
from llmgw.units import format_duration
from llmgw.wire.facts import ModelName, NodeId

Changed = tuple[World, tuple[Event, ...]]


def want(world: World, models: Map[ModelName, Model], clock: float) -> Changed:
    """These models, and no others, are wanted.

    One that comes back before all that it ran is gone gets a revision that none of that has, so that its shards of then
    are not taken for those of its profile now.
    """
    fresh = set(models) - set(world.models)
    for shard in world.shards.values() if fresh else ():
        if shard.model in fresh and shard.revision >= models[shard.model].revision:
            models = models.set(shard.model, structs.replace(models[shard.model], revision=shard.revision + 1))
    events: list[Event] = []

    def say(kind: str, name: str, text: str) -> None:
        events.append(Event(kind=kind, subject=f"model:{name}", text=text, clock=clock))

    for name in sorted(models):
        new, old = models[name], world.models.get(name)
        if old is None:
            say("model-added", name, f"{name}: {new.replicas} replica{' is' if new.replicas == 1 else 's are'} wanted")
        elif old != new:
            say("model-changed", name, f"{name}: {changes(old, new)}")
    for name in sorted(set(world.models) - set(models)):
        say("model-removed", name, f"{name} is wanted no more")
    if not events:
        return world, ()
    return attrs.evolve(world, models=models, version=world.version + 1), tuple(events)


def scale(world: World, name: str, replicas: int, clock: float) -> Changed:
    """So many replicas of a model from now on. Raises NotFound for one that is not wanted, BadInput for the number."""
    model = known_model(world, name)
    if not 0 <= replicas <= MOST_REPLICAS:
        raise BadInput(f"{replicas} replicas cannot be meant", remedy=f"give 0 to {MOST_REPLICAS}")
    if model.replicas == replicas:
        return world, ()
    text = f"{name}: scaled from {model.replicas} to {replicas} replica{'s' if replicas != 1 else ''}"
    event = Event(kind="model-scaled", subject=f"model:{name}", text=text, clock=clock)
    models = world.models.set(model.name, structs.replace(model, replicas=replicas))
    return attrs.evolve(world, models=models, version=world.version + 1), (event,)


def rollback(world: World, name: str, clock: float, to: int | None = None) -> Changed:
    """A model with the profile it had before, or with that of revision `to`, for all its replicas in turn.

    Raises NotFound for a model or a revision that is not known, Conflict when there is nothing to go back to.
    """
    old = known_model(world, name)
    new = rolled_back(old, clock, to)
    what = "; ".join(differences(old.profile, new.profile))
    text = f"{name}: rolled back from revision {old.revision} of its profile to {new.revision} ({what})"
    event = Event(kind="model-rolled-back", subject=f"model:{name}", text=text, clock=clock)
    return attrs.evolve(world, models=world.models.set(new.name, new), version=world.version + 1), (event,)


def known_model(world: World, name: str) -> Model:
    """A wanted model by name. Raises NotFound, naming the near miss."""
    model = world.models.get(ModelName(name))
    if model is None:
        meant = near(name, world.models)
        remedy = f"did you mean {meant!r}?" if meant else "`llmgw ctl models` lists them"
        raise NotFound(f"no model is called {name!r}", remedy=remedy)
    return model


def changes(old: Model, new: Model) -> str:
    """What differs between a model and the one before, in words."""
    parts = [] if old.replicas == new.replicas else [f"replicas {old.replicas} -> {new.replicas}"]
    if old.revision != new.revision:
        what = "; ".join(differences(old.profile, new.profile))
        parts.append(f"profile revision {old.revision} -> {new.revision} ({what})")
    parts += [] if old.surge == new.surge else [f"surge {old.surge} -> {new.surge}"]
    parts += [] if old.idle == new.idle else [f"unloaded when idle: {_idle(old)} -> {_idle(new)}"]
    return ", ".join(parts) or "its history changed"


def _idle(model: Model) -> str:
    return f"after {format_duration(model.idle)}" if model.idle else "never"


def cordon(world: World, id: NodeId, on: bool, clock: float) -> Changed:
    node = _known(world, id)
    text = f"{id} is cordoned: it takes no new shard" if on else f"{id} takes new shards again"
    kept = node.drain_within if on else None
    changed = attrs.evolve(node, cordoned=on, draining=node.draining and on, drain_within=kept)
    return _node(world, node, changed, "node-cordoned" if on else "node-uncordoned", text, clock)


def drain(world: World, id: NodeId, on: bool, clock: float, within: float | None = None) -> Changed:
    """A node is emptied, or no more. What leaves may finish for `within` seconds; None: as long as anywhere."""
    node = _known(world, id)
    text = f"{id} is draining: its replicas move elsewhere" if on else f"{id} is drained no more"
    if on and within is not None:
        text += f", and may finish requests for {format_duration(within)}"
    changed = attrs.evolve(node, draining=on, drain_within=within if on else None)
    kind = "node-draining" if on else "node-undrained"
    after, events = _node(world, node, changed, kind, text, clock)
    if on and not node.draining and not left(world, id):
        events = (*events, drained(id, clock))
    return after, events


def label(world: World, id: NodeId, labels: Mapping[str, str | None], clock: float) -> Changed:
    node = _known(world, id)
    after = {**dict(node.labels), **labels}
    kept = Map({name: value for name, value in after.items() if value is not None})
    words = ", ".join(f"{name}={value}" if value is not None else f"{name} removed" for name, value in labels.items())
    return _node(world, node, attrs.evolve(node, labels=kept), "node-labelled", f"{id}: {words}", clock)


def acknowledge(world: World, id: NodeId, subject: str, code: str, seconds: float, now: float, clock: float) -> Changed:
    """A problem is taken as it is until then. Raises NotFound for one that is neither open nor acknowledged."""
    node, key = _known(world, id), (subject, code)
    open_ = node.problems.get(key)
    if open_ is None and key not in node.acks:
        known = ", ".join(f"{c} of {s}" for s, c in sorted(node.problems)) or "none"
        raise NotFound(f"{id} has no open problem {code!r} of {subject!r}", remedy=f"open problems there: {known}")
    if seconds > 0:
        acks, until = node.acks.set(key, Ack(now + seconds, clock + seconds)), now + seconds
        text = f"{id}: {code} of {subject} is acknowledged for {seconds:.0f} s"
    else:
        acks, until = (node.acks.delete(key) if key in node.acks else node.acks), None
        text = f"{id}: {code} of {subject} is acknowledged no more"
    problems = node.problems
    if open_ is not None:
        problems = problems.set(key, attrs.evolve(open_, acknowledged_until=until))
    changed = attrs.evolve(node, acks=acks, problems=problems)
    return _node(world, node, changed, "problem-acknowledged", text, clock)


def expect(world: World, id: NodeId, on: bool, now: float, clock: float) -> Changed:
    """What the node has now is what it should have; or nothing is confirmed of it any more, and its peers count."""
    node = _known(world, id)
    if not on:
        text = f"{id}: nothing is confirmed of it any more: it is compared with its peers"
        confirmed = None
    else:
        if node.stage is not Stage.READY or not node.connected or (have := expected_state.inventory(node)) is None:
            why = node.stage.value if node.connected else "not connected"
            raise Conflict(
                f"{id} is {why}, so what it has now cannot be confirmed",
                remedy="wait until its agent is connected",
            )
        confirmed = structs.replace(have, clock=clock)
        text = f"{id}: confirmed: {expected_state.in_words(have)}"
    # An operator has spoken: what was found before is not kept for a clean window.
    over = [open_ for open_ in node.problems.values() if open_.by_plane]
    problems = node.problems
    for open_ in over:
        problems = problems.delete((open_.problem.subject, open_.problem.code))
    changed = attrs.evolve(node, expected=confirmed, problems=problems, suspects=Map())
    world, events = _node(world, node, changed, "node-expected" if on else "node-not-expected", text, clock)
    return world, (*events, *(cleared(node, open_, now, clock) for open_ in over))


def forget(world: World, id: NodeId, clock: float) -> Changed:
    """The node is no more; strays that it ran go with it."""
    _known(world, id)
    strays = world.strays
    for key in [key for key in strays if key[0] == id]:
        strays = strays.delete(key)
    event = Event(kind="node-forgotten", subject=f"node:{id}", text=f"{id} is forgotten", clock=clock)
    world = attrs.evolve(world, nodes=world.nodes.delete(id), strays=strays, version=world.version + 1)
    return world, (event,)


def _known(world: World, id: NodeId) -> Node:
    node = world.nodes.get(id)
    if node is None:
        meant = near(id, world.nodes)
        remedy = f"did you mean {meant!r}?" if meant else "`llmgw ctl nodes` lists them"
        raise NotFound(f"there is no node {id!r}", remedy=remedy)
    return node


def _node(world: World, before: Node, after: Node, kind: str, text: str, clock: float) -> Changed:
    if before == after:
        return world, ()
    event = Event(kind=kind, subject=f"node:{after.id}", text=text, clock=clock, data={"node": str(after.id)})
    return attrs.evolve(world, nodes=world.nodes.set(after.id, after), version=world.version + 1), (event,)

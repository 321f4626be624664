"""How a change of a model's profile goes through its replicas: revisions, how far it is, and when it pauses.

Pure. A rollout needs no record of its own: it is under way while replicas of another revision are wanted to run, and it
is paused while a replica of the new revision has failed several times in a row, or its engine cannot be installed.
plan.py makes the steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
from msgspec.structs import replace

from llmgw.errors import Conflict, NotFound
from llmgw.plane.checks import Need, brought, engine_missing, installed
from llmgw.plane.event import Event
from llmgw.plane.gang import Replica, replicas
from llmgw.plane.world import DEFAULT, Model, Profile, Revision, Settings, Want, World
from llmgw.wire.facts import ModelName, NodeId

#: Profiles that are kept of a model's past.
KEPT = 5


# Revisions ------------------------------------------------------------------------------------------------


def after_change(old: Model, new_profile: Profile, clock: float) -> Model:
    """The model with another profile, and what it had until now in its history (`clock`: Unix seconds).

    A profile that it had before gets its old revision again, so that replicas which still run it simply stay. Any
    other gets a number that no profile ever had. The same profile again changes nothing.
    """
    if new_profile == old.profile:
        return old
    known = next((past for past in reversed(old.history) if past.profile == new_profile), None)
    if known is not None:
        return _back_to(old, known, clock)
    newest = max((past.revision for past in old.history), default=0)
    return replace(
        old,
        profile=new_profile,
        revision=max(newest, old.revision) + 1,
        history=_with_present(old, old.history, clock),
    )


def rolled_back(model: Model, clock: float, to: int | None = None) -> Model:
    """The model with the profile it had before the present one, or with that of revision `to`.

    Replicas that still run it stay as they are. Raises Conflict when there is nothing to go back to, NotFound for a
    revision that is not known (any more).
    """
    if to == model.revision:
        raise Conflict(
            f"{model.name} has revision {to} of its profile already",
            remedy="`llmgw ctl models` shows how far its replicas are",
        )
    if not model.history:
        raise Conflict(
            f"{model.name} never had another profile than the present one, revision {model.revision}",
            remedy="change its profile in models.toml and apply that",
        )
    if to is None:
        return _back_to(model, model.history[-1], clock)
    known = next((past for past in reversed(model.history) if past.revision == to), None)
    if known is None:
        kept = ", ".join(str(past.revision) for past in model.history)
        raise NotFound(f"{model.name} has no revision {to} in its history", remedy=f"it can go back to {kept}")
    return _back_to(model, known, clock)


def _back_to(model: Model, past: Revision, clock: float) -> Model:
    rest = tuple(one for one in model.history if one.revision != past.revision)
    return replace(model, profile=past.profile, revision=past.revision, history=_with_present(model, rest, clock))


def _with_present(model: Model, history: tuple[Revision, ...], clock: float) -> tuple[Revision, ...]:
    return (*history, Revision(revision=model.revision, profile=model.profile, clock=clock))[-KEPT:]


def of_revision(model: Model, revision: int) -> Model | None:
    """The model as replicas of an earlier revision have it; None when that is not known any more."""
    if revision == model.revision:
        return model
    past = next((one for one in reversed(model.history) if one.revision == revision), None)
    return None if past is None else replace(model, profile=past.profile, revision=revision)


# How far it is --------------------------------------------------------------------------------------------


@attrs.frozen
class Rollout:
    """A change of a model's profile that is under way.

    `updated` replicas are placed with the new `revision` and `ready` of them serve, of `total` that are wanted;
    `outdated` ones of another revision still run. `why` says what pauses it, "" while it goes on; `waits` for what
    the next part waits, which comes by itself.
    """

    revision: int
    updated: int
    ready: int
    total: int
    outdated: int
    why: str = ""
    waits: str = ""

    @property
    def paused(self) -> bool:
        return bool(self.why)

    def __str__(self) -> str:
        far = f"{self.ready} of {self.total} replicas have revision {self.revision}"
        if self.waits:
            far += f", waiting for {self.waits}"
        return f"paused: {self.why}; {far}" if self.why else far


def rollout_of(world: World, model: Model, settings: Settings = DEFAULT) -> Rollout | None:
    """The rollout of a model that is under way; None when no replica of another revision is wanted to run."""
    mine = replicas(shard for shard in world.shards.values() if shard.model == model.name)
    found = _standing(world, model, mine, settings)
    return found if found.outdated else None


def _standing(world: World, model: Model, mine: Iterable[Replica], settings: Settings) -> Rollout:
    running = [replica for replica in mine if replica.runs]
    updated = [replica for replica in running if replica.revision == model.revision]
    outdated = [replica for replica in running if replica.revision != model.revision]
    why, waits = paused(updated, settings), ""
    if not why and all(replica.ready for replica in updated):
        why, waits = _installs(world, model, outdated)
        if not why and outdated:
            why, weights = _weights(world, model)
            waits = " and ".join(filter(None, (waits, weights)))
            if not why and not waits and model.name in world.unplaced:
                waits = "room"
    return Rollout(
        revision=model.revision,
        updated=len(updated),
        ready=sum(replica.ready for replica in updated),
        total=model.replicas,
        outdated=len(outdated),
        why=why,
        waits=waits,
    )


def _installs(world: World, model: Model, outdated: Iterable[Replica]) -> tuple[str, str]:
    """Where the engine of the new profile is not on any node that runs an older one, and nothing is on its way beside
    them: why it cannot be had there, and where it is being installed."""
    need, failed, awaited = Need.of(model), dict[NodeId, str](), list[NodeId]()
    for replica in outdated:
        lacking = [
            world.nodes[id] for id in replica.nodes if id in world.nodes and not installed(world.nodes[id], need)
        ]
        if not lacking:
            return "", ""
        for node in lacking:
            if node.facts is None:
                continue
            if words := engine_missing(node, need.engine, need.version):
                failed[node.id] = words
            else:
                awaited.append(node.id)
    engine = f"{need.engine} {need.version}".strip()
    if failed and model.name in world.unplaced:
        first = min(failed)
        return f"{engine} cannot be had on {_some(failed)}: {failed[first]}", ""
    return "", f"{engine} to be installed on {_some(awaited)}" if awaited else ""


def _weights(world: World, model: Model) -> tuple[str, str]:
    """The same of the weights of the new profile, which are brought to where its next replica will be."""
    source, failed, awaited = model.profile.source, dict[NodeId, str](), list[NodeId]()
    for id in (node for node, what in world.ahead if what == source):
        node = world.nodes.get(id)
        if node is None or node.facts is None or brought(node, source):
            continue
        held = next((weights for weights in node.facts.weights if weights.source == source), None)
        if held is not None and held.error:
            failed[id] = f"{held.error}{', and is tried again now' if held.fetching else ''}"
        else:
            awaited.append(id)
    if failed:
        return f"{source} cannot be brought to {_some(failed)}: {failed[min(failed)]}", ""
    return "", f"{source} to be brought to {_some(awaited)}" if awaited else ""


def _some(nodes: Iterable[NodeId]) -> str:
    first, *rest = sorted(set(nodes))
    return f"{first} and {len(rest)} more" if rest else first


def paused(updated: Iterable[Replica], settings: Settings) -> str:
    """Why replicas of a new revision are no reason to go on; "" when none keeps failing."""
    for replica in updated:
        failures = max(member.restarts for member in replica.members)
        if failures >= settings.pause_after and not replica.ready:
            last = max(
                (member.last_failure for member in replica.members if member.last_failure is not None),
                key=lambda failure: failure.generation,
                default=None,
            )
            often = "once" if failures == 1 else f"{failures} times in a row"
            cause = f": {last.cause}" if last is not None and last.cause else ""
            return f"replica {replica.id} of revision {replica.revision} failed {often}{cause}"
    return ""


# What is said of it ---------------------------------------------------------------------------------------


class Rollouts:
    """Which rollouts are under way, so that each change of that is said once.

    One is done when nothing of another revision runs and all that is wanted of the new one is ready.
    """

    def __init__(self) -> None:
        self._known: dict[ModelName, tuple[int, bool]] | None = None

    def judge(self, world: World, clock: float, settings: Settings = DEFAULT) -> tuple[Event, ...]:
        """What has changed since the last look. The first look of a plane that has just started says nothing."""
        if world.settling_until is not None:
            return ()  # nobody knows yet what runs
        before, known = self._known, dict[ModelName, tuple[int, bool]]()
        events: list[Event] = []

        def say(kind: str, name: ModelName, text: str) -> None:
            events.append(Event(kind=kind, subject=f"model:{name}", text=f"{name}: {text}", clock=clock))

        for name, found in _under_way(world, before or {}, settings):
            change = f"the rollout of revision {found.revision}"
            was_paused = before is not None and before.get(name) == (found.revision, True)
            if not found.outdated and found.ready >= found.total:
                say("rollout-done", name, f"every replica has revision {found.revision} of its profile")
                continue
            known[name] = (found.revision, found.paused)
            if found.paused and not was_paused:
                stay = f"; {found.outdated} replicas of another revision stay" if found.outdated else ""
                say("rollout-paused", name, f"{change} is paused: {found.why}{stay}")
            elif was_paused and not found.paused:
                say("rollout-resumed", name, f"{change} goes on")
        self._known = known
        return () if before is None else tuple(events)


def _under_way(
    world: World, known: Mapping[ModelName, object], settings: Settings
) -> Iterable[tuple[ModelName, Rollout]]:
    """Every model of which some shard has another revision than is wanted, and those that had one before."""
    names = {name for name in known if name in world.models}
    for shard in world.shards.values():
        model = world.models.get(shard.model)
        if model is not None and shard.revision != model.revision and shard.want is Want.RUN:
            names.add(shard.model)
    if not names:
        return
    mine: dict[ModelName, list[Replica]] = {name: [] for name in names}
    for replica in replicas(shard for shard in world.shards.values() if shard.model in names):
        mine[replica.model].append(replica)
    for name in sorted(names):
        model = world.models[name]
        found = _standing(world, model, mine[name], settings)
        # One that is unloaded while idle is as it should be with none.
        yield name, attrs.evolve(found, total=found.updated) if model.idle else found

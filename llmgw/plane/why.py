"""Why a model is not fully placed or not ready, node by node, and the smallest change that would help (D7). Pure."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from msgspec import Struct

from llmgw.errors import NotFound
from llmgw.plane import idle
from llmgw.plane.changes import Change, in_words
from llmgw.plane.changes import without as changed_without
from llmgw.plane.cheapest import MOST, cheapest
from llmgw.plane.checks import Need
from llmgw.plane.gang import Replica, mates, replicas
from llmgw.plane.nearest import beyond, nearest, smallest
from llmgw.plane.place import Rooms
from llmgw.plane.rollout import of_revision, rollout_of
from llmgw.plane.world import DEFAULT, Model, Profile, Reason, Settings, Shard, Stage, Want, World, seen
from llmgw.wire.facts import ModelName, ShardState

__all__ = ["Standing", "Why", "nearest", "smallest", "why"]


class Standing(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One shard of the model: where it is, what it does, and what is in its way."""

    shard: str
    node: str
    generation: int
    state: str
    text: str


@attrs.frozen
class Why:
    """The whole answer. `text` is one sentence; `reasons` are per node, the nearest to fitting first."""

    model: ModelName
    wanted: int
    placed: int
    ready: int
    text: str
    standings: tuple[Standing, ...] = ()
    reasons: tuple[Reason, ...] = ()
    smallest_change: str = ""
    changes: tuple[Change, ...] = ()  # the same, one by one; proved to be enough


def why(world: World, name: ModelName, now: float, settings: Settings = DEFAULT) -> Why:
    """How a model stands. Raises NotFound for a name that no model has."""
    model = world.models.get(name)
    shards = sorted((s for s in world.shards.values() if s.model == name), key=lambda s: (s.replica, s.rank, s.id))
    if model is None:
        if not shards:
            raise NotFound(f"there is no model {name!r}", remedy="`llmgw ctl models` lists them")
        spec = shards[0].spec  # the model was removed and its last shards are on their way out
        model = Model(name=name, profile=Profile(engine=spec.engine, source=spec.source), replicas=0)
    running = [replica for replica in replicas(shards) if replica.runs]
    stranded = [replica for replica in running if _gone(world, replica)]
    ready = sum(_serves(world, replica) for replica in running)
    placed, wanted = len(running) - len(stranded), idle.wanted(world, model, now)
    found = Why(name, model.replicas, placed, ready, "", tuple(_standing(world, shard, now) for shard in shards))
    if model.idle and not wanted and model.replicas:
        return attrs.evolve(found, text=_unloaded(world, model, len(running), now))
    if world.settling_until is not None and now < world.settling_until and placed < wanted:
        wait = world.settling_until - now
        text = f"nothing is placed before the known nodes have had time to return: {wait:.0f} s more at most"
        return attrs.evolve(found, text=text)
    rollout = rollout_of(world, model, settings)
    change = f"; {'a rollout is ' if rollout.paused else 'a rollout goes on: '}{rollout}" if rollout is not None else ""
    held = world.unplaced.get(name)
    asks = model if held is None or held.revision is None else of_revision(model, held.revision) or model
    if placed >= wanted:
        text = "every replica is ready" if wanted else "no replica is wanted"
        if ready < wanted:
            text = f"every replica has its place, {ready} of {wanted} are ready"
        text += change
        if rollout is None and placed > wanted:
            text += f"; {placed - wanted} more {'is' if placed == wanted + 1 else 'are'} being replaced or stopped"
        found = attrs.evolve(found, text=text)
        if held is None:
            return found
        # It has a place that takes it no more, or makes no room for what replaces it.
        stuck = [replica for replica in running if replica.broken][:1]
        text += f"; for {max(1, wanted - held.placed)} of them no node passes every check"
        return _looked_into(attrs.evolve(found, text=text), world, asks, stuck, now, settings) or attrs.evolve(
            found, text=text, reasons=held.reasons, smallest_change=held.smallest_change
        )
    missing = f"{wanted - placed} of {wanted} replicas are not placed" if wanted > 1 else "its replica is not placed"
    if not world.nodes:
        join = "join a node: `llmgw ctl token create`, then `llmgw-node join` there"
        return attrs.evolve(found, text=f"{missing}: no node has joined", smallest_change=join)
    if asks.revision != model.revision:
        missing += f", as revision {asks.revision} of its profile asks"
    whole = "too few nodes pass every check" if model.profile.nodes > 1 else "no node passes every check"
    looked = _looked_into(
        attrs.evolve(found, text=f"{missing}: {whole}{change}"), world, asks, stranded, now, settings, wanted - placed
    )
    if looked is None:
        return attrs.evolve(found, text=f"{missing} yet; there is room, so the next round places one")
    return looked


def _looked_into(
    found: Why, world: World, model: Model, without: Sequence[Replica], now: float, settings: Settings, missing: int = 1
) -> Why | None:
    """The answer with what keeps more replicas away, and the least that would help; None when one fits.

    `without`: replicas that would give back what they hold, since it is them that look for a place.
    """
    rest = changed_without(world, [shard.id for replica in without for shard in replica.members])
    need, rooms = Need.of(model), Rooms(rest, now, settings)
    if rooms.choose(need, model.name) is not None:
        return None
    reasons = rooms.refused(need)
    every = missing if need.nodes == 1 and missing <= MOST else 1
    best = cheapest(rest, need, model.name, now, rooms, reasons, settings, every)
    change = in_words(best) or beyond(reasons, need)
    if change and every < missing:
        change = f"for one of them: {change}"
    return attrs.evolve(found, reasons=nearest(reasons), smallest_change=change, changes=best)


def _gone(world: World, replica: Replica) -> bool:
    """Whether a replica is where nobody runs it: a node of it is lost, or not known any more."""
    nodes = (world.nodes.get(node) for node in replica.nodes)
    return any(node is None or node.stage is Stage.LOST for node in nodes)


def _serves(world: World, replica: Replica) -> bool:
    return replica.ready and all(
        seen(shard, world.nodes.get(shard.node)) is ShardState.READY for shard in replica.members
    )


def _unloaded(world: World, model: Model, running: int, now: float) -> str:
    """How a model stands that is unloaded while nobody asks for it."""
    asked = world.asked.get(model.name)
    lately = f"for {now - asked:.0f} s" if asked is not None else "since the plane started"
    since = f"nobody has asked for it {lately}"
    being = "being unloaded" if running else "unloaded"
    return f"{being}: {since}; a request loads it ({model.replicas} replica{'s' if model.replicas != 1 else ''})"


def _standing(world: World, shard: Shard, now: float) -> Standing:
    state = seen(shard, world.nodes.get(shard.node))
    words = [shard.why] if shard.why else []
    if shard.want is not Want.RUN:
        words.append(f"told to {shard.want.value}")
    node = world.nodes.get(shard.node)
    if node is None or node.stage is not Stage.READY:
        words.append(f"{shard.node} is {'not known' if node is None else node.stage.value}")
    if state is ShardState.FAILED and shard.last_failure is not None:
        often = "once" if shard.restarts == 1 else f"{shard.restarts} times in a row"
        words.append(f"failed {often}: {shard.last_failure.cause or 'no cause known'}")
        if shard.not_before is not None and shard.not_before > now:
            words.append(f"tried again in {shard.not_before - now:.0f} s")
    elif shard.restarts:
        words.append(f"attempt {shard.restarts + 1}")
    if state is ShardState.STOPPING and shard.status is not None and shard.status.detail:
        words.append(shard.status.detail)
    if waits := _waits_for(world, shard):
        words.append(waits)
    if shard.status is not None and shard.status.progress is not None and state is not ShardState.READY:
        done = shard.status.progress
        words.append(f"{done.what}: {done.done / done.total:.0%} done" if done.total else done.what)
    return Standing(
        shard=shard.id, node=shard.node, generation=shard.generation, state=state.value, text="; ".join(words)
    )


def _waits_for(world: World, shard: Shard) -> str:
    """Which followers the leader of a replica of several nodes waits for, and in which state they are."""
    if shard.rank or shard.want is not Want.RUN or shard.state is ShardState.READY:
        return ""
    slow = [
        f"{mate.id} on {mate.node} ({seen(mate, world.nodes.get(mate.node)).value})"
        for mate in mates(world, shard)
        if seen(mate, world.nodes.get(mate.node)) is not ShardState.READY or mate.generation != shard.generation
    ]
    return f"waits for {', '.join(slow)}" if slow else ""

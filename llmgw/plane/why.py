"""Why a model is not fully placed or not ready, node by node, and the smallest change that would help (D7). Pure."""

from __future__ import annotations

import attrs
from msgspec import Struct

from llmgw.errors import NotFound
from llmgw.plane.changes import Change, in_words
from llmgw.plane.cheapest import cheapest
from llmgw.plane.checks import Need
from llmgw.plane.nearest import beyond, nearest, smallest
from llmgw.plane.place import Rooms
from llmgw.plane.world import Model, Profile, Reason, Shard, Stage, Want, World, seen
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
    changes: tuple[Change, ...] = ()  # the same, one by one; proved to be enough for one more replica


def why(world: World, name: ModelName, now: float) -> Why:
    """How a model stands. Raises NotFound for a name that no model has."""
    model = world.models.get(name)
    shards = sorted((s for s in world.shards.values() if s.model == name), key=lambda s: s.id)
    if model is None:
        if not shards:
            raise NotFound(f"there is no model {name!r}", remedy="`llmgw ctl models` lists them")
        spec = shards[0].spec  # the model was removed and its last shards are on their way out
        model = Model(name=name, profile=Profile(engine=spec.engine, source=spec.source), replicas=0)
    running = [shard for shard in shards if shard.want is Want.RUN]
    ready = sum(seen(shard, world.nodes.get(shard.node)) is ShardState.READY for shard in running)
    standings = tuple(_standing(world, shard, now) for shard in shards)
    placed, wanted = len(running), model.replicas
    if world.settling_until is not None and now < world.settling_until and placed < wanted:
        wait = world.settling_until - now
        text = f"nothing is placed before the known nodes have had time to return: {wait:.0f} s more at most"
        return Why(name, wanted, placed, ready, text, standings)
    if placed >= wanted:
        text = "every replica is ready" if wanted else "no replica is wanted"
        if ready < wanted:
            text = f"every replica has its place, {ready} of {wanted} are ready"
        if placed > wanted:
            text += f"; {placed - wanted} more {'is' if placed == wanted + 1 else 'are'} being replaced or stopped"
        held = world.unplaced.get(name)
        if held is None:
            return Why(name, wanted, placed, ready, text, standings)
        text += f"; for {wanted - held.placed} of them no node passes every check"
        return Why(name, wanted, placed, ready, text, standings, held.reasons, held.smallest_change)
    need = Need.of(model)
    rooms = Rooms(world, now)
    missing = wanted - placed
    if not world.nodes:
        text = f"{missing} of {wanted} replicas are not placed: no node has joined"
        change = "join a node: `llmgw ctl token create`, then `llmgw-node join` there"
        return Why(name, wanted, placed, ready, text, standings, (), change)
    if rooms.choose(need, name) is not None:
        text = f"{missing} of {wanted} replicas are not placed yet; there is room, so the next round places one"
        return Why(name, wanted, placed, ready, text, standings)
    reasons = rooms.refused(need)
    text = f"{missing} of {wanted} replicas are not placed: no node passes every check"
    found = cheapest(world, need, name, now, rooms, reasons)
    change = in_words(found) or beyond(reasons, need)
    return Why(name, wanted, placed, ready, text, standings, nearest(reasons), change, found)


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
    if shard.status is not None and shard.status.progress is not None and state is not ShardState.READY:
        done = shard.status.progress
        words.append(f"{done.what}: {done.done / done.total:.0%} done" if done.total else f"{done.what}: {done.done}")
    return Standing(
        shard=shard.id, node=shard.node, generation=shard.generation, state=state.value, text="; ".join(words)
    )

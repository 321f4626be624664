"""Why a model is not fully placed or not ready, node by node, and the smallest change that would help (D7). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
from msgspec import Struct

from llmgw.errors import NotFound
from llmgw.plane.checks import Need
from llmgw.plane.place import Rooms
from llmgw.plane.world import Model, Profile, Reason, Shard, Stage, Want, World, seen
from llmgw.wire.facts import ModelName, NodeId, ShardState

#: What it takes to pass each check, from a command to a purchase: the smallest sum over a node's checks wins.
_EFFORT: Mapping[str, int] = {
    "cordon": 1,
    "drain": 1,
    "labels": 2,
    "stage": 3,
    "inventory": 3,
    "disk": 4,
    "gpu-foreign": 4,
    "engine": 5,
    "node-health": 5,
    "gpu-health": 6,
    "gpu-fabric": 6,
    "gpus-free": 8,
    "cpu-threads": 8,
    "memory": 8,
    "gpu-memory": 50,
    "compute-capability": 50,
    "gpus": 50,
}
_HARDEST = 50

#: No command passes these: only another machine does, or a model that asks for less.
_BOUGHT = frozenset({"gpus", "gpu-memory", "compute-capability"})


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
    return Why(name, wanted, placed, ready, text, standings, nearest(reasons), smallest(reasons, need))


def nearest(reasons: Iterable[Reason]) -> tuple[Reason, ...]:
    """The reasons with the node nearest to fitting first."""
    by_node = _by_node(reasons)
    return tuple(reason for node in sorted(by_node, key=lambda n: (_cost(by_node[n]), n)) for reason in by_node[node])


def smallest(reasons: Iterable[Reason], need: Need) -> str:
    """The change that makes one node pass all its checks with the least effort, in words; "" without any node."""
    by_node = _by_node(reasons)
    if not by_node:
        return ""
    best = min(by_node, key=lambda node: (_cost(by_node[node]), node))
    if short := [reason for reason in by_node[best] if reason.check in _BOUGHT]:
        # What else is in the way on that node does not matter: it would not fit after that either.
        return f"add a node with {_machine(need)}, or ask for less: {best} is nearest and {_has(short[0])}"
    return "; ".join(_change(reason, need) for reason in by_node[best])


def _machine(need: Need) -> str:
    """What a node must have that no command gives it, in words."""
    resources = need.resources
    words = f"{resources.gpus} GPU{'s' if resources.gpus != 1 else ''}"
    if resources.gpu_memory_bytes:
        words += f" of {resources.gpu_memory_bytes / (1 << 30):.1f} GiB"
    if resources.compute_capability is not None:
        words += " and compute capability {}.{}".format(*resources.compute_capability)
    return words


def _has(reason: Reason) -> str:
    return reason.text.removeprefix(f"{reason.node}: ")


def _by_node(reasons: Iterable[Reason]) -> dict[NodeId, list[Reason]]:
    found: dict[NodeId, list[Reason]] = {}
    for reason in reasons:
        found.setdefault(reason.node, []).append(reason)
    return found


def _cost(reasons: Iterable[Reason]) -> int:
    return sum(_EFFORT.get(reason.check, _HARDEST) for reason in reasons)


def _change(reason: Reason, need: Need) -> str:
    node, resources = reason.node, need.resources
    match reason.check:
        case "cordon":
            return f"`llmgw ctl uncordon {node}`"
        case "drain":
            return f"`llmgw ctl uncordon {node}` ends its drain"
        case "labels":
            return f"`llmgw ctl label {node} {reason.needed}`"
        case "stage" | "inventory":
            return f"bring {node} back: its agent is not heard"
        case "engine":
            return f"install {reason.needed} on {node} ({reason.value})"
        case "node-health" | "gpu-health":
            return f"mend {node} ({reason.value}), or acknowledge the problem"
        case "gpu-fabric":
            return f"bring the NVLink fabric of {node} up ({reason.value})"
        case "gpu-foreign":
            return f"stop what else holds GPU memory on {node} ({reason.value})"
        case "disk":
            return f"free disk for weights on {node}: {reason.needed} needed, {reason.value} there"
        case "gpus-free":
            return f"free GPUs on {node}: {reason.value}, {reason.needed} needed"
        case "cpu-threads":
            return f"free CPU threads on {node}, or ask for fewer than {resources.cpu_threads}: {reason.value}"
        case "memory":
            return f"free memory on {node}, or ask for less than {reason.needed}: {reason.value} is free"
    return f"{node}: {reason.check} {reason.value} must become {reason.needed}"


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

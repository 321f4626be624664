"""What it costs that one node takes a replica, or its part of one of several nodes: what must be mended there, what
could be freed. Pure.

What must be mended has no alternative. What is held is freed by fewer replicas of others, by stopping what is nobody's,
or by mending GPUs, whichever sum is the least.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import attrs
from immutables import Map
from msgspec.structs import replace

from llmgw.plane import changes, idle
from llmgw.plane.changes import BOUGHT, EFFORT, Change, applied, bad_problems, effort
from llmgw.plane.checks import IDLE_FOREIGN, Need, refusals
from llmgw.plane.gang import Replica, ends_by, replicas
from llmgw.plane.rooms import FULL_DISK, Room, Unit, room
from llmgw.plane.world import Node, Reason, Shard, Stage, Want, World
from llmgw.wire.facts import Gpu, ModelName, NodeId, Resources, ShardId

#: What is held on a node: one change may free several of these at once.
_HELD = frozenset({"gpus-free", "cpu-threads", "memory", "apart"})
#: Where one of several changes may do.
_CHOSEN = _HELD | {"disk", "gpu-health", "gpu-fabric", "gpu-foreign"}
#: No model is scaled down by more than what another machine costs.
_MOST_STEPS = (BOUGHT - 1) // EFFORT["gpus-free"]
#: So many ways to free a node are tried, and so many of the cheapest are kept.
_MOST_WAYS, _KEPT = 4096, 3
#: Checks between nodes: what one node costs says nothing of them.
BETWEEN = frozenset({"nodes", "fabric", "rails", "nvlink", "engine-match", "evidence", "ports"})


def at_least(reasons: Sequence[Reason], there: Room | None, need: Need, model: ModelName, going: Going) -> int:
    """What a node costs at least, from the checks that it fails."""
    checks = {reason.check for reason in reasons} - BETWEEN
    if there is None or "inventory" in checks:
        return BOUGHT  # what it has is not known, so nothing can be said of it
    total = EFFORT["labels"] * len({reason.needed for reason in reasons if reason.check == "labels"})
    # A full disk is told as a problem of the node as well, and freed once.
    alone = checks - _HELD - {"labels"} - ({"node-health"} if "disk" in checks else set())
    total += sum(min(EFFORT["disk"], EFFORT[c]) if c == "node-health" else EFFORT.get(c, BOUGHT) for c in alone)
    if held := checks & _HELD:
        ways = [max(going.least(there.node.id, model), _freed_at_least(there, need, going))]
        if going.leaving(there.node.id):
            ways.append(EFFORT["wait"])
        if held == {"memory"}:
            ways.append(EFFORT["memory"])
        if held == {"gpus-free"} and any((u.broken or u.apart) and not u.holder for u in there.units):
            ways.append(EFFORT["gpu-health"])
        total += min(ways)
    return total


def _freed_at_least(there: Room, need: Need, going: Going) -> int:
    """What it costs at least to free as many GPUs as are missing, by what each shard here holds."""
    missing = need.resources.gpus - sum(not unit.holder for unit in there.units)
    most = max((len(shard.spec.gpus) for shard in going.on(there.node.id)), default=0)
    return EFFORT["gpus-free"] * math.ceil(missing / most) if missing > 0 and most else 0


class Going:
    """Which replicas of a model go when it is scaled down, in the order in which they go."""

    def __init__(self, world: World, now: float) -> None:
        self._world, self._now = world, now
        self._options: dict[ModelName, tuple[tuple[int, tuple[Shard, ...]], ...]] = {}
        self._here: dict[NodeId, list[Shard]] = {}
        self._replicas: dict[ModelName, dict[str, list[Shard]]] | None = None
        for shard in world.shards.values():
            self._here.setdefault(shard.node, []).append(shard)

    def on(self, node: NodeId) -> tuple[Shard, ...]:
        return tuple(sorted(self._here.get(node, ()), key=lambda shard: shard.id))

    def leaving(self, node: NodeId) -> list[Shard]:
        return [shard for shard in self.on(node) if shard.want is not Want.RUN]

    def hung(self, node: NodeId) -> list[Shard]:
        """What should have ended there long ago."""
        due = ((shard, ends_by(self._world, shard)) for shard in self.on(node))
        return [shard for shard, at in due if at is not None and at <= self._now]

    def options(self, model: ModelName, node: NodeId) -> Iterator[tuple[int, tuple[Shard, ...]]]:
        """How far to scale a model down so that more and more of it leaves a node, and all that goes with it."""
        most = 0
        for to, going in self._of(model):
            if (here := sum(shard.node == node for shard in going)) > most:
                most = here
                yield to, going

    def least(self, node: NodeId, but: ModelName) -> int:
        """What it costs at least that anything of other models leaves a node."""
        others = {shard.model for shard in self._here.get(node, ()) if shard.want is Want.RUN} - {but}
        first = (next(self.options(model, node), None) for model in others)
        replicas = [len({shard.replica for shard in option[1]}) for option in first if option is not None]
        return EFFORT["gpus-free"] * min(replicas) if replicas else BOUGHT

    def _of(self, model: ModelName) -> tuple[tuple[int, tuple[Shard, ...]], ...]:
        """What goes with each step by which a model is scaled down."""
        if model not in self._options:
            placed = self._placed(model)
            standing = min(len(placed), self._wanted(model))
            steps = range(standing - 1, max(-1, standing - 1 - _MOST_STEPS), -1)
            calm = self._calm(model, placed)
            if calm is None:
                self._options[model] = tuple((to, self._leaving(model, to)) for to in steps)
            else:
                every = [tuple(calm[at:]) for at in steps]
                options = zip(steps, every, strict=True)
                self._options[model] = tuple((to, tuple(s for r in gone for s in r.members)) for to, gone in options)
        return self._options[model]

    def _calm(self, model: ModelName, placed: Mapping[str, Sequence[Shard]]) -> list[Replica] | None:
        """The replicas of a model that are all worth the same, of which the plan lets the last go; else None."""
        known = self._world.models.get(model)
        if known is None or len(placed) > known.replicas:
            return None
        found = replicas(shard for members in placed.values() for shard in members)
        for replica in found:
            nodes = [self._world.nodes.get(node) for node in replica.nodes]
            if not replica.sound or not replica.ready or replica.revision != known.revision:
                return None
            if any(n is None or n.stage is not Stage.READY or n.cordoned or n.draining for n in nodes):
                return None
        return found

    def _wanted(self, model: ModelName) -> int:
        known = self._world.models.get(model)
        return 0 if known is None else idle.wanted(self._world, known, self._now)

    def _placed(self, model: ModelName) -> dict[str, list[Shard]]:
        if self._replicas is None:
            self._replicas = {}
            for shard in self._world.shards.values():
                if shard.want is Want.RUN:
                    self._replicas.setdefault(shard.model, {}).setdefault(shard.replica, []).append(shard)
        return self._replicas.get(model, {})

    def _leaving(self, model: ModelName, to: int) -> tuple[Shard, ...]:
        """What leaves when a model is scaled to so many replicas, as the plan has it."""
        from llmgw.plane.plan import plan  # it says in a word what is nearest, and so needs this module's neighbours
        from llmgw.plane.steps import Drain, GiveUp, Stop

        world = self._world
        fewer = Map({model: replace(world.models[model], replicas=to)})
        of_it = Map({shard.id: shard for members in self._placed(model).values() for shard in members})
        alone = attrs.evolve(world, models=fewer, shards=of_it, settling_until=None)
        steps = plan(alone, self._now).steps
        leaving = {step.shard for step in steps if isinstance(step, Drain | Stop | GiveUp)}
        return tuple(shard for id, shard in sorted(of_it.items()) if id in leaving)


# One node ----------------------------------------------------------------------------------------------------


def on_node(
    world: World,
    node: Node,
    need: Need,
    model: ModelName,
    now: float,
    going: Going,
    times: int = 1,
    limit: int = BOUGHT,
) -> Iterator[tuple[Change, ...]]:
    """Sets of changes after which so many replicas should fit on this node, the least effort first, below a limit."""
    spans = need.resources.gpus > 1
    need = attrs.evolve(need, resources=_times(need.resources, times))
    must, here = _must(only(world, node.id, going), node.id, need, now)
    if must is None:
        return
    there = room(here.nodes[node.id], here.shards.values(), now)
    found: list[tuple[int, int, tuple[tuple[str, ...], ...], tuple[Change, ...]]] = []
    for freed, ids in _freeing(node.id, model, going):
        if effort(must) + effort(freed) >= min(
            limit, sorted(entry[0] for entry in found)[2] if len(found) > 2 else limit
        ):
            break  # what comes costs more than what there is
        if not _enough(there, need, ids, here):
            continue
        rest = _rest(applied(here, freed), node.id, need, now, spans)
        if rest is not None:
            answer = (*must, *freed, *rest)
            found.append((effort(answer), len(answer), tuple(change.key for change in answer), answer))
    for *_, answer in sorted(found, key=lambda entry: entry[:3]):
        yield answer


def _enough(there: Room, need: Need, ids: Collection[ShardId], here: World) -> bool:
    """Whether these shards leave enough GPUs and threads behind them; a look that spares most of the work."""
    freed = [here.shards[id] for id in ids]
    threads = there.threads_free + sum(shard.spec.resources.cpu_threads for shard in freed)
    if need.resources.cpu_threads > threads:
        return False
    return need.resources.gpus <= sum(not unit.holder or unit.holder in ids for unit in there.units)


def _times(asked: Resources, times: int) -> Resources:
    return replace(
        asked,
        gpus=asked.gpus * times,
        cpu_threads=asked.cpu_threads * times,
        memory_bytes=asked.memory_bytes * times,  # the weights come once
    )


def only(world: World, node: NodeId, going: Going) -> World:
    """The world of one node, which is all that its room depends on."""
    shards = Map({shard.id: shard for shard in going.on(node)})
    return attrs.evolve(world, nodes=Map({node: world.nodes[node]}), shards=shards)


def _must(here: World, id: NodeId, need: Need, now: float) -> tuple[tuple[Change, ...] | None, World]:
    """The changes without which nothing runs here, and the world after them; None where none that is known would do."""
    found: list[Change] = []
    while True:
        node, shards = here.nodes[id], here.shards.values()
        there = room(node, shards, now)
        reason = next((r for r in refusals(there, need) if r.check not in _CHOSEN), None)
        if reason is None:
            return tuple(found), here
        change = _mended(there, reason, need)
        if change is None or change in found:
            return None, here
        found.append(change)
        here = change.after(here)


def _mended(there: Room, reason: Reason, need: Need) -> Change | None:
    """The one change that makes a check pass which has no alternative."""
    node = there.node
    match reason.check:
        case "stage":
            return changes.bring_back(node.id)
        case "cordon" | "drain":
            return changes.uncordon(node)
        case "labels":
            name, _, value = reason.needed.partition("=")
            return changes.label(node.id, name, value)
        case "engine":
            return changes.install(node.id, need.engine, need.version, reason.value)
        case "agent":
            return changes.upgrade(node, reason.needed)
        case "node-health":
            code = reason.value.partition(":")[0]
            if code == FULL_DISK:
                return next(_disk(there, need, sick=True), None)
            return changes.acknowledge(node, "node", code)
    return None


def _freeing(node: NodeId, model: ModelName, going: Going) -> Iterator[tuple[tuple[Change, ...], frozenset[ShardId]]]:
    """Every way to have less on a node, the least effort first, and the shards that leave it: what is on its way out
    is awaited, other models are scaled down, or nothing is."""
    here, leaving = going.on(node), going.leaving(node)
    axes: list[list[tuple[int, Change | None, frozenset[ShardId]]]] = []
    if leaving:
        ids = frozenset(shard.id for shard in leaving)
        away = changes.wait(leaving, going.hung(node))
        axes.append([(0, None, frozenset()), (away.effort, away, ids)])
    for other in sorted({shard.model for shard in here if shard.want is Want.RUN and shard.model != model}):
        options: list[tuple[int, Change | None, frozenset[ShardId]]] = [(0, None, frozenset())]
        for to, gone in going.options(other, node):
            change = changes.scale(other, to, gone)
            options.append((change.effort, change, frozenset(shard.id for shard in gone if shard.node == node)))
        axes.append(options)
    begin = (0,) * len(axes)
    heap, seen = [(0, begin)], {begin}
    for _ in range(_MOST_WAYS):
        if not heap:
            return
        spent, at = heapq.heappop(heap)
        if spent >= BOUGHT:
            return
        chosen = [axis[index] for axis, index in zip(axes, at, strict=True)]
        yield (
            tuple(change for _, change, _ in chosen if change is not None),
            frozenset(id for _, _, ids in chosen for id in ids),
        )
        for axis, index in enumerate(at):
            further = (*at[:axis], index + 1, *at[axis + 1 :])
            if index + 1 < len(axes[axis]) and further not in seen:
                seen.add(further)
                heapq.heappush(heap, (sum(axes[a][i][0] for a, i in enumerate(further)), further))


def _rest(here: World, id: NodeId, need: Need, now: float, spans: bool) -> tuple[Change, ...] | None:
    """What else it takes when nothing more is stopped; None when that is not enough."""
    resources, shards = need.resources, tuple(here.shards.values())
    there = room(here.nodes[id], shards, now)
    found: list[Change] = []
    if resources.cpu_threads > there.threads_free:
        return None
    if resources.memory_bytes > there.memory_free:
        promised = there.memory_bytes - sum(shard.spec.resources.memory_bytes for shard in shards)
        if resources.memory_bytes > promised:
            return None
        value, wanted = _gib(max(0, there.memory_free)), _gib(resources.memory_bytes)
        found.append(changes.free_memory(there.node, value, wanted))
    if not need.leader_reads and (size := there.disk_needed(need.source, resources.disk_bytes)):
        if there.disk_free is None:
            return None
        if size > there.disk_free:
            freed = tuple(_disk(there, need))
            if not freed:
                return None
            found += freed
    if not resources.gpus:
        return tuple(found)
    units = _gpus(there, need, spans)
    return None if units is None else (*found, *units)


def _disk(there: Room, need: Need, *, sick: bool = False) -> Iterator[Change]:
    """Room for the weights, where the disk is large enough for them beside what was promised to others."""
    facts = there.node.facts
    disk = next((d for d in facts.host.disks if d.purpose == "weights"), None) if facts is not None else None
    if disk is None or there.disk_free is None:
        return
    promised = disk.free_bytes - there.disk_free
    size = there.disk_needed(need.source, need.resources.disk_bytes)
    wanted = size + promised
    if wanted > disk.total_bytes > 0:
        return
    value = _gib(max(0, there.disk_free))
    yield changes.free_disk(there.node, wanted, value, _gib(size) if not sick else "more")


def _gpus(there: Room, need: Need, spans: bool) -> tuple[Change, ...] | None:
    """The least that makes enough GPUs usable; None when too few could ever be."""
    facts, wanted = there.node.facts, need.resources.gpus
    assert facts is not None
    found: list[tuple[Change, ...]] = []
    fabric = changes.mend_fabric(there.node.id, next((u.apart or u.broken for u in there.units if _waits(u)), ""))
    for mended in (False, True):
        costs = sorted(
            (
                (effort(parts), at, parts)
                for at, unit in enumerate(there.units)
                if (parts := _unit(there, unit, need, spans=spans, mended=mended)) is not None
            ),
            key=lambda entry: entry[:2],
        )
        if len(costs) >= wanted:
            chosen = [change for _, _, parts in costs[:wanted] for change in parts]
            found.append(tuple(dict.fromkeys([fabric, *chosen] if mended else chosen)))
    return min(found, key=lambda parts: (effort(parts), len(parts)), default=None)


def _waits(unit: Unit) -> bool:
    return "fabric" in unit.apart or unit.broken.startswith("its fabric")


def _unit(there: Room, unit: Unit, need: Need, *, spans: bool, mended: bool) -> tuple[Change, ...] | None:
    """What makes one GPU usable; None when nothing here does. `spans`: a replica has several; `mended`: its node's
    NVLink fabric is up."""
    resources, node = need.resources, there.node
    if unit.holder:
        return None
    if (wants := resources.compute_capability) is not None and (unit.capability is None or unit.capability < wants):
        return None
    if resources.gpu_memory_bytes and (unit.memory_bytes or 0) < resources.gpu_memory_bytes:
        return None
    found: list[Change] = []
    gpu = _gpu_of(node, unit.uuid)
    if gpu.unreadable:
        found.append(changes.mend_gpu(node.id, gpu))
    for subject in dict.fromkeys((f"gpu:{gpu.uuid}", f"gpu:{unit.uuid}")):
        found += [changes.acknowledge(node, subject, code) for code in bad_problems(node, subject)]
    down = gpu.fabric is not None and (gpu.fabric.state == "not-started" or (spans and bool(unit.apart)))
    if down and not mended:
        return None
    if spans and gpu.mig_enabled:
        return None
    crowded = (
        unit.offered_bytes is None or unit.offered_bytes < resources.gpu_memory_bytes
        if resources.gpu_memory_bytes
        else unit.foreign_bytes > IDLE_FOREIGN
    )
    if crowded:
        found.append(changes.stop_foreign(node, unit.uuid, f"{_gib(unit.foreign_bytes)} in use by others"))
    return tuple(found)


def _gpu_of(node: Node, uuid: str) -> Gpu:
    assert node.facts is not None
    return next(gpu for gpu in node.facts.gpus if gpu.uuid == uuid or any(mig.uuid == uuid for mig in gpu.mig_devices))


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"

"""Which node takes a shard, and why the others do not (D6, D7).

Pure and deterministic. Hard checks come first, each with a stable name; among the nodes that pass, the one wins
that has the weights already, then has fewest replicas of the model, then is left with the least room. A replica of
several nodes will choose among groups of rooms that reach one another; the checks of one node stay what they are.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping

import attrs

from llmgw.plane.rooms import Room, Unit, room
from llmgw.plane.world import Model, Node, Reason, Shard, Stage, World
from llmgw.wire.facts import EngineInstall, InstallState, ModelName, NodeId, Resources, ShardId

GIB = 1 << 30

#: What an agent can install that says nothing of it (A7).
SILENT_INSTALLS = ("llama.cpp",)


@attrs.frozen
class Need:
    """What one shard asks of a node."""

    engine: str
    version: str
    source: str
    resources: Resources
    labels: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, model: Model) -> Need:
        profile = model.profile
        labels = tuple(sorted(profile.labels.items()))
        return cls(profile.engine, profile.engine_version, profile.source, profile.resources, labels)


@attrs.frozen
class Choice:
    """The node that takes the shard, the GPUs it takes, and why this one."""

    node: NodeId
    gpus: tuple[str, ...]
    why: str


def refusals(room: Room, need: Need, *, despite_cordon: bool = False) -> Iterator[Reason]:
    """Every check that this node fails, the cheapest to see first; nothing when it takes the shard.

    `despite_cordon`: a shard that is here already may be started again on a cordoned node.
    """
    node, resources = room.node, need.resources

    def no(check: str, value: str, needed: str, text: str, age: float | None = None) -> Reason:
        return Reason(node.id, check, value, needed, age, f"{node.id}: {text}")

    if node.facts is None:
        yield no("inventory", "unknown", "registered", "has not registered since the plane started", room.heard_age)
        return
    if node.stage is not Stage.READY:
        yield no("stage", node.stage.value, "ready", f"is {node.stage.value}", room.heard_age)
    if node.draining:
        yield no("drain", "draining", "not draining", "is being drained")
    elif node.cordoned and not despite_cordon:
        yield no("cordon", "cordoned", "not cordoned", "is cordoned")
    if room.sick:
        yield no("node-health", room.sick, "no bad problem", f"has a bad problem ({room.sick})", room.facts_age)
    for name, value in need.labels:
        has = room.labels.get(name)
        if has != value:
            words = f"has the label {name}={has}" if has is not None else f"has no label {name}"
            yield no("labels", "" if has is None else f"{name}={has}", f"{name}={value}", f"{words}, not {name}={value}")
    if words := engine_missing(node, need.engine, need.version):
        wanted = f"{need.engine} {need.version}".strip()
        yield no("engine", words, wanted, f"cannot run {wanted}: {words}", room.facts_age)
    if resources.cpu_threads > room.threads_free:
        value = f"{max(0, room.threads_free)} of {room.threads} free"
        text = f"has {value} CPU threads, {resources.cpu_threads} needed"
        yield no("cpu-threads", value, str(resources.cpu_threads), text, room.facts_age)
    if resources.memory_bytes > room.memory_free:
        value, needed = _gib(max(0, room.memory_free)), _gib(resources.memory_bytes)
        text = f"has {value} of {_gib(room.memory_bytes)} memory to give, {needed} needed"
        yield no("memory", value, needed, text, room.heard_age)
    if resources.disk_bytes and need.source not in room.weights:
        if room.disk_free is None:
            yield no("disk", "unknown", _gib(resources.disk_bytes), "says nothing of the disk for weights", room.facts_age)
        elif resources.disk_bytes > room.disk_free:
            value, needed = _gib(max(0, room.disk_free)), _gib(resources.disk_bytes)
            yield no("disk", value, needed, f"has {value} of disk for weights, {needed} needed", room.heard_age)
    if resources.gpus:
        fitting, check = _gpus(room, resources)
        if check is not None:
            value, needed, text, age = check[1:]
            yield no(check[0], value, needed, text, age)
        assert check is not None or len(fitting) >= resources.gpus


def engine_missing(node: Node, engine: str, version: str) -> str:
    """Why a node cannot run an engine; "" when it has it, or can install it when told to."""
    assert node.facts is not None
    known = [install for install in node.facts.installs if install.engine == engine]
    fitting = [install for install in known if not version or install.version == version]
    for state in (InstallState.INSTALLED, InstallState.INSTALLING, InstallState.FAILED, InstallState.UNSUPPORTED):
        found = next((install for install in fitting if install.state is state), None)
        if found is not None:
            return "" if state is InstallState.INSTALLED else _install_words(found)
    installable = SILENT_INSTALLS if node.facts.installable is None else node.facts.installable
    if engine in installable:
        return ""
    if known:
        have = ", ".join(sorted(install.version or "an unknown version" for install in known))
        return f"has {have} and cannot install another"
    return "not installed, and the node cannot install it"


def installed(node: Node, need: Need) -> bool:
    return node.facts is not None and any(
        i.engine == need.engine and i.state is InstallState.INSTALLED and need.version in ("", i.version)
        for i in node.facts.installs
    )


def _install_words(install: EngineInstall) -> str:
    return f"{install.state.value}: {install.detail}" if install.detail else install.state.value


def _gpus(room: Room, need: Resources) -> tuple[tuple[Unit, ...], tuple[str, str, str, str, float | None] | None]:
    """The units that would do, and the first check at which too few are left, with its words."""
    wanted = need.gpus
    units = room.units
    if not units:
        absent = room.node.facts.gpu_driver.absent if room.node.facts is not None else ""
        words = f"has no GPUs ({absent})" if absent else "has no GPUs"
        return (), ("gpus", "0", str(wanted), f"{words}, {wanted} needed", room.facts_age)

    def short(check: str, left: tuple[Unit, ...], value: str, needed: str, words: str, age: float | None):  # type: ignore[no-untyped-def]
        return left, (check, value, needed, f"{words}: {len(left)} left, {wanted} needed", age)

    left = units
    if len(left) < wanted:
        return left, ("gpus", str(len(left)), str(wanted), f"has {len(left)} GPUs, {wanted} needed", room.facts_age)
    if need.compute_capability is not None:
        wants = need.compute_capability
        left = tuple(u for u in left if u.capability is not None and u.capability >= wants)
        if len(left) < wanted:
            has = ", ".join(sorted({_dotted(u.capability) for u in units}))
            text = f"has GPUs of compute capability {has}, {_dotted(wants)} needed"
            return short("compute-capability", left, has, _dotted(wants), text, room.facts_age)
    if need.gpu_memory_bytes:
        before, left = left, tuple(u for u in left if (u.memory_bytes or 0) >= need.gpu_memory_bytes)
        if len(left) < wanted:
            has = ", ".join(sorted({"unknown" if u.memory_bytes is None else _gib(u.memory_bytes) for u in before}))
            text = f"has GPUs of {has}, {_gib(need.gpu_memory_bytes)} needed"
            return short("gpu-memory", left, has, _gib(need.gpu_memory_bytes), text, room.facts_age)
    before, left = left, tuple(u for u in left if not u.broken)
    if len(left) < wanted:
        first = next(u for u in before if u.broken)
        return short("gpu-health", left, first.broken, "no bad problem", f"{first.uuid} {first.broken}", first.broken_age)
    if wanted > 1:
        before, left = left, tuple(u for u in left if not u.apart)
        if len(left) < wanted:
            first = next(u for u in before if u.apart)
            return short("gpu-fabric", left, first.apart, "completed", f"{first.uuid}: {first.apart}", room.heard_age)
    before, left = left, tuple(u for u in left if not u.holder)
    if len(left) < wanted:
        holders = ", ".join(sorted({u.holder for u in before if u.holder}))
        value = f"{len(left)} of {len(units)} free"
        return left, ("gpus-free", value, str(wanted), f"has {value} GPUs ({holders} hold the rest), {wanted} needed", None)
    before, left = left, tuple(u for u in left if _undisturbed(u, need))
    if len(left) < wanted:
        worst = max(before, key=lambda u: u.foreign_bytes)
        has = f"{_gib(worst.foreign_bytes)} in use by others"
        needed = _gib(need.gpu_memory_bytes) if need.gpu_memory_bytes else "an idle GPU"
        return short("gpu-foreign", left, has, needed, f"{worst.uuid} has {has}", room.heard_age)
    return left, None


def _undisturbed(unit: Unit, need: Resources) -> bool:
    if not need.gpu_memory_bytes:
        return unit.foreign_bytes <= IDLE_FOREIGN
    return unit.offered_bytes is not None and unit.offered_bytes >= need.gpu_memory_bytes


#: A shard that does not say how much it needs takes the whole GPU, so others may hold no more than this.
IDLE_FOREIGN = 512 << 20


def pick(room: Room, need: Need) -> tuple[str, ...]:
    """The GPUs that the shard takes on a node that has room: those without a warning first, then by index."""
    if not need.resources.gpus:
        return ()
    fitting, _ = _gpus(room, need.resources)
    order = sorted(range(len(fitting)), key=lambda n: (fitting[n].warned, n))
    return tuple(fitting[n].uuid for n in sorted(order[: need.resources.gpus]))


_Score = tuple[bool, int, int, int]


class Rooms:
    """Every node's room while one plan is made. Choosing costs a logarithm of the fleet, not the fleet.

    Scores are kept by need and refreshed only for nodes on which something was held or released since.
    """

    def __init__(self, world: World, now: float) -> None:
        self._nodes: Mapping[NodeId, Node] = world.nodes
        self._now = now
        self._held: dict[NodeId, dict[ShardId, Shard]] = {}
        self._replicas: dict[tuple[ModelName, NodeId], int] = {}
        for shard in world.shards.values():
            self._count(shard, 1)
            self._held.setdefault(shard.node, {})[shard.id] = shard
        self._rooms: dict[NodeId, Room] = {}
        self._log: list[NodeId] = []
        self._scores: dict[Need, tuple[dict[NodeId, _Score], list[int]]] = {}
        self._heaps: dict[tuple[Need, ModelName], tuple[list[tuple[object, ...]], list[int]]] = {}

    def room(self, node: NodeId, *, without: ShardId | None = None) -> Room | None:
        """A node's room; `without` one shard that is placed there."""
        known = self._nodes.get(node)
        if known is None:
            return None
        held = self._held.get(node, {})
        if without is not None and without in held:
            return room(known, [shard for id, shard in held.items() if id != without], self._now)
        found = self._rooms.get(node)
        if found is None:
            found = self._rooms[node] = room(known, held.values(), self._now)
        return found

    def hold(self, shard: Shard) -> None:
        """The shard is placed: its node has so much less to give."""
        self._held.setdefault(shard.node, {})[shard.id] = shard
        self._count(shard, 1)
        self._touch(shard.node)

    def release(self, shard: Shard) -> None:
        if self._held.get(shard.node, {}).pop(shard.id, None) is not None:
            self._count(shard, -1)
            self._touch(shard.node)

    def here(self, node: NodeId, need: Need, shard: ShardId) -> Choice | None:
        """The place of a shard that starts again on its node, cordoned or not; None when it fits there no more."""
        found = self.room(node, without=shard)
        if found is None or next(refusals(found, need, despite_cordon=True), None) is not None:
            return None
        return Choice(node, pick(found, need), "it ran here before")

    def choose(self, need: Need, model: ModelName, avoid: Collection[NodeId] = ()) -> Choice | None:
        """The best node for one more shard of a model, none of `avoid`; None when no node has room."""
        heap = self._heap(need, model)
        aside: list[tuple[object, ...]] = []
        chosen: NodeId | None = None
        while heap:
            entry = heap[0]
            node = entry[-1]
            assert isinstance(node, str)
            if entry != self._entry(need, model, NodeId(node)):
                heapq.heappop(heap)  # an older score; the newer one is in the heap as well
            elif node in avoid:
                aside.append(heapq.heappop(heap))
            else:
                chosen = NodeId(node)
                break
        for entry in aside:
            heapq.heappush(heap, entry)
        if chosen is None:
            return None
        found = self.room(chosen)
        assert found is not None
        return Choice(chosen, pick(found, need), self._why(found, need, model))

    def refused(self, need: Need) -> tuple[Reason, ...]:
        """Every node's failing checks, by node name."""
        found: list[Reason] = []
        for node in sorted(self._nodes):
            here = self.room(node)
            assert here is not None
            found += refusals(here, need)
        return tuple(found)

    def _why(self, room: Room, need: Need, model: ModelName) -> str:
        others = self._replicas.get((model, room.node.id), 0)
        words = ["the weights are there"] if need.source in room.weights else []
        words.append(f"{others} other replicas of the model there" if others else "no other replica of the model there")
        if need.resources.gpus:
            left = sum(not u.holder and not u.broken for u in room.units) - need.resources.gpus
            words.append(f"{left} GPUs left")
        elif need.resources.cpu_threads:
            words.append(f"{room.threads_free - need.resources.cpu_threads} CPU threads left")
        return ", ".join(words)

    def _count(self, shard: Shard, by: int) -> None:
        key = (shard.model, shard.node)
        self._replicas[key] = self._replicas.get(key, 0) + by

    def _touch(self, node: NodeId) -> None:
        self._rooms.pop(node, None)
        self._log.append(node)

    def _score(self, node: NodeId, need: Need) -> _Score | None:
        found = self.room(node)
        if found is None or next(refusals(found, need), None) is not None:
            return None
        resources = need.resources
        gpus = sum(not u.holder and not u.broken for u in found.units) - resources.gpus
        return (
            not installed(found.node, need),
            gpus,
            found.threads_free - resources.cpu_threads,
            found.memory_free - resources.memory_bytes,
        )

    def _fresh(self, need: Need) -> dict[NodeId, _Score]:
        kept = self._scores.get(need)
        if kept is None:
            scores = {node: score for node in self._nodes if (score := self._score(node, need)) is not None}
            kept = self._scores[need] = (scores, [len(self._log)])
        scores, seen = kept
        for node in set(self._log[seen[0] :]):
            score = self._score(node, need)
            if score is None:
                scores.pop(node, None)
            else:
                scores[node] = score
        seen[0] = len(self._log)
        return scores

    def _entry(self, need: Need, model: ModelName, node: NodeId) -> tuple[object, ...] | None:
        score = self._scores[need][0].get(node)
        if score is None:
            return None
        found = self.room(node)
        assert found is not None
        return (need.source not in found.weights, self._replicas.get((model, node), 0), *score, node)

    def _heap(self, need: Need, model: ModelName) -> list[tuple[object, ...]]:
        scores = self._fresh(need)
        kept = self._heaps.get((need, model))
        if kept is None:
            heap = [entry for node in scores if (entry := self._entry(need, model, node)) is not None]
            heapq.heapify(heap)
            self._heaps[need, model] = (heap, [len(self._log)])
            return heap
        heap, seen = kept
        for node in set(self._log[seen[0] :]):
            entry = self._entry(need, model, node)
            if entry is not None:
                heapq.heappush(heap, entry)
        seen[0] = len(self._log)
        return heap


def place(world: World, model: Model, now: float) -> Choice | tuple[Reason, ...]:
    """One decision by itself: where one more replica of a model goes, or why it goes nowhere."""
    rooms, need = Rooms(world, now), Need.of(model)
    return rooms.choose(need, model.name) or rooms.refused(need)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB // 10 or size == 0 else f"{size / (1 << 20):.0f} MiB"


def _dotted(capability: tuple[int, int] | None) -> str:
    return "unknown" if capability is None else f"{capability[0]}.{capability[1]}"

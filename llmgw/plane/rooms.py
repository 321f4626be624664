"""What a node still has to give: its GPUs, threads, memory and disk, less what is reserved, measured or foreign (B4).

Pure. A `Room` is computed from the node and the shards placed on it, so that it can never drift from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from llmgw.plane.world import Node, Shard
from llmgw.wire.facts import Gpu, Grade, ModelName

_NOTHING: Mapping[str, int] = {}

#: Memory that a driver and a display server hold on an idle GPU is nobody's load.
IDLE_BYTES = 1 << 30


@attrs.frozen
class Unit:
    """A GPU, or a MIG device where MIG is on: what one shard takes whole. Bytes are None where unknown.

    `broken` says why it takes no shard at all, `apart` why it takes none that spans GPUs; "" when all is well.
    """

    uuid: str
    memory_bytes: int | None
    foreign_bytes: int
    capability: tuple[int, int] | None
    holder: str = ""  # the shard that it is reserved for
    broken: str = ""
    broken_age: float | None = None
    apart: str = ""
    warned: bool = False
    domain: str = ""  # the NVLink domain in which it reaches GPUs of other nodes
    apart_age: float | None = None  # for how long it has waited for its fabric

    @property
    def offered_bytes(self) -> int | None:
        return None if self.memory_bytes is None else self.memory_bytes - self.foreign_bytes


@attrs.frozen
class Room:
    """One node as placement sees it. Free amounts may be negative: a node can be promised too much by its past."""

    node: Node
    units: tuple[Unit, ...]
    threads: int
    threads_free: int
    memory_bytes: int
    memory_free: int
    disk_free: int | None
    weights: frozenset[str]
    labels: Mapping[str, str]
    sick: str = ""  # a bad problem of the node itself, for whatever would run there
    sick_gpus: str = ""  # one that only shards with GPUs mind
    sick_disk: str = ""  # one that only shards mind whose weights are not there yet
    holders: tuple[str, ...] = ()
    models: frozenset[ModelName] = frozenset()  # of the shards here
    facts_age: float | None = None
    heard_age: float | None = None
    arriving: frozenset[str] = frozenset()  # sources that are brought here, with their room on the disk set aside
    partly: Mapping[str, int] = {}  # bytes that are there of sources that are not complete

    def disk_needed(self, source: str, size: int) -> int:
        """How much of the disk weights of this size still take here."""
        if source in self.weights or source in self.arriving:
            return 0
        return max(0, size - self.partly.get(source, 0))


def labels_of(node: Node) -> dict[str, str]:
    """A node's labels: its own from its configuration, and the operator's, which win."""
    return {**(node.facts.labels if node.facts else {}), **dict(node.labels)}


def weights_of(node: Node) -> frozenset[str]:
    """The sources whose files are all in the node's cache."""
    if node.facts is None or not node.facts.weights:
        return frozenset()
    return frozenset(w.source for w in node.facts.weights if w.complete and not w.error)


def reads(engine: str, rank: int) -> bool:
    """Whether a member reads the weights itself: llama.cpp's followers lend memory and have them from the leader."""
    return engine != "llamacpp" or rank == 0


def room(
    node: Node,
    shards: Iterable[Shard],
    now: float,
    leaving: Iterable[Shard] = (),
    ahead: Mapping[str, int] = _NOTHING,
) -> Room:
    """What `node` has to give beside `shards`, which are all those placed on it.

    `leaving` are shards that give back what they hold: what is still measured as their own is not foreign. `ahead` are
    the sources that are brought here before a shard needs them, with their sizes in bytes.
    """
    facts = node.facts
    held, leaving = tuple(shards), tuple(leaving)
    heard_age = None if node.heard_at is None else max(0.0, now - node.heard_at)
    if facts is None:
        return Room(node, (), 0, 0, 0, 0, None, frozenset(), labels_of(node), heard_age=heard_age)
    weights = weights_of(node)
    threads = facts.host.cpu.threads
    asked = [shard.spec.resources for shard in held]
    memory_free = facts.host.memory_bytes - facts.host.reserved_bytes - sum(r.memory_bytes for r in asked)
    if node.load is not None and node.load.memory_available_bytes:
        # What is available now, less what the shards here may still grow into.
        growth = 0
        for shard in held:
            load = node.shard_loads.get(shard.id)
            growth += max(0, shard.spec.resources.memory_bytes - (load.rss_bytes if load else 0))
        for shard in leaving:
            load = node.shard_loads.get(shard.id)
            growth -= load.rss_bytes if load else 0
        memory_free = min(memory_free, node.load.memory_available_bytes - growth)
    disk = next((d.free_bytes for d in facts.host.disks if d.purpose == "weights"), None)
    partly = {w.source: w.bytes for w in facts.weights if not w.complete}
    arriving = {source: size for source, size in ahead.items() if source not in weights}
    for shard in held:
        spec = shard.spec
        if reads(spec.engine, shard.rank) and spec.source not in weights:
            # What several shards here wait for comes once.
            arriving[spec.source] = max(arriving.get(spec.source, 0), spec.resources.disk_bytes)
    if disk is not None:
        disk -= sum(max(0, size - partly.get(source, 0)) for source, size in arriving.items())
    bad = [
        open_
        for open_ in node.problems.values()
        if open_.problem.grade is Grade.BAD and open_.acknowledged_until is None
    ]
    sick: dict[str, str] = {}
    for open_ in bad:
        if open_.problem.subject == "node":
            sick.setdefault(_minded_by(open_.problem.code), f"{open_.problem.code}: {open_.problem.text}")
    return Room(
        node=node,
        units=_units(node, held, now, leaving),
        threads=threads,
        threads_free=threads - sum(r.cpu_threads for r in asked),
        memory_bytes=max(0, facts.host.memory_bytes - facts.host.reserved_bytes),
        memory_free=memory_free,
        disk_free=disk,
        weights=weights,
        labels=labels_of(node),
        sick=sick.get("all", ""),
        sick_gpus=sick.get("gpus", ""),
        sick_disk=sick.get("disk", ""),
        holders=tuple(sorted(shard.id for shard in held)),
        models=frozenset(shard.model for shard in held),
        facts_age=None if node.facts_at is None else max(0.0, now - node.facts_at),
        heard_age=heard_age,
        arriving=frozenset(source for source, size in arriving.items() if size),
        partly=partly,
    )


#: The problem of a disk on which no more weights have room.
FULL_DISK = "disk-full-weights"
#: Bad problems of a whole node that are about its GPUs: an engine on the CPU runs as well as before.
_ABOUT_GPUS = ("driver-", "xid-", "gpu-", "fewer-gpus")


def _minded_by(code: str) -> str:
    """Which shards a bad problem of the node itself keeps away: "all", "gpus", or "disk", those that must fetch.

    A full disk of weights says nothing against weights that are there. A full disk of state does: an engine's
    record and its log are written before it starts.
    """
    if code == FULL_DISK:
        return "disk"
    return "gpus" if code.startswith(_ABOUT_GPUS) else "all"


def _units(node: Node, held: tuple[Shard, ...], now: float, leaving: tuple[Shard, ...]) -> tuple[Unit, ...]:
    assert node.facts is not None
    if not node.facts.gpus:
        return ()
    holders = {uuid: str(shard.id) for shard in held for uuid in shard.spec.gpus}
    ours = {shard.id for shard in (*held, *leaving)}
    known = holders.keys() | {uuid for shard in leaving for uuid in shard.spec.gpus}
    foreign: dict[str, int] = {}
    own: dict[str, int] = {}
    for process in node.gpu_processes:
        if process.shard == "?":
            # Whose it is cannot be told. Beside our shards it may be theirs; on a GPU without any, what the GPU
            # measures is taken as it is.
            continue
        total = own if process.shard in ours else foreign
        total[process.gpu] = total.get(process.gpu, 0) + (process.memory_bytes or 0)
    units: list[Unit] = []
    for gpu in sorted(node.facts.gpus, key=lambda g: (g.index is None, g.index or 0, g.uuid)):
        broken, age, warned = _health(node, gpu, now)
        apart = _fabric(gpu)
        waiting = node.problems.get((f"gpu:{gpu.uuid}", "fabric-not-ready")) if apart else None
        if gpu.fabric is not None and gpu.fabric.state == "not-started" and not broken:
            broken, age = "its fabric is not started: is the fabric manager running?", None
        if gpu.mig_enabled:
            units += [
                Unit(
                    mig.uuid,
                    mig.memory_bytes,
                    foreign.get(mig.uuid, 0),
                    gpu.compute_capability,
                    holders.get(mig.uuid, ""),
                    broken or _bad(node, mig.uuid, now)[0],
                    age,
                    "MIG devices do not reach one another",
                    warned,
                )
                for mig in gpu.mig_devices
            ]
            continue
        load = node.gpu_loads.get(gpu.uuid)
        # A driver may hide processes (containers do): what is used beyond our own is foreign all the same.
        measured = 0
        if load is not None and load.memory_used_bytes is not None and gpu.uuid not in known:
            measured = load.memory_used_bytes - own.get(gpu.uuid, 0)
        taken = max(foreign.get(gpu.uuid, 0), measured if measured > IDLE_BYTES else 0)
        units.append(
            Unit(
                gpu.uuid,
                gpu.memory_bytes,
                taken,
                gpu.compute_capability,
                holders.get(gpu.uuid, ""),
                broken,
                age,
                apart,
                warned,
                (gpu.fabric.domain or "") if gpu.fabric is not None and not apart else "",
                max(0.0, now - waiting.first_at) if waiting is not None else None,
            )
        )
    return tuple(units)


def _health(node: Node, gpu: Gpu, now: float) -> tuple[str, float | None, bool]:
    if gpu.unreadable:
        return f"cannot be read: {gpu.unreadable}", None, False
    if not node.problems:
        return "", None, False
    broken, age = _bad(node, gpu.uuid, now)
    subject = f"gpu:{gpu.uuid}"
    warned = any(key[0] == subject and o.problem.grade is Grade.WARN for key, o in node.problems.items())
    return broken, age, warned


def _bad(node: Node, uuid: str, now: float) -> tuple[str, float | None]:
    subject = f"gpu:{uuid}"
    for key in sorted(node.problems):
        open_ = node.problems[key]
        if key[0] == subject and open_.problem.grade is Grade.BAD and open_.acknowledged_until is None:
            return f"{open_.problem.code}: {open_.problem.text}", max(0.0, now - open_.first_at)
    return "", None


def _fabric(gpu: Gpu) -> str:
    """Why a GPU cannot work together with others; "" where it can, or where there is no NVLink fabric to wait for."""
    fabric = gpu.fabric
    if fabric is None or fabric.state in ("not-supported", ""):
        return ""
    if fabric.state != "completed":
        words = {"in-progress": "In Progress", "not-started": "Not Started"}.get(fabric.state, fabric.state)
        return f"its fabric is not ready ({words})"
    if fabric.status != 0:
        return f"its fabric failed (status {fabric.status})"
    return ""

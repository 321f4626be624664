"""What a shard asks of a node, and every check that a node fails (D6, D7). Pure.

Each check has a stable name, the value there, the value needed and the age of the fact.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from llmgw.plane.memory import Estimate
from llmgw.plane.rooms import Room, Unit, reads, weights_of
from llmgw.plane.world import Model, Node, Profile, Reason, Stage
from llmgw.wire.agent import GANGS
from llmgw.wire.facts import EngineInstall, InstallState, ModelName, Resources, release, same_version

GIB = 1 << 30

#: What an agent can install that says nothing of it (A7).
SILENT_INSTALLS = ("llamacpp",)


@attrs.frozen
class Need:
    """What one replica asks: the same of each of its `nodes`.

    `network` is what joins them, one of "nvlink", "rdma" and "tcp", or several, any of which does; empty for one node.
    `apart` are models that share no node with `model`. `Rooms` makes `estimate` and `took` of `args`, `context` and
    what it knows of the weights.
    """

    engine: str
    version: str
    source: str
    resources: Resources
    labels: tuple[tuple[str, str], ...]
    nodes: int = 1
    network: tuple[str, ...] = ()
    rails: int = 0
    spread: str = ""
    apart: tuple[ModelName, ...] = ()
    model: ModelName = ModelName("")
    args: tuple[str, ...] = ()
    context: int | None = None
    estimate: Estimate | None = None  # of what each GPU must hold, where the profile does not say it
    took: int = 0  # bytes of the host's memory that a run took, where that is more than what is asked for

    @property
    def leader_reads(self) -> bool:
        """Whether only the leading one of several nodes needs the weights: llama.cpp's others lend their memory."""
        return self.nodes > 1 and not reads(self.engine, 1)

    @classmethod
    def of(cls, model: Model) -> Need:
        profile = model.profile
        several = profile.nodes > 1
        return cls(
            profile.engine,
            profile.engine_version,
            profile.source,
            profile.resources,
            tuple(sorted(profile.labels.items())),
            profile.nodes,
            networks(profile) if several else (),
            profile.rails if several else 0,
            profile.spread,
            tuple(sorted(set(profile.apart))),
            model.name,
            profile.args,
            profile.context,
        )


def networks(profile: Profile) -> tuple[str, ...]:
    """What may join the nodes of a replica, the best first. llama.cpp's RPC is TCP, GPUs or not."""
    if profile.network:
        return (profile.network,)
    if profile.resources.gpus and profile.engine != "llamacpp":
        return ("nvlink", "rdma")
    return ("tcp",)


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
    if resources.gpus and room.sick_gpus:
        text = f"has a bad problem with its GPUs ({room.sick_gpus})"
        yield no("node-health", room.sick_gpus, "no bad problem", text, room.facts_age)
    if not need.leader_reads:
        yield from _full_disk(room, need)
    for name, value in need.labels:
        has = room.labels.get(name)
        if has != value:
            words = f"has the label {name}={has}" if has is not None else f"has no label {name}"
            yield no(
                "labels", "" if has is None else f"{name}={has}", f"{name}={value}", f"{words}, not {name}={value}"
            )
    if need.apart and (beside := room.models & set(need.apart)):
        names = ", ".join(sorted(beside))
        yield no("apart", names, f"without {names}", f"runs {names}, which shares no node with this model")
    if need.nodes > 1 and not carries(node):
        version = node.facts.version or "unknown"
        text = f"has an agent of version {version}, which is too old for replicas of several nodes: upgrade its agent"
        yield no("agent", version, GANGS, text, room.facts_age)
    if words := engine_missing(node, need.engine, need.version):
        wanted = f"{need.engine} {need.version}".strip()
        yield no("engine", words, wanted, f"cannot run {wanted}: {words}", room.facts_age)
    if resources.cpu_threads > room.threads_free:
        value = f"{max(0, room.threads_free)} of {room.threads} free"
        text = f"has {value} CPU threads, {resources.cpu_threads} needed"
        yield no("cpu-threads", value, str(resources.cpu_threads), text, room.facts_age)
    if resources.memory_bytes > room.memory_free:
        value, needed = _gib(max(0, room.memory_free)), _gib(resources.memory_bytes)
        before = f" (a run took {_gib(need.took)})" if need.took else ""
        text = f"has {value} of {_gib(room.memory_bytes)} memory to give, {needed} needed{before}"
        yield no("memory", value, needed, text, room.heard_age)
    if not need.leader_reads:
        yield from _too_little_disk(room, need)
    if resources.gpus:
        _, short = _gpus(room, need)
        if short is not None:
            yield no(short.check, short.value, short.needed, short.text, short.age)


def unreadable(room: Room, need: Need) -> Iterator[Reason]:
    """What keeps this node from having the weights, where only one of the nodes needs them."""
    yield from _full_disk(room, need)
    yield from _too_little_disk(room, need)


def _full_disk(room: Room, need: Need) -> Iterator[Reason]:
    if room.sick_disk and fetched(need.source) and need.source not in room.weights:
        text = f"{room.node.id}: has no disk for weights that are not there yet ({room.sick_disk})"
        yield Reason(room.node.id, "node-health", room.sick_disk, "no bad problem", room.facts_age, text)


def _too_little_disk(room: Room, need: Need) -> Iterator[Reason]:
    node, size = room.node.id, room.disk_needed(need.source, need.resources.disk_bytes)
    if not size:
        return
    if room.disk_free is None:
        text = f"{node}: says nothing of the disk for weights"
        yield Reason(node, "disk", "unknown", _gib(size), room.facts_age, text)
    elif size > room.disk_free:
        value, needed = _gib(max(0, room.disk_free)), _gib(size)
        text = f"{node}: has {value} of disk for weights, {needed} needed"
        yield Reason(node, "disk", value, needed, room.heard_age, text)


def fetched(source: str) -> bool:
    """Whether weights must be brought to the node: those of a hub or a URL; a path names files that are there."""
    return "://" in source and not source.startswith("file://")


def brought(node: Node, source: str) -> bool:
    """Whether weights need not be brought to a node any more."""
    return not fetched(source) or source in weights_of(node)


def carries(node: Node) -> bool:
    """Whether a node's agent can be given a part of a replica of several nodes, by what it last said of itself."""
    return node.facts is not None and GANGS in node.facts.features


def engine_missing(node: Node, engine: str, version: str) -> str:
    """Why a node cannot run an engine; "" when it has it, is installing it, or can install it when told to."""
    assert node.facts is not None
    known = [install for install in node.facts.installs if install.engine == engine]
    # What cannot be here at all cannot be at any version.
    never = (InstallState.UNSUPPORTED, "")
    fitting = [i for i in known if not version or same_version(version, i.version) or (i.state, i.version) == never]
    for state in (InstallState.INSTALLED, InstallState.INSTALLING, InstallState.FAILED, InstallState.UNSUPPORTED):
        found = next((install for install in fitting if install.state is state), None)
        if found is not None:
            return "" if state in (InstallState.INSTALLED, InstallState.INSTALLING) else _install_words(found)
    installable = SILENT_INSTALLS if node.facts.installable is None else node.facts.installable
    if engine in installable:
        return ""
    here = [install.version or "an unknown version" for install in known if install.state is InstallState.INSTALLED]
    if here:
        have = ", ".join(sorted(here))
        return f"has {have} and cannot install another"
    return "not installed, and the node cannot install it"


def installed(node: Node, need: Need) -> bool:
    return node.facts is not None and any(
        i.engine == need.engine
        and i.state is InstallState.INSTALLED
        and (not need.version or same_version(need.version, i.version))
        for i in node.facts.installs
    )


def installed_versions(node: Node, need: Need) -> tuple[str, ...]:
    """At which versions a node that has room could run its part of a replica, whose members must have one version.

    "" stands for a version that nobody knows yet: the engine is not installed there. Builds of one version are one.
    """
    if need.version:
        return (need.version,)
    installs = node.facts.installs if node.facts is not None else ()
    mine = [install for install in installs if install.engine == need.engine]
    for state in (InstallState.INSTALLED, InstallState.INSTALLING):
        if found := {release(install.version) for install in mine if install.state is state}:
            return tuple(sorted(found))
    return ("",)


def _install_words(install: EngineInstall) -> str:
    return f"{install.state.value}: {install.detail}" if install.detail else install.state.value


@attrs.frozen
class _Short:
    """The check at which too few GPUs are left."""

    check: str
    value: str
    needed: str
    text: str
    age: float | None = None


def _gpus(room: Room, asked: Need) -> tuple[tuple[Unit, ...], _Short | None]:
    """The units that would do; or those still left when a check leaves too few, and that check.

    What no operator can change comes first, so that a node which never fits says so and not that it is busy.
    """
    need = asked.resources
    wanted, units = need.gpus, room.units

    def left_of(left: tuple[Unit, ...]) -> str:
        return f"{len(left)} left, {wanted} needed"

    if len(units) < wanted:
        absent = room.node.facts.gpu_driver.absent if room.node.facts is not None else ""
        has = f"{len(units)} GPUs" if units else f"no GPUs ({absent})" if absent else "no GPUs"
        return units, _Short("gpus", str(len(units)), str(wanted), f"has {has}, {wanted} needed", room.facts_age)
    left = units
    if (wants := need.compute_capability) is not None:
        left = tuple(u for u in left if u.capability is not None and u.capability >= wants)
        if len(left) < wanted:
            has = ", ".join(sorted({_dotted(u.capability) for u in units}))
            text = f"has GPUs of compute capability {has}, not {_dotted(wants)}: {left_of(left)}"
            return left, _Short("compute-capability", has, _dotted(wants), text, room.facts_age)
    needed = _gib(need.gpu_memory_bytes) if need.gpu_memory_bytes else "an idle GPU"
    if need.gpu_memory_bytes:
        before, left = left, tuple(u for u in left if (u.memory_bytes or 0) >= need.gpu_memory_bytes)
        if len(left) < wanted:
            has = ", ".join(sorted({"unknown" if u.memory_bytes is None else _gib(u.memory_bytes) for u in before}))
            text = f"has GPUs of {has} memory, not {needed}: {left_of(left)}"
            return left, _Short("gpu-memory", has, needed, text, room.facts_age)
    elif (guess := asked.estimate) is not None:
        before, left = left, tuple(u for u in left if guess.fits(u.memory_bytes))
        if len(left) < wanted:
            sizes = sorted({u.memory_bytes or 0 for u in before})
            share = f" x {guess.share:g}" if guess.share < 1 else ""
            has = ", ".join(f"{_gib(size)}{share}" for size in sizes)
            text = f"has GPUs of {has} memory, too little for {guess.text}: {left_of(left)}"
            return left, _Short("estimate", has, _gib(guess.bytes), text, room.facts_age)
    before, left = left, tuple(u for u in left if not u.broken)
    if len(left) < wanted:
        worst = next(u for u in before if u.broken)
        text = f"{worst.uuid}: {worst.broken}: {left_of(left)}"
        return left, _Short("gpu-health", worst.broken, "no bad problem", text, worst.broken_age)
    if wanted > 1:
        before, left = left, tuple(u for u in left if not u.apart)
        if len(left) < wanted:
            worst = next(u for u in before if u.apart)
            since = "" if worst.apart_age is None else f" for {worst.apart_age:.0f} s"
            text = f"{worst.uuid}: {worst.apart}{since}: {left_of(left)}"
            age = room.heard_age if worst.apart_age is None else worst.apart_age
            return left, _Short("gpu-fabric", worst.apart, "completed", text, age)
    before, left = left, tuple(u for u in left if not u.holder)
    if len(left) < wanted:
        holders = ", ".join(sorted({u.holder for u in before if u.holder}))
        text = f"has {len(left)} of {len(units)} GPUs free, {wanted} needed; held by {holders}"
        return left, _Short("gpus-free", f"{len(left)} of {len(units)} free", str(wanted), text)
    before, left = left, tuple(u for u in left if _undisturbed(u, need))
    if len(left) < wanted:
        worst = max(before, key=lambda u: u.foreign_bytes)
        has = f"{_gib(worst.foreign_bytes)} in use by others"
        return left, _Short("gpu-foreign", has, needed, f"{worst.uuid} has {has}: {left_of(left)}", room.heard_age)
    return left, None


def _undisturbed(unit: Unit, need: Resources) -> bool:
    if not need.gpu_memory_bytes:
        return unit.foreign_bytes <= IDLE_FOREIGN
    return unit.offered_bytes is not None and unit.offered_bytes >= need.gpu_memory_bytes


#: A shard that does not say how much it needs takes the whole GPU, so others may hold no more than this.
IDLE_FOREIGN = 512 << 20


def domains(room: Room, need: Need) -> tuple[str, ...]:
    """The NVLink domains in which a node that has room has enough GPUs for the shard, by name."""
    counts: dict[str, int] = {}
    for unit in _gpus(room, need)[0] if need.resources.gpus else ():
        if unit.domain:
            counts[unit.domain] = counts.get(unit.domain, 0) + 1
    return tuple(sorted(domain for domain, count in counts.items() if count >= need.resources.gpus))


def pick(room: Room, need: Need, domain: str = "") -> tuple[str, ...]:
    """The GPUs that the shard takes on a node that has room: those without a warning first, then by index.

    `domain`: only of this NVLink domain.
    """
    if not need.resources.gpus:
        return ()
    fitting, _ = _gpus(room, need)
    if domain:
        fitting = tuple(unit for unit in fitting if unit.domain == domain)
    order = sorted(range(len(fitting)), key=lambda n: (fitting[n].warned, n))
    return tuple(fitting[n].uuid for n in sorted(order[: need.resources.gpus]))


def took(need: Need) -> str:
    """What a run of this kind took of the host's memory, beyond what the profile asks for."""
    asked = _gib(need.resources.memory_bytes) if need.resources.memory_bytes else "none"
    return f"a run took {_gib(need.took)} of the host's memory, {asked} is asked for"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB // 10 or size == 0 else f"{size / (1 << 20):.0f} MiB"


def _dotted(capability: tuple[int, int] | None) -> str:
    return "unknown" if capability is None else f"{capability[0]}.{capability[1]}"

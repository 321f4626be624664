"""What an operator can do so that a replica fits: each change with its effort, its words and the world after it. Pure.

A change is tried on a world of our own making: nothing happens to the fleet. What it claims is what the checks look
at (rooms.py, checks.py), so that a set of changes can be proved before anybody is told of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import attrs
from msgspec.structs import replace

from llmgw.plane import operate
from llmgw.plane.checks import Need
from llmgw.plane.rooms import FULL_DISK
from llmgw.plane.wires import Fault
from llmgw.plane.world import Node, Shard, Stage, World
from llmgw.wire.agent import Register
from llmgw.wire.facts import (
    Cpu,
    Disk,
    EngineInstall,
    Gpu,
    Grade,
    Host,
    ModelName,
    NodeId,
    Port,
    ShardId,
)

#: What it takes to pass each check, from a command to a purchase.
EFFORT: Mapping[str, int] = {
    "wait": 1,
    "cordon": 1,
    "drain": 1,
    "labels": 2,
    "stage": 3,
    "inventory": 3,
    "evidence": 3,
    "disk": 4,
    "gpu-foreign": 4,
    "engine": 5,
    "engine-match": 5,
    "reboot": 5,
    "agent": 5,
    "ports": 5,
    "node-health": 5,
    "gpu-health": 6,
    "gpu-fabric": 6,
    "rails": 6,
    "nvlink": 6,
    "gpus-free": 8,
    "cpu-threads": 8,
    "memory": 8,
    "apart": 8,
    "gpu-memory": 50,
    "compute-capability": 50,
    "estimate": 50,
    "gpus": 50,
    "nodes": 50,
    "fabric": 50,
}
#: A machine more: what no command does.
BOUGHT = 50

Act = Callable[[World], World]


@attrs.frozen
class Change:
    """Something that an operator can do. Two changes are the same when their keys are."""

    key: tuple[str, ...]
    effort: int = attrs.field(eq=False)
    text: str = attrs.field(eq=False)
    after: Act = attrs.field(eq=False, repr=False)


def applied(world: World, changes: Iterable[Change]) -> World:
    """The world after all of these."""
    for change in changes:
        world = change.after(world)
    return world


def effort(changes: Iterable[Change]) -> int:
    return sum(change.effort for change in changes)


def in_words(changes: Iterable[Change]) -> str:
    return "; ".join(change.text for change in changes)


# A node ------------------------------------------------------------------------------------------------------


def uncordon(node: Node) -> Change:
    text = f"`llmgw ctl uncordon {node.id}`" + (" ends its drain" if node.draining else "")
    return Change(("uncordon", node.id), EFFORT["cordon"], text, lambda w: operate.cordon(w, node.id, False, 0.0)[0])


def label(node: NodeId, name: str, value: str) -> Change:
    return Change(
        ("label", node, name),
        EFFORT["labels"],
        f"`llmgw ctl label {node} {name}={value}`",
        lambda w: operate.label(w, node, {name: value}, 0.0)[0],
    )


def bring_back(node: NodeId) -> Change:
    def after(world: World) -> World:
        back = attrs.evolve(world.nodes[node], stage=Stage.READY, connected=True)
        return attrs.evolve(world, nodes=world.nodes.set(node, back))

    return Change(("back", node), EFFORT["stage"], f"bring {node} back: its agent is not heard", after)


def upgrade(node: Node, feature: str) -> Change:
    """A newer agent, which answers to `feature`."""

    def facts(known: Register) -> Register:
        return replace(known, features=(*known.features, feature))

    text = f"upgrade the agent of {node.id} (it is {node.version or 'of an unknown version'})"
    return Change(("upgrade", node.id), EFFORT["agent"], text, _of_facts(node.id, facts))


def acknowledge(node: Node, subject: str, code: str) -> Change:
    """A problem is mended, or known and taken as it is."""
    problem = node.problems[subject, code].problem

    def after(world: World) -> World:
        here = world.nodes[node.id]
        return attrs.evolve(
            world, nodes=world.nodes.set(node.id, attrs.evolve(here, problems=here.problems.delete((subject, code))))
        )

    what = "" if subject == "node" else f"{subject.partition(':')[2]} of "
    text = f"mend {what}{node.id} ({code}: {problem.text}), or acknowledge the problem"
    grade = EFFORT["node-health" if subject == "node" else "gpu-health"]
    return Change(("problem", node.id, subject, code), grade, text, after)


def free_disk(node: Node, needed: int, there: str, wanted: str) -> Change:
    """Room for weights: `needed` bytes free on that disk."""

    def after(world: World) -> World:
        here = world.nodes[node.id]
        assert here.facts is not None
        host = here.facts.host
        disks = tuple(replace(d, free_bytes=max(d.free_bytes, needed)) if _weights(d) else d for d in host.disks)
        problems = here.problems
        if ("node", FULL_DISK) in problems:
            problems = problems.delete(("node", FULL_DISK))
        here = attrs.evolve(here, facts=replace(here.facts, host=replace(host, disks=disks)), problems=problems)
        return attrs.evolve(world, nodes=world.nodes.set(node.id, here))

    text = f"free disk for weights on {node.id}: {wanted} needed, {there} there"
    return Change(("disk", node.id), EFFORT["disk"], text, after)


def free_memory(node: Node, there: str, wanted: str) -> Change:
    """What else runs on the machine gives memory back."""

    def after(world: World) -> World:
        here = world.nodes[node.id]
        return attrs.evolve(world, nodes=world.nodes.set(node.id, attrs.evolve(here, load=None)))

    text = f"free memory on {node.id}, where others take it: {there} is free, {wanted} needed"
    return Change(("memory", node.id), EFFORT["memory"], text, after)


def install(node: NodeId, engine: str, version: str, there: str) -> Change:
    def facts(known: Register) -> Register:
        rest = tuple(i for i in known.installs if (i.engine, i.version) != (engine, version))
        return replace(known, installs=(EngineInstall(engine=engine, version=version), *rest))

    wanted = f"{engine} {version}".strip()
    return Change(
        ("install", node, engine, version),
        EFFORT["engine"],
        f"install {wanted} on {node} ({there})",
        _of_facts(node, facts),
    )


# GPUs --------------------------------------------------------------------------------------------------------


def mend_gpu(node: NodeId, gpu: Gpu) -> Change:
    text = f"mend {gpu.uuid} of {node}: it cannot be read ({gpu.unreadable})"
    return Change(
        ("gpu", node, gpu.uuid),
        EFFORT["gpu-health"],
        text,
        _of_gpus(node, lambda g: replace(g, unreadable="") if g.uuid == gpu.uuid else g),
    )


def mend_fabric(node: NodeId, there: str) -> Change:
    """The NVLink fabric of all GPUs of a node comes up."""

    def mended(gpu: Gpu) -> Gpu:
        if gpu.fabric is None or gpu.fabric.state in ("not-supported", ""):
            return gpu
        return replace(gpu, fabric=replace(gpu.fabric, state="completed", status=0))

    return Change(
        ("nvlink", node),
        EFFORT["gpu-fabric"],
        f"bring the NVLink fabric of {node} up ({there})",
        _of_gpus(node, mended),
    )


def stop_foreign(node: Node, gpu: str, there: str) -> Change:
    """Processes that are nobody's shard leave a GPU."""
    pids = sorted({(p.pid, p.name) for p in node.gpu_processes if p.gpu == gpu and not p.shard})

    def after(world: World) -> World:
        here = world.nodes[node.id]
        mine = tuple(p for p in here.gpu_processes if p.gpu != gpu or p.shard)
        loads = here.gpu_loads
        if (load := loads.get(gpu)) is not None:
            loads = loads.set(gpu, replace(load, memory_used_bytes=0))
        here = attrs.evolve(here, gpu_processes=mine, gpu_loads=loads)
        return attrs.evolve(world, nodes=world.nodes.set(node.id, here))

    who = ", ".join(f"{pid} {name}".strip() for pid, name in pids) or "processes that its driver hides"
    text = f"stop what else holds memory of {gpu} on {node.id} ({there}): {who}"
    return Change(("foreign", node.id, gpu), EFFORT["gpu-foreign"], text, after)


# Wires -------------------------------------------------------------------------------------------------------


def mendable(node: Node, fault: Fault) -> bool:
    """Whether a rail is there at all: of one that is missing nobody knows what it would be."""
    return node.facts is not None and any(port.device == fault.device for port in node.facts.ports)


def mend_rail(node: Node, fault: Fault) -> Change:
    """A rail is up at its full rate."""

    def mended(port: Port, best: float | None) -> Port:
        if port.device != fault.device:
            return port
        lid = port.lid if port.lid is not None else 1
        sm_lid = port.sm_lid if port.sm_lid is not None else 1
        return replace(port, state="ACTIVE", physical_state="LinkUp", rate_gbps=best, lid=lid, sm_lid=sm_lid)

    def after(world: World) -> World:
        here = world.nodes[node.id]
        assert here.facts is not None
        ports, problems = here.facts.ports, here.problems
        kinds = {(port.hca_type, port.board) for port in ports if port.device == fault.device}
        rates = [p.rate_gbps or 0.0 for p in ports if (p.hca_type, p.board) in kinds]
        confirmed = here.expected.slowest if here.expected is not None else {}
        rates += [confirmed.get(f"{p.role} {p.kind}", 0.0) for p in ports if p.device == fault.device]
        best = max(rates, default=0.0) or None
        for key in problems:
            if key[0].startswith(f"port:{fault.device}/"):
                problems = problems.delete(key)
        facts = replace(here.facts, ports=tuple(mended(port, best) for port in ports))
        return attrs.evolve(world, nodes=world.nodes.set(node.id, attrs.evolve(here, facts=facts, problems=problems)))

    return Change(
        ("rail", node.id, fault.device), EFFORT["rails"], f"mend {fault.device} of {node.id} ({fault.words})", after
    )


def mend_imex(node: NodeId, there: str) -> Change:
    """The IMEX daemon of a node lets its GPUs reach those of others."""

    def facts(known: Register) -> Register:
        return known if known.imex is None else replace(known, imex=replace(known.imex, state="UP"))

    return Change(("imex", node), EFFORT["nvlink"], f"mend IMEX of {node} ({there})", _of_facts(node, facts))


def tested_again(a: NodeId, b: NodeId) -> Change:
    """What was found bad between two nodes is mended, which another test shows."""

    def after(world: World) -> World:
        evidence = world.evidence
        for pair in ((a, b), (b, a)):
            if pair in evidence:
                evidence = evidence.delete(pair)
        return attrs.evolve(world, evidence=evidence)

    text = f"mend what a test found between {a} and {b}, and test again (`llmgw ctl fabric-test {a} {b}`)"
    return Change(("test", a, b), EFFORT["evidence"], text, after)


# Machines more -----------------------------------------------------------------------------------------------


def new_names(count: int) -> tuple[NodeId, ...]:
    """What machines are called here that are not there yet."""
    return tuple(NodeId(f"+{number}") for number in range(1, count + 1))


def buy(like: Node, count: int, words: str, beside: Iterable[NodeId], where: str) -> Change:
    """So many machines more, like one that is there."""

    def after(world: World) -> World:
        nodes = world.nodes
        for name in new_names(count):
            empty = Node(id=name, stage=Stage.READY, stage_at=0.0, facts=like.facts, facts_at=like.facts_at)
            nodes = nodes.set(name, attrs.evolve(empty, connected=True, labels=like.labels, masters=like.masters))
        return attrs.evolve(world, nodes=nodes)

    machines = f"{count} nodes" if count > 1 else "a node"
    text = f"add {machines} with {words} that reach{'' if count > 1 else 'es'} {', '.join(sorted(beside))} {where}"
    return Change(("buy", str(count)), BOUGHT * count, text, after)


def buy_for(need: Need, count: int, words: str) -> Change:
    """So many machines, each of which takes one replica."""
    asked = need.resources
    gpus = tuple(
        Gpu(
            uuid=f"GPU-{at}",
            index=at,
            memory_bytes=asked.gpu_memory_bytes or 1 << 50,
            compute_capability=asked.compute_capability,
        )
        for at in range(asked.gpus)
    )
    disks = (Disk(purpose="weights", path="", free_bytes=asked.disk_bytes, total_bytes=asked.disk_bytes),)
    host = Host(cpu=Cpu(threads=asked.cpu_threads), memory_bytes=asked.memory_bytes, disks=disks)

    def after(world: World) -> World:
        nodes = world.nodes
        for name in new_names(count):
            facts = Register(
                node=name,
                version="",
                host=host,
                gpus=gpus,
                installs=(EngineInstall(engine=need.engine, version=need.version),),
                labels=dict(need.labels),
            )
            made = Node(id=name, stage=Stage.READY, stage_at=0.0, facts=facts, facts_at=0.0, connected=True)
            nodes = nodes.set(name, made)
        return attrs.evolve(world, nodes=nodes)

    machines = f"{count} nodes, each with" if count > 1 else "a node with"
    return Change(("buy", str(count)), BOUGHT * count, f"add {machines} {words}", after)


# Other replicas ----------------------------------------------------------------------------------------------


def scale(model: ModelName, to: int, going: Collection[Shard]) -> Change:
    """Fewer replicas of another model: these shards of it go."""
    replicas = sorted({shard.replica for shard in going})

    def after(world: World) -> World:
        known = world.models.get(model)
        if known is not None:
            world = attrs.evolve(world, models=world.models.set(model, replace(known, replicas=to)))
        return without(world, [shard.id for shard in going])

    where = ", ".join(f"{r} on {', '.join(sorted({s.node for s in going if s.replica == r}))}" for r in replicas)
    goes = "goes" if len(replicas) == 1 else "go"
    text = f"`llmgw ctl scale {model} {to}`: {where} {goes}"
    return Change(("scale", model, str(to)), EFFORT["gpus-free"] * len(replicas), text, after)


def wait(shards: Collection[Shard], hung: Collection[Shard] = ()) -> Change:
    """What is on its way out on a node is gone. What hangs there goes with nothing but a reboot."""
    node, many = min(shard.node for shard in shards), len(hung or shards) > 1
    names = ", ".join(sorted(shard.id for shard in hung or shards))
    ids = [shard.id for shard in shards]
    if hung:
        text = f"reboot {node}, where {names} {'do' if many else 'does'} not end"
    else:
        text = f"wait until {names} on {node} {'have' if many else 'has'} ended"
    return Change(("wait", node), EFFORT["reboot" if hung else "wait"], text, lambda w: without(w, ids))


def without(world: World, ids: Iterable[ShardId]) -> World:
    """The world after these shards are gone and their nodes have told what that gave back."""
    shards, nodes = world.shards, world.nodes
    for id in ids:
        shard = shards.get(id)
        if shard is None:
            continue
        shards = shards.delete(id)
        node = nodes.get(shard.node)
        if node is not None:
            nodes = nodes.set(node.id, given_back(node, shard.id, shard.spec.gpus))
    return attrs.evolve(world, shards=shards, nodes=nodes)


def given_back(node: Node, shard: ShardId, gpus: Collection[str]) -> Node:
    """A node on which a shard's processes have ended: memory and GPUs are free again."""
    load, loads = node.load, node.shard_loads
    if shard in loads:
        if load is not None and load.memory_available_bytes:
            free = load.memory_available_bytes + loads[shard].rss_bytes
            load = replace(load, memory_available_bytes=free)
        loads = loads.delete(shard)
    held = {*gpus, *(process.gpu for process in node.gpu_processes if process.shard == shard)}
    processes, measured = node.gpu_processes, node.gpu_loads
    if held:
        processes = tuple(process for process in processes if process.shard != shard)
        rest = dict.fromkeys(held, 0)
        for process in processes:
            if process.gpu in rest:
                rest[process.gpu] += process.memory_bytes or 0
        measured = measured.update(
            {uuid: replace(measured[uuid], memory_used_bytes=used) for uuid, used in rest.items() if uuid in measured}
        )
    return attrs.evolve(node, load=load, shard_loads=loads, gpu_processes=processes, gpu_loads=measured)


def bad_problems(node: Node, subject: str) -> tuple[str, ...]:
    """The codes of the bad problems of a subject that nobody acknowledged, by name."""
    return tuple(
        sorted(
            key[1]
            for key, open_ in node.problems.items()
            if key[0] == subject and open_.problem.grade is Grade.BAD and open_.acknowledged_until is None
        )
    )


def _weights(disk: Disk) -> bool:
    return disk.purpose == "weights"


def _of_facts(node: NodeId, change: Callable[[Register], Register]) -> Act:
    def after(world: World) -> World:
        here = world.nodes[node]
        assert here.facts is not None
        return attrs.evolve(world, nodes=world.nodes.set(node, attrs.evolve(here, facts=change(here.facts))))

    return after


def _of_gpus(node: NodeId, change: Callable[[Gpu], Gpu]) -> Act:
    return _of_facts(node, lambda facts: replace(facts, gpus=tuple(map(change, facts.gpus))))

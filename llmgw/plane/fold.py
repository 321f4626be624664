"""What an agent says, folded into the world: `fold(world, node, message, now, clock)` -> the next world and events.

Pure. A Register replaces a node's whole inventory (A5); a heartbeat gives what changed, where None says nothing
and a list is the whole truth (B2). `World.version` grows only with what matters to placement or routes, never
with load; every change of state is one event with before and after (B7).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

import attrs
from immutables import Map
from msgspec.structs import replace

from llmgw.plane import attempts
from llmgw.plane.event import Event
from llmgw.plane.health import masters, problems
from llmgw.plane.traits import difference, traits
from llmgw.plane.world import DEFAULT, Counts, Node, Readings, Settings, Stage, World
from llmgw.wire.agent import Heartbeat, Register, ShardStatus
from llmgw.wire.facts import NodeId, Port, PortLoad

A = TypeVar("A")


def _swift(kind: type[A]) -> Callable[..., A]:
    """`attrs.evolve` for one slotted class without validators, at a third of its cost: it runs with every heartbeat."""
    names = [field.name for field in attrs.fields(kind)]  # type: ignore[arg-type]
    read, setters = attrgetter(*names), tuple(getattr(kind, name).__set__ for name in names)
    by_name = dict(zip(names, setters, strict=True))

    def evolve(value: A, **changes: object) -> A:
        new = kind.__new__(kind)
        for put, old in zip(setters, read(value), strict=True):
            put(new, old)
        for name, changed in changes.items():
            by_name[name](new, changed)
        return new

    return evolve


_node, _world = _swift(Node), _swift(World)


def fold(
    world: World,
    node: NodeId,
    message: Register | Heartbeat | ShardStatus,
    now: float,
    clock: float,
    settings: Settings = DEFAULT,
    *,
    stream: int = 0,
    address: str = "",
) -> tuple[World, tuple[Event, ...]]:
    """One message of the stream that speaks for a node. A node's first Register makes it known."""
    if type(message) is Heartbeat:
        return _heartbeat(world, node, message, now, clock)
    if type(message) is ShardStatus:
        world, events = _heard(world, node, now, clock)
        world, more = attempts.tell(world, node, message, now, clock, settings)
        return world, events + more
    assert isinstance(message, Register)
    return _register(world, node, message, now, clock, settings, stream, address)


def _heard(world: World, id: NodeId, now: float, clock: float) -> tuple[World, tuple[Event, ...]]:
    node = world.nodes.get(id)
    if node is None:
        return world, ()
    if node.stage is Stage.READY or node.facts is None:
        return _world(world, nodes=world.nodes.set(id, _node(node, heard_at=now))), ()
    back = _node(node, heard_at=now, stage=Stage.READY, stage_at=now)
    return _world(world, nodes=world.nodes.set(id, back), version=world.version + 1), (_returned(node, now, clock),)


def _heartbeat(world: World, id: NodeId, beat: Heartbeat, now: float, clock: float) -> tuple[World, tuple[Event, ...]]:
    node = world.nodes.get(id)
    if node is None:
        return world, ()
    changes: dict[str, Any] = {"heard_at": now}
    events: list[Event] = []
    if node.stage is not Stage.READY and node.facts is not None:
        changes.update(stage=Stage.READY, stage_at=now)
        events.append(_returned(node, now, clock))
    if beat.load is not None:
        changes["load"] = beat.load
        if beat.load.clock:
            changes["clock_offset"] = beat.load.clock - clock
    if beat.shards is not None:
        changes["shard_loads"] = Map({load.shard: load for load in beat.shards})
    if beat.gpus is not None:
        changes["gpu_loads"] = Map({load.uuid: load for load in beat.gpus})
    if beat.gpu_processes is not None:
        changes["gpu_processes"] = beat.gpu_processes
    if beat.problems is not None:
        changes["problems"], more = problems(node, beat.problems, now, clock)
        events += more
    ports = node.facts.ports if node.facts is not None else ()
    if beat.port_facts is not None:
        ports = beat.port_facts
    last = node.ports
    if beat.ports is not None or beat.counts is not None:
        loads = last.last.ports if beat.ports is None else beat.ports
        names = last.names if beat.counters is None else beat.counters
        changes["ports"] = Readings(
            Counts(now, loads, beat.counts), last.last if last.last.ports else last.before, names
        )
    if beat.ports is not None or (beat.port_facts is not None and last.last.ports):
        # Facts that came now are compared with the states told last, too.
        ports, more = _ports(ports, last.last.ports if beat.ports is None else beat.ports, id, clock)
        events += more
    matters = False
    if node.facts is not None:
        facts = _freshened(node.facts, beat, ports)
        if facts is not node.facts:
            changes.update(facts=facts, facts_at=now)
            if (what := difference(traits(node.facts), traits(facts))) is not None:
                events.append(_changed(id, what, clock))
            matters = facts.weights != node.facts.weights
    if beat.managers is not None:
        changes["masters"], quiet, more = masters(node, beat.managers, world.masters_changed, now, clock)
        if more:
            events += more
            world = attrs.evolve(world, masters_changed=quiet)
    version = world.version + (1 if events or matters else 0)
    return _world(world, nodes=world.nodes.set(id, _node(node, **changes)), version=version), tuple(events)


def _freshened(facts: Register, beat: Heartbeat, ports: tuple[Port, ...]) -> Register:
    """The facts with every list that the heartbeat gave put in its place (B8); the same object when none did."""
    new: dict[str, Any] = {}
    if ports is not facts.ports:
        new["ports"] = ports
    if beat.gpu_fabrics is not None:
        new["gpus"] = tuple(replace(gpu, fabric=beat.gpu_fabrics.get(gpu.uuid)) for gpu in facts.gpus)
    if beat.managers is not None:
        new["managers"] = beat.managers
    if beat.imex is not None:
        new["imex"] = beat.imex
    if beat.disks is not None or beat.memory_bytes is not None:
        disks = facts.host.disks if beat.disks is None else beat.disks
        memory = facts.host.memory_bytes if beat.memory_bytes is None else beat.memory_bytes
        new["host"] = replace(facts.host, disks=disks, memory_bytes=memory)
    if beat.installs is not None:
        new["installs"] = beat.installs
    if beat.installable is not None:
        new["installable"] = beat.installable
    if beat.weights is not None:
        new["weights"] = beat.weights
    if beat.share is not None:
        new["share"] = beat.share
    if beat.problems is not None:
        new["problems"] = beat.problems
    return replace(facts, **new) if new else facts


def _ports(
    ports: tuple[Port, ...], loads: tuple[PortLoad, ...], node: NodeId, clock: float
) -> tuple[tuple[Port, ...], list[Event]]:
    """The ports' facts with the state they have now, and an event for each that changed.

    The list is the whole truth: a port that it does not name is not there any more (SE06).
    """
    by_key = {(load.device, load.number): load for load in loads}
    events: list[Event] = []
    kept: list[Port] = []
    changed = False
    for port in ports:
        load = by_key.get((port.device, port.number))
        if load is None:
            changed = True
            events.append(_port(node, port, "gone", clock))
            continue
        now_is = (load.state or port.state, load.physical_state or port.physical_state, load.rate_gbps, load.sm_lid)
        if now_is != (port.state, port.physical_state, port.rate_gbps, port.sm_lid):
            changed = True
            if now_is[0] != port.state:
                events.append(_port(node, port, now_is[0], clock))
            port = replace(port, state=now_is[0], physical_state=now_is[1], rate_gbps=now_is[2], sm_lid=now_is[3])
        kept.append(port)
    return tuple(kept) if changed else ports, events


def _register(
    world: World,
    id: NodeId,
    message: Register,
    now: float,
    clock: float,
    settings: Settings,
    stream: int,
    address: str,
) -> tuple[World, tuple[Event, ...]]:
    known = world.nodes.get(id)
    node = known or Node(id=id, stage=Stage.EXPECTED, stage_at=now, stream=stream, first_clock=clock)
    events: list[Event] = []
    if known is None:
        events.append(_node_event("node-joined", id, f"{id} joined: {_summary(message)}", clock))
    elif node.stage is not Stage.READY:
        events.append(_returned(node, now, clock))
    elif not node.connected:
        events.append(_node_event("node-connected", id, f"{id} is connected again", clock))
    if node.facts is not None and (what := difference(traits(node.facts), traits(message))) is not None:
        events.append(_changed(id, what, clock))
    found, more = problems(node, message.problems, now, clock)
    events += more
    masters_now, quiet, more = masters(node, message.managers, world.masters_changed, now, clock)
    events += more
    gpus = {gpu.uuid for gpu in message.gpus}
    listed = frozenset(status.shard for status in message.shards)
    runs = frozenset((status.shard, status.generation) for status in message.shards)
    node = attrs.evolve(
        node,
        facts=message,
        facts_at=now,
        heard_at=now,
        stage=Stage.READY,
        stage_at=node.stage_at if node.stage is Stage.READY else now,
        connected=True,
        stream=stream or node.stream,
        peer_address=address or node.peer_address,
        problems=found,
        masters=masters_now,
        gpu_loads=Map({uuid: load for uuid, load in node.gpu_loads.items() if uuid in gpus}),
        gpu_processes=node.gpu_processes if gpus else (),
        # Rates go on, and no state of an older list stands over the new facts.
        ports=Readings(before=node.ports.last if node.ports.last.ports else node.ports.before, names=node.ports.names),
        shard_loads=Map({shard: load for shard, load in node.shard_loads.items() if shard in listed}),
    )
    strays = world.strays
    for key in [key for key in strays if key[0] == id and key[1] not in listed]:
        strays = strays.delete(key)
    world = attrs.evolve(
        world,
        nodes=world.nodes.set(id, node),
        strays=strays,
        masters_changed=quiet,
        version=world.version + 1,
    )
    for status in message.shards:
        world, told = attempts.tell(world, id, status, now, clock, settings)
        events += told
    world, told = attempts.unmentioned(world, id, runs, now, clock)
    return world, (*events, *told)


def _summary(facts: Register) -> str:
    gpus = f"{len(facts.gpus)} GPUs" if facts.gpus else "no GPUs"
    return f"{gpus}, {facts.host.cpu.threads} CPU threads, {facts.host.memory_bytes / (1 << 30):.0f} GiB of memory"


def _returned(node: Node, now: float, clock: float) -> Event:
    since = node.stage_at if node.heard_at is None else node.heard_at
    text = f"{node.id} is back after {now - since:.0f} s ({node.stage.value} -> {Stage.READY.value})"
    return _node_event("node-returned", node.id, text, clock, before=node.stage.value, after=Stage.READY.value)


def _changed(id: NodeId, what: dict[str, tuple[str, str]], clock: float) -> Event:
    text = "; ".join(f"{name}: {before or 'none'} -> {after or 'none'}" for name, (before, after) in what.items())
    return _node_event("node-changed", id, f"{id} changed: {text}", clock)


def _port(id: NodeId, port: Port, state: str, clock: float) -> Event:
    name = f"{port.device}/{port.number}"
    text = f"{id} {name}: {port.state or 'unknown'} -> {state}"
    return _node_event("port-changed", id, text, clock, port=name, before=port.state, after=state)


def _node_event(kind: str, id: NodeId, text: str, clock: float, **data: str) -> Event:
    return Event(kind=kind, subject=f"node:{id}", text=text, clock=clock, data={"node": str(id), **data})

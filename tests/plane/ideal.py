"""A real Fleet with nodes that do at once what they are told, and never fail: what a what-if is held against."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import attrs
import trio
from msgspec.structs import replace

from llmgw.plane.fleet import Fleet
from llmgw.plane.store.memory import MemoryStore
from llmgw.plane.whatif import ports_down
from llmgw.plane.world import Settings, Shard, World
from llmgw.wire.agent import Heartbeat, Register, ShardStatus
from llmgw.wire.control import ControlMessage, DrainShard, FetchWeights, StartShard, StopShard
from llmgw.wire.facts import (
    Disk,
    GpuLoad,
    GpuProcess,
    ModelName,
    NodeId,
    ReplicaId,
    ShardId,
    ShardSpec,
    ShardState,
    Weights,
)

GIB = 1 << 30


@attrs.define
class Machine:
    """One node: what it registered, what it runs, and what that takes."""

    fleet: Fleet
    facts: Register
    silent: bool = False
    runs: dict[ShardId, tuple[ShardStatus, ShardSpec]] = attrs.field(factory=dict)

    @property
    def id(self) -> NodeId:
        return self.facts.node

    def connect(self) -> None:
        self.fleet.attach(self.id, 1, "192.0.2.1:5000")
        self.fleet.heard(self.id, 1, self.facts)

    def say(self, message: Heartbeat | ShardStatus) -> None:
        if not self.silent:
            self.fleet.heard(self.id, 1, message)

    def obey(self, command: ControlMessage) -> None:
        match command:
            case StartShard(shard=shard, replica=replica, model=model, generation=generation, spec=spec):
                status = ShardStatus(
                    shard=shard, replica=replica, model=model, generation=generation, state=ShardState.READY, port=1
                )
                self.runs[shard] = (status, spec)
                self._fetch(spec.source, spec.resources.disk_bytes)
                self.say(status)
                self.say(self.loads())
            case FetchWeights(source=source):
                self._fetch(source, self.fleet.world.value.ahead.get((self.id, source), 0))
            case DrainShard(shard=shard, generation=generation):
                self._turn(shard, generation, ShardState.DRAINING)
            case StopShard(shard=shard, generation=generation):
                self._turn(shard, generation, ShardState.STOPPED)
                self.runs.pop(shard, None)
                self.say(self.loads())

    def _turn(self, shard: ShardId, generation: int, state: ShardState) -> None:
        if shard in self.runs:
            status, spec = self.runs[shard]
            self.runs[shard] = (replace(status, state=state), spec)
            self.say(self.runs[shard][0])
        else:  # what is not there is told as stopped
            replica = ReplicaId(shard.rpartition("-")[0])
            model = ModelName(replica.rpartition("-")[0])
            state = ShardState.STOPPED
            self.say(ShardStatus(shard=shard, replica=replica, model=model, generation=generation, state=state))

    def _fetch(self, source: str, size: int) -> None:
        if "://" not in source or any(w.source == source for w in self.facts.weights):
            return
        host = self.facts.host
        disks = tuple(self._less(disk, size) for disk in host.disks)
        weights = (*self.facts.weights, Weights(source=source, complete=True))
        self.facts = replace(self.facts, host=replace(host, disks=disks), weights=weights)
        self.say(Heartbeat(disks=disks, weights=weights))

    def _less(self, disk: Disk, size: int) -> Disk:
        return replace(disk, free_bytes=max(0, disk.free_bytes - size)) if disk.purpose == "weights" else disk

    def loads(self) -> Heartbeat:
        """What its GPUs are measured at: 70 GiB where a shard has one."""
        held = {gpu: shard for shard, (_, spec) in self.runs.items() for gpu in spec.gpus}
        loads = tuple(GpuLoad(gpu.uuid, 70 * GIB if gpu.uuid in held else 0) for gpu in self.facts.gpus)
        processes = tuple(GpuProcess(gpu, 100, "engine", 70 * GIB, shard) for gpu, shard in sorted(held.items()))
        return Heartbeat(gpus=loads, gpu_processes=processes)

    def lose_ports(self, lost: Collection[tuple[str, int]]) -> None:
        """These ports go down, and what talks over them ends."""
        if not lost:
            return
        down = ports_down(self.fleet.world.value.nodes[self.id], lost)
        self.say(down)
        for shard, (status, spec) in sorted(self.runs.items()):
            if any(f"{device}:{number}" in spec.rdma for device, number in lost):
                self.runs.pop(shard)
                self.say(replace(status, state=ShardState.FAILED, cause="its fabric is gone"))

    async def live(self) -> None:
        while True:
            await trio.sleep(5)
            self.say(Heartbeat())


@attrs.define
class Ideal:
    """The fleet and its machines; also the hub, which tells commands at once."""

    fleet: Fleet
    machines: dict[NodeId, Machine] = attrs.field(factory=dict)

    @property
    def world(self) -> World:
        return self.fleet.world.value

    def tell(self, node: NodeId, command: ControlMessage) -> None:
        if not self.machines[node].silent:
            self.machines[node].obey(command)

    def hurt(self, node: str) -> None:
        """The first engine of a node dies."""
        machine = self.machines[NodeId(node)]
        for shard in sorted(machine.runs)[:1]:
            status, _ = machine.runs.pop(shard)
            machine.say(replace(status, state=ShardState.FAILED, cause="it died"))
            machine.say(machine.loads())

    def lose(self, node: str) -> None:
        """A machine is gone, and its stream with it."""
        machine = self.machines[NodeId(node)]
        machine.silent = True
        self.fleet.detach(machine.id, 1)

    def lose_fabric(self, fabric: str) -> frozenset[tuple[NodeId, str, int]]:
        """The ports with this label, and all of them down."""
        found = {
            id: {(port.device, port.number) for port in machine.facts.ports if port.fabric == fabric}
            for id, machine in sorted(self.machines.items())
        }
        for id, ports in found.items():
            self.machines[id].lose_ports(ports)
        return frozenset((id, device, number) for id, ports in found.items() for device, number in ports)


@asynccontextmanager
async def ideal(*registers: Register, settings: Settings) -> AsyncIterator[Ideal]:
    """These nodes, connected to a plane that runs; on a clock that jumps."""
    fleet = Fleet(MemoryStore(), settings=settings)
    made = Ideal(fleet)
    await fleet.load()
    async with trio.open_nursery() as nursery:
        for facts in registers:
            machine = made.machines[facts.node] = Machine(fleet, facts)
            machine.connect()
            nursery.start_soon(machine.live)
        nursery.start_soon(fleet.run, made)
        yield made
        nursery.cancel_scope.cancel()


def placements(world: World) -> list[tuple[object, ...]]:
    """What runs where, in which state, with which GPUs and at which attempt."""
    return sorted(map(_placement, world.shards.values()), key=str)


def _placement(shard: Shard) -> tuple[object, ...]:
    return (shard.id, shard.node, shard.generation, shard.revision, shard.want, shard.state, shard.spec.gpus)

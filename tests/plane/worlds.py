"""Nodes, models and worlds that tests speak about in a line."""

from __future__ import annotations

from collections.abc import Iterable

from immutables import Map
from msgspec.structs import replace

from llmgw.plane.events import Event
from llmgw.plane.fold import fold
from llmgw.plane.plan import plan
from llmgw.plane.steps import Step, enact
from llmgw.plane.world import DEFAULT, Model, Profile, Settings, World
from llmgw.wire.agent import GANGS, Heartbeat, Register, ShardStatus
from llmgw.wire.facts import (
    Cpu,
    Disk,
    EngineInstall,
    Gpu,
    Host,
    ModelName,
    NodeId,
    ReplicaId,
    Resources,
    ShardId,
    ShardState,
)

GIB = 1 << 30
CLOCK = 1_700_000_000.0


def gpus(
    count: int, *, node: str = "n", memory: int = 80 * GIB, capability: tuple[int, int] = (9, 0)
) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(uuid=f"GPU-{node}-{n}", index=n, name="H100", memory_bytes=memory, compute_capability=capability)
        for n in range(count)
    )


def register(
    node: str,
    *,
    threads: int = 8,
    memory: int = 64 * GIB,
    disk: int = 1000 * GIB,
    gpu: int | tuple[Gpu, ...] = 0,
    engines: Iterable[str] = ("llamacpp", "vllm"),
    shards: Iterable[ShardStatus] = (),
    labels: dict[str, str] | None = None,
    engine_ports: tuple[int, int] | None = None,
) -> Register:
    return Register(
        node=NodeId(node),
        version="1",
        features=(GANGS,),
        address=f"{node}.example",
        host=Host(
            hostname=node,
            cpu=Cpu(threads=threads),
            memory_bytes=memory,
            disks=(Disk(purpose="weights", path="/w", free_bytes=disk, total_bytes=disk),),
        ),
        gpus=gpus(gpu, node=node) if isinstance(gpu, int) else gpu,
        installs=tuple(EngineInstall(engine=engine, version="1") for engine in engines),
        shards=tuple(shards),
        labels=labels or {},
        engine_ports=engine_ports,
    )


def profile(
    *,
    engine: str = "llamacpp",
    source: str = "/models/tiny.gguf",
    gpus: int = 0,
    threads: int = 0,
    memory: int = 0,
    gpu_memory: int = 0,
    disk: int = 0,
    capability: tuple[int, int] | None = None,
    labels: dict[str, str] | None = None,
    version: str = "",
    args: tuple[str, ...] = (),
    nodes: int = 1,
) -> Profile:
    return Profile(
        engine=engine,
        source=source,
        engine_version=version,
        args=args,
        nodes=nodes,
        resources=Resources(
            gpus=gpus,
            gpu_memory_bytes=gpu_memory,
            compute_capability=capability,
            cpu_threads=threads,
            memory_bytes=memory,
            disk_bytes=disk,
        ),
        labels=labels or {},
    )


def model(name: str = "tiny", replicas: int = 1, revision: int = 1, of: Profile | None = None) -> Model:
    return Model(name=ModelName(name), profile=of or profile(threads=1), replicas=replicas, revision=revision)


def world(*nodes: Register, models: Iterable[Model] = (), now: float = 0.0) -> World:
    """A world in which these nodes have registered."""
    made = World(models=Map({m.name: m for m in models}))
    for number, node in enumerate(nodes, 1):
        made, _ = fold(made, node.node, node, now, CLOCK, stream=number, address="192.0.2.1")
    return made


def status(shard: str, generation: int = 1, state: ShardState = ShardState.READY, **fields: object) -> ShardStatus:
    replica = shard.rpartition("-")[0]
    return replace(
        ShardStatus(
            shard=ShardId(shard),
            replica=ReplicaId(replica),
            model=ModelName(replica.rpartition("-")[0]),
            generation=generation,
            state=state,
            port=9000,
        ),
        **fields,
    )


def hear(
    world: World,
    node: str,
    message: Register | Heartbeat | ShardStatus,
    now: float = 0.0,
    settings: Settings = DEFAULT,
) -> World:
    return fold(world, NodeId(node), message, now, CLOCK + now, settings)[0]


def fold_events(
    world: World, node: str, message: Register | Heartbeat | ShardStatus, now: float
) -> tuple[World, tuple[Event, ...]]:
    return fold(world, NodeId(node), message, now, CLOCK + now)


def settle(world: World, now: float = 0.0, settings: Settings = DEFAULT) -> tuple[World, tuple[Step, ...]]:
    """The world after the plan's steps, and the steps."""
    steps = plan(world, now, settings).steps
    return enact(world, steps, now, CLOCK + now), steps


def ready(world: World, now: float = 0.0) -> World:
    """Every node says that its shards of this world are ready."""
    for shard in world.shards.values():
        if shard.state in (ShardState.STARTING, ShardState.FETCHING):
            world = hear(world, shard.node, status(shard.id, shard.generation), now)
    return world


def where(world: World) -> dict[str, str]:
    return {shard.id: shard.node for shard in world.shards.values()}

"""Shared by tests of adapters: a node with GPUs, a seat, a shorthand for profiles."""

from __future__ import annotations

from llmgw.node.engines import Found, Seat
from llmgw.wire.agent import Register
from llmgw.wire.facts import Cpu, Gpu, Host, MigDevice, ModelName, NodeId, Resources, ShardSpec

GPUS = tuple(f"GPU-{n:08x}-0000-0000-0000-000000000000" for n in range(8))
MIG = "MIG-11111111-2222-3333-4444-555555555555"
FACTS = Register(
    node=NodeId("gpu-01"),
    version="1",
    host=Host(cpu=Cpu(threads=64), memory_bytes=512 << 30),
    gpus=(
        *(Gpu(uuid=uuid, index=n, memory_bytes=80 << 30, compute_capability=(9, 0)) for n, uuid in enumerate(GPUS[:7])),
        Gpu(
            uuid=GPUS[7],
            index=7,
            memory_bytes=80 << 30,
            compute_capability=(9, 0),
            mig_enabled=True,
            mig_devices=(MigDevice(uuid=MIG, memory_bytes=20 << 30),),
        ),
    ),
)


def spec(
    engine: str,
    *args: str,
    gpus: int = 0,
    context: int | None = None,
    threads: int = 0,
    memory: int = 0,
    gpu_memory: int = 0,
    source: str = "/models/m",
    rank: int = 0,
    peers: tuple[str, ...] = (),
    chosen: tuple[str, ...] | None = None,
    peer_ports: tuple[dict[str, int], ...] | None = None,
    network: dict[str, str] | None = None,
    rdma: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
) -> ShardSpec:
    given = tuple({"master": 8001, "dist+": 8030, "rpc": 8002} for _ in peers)
    return ShardSpec(
        engine=engine,
        model=ModelName("m"),
        source=source,
        args=args,
        context=context,
        resources=Resources(gpus=gpus, cpu_threads=threads, memory_bytes=memory, gpu_memory_bytes=gpu_memory),
        gpus=GPUS[:gpus] if chosen is None else chosen,
        rank=rank,
        peers=peers,
        peer_ports=given if peer_ports is None else peer_ports,
        network=network or {},
        rdma=rdma,
        env=env or {},
    )


def seat(
    engine: str,
    program: str,
    *,
    model: str = "/models/m",
    gpu_memory: int | None = None,
    revision: str = "",
    layers: int | None = None,
    programs: dict[str, str] | None = None,
) -> Seat:
    ports = {"http": 8000, "master": 8001, "rpc": 8002, "internal+": 8010, "nccl": 8020, "dist+": 8030}
    found = Found(engine, (program,), "1", programs=programs or {})
    return Seat(found, "0.0.0.0", ports, model, revision, "10.0.0.1", 4, gpu_memory, layers)

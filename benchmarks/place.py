"""How long placement takes: 1,000 replicas on 1,000 nodes of 8 GPUs, in one plan and decision by decision.

python -m benchmarks.place
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import attrs
from immutables import Map

from llmgw.plane.checks import Need
from llmgw.plane.place import Rooms
from llmgw.plane.plan import plan
from llmgw.plane.steps import enact
from llmgw.plane.world import Model, Node, Profile, Shard, Stage, World
from llmgw.wire.agent import Register, ShardStatus
from llmgw.wire.facts import (
    Cpu,
    EngineInstall,
    Gpu,
    GpuLoad,
    Host,
    ModelName,
    NodeId,
    ReplicaId,
    Resources,
    ShardId,
    ShardSpec,
    ShardState,
    Weights,
)

NODES, GPUS, REPLICAS = 1000, 8, 1000
GIB = 1 << 30


def node(number: int) -> Node:
    """A node of the fleet; one in ten has the weights of the first model already."""
    name = f"gpu-{number:04d}"
    gpus = tuple(
        Gpu(uuid=f"GPU-{number}-{n}", index=n, memory_bytes=80 * GIB, compute_capability=(9, 0)) for n in range(GPUS)
    )
    facts = Register(
        node=NodeId(name),
        version="1",
        host=Host(cpu=Cpu(threads=128), memory_bytes=2048 * GIB),
        gpus=gpus,
        installs=(EngineInstall(engine="vllm", version="1"),),
        weights=(Weights(source="hf://org/m0", complete=True),) if number % 10 == 0 else (),
    )
    loads = Map({gpu.uuid: GpuLoad(gpu.uuid, 500 << 20) for gpu in gpus})
    return Node(
        id=NodeId(name), stage=Stage.READY, stage_at=0.0, facts=facts, facts_at=0.0, heard_at=0.0, gpu_loads=loads
    )


def wanted(name: str, replicas: int, gpus: int) -> Model:
    profile = Profile(
        engine="vllm",
        source=f"hf://org/{name}",
        resources=Resources(gpus=gpus, gpu_memory_bytes=70 * GIB, cpu_threads=4 * gpus, memory_bytes=16 * GIB * gpus),
    )
    return Model(name=ModelName(name), profile=profile, replicas=replicas)


def fleet(*models: Model) -> World:
    nodes = (node(number) for number in range(NODES))
    return World(nodes=Map({n.id: n for n in nodes}), models=Map({m.name: m for m in models}))


def timed(what: Callable[[], object]) -> float:
    begun = time.perf_counter()
    what()
    return time.perf_counter() - begun


def whole_plans() -> None:
    cases = {
        "1 model of 1,000 replicas of 4 GPUs": [wanted("m0", REPLICAS, 4)],
        "1,000 models of 1 replica of 1, 2, 4 or 8 GPUs": [wanted(f"m{n}", 1, 1 << n % 4) for n in range(REPLICAS)],
        "10 models of 100 replicas of 8 GPUs (the fleet is full)": [wanted(f"m{n}", 100, 8) for n in range(10)],
    }
    for words, models in cases.items():
        world = fleet(*models)
        seconds = timed(lambda: plan(world, 0.0))  # noqa: B023 - called at once
        placed = enact(world, plan(world, 0.0).steps, 0.0, 0.0)
        assert len(placed.shards) == REPLICAS
        again = timed(lambda: plan(placed, 0.0))  # noqa: B023 - called at once
        print(f"  {words:58} {seconds:7.3f} s   again, all placed {1000 * again:6.2f} ms")
    crowded = fleet(wanted("m0", 1001, 8))
    placed = enact(crowded, plan(crowded, 0.0).steps, 0.0, 0.0)
    print(f"  {'one replica too many, and why on each of 1,000 nodes':58} {timed(lambda: plan(placed, 0.0)):7.3f} s")


def one_by_one() -> None:
    """Each decision alone, over rooms that are kept: what a running plane pays for one more replica."""
    model = wanted("m0", REPLICAS, 4)
    need, rooms = Need.of(model), Rooms(fleet(model), 0.0)
    spent: list[float] = []
    for number in range(REPLICAS):
        begun = time.perf_counter()
        choice = rooms.choose(need, model.name)
        assert choice is not None
        spec = ShardSpec(
            engine="vllm", model=model.name, source=need.source, resources=need.resources, gpus=choice.members[0].gpus
        )
        rooms.hold(
            Shard(
                id=ShardId(f"m0-{number}-0"),
                replica=ReplicaId(f"m0-{number}"),
                model=model.name,
                rank=0,
                node=choice.nodes[0],
                generation=1,
                spec=spec,
                revision=1,
            )
        )
        spent.append(time.perf_counter() - begun)
    first, rest = spent[0], sorted(spent[1:])
    print(f"  the first, which looks at every node {1000 * first:8.2f} ms")
    print(f"  p50 {1000 * rest[len(rest) // 2]:.3f} ms   p99 {1000 * rest[int(len(rest) * 0.99)]:.3f} ms", end="")
    print(f"   longest {1000 * rest[-1]:.3f} ms")


def a_lost_node() -> None:
    """What a plane pays when a node of a full fleet is lost: a plan from nothing."""
    world = fleet(wanted("m0", 900, 8))
    world = enact(world, plan(world, 0.0).steps, 0.0, 0.0)
    for shard in world.shards.values():
        said = ShardStatus(
            shard=shard.id, replica=shard.replica, model=shard.model, generation=1, state=ShardState.READY, port=1
        )
        world = attrs.evolve(world, shards=world.shards.set(shard.id, attrs.evolve(shard, status=said, ready_at=0.0)))
    lost = next(iter(sorted(shard.node for shard in world.shards.values())))
    gone = attrs.evolve(world.nodes[lost], stage=Stage.LOST)
    world = attrs.evolve(world, nodes=world.nodes.set(lost, gone))
    times = sorted(timed(lambda: plan(world, 1.0)) for _ in range(20))
    assert len(plan(world, 1.0).steps) == 1
    print(f"  one node of 1,000 lost: a plan takes {1000 * times[10]:.1f} ms (median of 20)")


def main() -> None:
    print(f"placement on {NODES} nodes of {GPUS} GPUs (Python {sys.version.split()[0]})")
    print("whole plans:")
    whole_plans()
    print("one decision (choose and hold), aim: p99 below 5 ms:")
    one_by_one()
    a_lost_node()


if __name__ == "__main__":
    main()

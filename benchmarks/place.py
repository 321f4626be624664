"""How long placement takes: 1,000 replicas on 1,000 nodes of 8 GPUs, in one plan and decision by decision; and replicas
of 2 to 4 nodes over InfiniBand, RoCE and NVLink, with tests that found pairs good and bad; and what each part of a
round takes of the plane's loop while nothing changes.

python -m benchmarks.place
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable

import attrs
from immutables import Map
from msgspec.structs import replace

from llmgw.plane import converge, memory
from llmgw.plane import evidence as tests
from llmgw.plane.checks import Need
from llmgw.plane.expect import Expectations
from llmgw.plane.expiry import expire
from llmgw.plane.gateway.route import routes_of
from llmgw.plane.place import Member, Rooms
from llmgw.plane.plan import plan
from llmgw.plane.rollout import Rollouts
from llmgw.plane.steps import enact
from llmgw.plane.store.records import Stored
from llmgw.plane.world import DEFAULT, Evidence, Model, Node, Profile, Shard, Stage, World
from llmgw.wire.agent import GANGS, Register, ShardStatus
from llmgw.wire.facts import (
    Cpu,
    EngineInstall,
    Gid,
    Gpu,
    GpuFabric,
    GpuLoad,
    Host,
    Interface,
    ModelName,
    NodeId,
    Port,
    PortManagers,
    ReplicaId,
    Resources,
    ShardId,
    ShardSpec,
    ShardState,
    SubnetManager,
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


def railed(number: int, kind: str) -> Node:
    """A node with 8 rails on one of four fabrics, or in an NVLink domain of 18; one in twenty has a rail down."""
    plain = node(number)
    assert plain.facts is not None
    down = number % 8 if number % 20 == 0 else -1
    if kind == "nvlink":
        fabric = GpuFabric(state="completed", cluster_uuid=f"rack-{number // 18}", clique=1)
        facts = replace(plain.facts, gpus=tuple(replace(gpu, fabric=fabric) for gpu in plain.facts.gpus))
    else:
        facts = replace(
            plain.facts,
            ports=tuple(rail(number, at, kind, at == down) for at in range(8)),
            managers=tuple(
                PortManagers(device=f"mlx5_{at}", master=SubnetManager(guid=f"sm-{number % 4}", state="master"))
                for at in range(8)
            ),
        )
    own = f"10.{number // 250}.0.{number % 250 + 1}"
    interfaces = [Interface(name="eth20", addresses=(f"{own}/16",), up=True)]
    interfaces += [Interface(name=f"eth{at}", addresses=(f"{address_of(number, at)}/18",), up=True) for at in range(8)]
    host = replace(facts.host, interfaces=tuple(interfaces))
    facts = replace(facts, features=(GANGS,), address=own, host=host)
    return attrs.evolve(plain, facts=facts)


def rail(number: int, at: int, kind: str, down: bool) -> Port:
    return Port(
        device=f"mlx5_{at}",
        kind=kind,
        state="DOWN" if down else "ACTIVE",
        rate_gbps=400.0,
        pci=f"0000:{at + 16:02x}:00.0",
        lid=number + 1,
        sm_lid=1,
        netdev=f"eth{at}",
        gids=gids(number, at) if kind == "roce" else (),
    )


def address_of(number: int, at: int) -> str:
    return f"10.{100 + at}.{number % 4 * 64 + number // 250}.{number % 250 + 1}"


def gids(number: int, at: int) -> tuple[Gid, ...]:
    """A table as adapters have it: each address twice, for both versions of RoCE."""
    texts = ("fe80::1", f"::ffff:{address_of(number, at)}")
    pairs = [(text, kind) for text in texts for kind in ("IB/RoCE v1", "RoCE v2")]
    return tuple(Gid(index, text, kind, f"eth{at}") for index, (text, kind) in enumerate(pairs))


def evidence(nodes: list[Node]) -> Map[tuple[NodeId, NodeId], Evidence]:
    """A tournament's first rounds: five tests of each node, one pair in fifty bad on a rail."""
    found: dict[tuple[NodeId, NodeId], Evidence] = {}
    for at, one in enumerate(nodes):
        for step in (4, 8, 12, 16, 20):
            other = nodes[(at + step) % len(nodes)]
            pair = (min(one.id, other.id), max(one.id, other.id))
            ends = tuple(f"{name} mlx5_{at % 8}/1" for name in pair)
            bad = (at + step) % 50 == 0
            found[pair] = Evidence(clock=0.0, at=0.0, bad=ends if bad else (), good=() if bad else ends)
    return Map(found)


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


def of_several() -> None:
    """Replicas of 2 to 4 nodes until 1,000 nodes are full, each decision alone: choose, and hold all members."""
    cases = {
        "InfiniBand, all 8 rails": ("ib", "rdma", 0),
        "InfiniBand, 6 rails of 8": ("ib", "rdma", 6),
        "RoCE, all 8 rails": ("roce", "rdma", 0),
        "NVLink, 56 domains": ("nvlink", "nvlink", 0),
        "TCP": ("ib", "tcp", 0),
    }
    for words, (kind, network, rails) in cases.items():
        fleet = [railed(number, kind) for number in range(NODES)]
        world = World(nodes=Map({n.id: n for n in fleet}), evidence=evidence(fleet))
        rooms = Rooms(world, 1.0)
        models = [several(f"g{nodes}", nodes, network, rails) for nodes in (2, 3, 4)]
        spent: list[float] = []
        left, turn = list(models), 0
        gc.collect()
        gc.freeze()  # as a plane does once it has started
        while left:
            model = left[turn % len(left)]
            begun = time.perf_counter()
            choice = rooms.choose(Need.of(model), model.name)
            for rank, member in enumerate(choice.members if choice is not None else ()):
                rooms.hold(placed(model, f"{model.name}-{turn}", rank, member))
            spent.append(time.perf_counter() - begun)
            if choice is None:
                left.remove(model)
            turn += 1
        first, rest = spent[0], sorted(spent[1:])
        print(f"  {words:26} {len(spent) - 3:4} replicas   first {1000 * first:6.1f} ms", end="")
        print(f"   p50 {1000 * rest[len(rest) // 2]:.2f} ms   p99 {1000 * rest[int(len(rest) * 0.99)]:.2f} ms", end="")
        print(f"   longest {1000 * rest[-1]:.2f} ms")
        begun = time.perf_counter()
        reasons = rooms.refused(Need.of(models[0]))
        print(f"  {'':26} and then why not, {len(reasons)} reasons: {1000 * (time.perf_counter() - begun):.0f} ms")


def several(name: str, nodes: int, network: str, rails: int) -> Model:
    one = wanted(name, 1, 8)
    return replace(one, profile=replace(one.profile, nodes=nodes, network=network, rails=rails))


def placed(model: Model, replica: str, rank: int, member: Member) -> Shard:
    spec = ShardSpec(
        engine="vllm",
        model=model.name,
        source=model.profile.source,
        resources=model.profile.resources,
        gpus=member.gpus,
        ports=dict(member.ports),
    )
    return Shard(
        id=ShardId(f"{replica}-{rank}"),
        replica=ReplicaId(replica),
        model=model.name,
        rank=rank,
        node=member.node,
        generation=1,
        spec=spec,
        revision=1,
    )


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


def a_round() -> None:
    """Each stretch of the loop in which no stream is read: 1,000 replicas that are ready, 200 of them of 2 nodes."""
    fleet = [attrs.evolve(railed(number, "ib"), connected=True, stream=1) for number in range(NODES)]
    models = [wanted(f"s{at}", 100, 1) for at in range(8)]
    models += [replace(several(f"g{at}", 2, "rdma", 0), replicas=50) for at in range(4)]
    world = World(
        nodes=Map({n.id: n for n in fleet}), models=Map({m.name: m for m in models}), evidence=evidence(fleet)
    )
    world = enact(world, plan(world, 0.0).steps, 0.0, 0.0)
    for shard in world.shards.values():
        said = ShardStatus(
            shard=shard.id, replica=shard.replica, model=shard.model, generation=1, state=ShardState.READY, port=1
        )
        world = attrs.evolve(world, shards=world.shards.set(shard.id, attrs.evolve(shard, status=said, ready_at=0.0)))
    assert len({shard.replica for shard in world.shards.values()}) == REPLICAS
    stored, told, rollouts, expectations = Stored(), converge.Told(10.0), Rollouts(), Expectations()
    stored.written(*stored.difference(world))
    # As heartbeats leave it: every node's value is new, and once in a while its facts are.
    beaten = Map({id: attrs.evolve(known, heard_at=1.0) for id, known in world.nodes.items()})
    fresh = Map({id: attrs.evolve(known, facts=replace(known.facts)) for id, known in beaten.items() if known.facts})
    quiet, after = attrs.evolve(world, nodes=beaten), attrs.evolve(world, nodes=fresh)
    short = attrs.evolve(after, models=after.models.set(ModelName("zz"), several("zz", 4, "nvlink", 0)))
    stretches: dict[str, Callable[[], object]] = {
        "silence": lambda: expire(quiet, 1.0, 0.0, DEFAULT),
        "what nodes should have": lambda: expectations.judge(after, 1.0, 0.0),
        "tests that are too old": lambda: tests.aged(quiet, 1.0, DEFAULT),
        "what runs took": lambda: memory.learn(quiet, 20.0, 0.0, 10.0),
        "the plan": lambda: plan(quiet, 1.0),
        "the same, a model is short (beside the loop)": lambda: plan(short, 1.0),
        "what differs from the store": lambda: stored.difference(quiet),
        "rollouts": lambda: rollouts.judge(quiet, 0.0),
        "commands": lambda: told.due(converge.commands(quiet), quiet, 1.0),
        "routes": lambda: routes_of(quiet),
    }
    gc.collect()
    gc.freeze()
    for words, stretch in stretches.items():
        times = sorted(timed(stretch) for _ in range(20))
        print(f"  {words:46} {1000 * times[10]:7.2f} ms   longest {1000 * times[-1]:7.2f} ms")


def main() -> None:
    print(f"placement on {NODES} nodes of {GPUS} GPUs (Python {sys.version.split()[0]})")
    print("whole plans:")
    whole_plans()
    print("one decision (choose and hold), aim: p99 below 5 ms:")
    one_by_one()
    a_lost_node()
    print("replicas of 2, 3 and 4 nodes in turn, one decision (choose and hold), aim: p99 below 5 ms:")
    of_several()
    print("a round of the plane in which nothing changes, stretch by stretch, aim: none above 50 ms:")
    a_round()


if __name__ == "__main__":
    main()

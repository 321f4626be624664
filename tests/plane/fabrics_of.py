"""Nodes with adapters and NVLink domains that tests speak about in a line."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from immutables import Map
from msgspec.structs import replace

from llmgw.plane.checks import Need
from llmgw.plane.members import Member
from llmgw.plane.place import Choice, Rooms
from llmgw.plane.world import Evidence, Model, Reason, Shard, World
from llmgw.wire.agent import Register
from llmgw.wire.facts import (
    Gid,
    GpuFabric,
    Interface,
    NodeId,
    Port,
    PortManagers,
    ReplicaId,
    ShardId,
    ShardSpec,
    SubnetManager,
)
from tests.plane.worlds import GIB, gpus, model, profile, register

CLUSTER = "8f3c2a10-0000-4000-8000-00000000beef"


def ib(number: int, **fields: object) -> Port:
    """An InfiniBand rail that is up, by its place in PCI order."""
    port = Port(
        device=f"mlx5_{number}",
        kind="ib",
        state="ACTIVE",
        physical_state="LinkUp",
        rate_gbps=400.0,
        pci=f"0000:{number + 16:02x}:00.0",
        lid=number + 1,
        sm_lid=1,
        hca_type="MT4129",
        board="MT_0000000838",
    )
    return replace(port, **fields)


def roce(number: int, *addresses: str, **fields: object) -> Port:
    """A RoCE rail whose v2 GIDs stand for these IP addresses, at indexes from 1."""
    rows = tuple(
        Gid(at, address if ":" in address else f"::ffff:{address}", "RoCE v2", f"eth{number}")
        for at, address in enumerate(addresses, 1)
    )
    fields = {"kind": "roce", "netdev": f"eth{number}", "gids": rows, "lid": None, "sm_lid": None, **fields}
    return ib(number, **fields)


def managed(number: int, master: str, *standbys: str) -> PortManagers:
    """What the subnet managers say through a port."""
    return PortManagers(
        device=f"mlx5_{number}",
        master=SubnetManager(guid=master, state="master"),
        others=tuple(SubnetManager(guid=guid, state="standby") for guid in standbys),
    )


def railed(name: str, *ports: Port, managers: Iterable[PortManagers] = (), gpu: int = 8, **fields: object) -> Register:
    """A node of 8 GPUs with these adapters."""
    made = register(name, gpu=gpu, threads=64, memory=512 * GIB)
    return replace(made, ports=ports, managers=tuple(managers), **fields)


def labelled(name: str, rails: int = 4, fabric: str = "red", **fields: object) -> Register:
    """A node with so many InfiniBand rails on a labelled fabric."""
    return railed(name, *(ib(number, fabric=fabric) for number in range(rails)), **fields)  # type: ignore[arg-type]


def linked(name: str, clique: int = 7, cluster: str = CLUSTER, count: int = 4, **fields: object) -> Register:
    """A node whose GPUs are in an NVLink domain over several nodes."""
    fabric = GpuFabric(**{"state": "completed", "cluster_uuid": cluster, "clique": clique, **fields})  # type: ignore[arg-type]
    made = tuple(replace(gpu, fabric=fabric) for gpu in gpus(count, node=name))
    return replace(register(name, gpu=made, threads=64, memory=512 * GIB))


def addressed(node: Register, address: str, *interfaces: tuple[str, str], boot: str = "") -> Register:
    """The node reached at this address, with interfaces (name, CIDR)."""
    known = tuple(Interface(name=name, addresses=(cidr,), up=True) for name, cidr in interfaces)
    host = replace(node.host, interfaces=known, boot_id=boot or f"boot-{node.node}")
    return replace(node, address=address, host=host)


def wanted(
    nodes: int = 2,
    *,
    name: str = "big",
    engine: str = "vllm",
    gpus: int = 8,
    network: str = "",
    rails: int = 0,
    threads: int = 0,
    **fields: object,
) -> Model:
    """A model whose replica takes so many nodes."""
    of = replace(
        profile(engine=engine, source="hf://org/big", gpus=gpus, threads=threads),
        nodes=nodes,
        network=network,
        rails=rails,
    )
    return model(name, of=replace(of, **fields))


def choose(world: World, model: Model, now: float = 10.0, avoid: Iterable[str] = ()) -> Choice | None:
    return Rooms(world, now).choose(Need.of(model), model.name, [NodeId(name) for name in avoid])


def chosen(world: World, model: Model, now: float = 10.0, avoid: Iterable[str] = ()) -> Choice:
    found = choose(world, model, now, avoid)
    assert found is not None, [reason.text for reason in refused(world, model, now)]
    return found


def nodes(world: World, model: Model, now: float = 10.0, avoid: Iterable[str] = ()) -> tuple[str, ...]:
    found = choose(world, model, now, avoid)
    return () if found is None else found.nodes


def refused(world: World, model: Model, now: float = 10.0) -> tuple[Reason, ...]:
    rooms, need = Rooms(world, now), Need.of(model)
    assert rooms.choose(need, model.name) is None
    return rooms.refused(need)


def told(world: World, model: Model, now: float = 10.0) -> list[tuple[str, str, str, str]]:
    """(node, check, value, needed) of every reason."""
    return [(reason.node, reason.check, reason.value, reason.needed) for reason in refused(world, model, now)]


def shard(model: Model, member: Member, rank: int = 0, replica: str = "big-0", generation: int = 1) -> Shard:
    """A member as it is placed."""
    spec = ShardSpec(
        engine=model.profile.engine,
        model=model.name,
        source=model.profile.source,
        resources=model.profile.resources,
        gpus=member.gpus,
        rank=rank,
        ports=dict(member.ports),
    )
    return Shard(
        id=ShardId(f"{replica}-{rank}"),
        replica=ReplicaId(replica),
        model=model.name,
        rank=rank,
        node=member.node,
        generation=generation,
        spec=spec,
        revision=1,
    )


def placed(world: World, model: Model, choice: Choice, replica: str = "big-0") -> tuple[World, tuple[Shard, ...]]:
    """The world with the replica in it, and its shards by rank."""
    shards = tuple(shard(model, member, rank, replica) for rank, member in enumerate(choice.members))
    return attrs.evolve(world, shards=world.shards.update({one.id: one for one in shards})), shards


def after_test(
    world: World, a: str, b: str, *, bad: Iterable[str] = (), good: Iterable[str] = (), at: float = 0.0
) -> World:
    """The world after a test of two nodes that found rails of these devices bad, or good."""
    pair = (NodeId(min(a, b)), NodeId(max(a, b)))
    ends = {device: tuple(f"{node} {device}/1" for node in pair) for device in (*bad, *good)}
    test = Evidence(
        clock=1000.0 + at,
        bad=tuple(end for device in bad for end in ends[device]),
        good=tuple(end for device in good for end in ends[device]),
        figures={end: "12 Gb/s of 400" for device in bad for end in ends[device]},
        text="rail 0 bad",
        at=at,
    )
    return attrs.evolve(world, evidence=Map({**world.evidence, pair: test}))

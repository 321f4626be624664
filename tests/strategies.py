"""Arbitrary values of the wire and of the plane, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from llmgw.wire.agent import Heartbeat, Register, ShardStatus
from llmgw.wire.facts import (
    Cpu,
    Disk,
    EngineInstall,
    Gpu,
    GpuFabric,
    GpuLoad,
    GpuProcess,
    Grade,
    Host,
    HostLoad,
    InstallState,
    ModelName,
    NodeId,
    Port,
    PortLoad,
    PortManagers,
    Problem,
    ReplicaId,
    ShardId,
    ShardLoad,
    ShardState,
    SubnetManager,
    Weights,
)

names = st.sampled_from(["a", "b", "c"])
sizes = st.integers(0, 1 << 42)
uuids = names.map(lambda name: f"GPU-{name}")
devices = names.map(lambda name: f"mlx5_{name}")
shard_ids = names.map(lambda name: ShardId(f"{name}-0-0"))


def several(of: st.SearchStrategy[object], key: str = "") -> st.SearchStrategy[tuple[object, ...]]:
    """A few values, no two with the same key."""
    unique = (lambda value: getattr(value, key)) if key else None
    return st.lists(of, max_size=4, unique_by=unique).map(tuple)


problem = st.builds(
    Problem,
    subject=st.one_of(st.just("node"), uuids.map(lambda u: f"gpu:{u}"), devices.map(lambda d: f"port:{d}/1")),
    code=st.sampled_from(["xid-79", "row-remap", "link-flap"]),
    grade=st.sampled_from(Grade),
    text=st.text(max_size=20),
)
fabric = st.builds(
    GpuFabric,
    state=st.sampled_from(["not-supported", "not-started", "in-progress", "completed"]),
    cluster_uuid=st.sampled_from(["", "c1"]),
    clique=st.integers(0, 3),
)
gpu = st.builds(
    Gpu,
    uuid=uuids,
    index=st.none() | st.integers(0, 7),
    memory_bytes=st.none() | sizes,
    compute_capability=st.none() | st.tuples(st.integers(5, 10), st.integers(0, 9)),
    fabric=st.none() | fabric,
    unreadable=st.sampled_from(["", "fell off the bus"]),
)
port_state = st.sampled_from(["ACTIVE", "DOWN", "INIT"])
port = st.builds(Port, device=devices, kind=st.sampled_from(["ib", "roce"]), state=port_state, fabric=names)
counters = st.dictionaries(
    st.sampled_from(["port_xmit_data", "symbol_error", "np_cnp_sent"]), st.integers(0, 2**64 - 1)
)
port_load = st.builds(PortLoad, device=devices, number=st.just(1), state=port_state, counters=counters)
manager = st.builds(SubnetManager, guid=names, state=st.sampled_from(["master", "standby"]))
managers = st.builds(PortManagers, device=devices, master=st.none() | manager)
install = st.builds(
    EngineInstall,
    engine=st.sampled_from(["llamacpp", "vllm"]),
    version=st.sampled_from(["", "1", "2"]),
    state=st.sampled_from(InstallState),
)
weights = st.builds(Weights, source=names, complete=st.booleans(), bytes=sizes)
disk = st.builds(Disk, purpose=st.sampled_from(["weights", "state"]), path=names, free_bytes=sizes)
shard_load = st.builds(ShardLoad, shard=shard_ids, rss_bytes=sizes)


def statuses() -> st.SearchStrategy[ShardStatus]:
    return st.builds(
        ShardStatus,
        shard=shard_ids,
        replica=names.map(lambda name: ReplicaId(f"{name}-0")),
        model=names.map(ModelName),
        generation=st.integers(0, 4),
        state=st.sampled_from(ShardState),
        port=st.integers(0, 65535),
        clock=st.floats(0, 2e9),
    )


def registers() -> st.SearchStrategy[Register]:
    """A node's whole truth."""
    return st.builds(
        Register,
        node=names.map(NodeId),
        version=st.just("1"),
        host=st.builds(
            Host,
            cpu=st.builds(Cpu, threads=st.integers(1, 64)),
            memory_bytes=sizes,
            disks=several(disk),
        ),
        gpus=several(gpu, "uuid"),
        ports=several(port, "device"),
        managers=several(managers, "device"),
        problems=several(problem),
        installs=several(install),
        weights=several(weights, "source"),
        shards=several(statuses(), "shard"),
    )


def heartbeats() -> st.SearchStrategy[Heartbeat]:
    """Any selection of what changed."""
    maybe = st.none()
    return st.builds(
        Heartbeat,
        load=maybe | st.builds(HostLoad, cpu_percent=st.floats(0, 100), memory_available_bytes=sizes),
        shards=maybe | several(shard_load, "shard"),
        gpus=maybe | several(st.builds(GpuLoad, uuid=uuids, memory_used_bytes=maybe | sizes), "uuid"),
        gpu_processes=maybe
        | several(st.builds(GpuProcess, gpu=uuids, pid=st.integers(1, 9), memory_bytes=maybe | sizes)),
        gpu_fabrics=maybe | st.dictionaries(uuids, fabric),
        ports=maybe | several(port_load, "device"),
        port_facts=maybe | several(port, "device"),
        managers=maybe | several(managers, "device"),
        problems=maybe | several(problem),
        disks=maybe | several(disk),
        memory_bytes=maybe | sizes,
        installs=maybe | several(install),
        weights=maybe | several(weights, "source"),
    )

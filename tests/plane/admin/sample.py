"""A small fleet with one of everything: what the API, the page and ctl show in tests."""

from __future__ import annotations

from immutables import Map

from llmgw.plane.world import (
    Counts,
    Failure,
    Inventory,
    Model,
    Node,
    OpenProblem,
    Profile,
    Readings,
    Reason,
    Shard,
    Stage,
    Stray,
    Unplaced,
    World,
)
from llmgw.wire.agent import Register, ShardStatus
from llmgw.wire.facts import (
    Cpu,
    Disk,
    EngineInstall,
    Gid,
    Gpu,
    GpuDriver,
    GpuFabric,
    GpuLoad,
    GpuProcess,
    Grade,
    Host,
    HostLoad,
    Imex,
    Interface,
    ModelName,
    NodeId,
    Port,
    PortLoad,
    PortManagers,
    Problem,
    Progress,
    ReplicaId,
    Resources,
    ShardId,
    ShardLoad,
    ShardSpec,
    ShardState,
    SubnetManager,
)

#: The plane's clocks at the moment of the sample.
NOW, WALL = 1000.0, 1_800_000_000.0
GPU = "GPU-5a0c1f0e-0000-4000-8000-000000000001"
#: A name that must never become markup.
EVIL = "<img src=x onerror=alert(1)>"


def port_load(**counters: int) -> PortLoad:
    return PortLoad("mlx5_0", 1, "4: ACTIVE", counters=counters)


def gpu_node() -> Node:
    facts = Register(
        node=NodeId("gpu-01"),
        version="0.1.0",
        features=("doctor",),
        address="10.0.0.1",
        host=Host(
            hostname="gpu-01.cluster",
            boot_id="b00t",
            os="Debian GNU/Linux 12",
            kernel="6.1.0-57-amd64",
            arch="x86_64",
            cpu=Cpu(model="EPYC 9654", threads=192),
            memory_bytes=1 << 40,
            interfaces=(Interface(name="eth0", addresses=("10.0.0.1/24",), mtu=1500, speed_mbps=25000, up=True),),
            disks=(Disk(purpose="weights", path="/var/cache/llmgw", total_bytes=1 << 42, free_bytes=1 << 41),),
        ),
        gpu_driver=GpuDriver(version="570.86.15", cuda="12.8"),
        gpus=(
            Gpu(
                uuid=GPU,
                index=0,
                name="NVIDIA H200",
                pci="0000:1b:00.0",
                memory_bytes=139 << 30,
                nvlinks=18,
                pcie_gen_max=5,
                pcie_width_max=16,
                fabric=GpuFabric(state="completed", cluster_uuid="c1", clique=7, healthy=True),
            ),
        ),
        ports=(
            Port(
                device="mlx5_0",
                kind="ib",
                state="4: ACTIVE",
                physical_state="5: LinkUp",
                rate_gbps=400.0,
                lid=17,
                rail=0,
                fabric="blue",
                gids=(Gid(0, "fe80:0000:0000:0000:0000:0000:0000:0001", "IB/RoCE v1"),),
            ),
        ),
        imex=Imex(state="UP", nodes=(("10.0.0.1", "READY"),)),
        managers=(PortManagers(device="mlx5_0", master=SubnetManager(guid="946dae0300000001", priority=14)),),
        installs=(EngineInstall(engine="vllm", version="0.9.1"),),
    )
    return Node(
        id=facts.node,
        stage=Stage.READY,
        stage_at=NOW - 500,
        facts=facts,
        facts_at=NOW - 400,
        connected=True,
        stream=3,
        heard_at=NOW - 2,
        peer_address="10.0.0.1",
        cordoned=True,
        labels=Map({"rack": "a7"}),
        load=HostLoad(12.5, 24.0, 1 << 39, WALL + 90),
        clock_offset=92.0,
        expected=Inventory(
            gpus={"NVIDIA H200": 2},
            ports={"fabric ib": 1},
            ports_up={"fabric ib": 1},
            slowest={"fabric ib": 400.0},
            nvlinks={"NVIDIA H200": 18},
            memory_bytes=1 << 40,
            clock=WALL - 86400,
        ),
        gpu_loads=Map({GPU: GpuLoad(GPU, memory_used_bytes=100 << 30, utilization_percent=97, temperature_c=61)}),
        gpu_processes=(GpuProcess(GPU, 4242, "python", 5 << 30),),
        ports=Readings(
            Counts(NOW - 2, (port_load(port_rcv_data=1 << 33, port_xmit_data=7),)),
            Counts(NOW - 4, (port_load(port_rcv_data=(1 << 33) - 2_500_000_000),)),
        ),
        problems=Map(
            {
                (f"gpu:{GPU}", "xid-79"): OpenProblem(
                    Problem(
                        subject=f"gpu:{GPU}",
                        code="xid-79",
                        grade=Grade.BAD,
                        text="XID 79: the GPU has fallen off the bus",
                        remedy="reset or replace it",
                    ),
                    NOW - 300,
                    NOW - 2,
                    WALL - 300,
                ),
                ("node", "clock"): OpenProblem(
                    Problem(subject="node", code="clock", grade=Grade.WARN, text="clock is 3 s ahead"),
                    NOW - 900,
                    NOW - 2,
                    WALL - 900,
                    acknowledged_until=NOW + 60,
                ),
            }
        ),
    )


def cpu_node() -> Node:
    facts = Register(
        node=NodeId("node-a"),
        version="0.1.0",
        host=Host(hostname="node-a", cpu=Cpu(threads=2), memory_bytes=8 << 30),
        gpu_driver=GpuDriver(absent="no NVIDIA driver is loaded"),
        installs=(EngineInstall(engine="llamacpp", version="b10068"),),
    )
    return Node(
        id=facts.node,
        stage=Stage.READY,
        stage_at=NOW - 60,
        facts=facts,
        facts_at=NOW - 60,
        connected=True,
        stream=1,
        heard_at=NOW - 1,
        peer_address="127.0.0.1",
        load=HostLoad(50.0, 1.5, 4 << 30, WALL),
        shard_loads=Map({ShardId("tiny-0-0"): ShardLoad(ShardId("tiny-0-0"), 80.0, 200 << 20, None, 1)}),
    )


def gone_node() -> Node:
    return Node(id=NodeId("node-b"), stage=Stage.LOST, stage_at=NOW - 30, heard_at=NOW - 120, peer_address="127.0.0.2")


def tiny_spec() -> ShardSpec:
    return ShardSpec(engine="llamacpp", model=ModelName("tiny"), source="/m/tiny.gguf", ports={"http": 20001})


def ready_shard() -> Shard:
    return Shard(
        id=ShardId("tiny-0-0"),
        replica=ReplicaId("tiny-0"),
        model=ModelName("tiny"),
        rank=0,
        node=NodeId("node-a"),
        generation=2,
        spec=tiny_spec(),
        revision=1,
        placed_clock=WALL - 50,
        status=ShardStatus(
            shard=ShardId("tiny-0-0"),
            replica=ReplicaId("tiny-0"),
            model=ModelName("tiny"),
            generation=2,
            state=ShardState.READY,
            port=20001,
            pid=777,
            adopted=True,
            command=("llama-server", "--port", "20001"),
        ),
        status_at=NOW - 40,
        ready_at=NOW - 40,
        restarts=1,
        last_failure=Failure(
            1, WALL - 45, None, "SIGKILL", "killed by SIGKILL: was it the kernel, for want of memory?", ("last words",)
        ),
    )


def fetching_shard() -> Shard:
    return Shard(
        id=ShardId("big-0-0"),
        replica=ReplicaId("big-0"),
        model=ModelName("big"),
        rank=0,
        node=NodeId("gpu-01"),
        generation=1,
        spec=ShardSpec(
            engine="vllm",
            model=ModelName("big"),
            source="hf://org/big",
            resources=Resources(gpus=1, gpu_memory_bytes=80 << 30),
            gpus=(GPU,),
        ),
        revision=1,
        placed_clock=WALL - 20,
        status=ShardStatus(
            shard=ShardId("big-0-0"),
            replica=ReplicaId("big-0"),
            model=ModelName("big"),
            generation=1,
            state=ShardState.FETCHING,
            progress=Progress("weights", 1 << 30, 4 << 30),
        ),
        status_at=NOW - 5,
    )


def world() -> World:
    """Three nodes (GPU, CPU, lost), two models, one of them waiting for a place."""
    nodes = (gpu_node(), cpu_node(), gone_node())
    shards = (ready_shard(), fetching_shard())
    stray = ShardStatus(
        shard=ShardId("old-0-0"),
        replica=ReplicaId("old-0"),
        model=ModelName("old"),
        generation=9,
        state=ShardState.READY,
        pid=31337,
    )
    return World(
        nodes=Map({node.id: node for node in nodes}),
        models=Map(
            {
                ModelName("tiny"): Model(
                    name=ModelName("tiny"), profile=Profile(engine="llamacpp", source="/m/tiny.gguf"), replicas=1
                ),
                ModelName("big"): Model(
                    name=ModelName("big"),
                    profile=Profile(engine="vllm", source="hf://org/big", resources=Resources(gpus=1)),
                    replicas=2,
                ),
            }
        ),
        shards=Map({shard.id: shard for shard in shards}),
        strays=Map({(NodeId("node-a"), stray.shard): Stray(NodeId("node-a"), stray)}),
        unplaced=Map(
            {
                ModelName("big"): Unplaced(
                    ModelName("big"),
                    2,
                    1,
                    (
                        Reason(NodeId("gpu-01"), "cordon", "cordoned", "not cordoned", None, "gpu-01 is cordoned"),
                        Reason(NodeId("node-a"), "gpus", "0", "1", 60.0, "node-a has no GPU"),
                    ),
                    "uncordon gpu-01",
                )
            }
        ),
    )


def evil_world() -> World:
    """The same with text that a careless page would run."""
    plain = world()
    node = gpu_node()
    evil = OpenProblem(
        Problem(subject="node", code="evil", grade=Grade.WARN, text=EVIL, remedy=EVIL), NOW - 1, NOW, WALL - 1
    )
    import attrs

    return attrs.evolve(
        plain, nodes=plain.nodes.set(node.id, attrs.evolve(node, problems=node.problems.set(("node", "evil"), evil)))
    )

"""A small fleet with one of everything: what the API, the page and ctl show in tests."""

from __future__ import annotations

import attrs
from immutables import Map

from llmgw.plane.world import (
    Counts,
    Evidence,
    Failure,
    Inventory,
    Model,
    Node,
    OpenProblem,
    Profile,
    Readings,
    Reason,
    Revision,
    Shard,
    Stage,
    Stray,
    Unplaced,
    Want,
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
#: Three days for whoever looks within half an hour.
THREE_DAYS = 3 * 86400 + 1800
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
                    acknowledged_until=NOW + THREE_DAYS,
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


def gang_spec(rank: int) -> ShardSpec:
    """What vLLM on two nodes is started with."""
    return ShardSpec(
        engine="vllm",
        engine_version="0.9.1",
        model=ModelName("org/large"),
        source="hf://org/large",
        env={"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "eth9"},
        gpus=(GPU,),
        rank=rank,
        peers=("10.0.0.1", "127.0.0.1"),
        ports={"master": 21000} if rank == 0 else {},
        peer_ports=({"master": 21000}, {}),
        network={"NCCL_IB_HCA": f"=mlx5_{rank}:1", "NCCL_SOCKET_IFNAME": "eth0", "VLLM_HOST_IP": "10.0.0.1"},
        rdma=(f"mlx5_{rank}:1",),
    )


def gang_world(*, ready: bool = False) -> World:
    """The same with a replica of two nodes, in its third attempt: its leader waits, or all serve over sockets."""
    plain = world()
    failed = Failure(1, WALL - 90, 1, "", "NCCL: unhandled system error", ("NCCL WARN Call to ibv_reg_mr failed",))
    again = Failure(2, WALL - 30, None, "SIGKILL", "killed by SIGKILL", ("Killed",))
    shards = plain.shards
    for rank, node in enumerate(("gpu-01", "node-a")):
        id = ShardId(f"org_large-0-{rank}")
        status = None
        if ready or rank:
            status = ShardStatus(
                shard=id,
                replica=ReplicaId("org_large-0"),
                model=ModelName("org/large"),
                generation=3,
                state=ShardState.READY if ready else ShardState.FETCHING,
                port=20002 if rank == 0 else 0,
                pid=800 + rank,
                progress=None if ready else Progress("weights", 3 << 30, 4 << 30),
                command=("vllm", "serve", "--node-rank", str(rank)),
                network="NET/Socket" if ready else "",
                warning="sockets are used where RDMA was meant" if ready and rank == 0 else "",
            )
        shards = shards.set(
            id,
            Shard(
                id=id,
                replica=ReplicaId("org_large-0"),
                model=ModelName("org/large"),
                rank=rank,
                node=NodeId(node),
                generation=3,
                spec=gang_spec(rank),
                revision=1,
                why="both have the weights",
                placed_clock=WALL - 25,
                status=status,
                status_at=NOW - 10 if status else None,
                ready_at=NOW - 10 if ready else None,
                want_at=NOW - 25,
                restarts=2,
                first_failure=failed if rank else None,
                last_failure=again if rank == 0 else failed,
            ),
        )
    profile = Profile(engine="vllm", engine_version="0.9.1", source="hf://org/large", nodes=2, context=4096)
    before = Profile(engine="vllm", engine_version="0.9.0", source="hf://org/large", nodes=2)
    model = Model(
        name=ModelName("org/large"),
        profile=profile,
        revision=2,
        history=(Revision(revision=1, profile=before, clock=WALL - 3600),),
    )
    pair = (NodeId("gpu-01"), NodeId("node-a"))
    tested = Evidence(
        clock=WALL - 7200,
        bad=("gpu-01 mlx5_0/1",),
        good=("node-a mlx5_1/1",),
        text="1 of 2 rails is far below its ceiling",
        figures={"gpu-01 mlx5_0/1": "12 Gb/s of 400"},
    )
    return attrs.evolve(plain, shards=shards, models=plain.models.set(model.name, model), evidence=Map({pair: tested}))


def draining_world() -> World:
    """The same with node-a being drained: one replica stays for want of room, one finishes, a stray is stopped."""
    plain = gang_world(ready=True)
    node = attrs.evolve(plain.nodes[NodeId("node-a")], draining=True, drain_within=600.0)
    shards = plain.shards
    for rank in range(2):
        shard = shards[ShardId(f"org_large-0-{rank}")]
        shards = shards.set(shard.id, attrs.evolve(shard, want=Want.DRAIN, want_at=NOW - 100))
    return attrs.evolve(plain, nodes=plain.nodes.set(node.id, node), shards=shards)


def evil_world() -> World:
    """The same with text that a careless page would run."""
    plain = world()
    node = gpu_node()
    evil = OpenProblem(
        Problem(subject="node", code="evil", grade=Grade.WARN, text=EVIL, remedy=EVIL), NOW - 1, NOW, WALL - 1
    )
    return attrs.evolve(
        plain, nodes=plain.nodes.set(node.id, attrs.evolve(node, problems=node.problems.set(("node", "evil"), evil)))
    )

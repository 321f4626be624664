"""What one stream has been told."""

from __future__ import annotations

from llmgw.node.beats import Beats, moved
from llmgw.node.snapshot import Snapshot
from llmgw.wire.agent import Register
from llmgw.wire.codec import encode
from llmgw.wire.counters import Packer
from llmgw.wire.facts import Disk, Gpu, GpuFabric, GpuLoad, Host, HostLoad, NodeId, Port, PortLoad


def test_disks_are_told_again_when_a_hundredth_of_them_or_a_gibibyte_changed() -> None:
    disk = Disk(purpose="weights", path="/w", total_bytes=10 << 30, free_bytes=5 << 30)
    assert not moved((disk,), (Disk(purpose="weights", path="/w", total_bytes=10 << 30, free_bytes=(5 << 30) + 4096),))
    assert moved((disk,), (Disk(purpose="weights", path="/w", total_bytes=10 << 30, free_bytes=(5 << 30) - (1 << 28)),))
    assert moved((disk,), ())


async def test_ports_that_stand_still_are_told_once_more_and_then_only_now_and_then() -> None:
    loads = [(PortLoad("mlx5_0", counters={"port_xmit_data": count}),) for count in (1, 2, 2, 2, 2)]
    looks = iter([Snapshot(host=Host(), port_loads=load) for load in loads])
    beats = Beats(lambda: next(looks), Register(node=NodeId("n"), version="1"))
    assert [(await beats.next()).ports is not None for _ in loads] == [True, True, True, False, False]


async def test_what_the_register_said_is_not_said_again() -> None:
    fabric = GpuFabric(state="completed", cluster_uuid="u", clique=1)
    now = Snapshot(host=Host(memory_bytes=7), gpu_fabrics={"GPU-1": fabric})
    told = Register(node=NodeId("n"), version="1", host=now.host, gpus=(Gpu(uuid="GPU-1", fabric=fabric),))
    beat = await Beats(lambda: now, told).next()
    assert beat.load is not None
    assert (beat.gpu_fabrics, beat.memory_bytes, beat.disks, beat.problems, beat.gpus) == (None,) * 5


async def test_an_idle_nodes_heartbeat_stays_within_64_bytes_however_much_hardware_it_has() -> None:
    names = [f"mlx5_{n}" for n in range(8)]
    now = Snapshot(
        host=Host(memory_bytes=2 << 40, disks=(Disk(purpose="weights", path="/w", total_bytes=1 << 45),)),
        load=HostLoad(0.1, 0.25, (2 << 40) - 12345, 1796037171.61),
        gpus=tuple(Gpu(uuid=f"GPU-{n}", index=n) for n in range(8)),
        gpu_loads=tuple(GpuLoad(f"GPU-{n}", 1 << 30) for n in range(8)),
        ports=tuple(Port(device=name) for name in names),
        port_loads=tuple(PortLoad(name, counters={f"counter_{n}": n << 40 for n in range(20)}) for name in names),
    )
    told = Register(node=NodeId("n"), version="1", host=now.host, gpus=now.gpus, ports=now.ports)
    beats, packer = Beats(lambda: now, told), Packer()
    sizes = [len(encode(packer.pack(await beats.next()))) for _ in range(6)]
    assert sizes[0] > 500, "the first one tells what the Register did not"
    assert max(sizes[3:]) <= 64

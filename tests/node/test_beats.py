"""What one stream has been told."""

from __future__ import annotations

from llmgw.node.beats import Beats, moved
from llmgw.node.snapshot import Snapshot
from llmgw.wire.agent import Register
from llmgw.wire.facts import Disk, Gpu, GpuFabric, Host, NodeId, PortLoad


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

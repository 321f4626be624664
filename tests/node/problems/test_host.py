"""What is wrong with hosts."""

from __future__ import annotations

from llmgw.node.gpus import GpuView
from llmgw.node.kernel import KernelEvent
from llmgw.node.ports import PortView
from llmgw.node.problems.memory import Facts, Memory
from llmgw.node.problems.verdict import problems
from llmgw.wire.facts import Disk, Gpu, Grade, Host, HostLimits, HostLoad, Port, Problem

RDMA = PortView(at=0.0, ports=(Port(device="mlx5_0", kind="ib"),))
GPUS = GpuView(at=0.0, gpus=(Gpu(uuid="GPU-1"),))


def found(seen: Facts, now: float = 100.0) -> dict[str, Problem]:
    return {each.code: each for each in problems(seen, Memory(), now).problems}


def test_a_small_memlock_limit_matters_only_where_there_is_rdma() -> None:
    limited = Host(limits=HostLimits(memlock_bytes=8 << 20))
    assert found(Facts(host=limited)) == {}
    assert "8 MiB" in found(Facts(host=limited, ports=RDMA))["memlock"].text
    assert found(Facts(host=Host(limits=HostLimits(memlock_bytes=-1)), ports=RDMA)) == {}


def test_gpus_and_adapters_that_cannot_talk_directly_are_told() -> None:
    host = Host(limits=HostLimits(peer_memory=(), acs_redirect=("0000:00:01.0",)))
    assert set(found(Facts(host=host, ports=RDMA, gpus=GPUS))) == {"peer-memory", "acs-redirect"}
    assert found(Facts(host=host, gpus=GPUS)) == {}


def test_a_full_disk_is_told_with_what_it_holds() -> None:
    def disk(free: int) -> Facts:
        return Facts(host=Host(disks=(Disk(purpose="weights", path="/w", total_bytes=1 << 40, free_bytes=free),)))

    assert found(disk(1 << 39)) == {}
    assert found(disk(19 << 30))["disk-full-weights"].grade is Grade.WARN
    assert found(disk(100 << 20))["disk-full-weights"].grade is Grade.BAD


def test_low_memory_must_last_and_a_kill_by_the_kernel_is_told_at_once() -> None:
    low = Facts(host=Host(memory_bytes=100 << 30), load=HostLoad(memory_available_bytes=1 << 30))
    first = problems(low, Memory(), 100)
    assert first.problems == ()
    assert [each.code for each in problems(low, first.memory, 131).problems] == ["memory-low"]
    kill = KernelEvent(90, "oom-kill", "Out of memory: Killed process 7 (vllm)")
    assert "vllm" in found(Facts(events=(kill,)))["oom-kill"].text


def test_a_host_whose_files_hang_is_told() -> None:
    assert "host-stalled" in found(Facts(host_stalled=0.0), 40)
    assert found(Facts(host_stalled=90.0), 100) == {}

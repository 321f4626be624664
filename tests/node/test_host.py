"""The host's facts and loads, on made-up machines and on this one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from llmgw.node.cgroups import Share
from llmgw.node.host import Meter, cpu, host, os_name
from llmgw.node.view import View
from llmgw.wire.facts import ShardId


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def test_sockets_and_cores_are_counted_and_threads_are_this_processes_share(tmp_path: Path) -> None:
    block = "processor: {0}\nmodel name: EPYC\nphysical id: {1}\ncore id: {2}\n"
    cpuinfo = "\n".join(block.format(n, n // 8, n % 4) for n in range(16))
    write(tmp_path, "proc/cpuinfo", cpuinfo)
    for node in ("node0", "node1", "possible"):
        (tmp_path / "sys/devices/system/node" / node).mkdir(parents=True)
    found = cpu(View(root=tmp_path), Share(cpus=1.5))
    assert (found.model, found.sockets, found.cores, found.numa_nodes) == ("EPYC", 2, 8, 2)
    assert found.threads == min(2, len(os.sched_getaffinity(0)))


def test_whether_the_fabric_manager_runs_is_looked_at_each_time(tmp_path: Path) -> None:
    unit = "nvidia-fabricmanager.service"
    write(tmp_path, f"usr/lib/systemd/system/{unit}", "")
    before = host(View(root=tmp_path))
    write(tmp_path, f"sys/fs/cgroup/system.slice/{unit}/cgroup.procs", "4711")
    now = host(View(root=tmp_path), before)
    assert (before.limits.fabric_manager, now.limits.fabric_manager) == ("inactive", "active")


def test_a_container_has_its_limit_of_memory_and_not_the_machines(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB")
    write(tmp_path, "proc/self/cgroup", "0::/")
    write(tmp_path, "sys/fs/cgroup/memory.max", "4294967296")
    write(tmp_path, "sys/fs/cgroup/memory.current", "3221225472")
    view = View(root=tmp_path)
    assert host(view).memory_bytes == 4 << 30
    assert Meter(view).host().memory_available_bytes == 1 << 30


def test_cpu_load_is_of_the_time_since_the_reading_before(tmp_path: Path) -> None:
    write(tmp_path, "proc/stat", "cpu 100 0 100 800 0 0 0 0 0 0")
    meter = Meter(View(root=tmp_path))
    assert meter.host().cpu_percent == 0.0
    write(tmp_path, "proc/stat", "cpu 150 0 125 825 0 0 0 0 0 0")
    assert meter.host().cpu_percent == 75.0
    assert meter.host().cpu_percent == 0.0
    write(tmp_path, "proc/stat", "cpu 1 0 1 1 0 0 0 0 0 0")
    assert meter.host().cpu_percent == 0.0


def test_a_process_whose_pid_was_used_again_does_not_inherit_its_cpu_time(tmp_path: Path) -> None:
    stat = "7 (a) b) S 1 1 1 0 -1 0 0 0 0 0 {0} 0 0 0 20 0 1 0 {1} 1000 100 0"
    write(tmp_path, "proc/7/stat", stat.format(1000, 50))
    meter = Meter(View(root=tmp_path))
    shard = {ShardId("m"): frozenset({7, 8})}
    (first,) = meter.shards(shard, {7: 5, 8: 6, 9: 7})
    assert (first.cpu_percent, first.processes, first.gpu_memory_bytes) == (0.0, 1, 11)
    assert first.rss_bytes == 100 * os.sysconf("SC_PAGE_SIZE")
    write(tmp_path, "proc/7/stat", stat.format(9000, 60))
    assert meter.shards(shard, {})[0].cpu_percent == 0.0
    write(tmp_path, "proc/7/stat", stat.format(9100, 60))
    assert meter.shards(shard, {})[0].cpu_percent > 0


def test_the_systems_name_is_unquoted_and_quotes_that_do_not_match_are_nothing(tmp_path: Path) -> None:
    write(tmp_path, "etc/os-release", 'PRETTY_NAME="Ubuntu 24.04 LTS"\nNAME=Ubuntu')
    assert os_name(View(root=tmp_path)) == "Ubuntu 24.04 LTS"
    write(tmp_path, "etc/os-release", 'PRETTY_NAME="broken')
    assert os_name(View(root=tmp_path)) == ""


@pytest.mark.real
def test_this_machine_is_known() -> None:
    found = host(View(state=Path("/tmp")))
    assert found.boot_id
    assert found.memory_bytes > 0
    assert found.cpu.threads >= 1


names = st.sampled_from(
    [
        "proc/meminfo", "proc/cpuinfo", "proc/stat", "proc/loadavg", "proc/self/cgroup", "proc/self/mountinfo",
        "proc/sys/kernel/osrelease", "proc/driver/nvidia/version", "proc/modules", "etc/os-release", "etc/machine-id",
        "sys/class/net/eth0/speed", "sys/class/net/eth0/device/x", "sys/kernel/iommu_groups/0/type",
        "sys/bus/pci/devices/0000:00:01.0/class", "sys/bus/pci/devices/0000:00:01.0/config", "sys/fs/cgroup/cpu.max",
        "sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.stat", "proc/7/stat",
    ]
)  # fmt: skip
words = st.sampled_from(
    [b"0x060400", b"0::/", b"cpu 1 2 3 4 5 6 7 8", b"MemTotal: x kB", b"1 (a) S " + b"1 " * 30, b""]
)


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(names, st.one_of(st.binary(max_size=300), words)))
def test_any_files_give_a_host_and_never_an_exception(tmp_path: Path, tree: dict[str, bytes]) -> None:
    root = tmp_path / str(abs(hash(frozenset(tree.items()))))
    for path, data in tree.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    view = View(root=root)
    host(view)
    meter = Meter(view)
    meter.host()
    meter.shards({ShardId("m"): frozenset({7})}, {})

"""What a container lets this process have."""

from __future__ import annotations

from pathlib import Path

from llmgw.node.cgroups import Share, share
from llmgw.node.view import View


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def test_the_smallest_limit_of_all_ancestors_counts(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/kubepods/pod1/box")
    write(tmp_path, "sys/fs/cgroup/kubepods/pod1/box/cpu.max", "max 100000")
    write(tmp_path, "sys/fs/cgroup/kubepods/pod1/cpu.max", "250000 100000")
    write(tmp_path, "sys/fs/cgroup/kubepods/pod1/box/memory.max", "8589934592")
    write(tmp_path, "sys/fs/cgroup/kubepods/pod1/memory.max", "4294967296")
    write(tmp_path, "sys/fs/cgroup/kubepods/pod1/memory.current", "3000000000")
    write(tmp_path, "sys/fs/cgroup/kubepods/pod1/memory.stat", "anon 5\ninactive_file 1000000000")
    assert share(View(root=tmp_path)) == Share(2.5, 4294967296, 2000000000)


def test_in_a_container_the_mounts_root_is_its_own(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/../../outside")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "50000 100000")
    write(tmp_path, "sys/fs/cgroup/memory.max", "max")
    assert share(View(root=tmp_path)) == Share(0.5, None, None)


def test_version_one_has_its_own_files_and_a_huge_number_for_no_limit(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "5:cpu,cpuacct:/box\n3:memory:/box")
    write(tmp_path, "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "150000")
    write(tmp_path, "sys/fs/cgroup/cpu/box/cpu.cfs_period_us", "100000")
    write(tmp_path, "sys/fs/cgroup/memory/box/memory.limit_in_bytes", "1073741824")
    write(tmp_path, "sys/fs/cgroup/memory/box/memory.usage_in_bytes", "536870912")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")
    assert share(View(root=tmp_path)) == Share(1.5, 1073741824, 536870912)


def test_no_cgroups_are_no_limits(tmp_path: Path) -> None:
    assert share(View(root=tmp_path)) == Share()
    write(tmp_path, "proc/self/cgroup", "0::/\ngarbage")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "nonsense")
    assert share(View(root=tmp_path)) == Share()

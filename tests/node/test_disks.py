"""The file systems that matter."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from llmgw.node.disks import disk, disks, mounted
from llmgw.node.view import View

MOUNTS = """\
22 1 8:1 / / rw - ext4 /dev/sda1 rw
30 22 8:2 / /data rw,noatime shared:5 - xfs /dev/sdb rw
31 22 0:50 / /data/my\\040models rw - nfs4 server:/models rw
32 22 8:3 / /data rw - xfs /dev/sdc rw
"""


def test_the_longest_mount_point_counts_and_the_latest_of_equals() -> None:
    assert mounted(MOUNTS, "/var/lib") == ("/", "ext4", "/dev/sda1")
    assert mounted(MOUNTS, "/data/x") == ("/data", "xfs", "/dev/sdc")
    assert mounted(MOUNTS, "/data/my models/llama") == ("/data/my models", "nfs4", "server:/models")
    assert mounted(MOUNTS, "/database") == ("/", "ext4", "/dev/sda1")


def test_a_folder_that_is_not_there_yet_counts_as_its_parent(tmp_path: Path) -> None:
    found = disk("weights", tmp_path / "a/b/c", View())
    assert found is not None
    assert found.path == str(tmp_path / "a/b/c")
    assert found.total_bytes > 0
    assert found.mount


def test_only_what_is_set_is_looked_at(tmp_path: Path) -> None:
    assert disks(View()) == ()
    assert [each.purpose for each in disks(View(state=tmp_path))] == ["state"]


@given(st.text(), st.text())
def test_any_mount_table_is_read(text: str, path: str) -> None:
    mounted(text, path)
    mounted(MOUNTS + text, path)

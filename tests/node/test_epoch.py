"""The fence against an older plane (D4), over restarts, new joins and full disks."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.node.epoch import Epoch
from llmgw.node.stream import Outdated
from llmgw.wire.control import Registered


def leads(epoch: int) -> Registered:
    return Registered(plane="p", version="0.1.0", epoch=epoch)


def test_an_older_plane_is_refused_also_after_a_restart(tmp_path: Path) -> None:
    Epoch.load(tmp_path / "epoch").obey(leads(7))
    again = Epoch.load(tmp_path / "epoch")
    with pytest.raises(Outdated, match="leads by epoch 6, and this node has obeyed 7"):
        again.obey(leads(6))
    again.obey(leads(7))


def test_a_new_join_forgets_it_in_a_running_agent_too(tmp_path: Path) -> None:
    epoch = Epoch.load(tmp_path / "epoch")
    epoch.obey(leads(7))
    (tmp_path / "epoch").unlink()
    epoch.reload()
    epoch.obey(leads(1))


def test_a_disk_that_cannot_be_written_keeps_nobody_from_the_plane_nor_lifts_the_fence(tmp_path: Path) -> None:
    epoch = Epoch.load(tmp_path / "no such folder" / "epoch")
    epoch.obey(leads(7))
    epoch.reload()
    with pytest.raises(Outdated):
        epoch.obey(leads(6))
    (tmp_path / "no such folder").mkdir()
    epoch.obey(leads(8))
    assert (tmp_path / "no such folder" / "epoch").read_text() == "8\n"


def test_a_file_that_is_no_number_is_taken_for_none(tmp_path: Path) -> None:
    (tmp_path / "epoch").write_text("seven")
    assert Epoch.load(tmp_path / "epoch").value == 0

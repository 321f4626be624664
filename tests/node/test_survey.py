"""The survey of a node, over the machine the tests run on and over made-up ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from llmgw.node.survey import Survey, moved
from llmgw.node.view import View
from llmgw.wire.facts import Disk, ShardId

pytestmark = pytest.mark.real


async def test_a_machine_without_gpus_registers_with_its_host_facts(tmp_path: Path) -> None:
    survey = Survey(View(state=tmp_path, weights=tmp_path / "not-there-yet"), dict)
    register = await survey.register()
    assert register.host.boot_id
    assert register.host.memory_bytes > 0
    assert register.host.cpu.threads >= 1
    assert [disk.purpose for disk in register.host.disks] == ["weights", "state"]
    assert all(disk.free_bytes > 0 for disk in register.host.disks)
    assert register.gpus == ()


async def test_heartbeats_say_only_what_changed(tmp_path: Path) -> None:
    own = {ShardId("m-0-0"): frozenset({os.getpid()})}
    survey = Survey(View(state=tmp_path), lambda: own)
    beats = survey.beats(await survey.register())
    first = await beats.next()
    assert first.load is not None
    assert first.shards is not None
    assert first.shards[0].rss_bytes > 1 << 20
    assert first.disks is None
    assert first.problems is None
    own.clear()
    second = await beats.next()
    assert second.shards == ()
    assert (await beats.next()).shards is None


async def test_a_machine_whose_files_are_all_missing_still_registers(tmp_path: Path) -> None:
    survey = Survey(View(root=tmp_path), dict)
    with trio.fail_after(5):
        register = await survey.register()
    assert register.host.memory_bytes == 0
    assert (await survey.beats(register).next()).load is not None


def test_disks_are_told_again_when_a_hundredth_of_them_or_a_gibibyte_changed() -> None:
    disk = Disk(purpose="weights", path="/w", total_bytes=10 << 30, free_bytes=5 << 30)
    assert not moved((disk,), (Disk(purpose="weights", path="/w", total_bytes=10 << 30, free_bytes=(5 << 30) + 4096),))
    assert moved((disk,), (Disk(purpose="weights", path="/w", total_bytes=10 << 30, free_bytes=(5 << 30) - (1 << 28)),))
    assert moved((disk,), ())

"""A state that was restored from a backup leads again."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.errors import BadInput, LlmgwError
from llmgw.plane.fleet import Fleet
from llmgw.plane.restored import LEAP, raise_epoch
from llmgw.plane.settings import PlaneSettings
from llmgw.plane.store.sqlite import SqliteStore

pytestmark = pytest.mark.real


async def epoch_of_a_start(settings: PlaneSettings) -> int:
    async with await SqliteStore.open(settings.path(settings.store)) as store:
        fleet = Fleet(store)
        await fleet.load()
        return fleet.epoch


async def test_a_restored_plane_leads_above_every_epoch_since_its_backup(tmp_path: Path) -> None:
    settings = PlaneSettings(directory=tmp_path)
    backed_up = await epoch_of_a_start(settings)
    assert await raise_epoch(settings.path(settings.store)) == backed_up + LEAP
    assert await epoch_of_a_start(settings) == backed_up + LEAP + 1


async def test_a_state_in_use_or_absent_is_left_alone(tmp_path: Path) -> None:
    settings = PlaneSettings(directory=tmp_path)
    with pytest.raises(BadInput, match="put the backup there first"):
        await raise_epoch(settings.path(settings.store))
    assert not settings.path(settings.store).exists()
    async with await SqliteStore.open(settings.path(settings.store)):
        with pytest.raises(LlmgwError, match="in use by another plane"):
            await raise_epoch(settings.path(settings.store))

"""`llmgw-plane check`: what it says of the state, before a plane opens it."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from llmgw.config import Listen
from llmgw.plane.check import check
from llmgw.plane.settings import PlaneSettings
from llmgw.plane.store.sqlite import SqliteStore, StoreUnusable, schemas

pytestmark = pytest.mark.real


def said(directory: Path) -> str:
    settings = PlaneSettings(directory=directory, insecure=True, agents_listen=Listen("127.0.0.1", 7443))
    (line,) = [line for line in check(settings, None) if line.startswith("state: ")]
    return line


def write(path: Path, steps: tuple[str, ...]) -> bytes:
    async def make() -> None:
        async with await SqliteStore.open(path, steps=steps) as store:
            await store.commit({"a": b"1"})

    trio.run(make)
    return path.read_bytes()


def test_a_state_that_is_not_there_yet_is_no_fault(tmp_path: Path) -> None:
    assert said(tmp_path) == f"state: {tmp_path / 'plane.db'} is made at the first start"


def test_an_older_state_is_said_to_be_migrated_and_is_not_yet(tmp_path: Path) -> None:
    path = tmp_path / "plane.db"
    before = write(path, schemas()[:1])
    assert f"schema 1, which is migrated to {len(schemas())} at the next start" in said(tmp_path)
    assert path.read_bytes() == before
    write(path, schemas())
    assert said(tmp_path) == f"state: {path}, schema {len(schemas())}"


def test_a_state_that_is_too_new_is_said_before_a_plane_is_started(tmp_path: Path) -> None:
    write(tmp_path / "plane.db", (*schemas(), "create table later (x);"))
    with pytest.raises(StoreUnusable, match="knows"):
        said(tmp_path)

"""Copies of the state: whole while a plane writes, checked, and not made where there is no room."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import trio

from llmgw.plane.store.backup import KEPT, BackupFailed, before_migration, copies, copy_before, copy_to
from llmgw.plane.store.sqlite import SqliteStore, StoreUnusable, schemas
from tests.disks import small_file_system

pytestmark = pytest.mark.real


async def stored(path: Path) -> dict[str, bytes]:
    async with await SqliteStore.open(path) as store:
        return dict((await store.load("")).values)


def names(folder: Path, pattern: str) -> list[str]:
    return [file.name for file in folder.glob(pattern)] + [file.name for file in folder.glob(f".{pattern}")]


def opened(path: Path) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False))


async def test_a_copy_made_while_a_plane_writes_is_the_state_of_one_moment(tmp_path: Path) -> None:
    path, copy = tmp_path / "plane.db", tmp_path / "copy.db"
    async with await SqliteStore.open(path) as store, trio.open_nursery() as nursery:
        begun = trio.Event()

        async def write() -> None:
            for n in range(10_000):
                await store.commit({"a": b"%d" % n, "b": b"%d" % n})
                if n == 20:
                    begun.set()

        nursery.start_soon(write)
        await begun.wait()
        with opened(path) as db:
            await trio.to_thread.run_sync(copy_to, db, copy)
        nursery.cancel_scope.cancel()
    there = await stored(copy)
    assert there["a"] == there["b"]
    assert int(there["a"]) >= 20


async def test_a_copy_is_one_file_for_the_planes_user_alone(tmp_path: Path) -> None:
    path, copy = tmp_path / "plane.db", tmp_path / "there" / "copy.db"
    copy.parent.mkdir()
    async with await SqliteStore.open(path) as store:
        await store.commit({"a": b"1"})
        with opened(path) as db:
            copy_to(db, copy)
            copy_to(db, copy)  # over the first
    assert [file.name for file in copy.parent.iterdir()] == ["copy.db"]
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert copy.read_bytes()[18:20] == b"\x01\x01"  # needs no write-ahead log


async def test_a_damaged_state_is_not_copied(tmp_path: Path) -> None:
    path = tmp_path / "plane.db"
    async with await SqliteStore.open(path) as store:
        await store.commit({f"key {n}": bytes(500) for n in range(200)})
    with path.open("r+b") as file:
        file.seek(3 * 4096)
        file.write(os.urandom(4096 * 8))
    with opened(path) as db, pytest.raises(BackupFailed, match="what was copied is damaged"):
        copy_to(db, tmp_path / "copy.db")
    assert not (tmp_path / "copy.db").exists()


async def test_a_copy_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    async with await SqliteStore.open(tmp_path / "plane.db"):
        pass
    with opened(tmp_path / "plane.db") as db, pytest.raises(BackupFailed, match=r"none/copy\.db cannot be written"):
        copy_to(db, tmp_path / "none" / "copy.db")


async def test_the_last_copies_are_kept_and_the_same_state_is_not_copied_twice(tmp_path: Path) -> None:
    path = tmp_path / "plane.db"
    for n in range(KEPT + 2):
        async with await SqliteStore.open(path) as store:
            await store.commit({"a": b"%d" % n})
        with opened(path) as db:
            first = before_migration(path, db, len(schemas()), wall=lambda n=n: 1e9 + n)  # type: ignore[misc]
            assert before_migration(path, db, len(schemas()), wall=lambda: 2e9) == first
    assert len(copies(path)) == KEPT
    assert copies(path)[-1].name == f"plane.db.v{len(schemas())}-20010909T014646Z.bak"
    assert [await stored(copy) for copy in copies(path)] == [{"a": b"%d" % n} for n in range(2, KEPT + 2)]


async def test_what_a_killed_plane_left_unfinished_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "plane.db"
    async with await SqliteStore.open(path):
        (tmp_path / ".plane.db.v1-20300101T000000Z.bak.4711.new").write_text("half")
        (tmp_path / ".plane.db.v1-20300101T000000Z.bak.4711.new-journal").write_text("half")
        with opened(path) as db:
            before_migration(path, db, len(schemas()))
    assert names(tmp_path, "*.new*") == []


async def test_the_copy_that_leads_back_is_the_newest_that_an_older_plane_can_open(tmp_path: Path) -> None:
    path = tmp_path / "plane.db"
    assert copy_before(path, 9) is None
    for version in range(1, len(schemas()) + 1):
        async with await SqliteStore.open(path, steps=schemas()[:version]) as store:
            await store.commit({"a": b"%d" % version})
            with opened(path) as db:
                before_migration(path, db, version, wall=lambda version=version: 1e9 + version)  # type: ignore[misc]
    (tmp_path / "plane.db.v1-29990909T014646Z.bak").write_text("not a copy")
    found = copy_before(path, 1)
    assert found is not None
    assert found.name.startswith("plane.db.v1-2")
    assert found.read_bytes().startswith(b"SQLite")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of four MiB."""
    with small_file_system(tmp_path / "small", "4m", "700") as place:
        yield place


async def test_a_state_is_not_migrated_where_there_is_no_room_for_a_copy(small_disk: Path) -> None:
    path = small_disk / "plane.db"
    async with await SqliteStore.open(path) as store:
        await store.commit({f"key {n}": os.urandom(200) for n in range(2000)})
    (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free - (1 << 20)))
    before = path.read_bytes()
    with pytest.raises(BackupFailed, match=r"MiB free: \d MiB are needed .*: free some space and start again"):
        await SqliteStore.open(path, steps=(*schemas(), "update entries set value = null;"))
    assert path.read_bytes() == before
    assert copies(path) == ()
    async with await SqliteStore.open(path) as store:
        assert len((await store.load("")).values) == 2000


async def test_a_copy_that_fails_keeps_the_migration_from_beginning(tmp_path: Path) -> None:
    path = tmp_path / "plane.db"
    async with await SqliteStore.open(path) as store:
        await store.commit({f"key {n}": bytes(500) for n in range(200)})
    with path.open("r+b") as file:
        file.seek(3 * 4096)
        file.write(os.urandom(4096 * 8))
    before = path.read_bytes()
    with pytest.raises((BackupFailed, StoreUnusable), match="damaged"):
        await SqliteStore.open(path, steps=(*schemas(), "delete from entries;"))
    assert path.read_bytes() == before

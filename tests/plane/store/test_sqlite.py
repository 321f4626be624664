"""The SQLite file: what is refused, in which words, and that it is left as it was."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from llmgw.plane.store.sqlite import SqliteStore, StoreUnusable, schemas

pytestmark = pytest.mark.real

MORE = "create table later (x integer);\nupdate entries set value = x'32' where key = 'a';"


async def test_what_was_committed_is_there_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state" / "plane.db"
    async with await SqliteStore.open(path) as store:
        revision = await store.commit({"a": b"1"})
    async with await SqliteStore.open(path) as store:
        snapshot = await store.load("")
        assert (snapshot.revision, dict(snapshot.values)) == (revision, {"a": b"1"})


async def test_the_file_is_for_the_planes_user_alone(tmp_path: Path) -> None:
    async with await SqliteStore.open(tmp_path / "plane.db") as store:
        await store.commit({"a": b"1"})
        for file in list(_files(tmp_path)):
            assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0, file


async def test_a_commit_survives_the_planes_sudden_death(tmp_path: Path) -> None:
    path = tmp_path / "plane.db"
    code = (
        "import os, sys, trio\n"
        "from llmgw.plane.store.sqlite import SqliteStore\n"
        "async def main():\n"
        "    store = await SqliteStore.open(sys.argv[1])\n"
        "    await store.commit({'a': b'1'})\n"
        "    os.kill(os.getpid(), 9)\n"
        "trio.run(main)\n"
    )
    process = await _run(code, path)
    assert process == -9
    async with await SqliteStore.open(path) as store:
        assert dict((await store.load("")).values) == {"a": b"1"}


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.chmod(0o500)
    yield
    folder.chmod(0o700)


async def _run(code: str, path: Path) -> int:
    ended = await trio.run_process([sys.executable, "-c", code, str(path)], check=False, stderr=subprocess.DEVNULL)
    return ended.returncode


async def test_a_second_plane_is_refused_with_the_firsts_pid(tmp_path: Path) -> None:
    path = tmp_path / "plane.db"
    async with await SqliteStore.open(path) as store:
        with pytest.raises(StoreUnusable, match=f"another plane \\(pid {os.getpid()}\\)"):
            await SqliteStore.open(path)
        await store.commit({"still": b"1"})
    async with await SqliteStore.open(path):
        pass


async def test_a_newer_versions_file_is_refused_and_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "plane.db"
    async with await SqliteStore.open(path, steps=(*schemas(), MORE)) as store:
        await store.commit({"a": b"1"})
    before = path.read_bytes()
    with pytest.raises(StoreUnusable, match=rf"written by a newer llmgw \(state version {len(schemas()) + 1}"):
        await SqliteStore.open(path)
    assert path.read_bytes() == before
    assert [file.name for file in _files(tmp_path)] == ["plane.db", "plane.db.lock"]


async def test_an_older_versions_file_is_migrated_and_backed_up_first(tmp_path: Path) -> None:
    path = tmp_path / "plane.db"
    async with await SqliteStore.open(path) as store:
        await store.commit({"a": b"1"})
    async with await SqliteStore.open(path, steps=(*schemas(), MORE)) as store:
        assert dict((await store.load("")).values) == {"a": b"2"}
    with sqlite3.connect(tmp_path / "plane.db.v1.bak") as backup:
        assert backup.execute("select value from entries").fetchall() == [(b"1",)]
    backup.close()


async def test_a_migration_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "plane.db"
    async with await SqliteStore.open(path) as store:
        await store.commit({"a": b"1"})
    with pytest.raises(StoreUnusable):
        await SqliteStore.open(path, steps=(*schemas(), "delete from entries; select nonsense;"))
    async with await SqliteStore.open(path) as store:
        assert dict((await store.load("")).values) == {"a": b"1"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"hello, this is not a database at all", "no SQLite file", id="text"),
        pytest.param(b"SQLite format 3\x00" + bytes(84), "no SQLite file|damaged|another program", id="header only"),
        pytest.param(b"SQLite format 3\x00", "no SQLite file", id="cut off"),
    ],
)
async def test_a_file_that_is_no_database_is_refused_and_kept(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "plane.db"
    path.write_bytes(content)
    with pytest.raises(StoreUnusable, match=words):
        await SqliteStore.open(path)
    assert path.read_bytes() == content


async def test_another_programs_database_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "plane.db"
    with sqlite3.connect(path) as other:
        other.execute("create table theirs (x)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(StoreUnusable, match="database of another program"):
        await SqliteStore.open(path)
    with sqlite3.connect(path) as other:
        assert other.execute("select name from sqlite_master").fetchall() == [("theirs",)]
    other.close()
    assert len(path.read_bytes()) == len(before)


async def test_a_folder_in_the_files_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "plane.db").mkdir()
    with pytest.raises(StoreUnusable, match=r"plane\.db cannot be written"):
        await SqliteStore.open(tmp_path / "plane.db")


async def test_a_file_in_the_state_directorys_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(StoreUnusable, match=r"the state directory .*state cannot be used"):
        await SqliteStore.open(tmp_path / "state" / "plane.db")


async def test_a_state_directory_of_another_user_is_named(tmp_path: Path) -> None:
    """Asked as a user who may not write there; root, who may, asks in that user's name."""
    code = (
        "import os, sys, trio\n"
        "from llmgw.plane.store.sqlite import SqliteStore, StoreUnusable, schemas\n"
        "steps = schemas()\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "async def main():\n"
        "    try:\n"
        "        await SqliteStore.open(sys.argv[1], steps=steps)\n"
        "    except StoreUnusable as error:\n"
        "        sys.exit(42 if 'make it writable' in str(error) else 43)\n"
        "trio.run(main)\n"
    )
    with _locked(tmp_path):
        assert await _run(code, tmp_path / "plane.db") == 42


async def test_a_tool_that_holds_the_file_is_a_clear_error_and_passes(tmp_path: Path) -> None:
    path = tmp_path / "plane.db"
    async with await SqliteStore.open(path, busy=0.1) as store:
        tool = sqlite3.connect(path, isolation_level=None)
        tool.execute("begin immediate")
        with pytest.raises(StoreUnusable, match="locked by another process"):
            await store.commit({"a": b"1"})
        tool.execute("rollback")
        tool.close()
        await store.commit({"a": b"2"})
        assert dict((await store.load("")).values) == {"a": b"2"}


async def test_a_closed_store_says_so_and_closing_twice_is_no_error(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "plane.db")
    await store.aclose()
    await store.aclose()
    with pytest.raises(StoreUnusable, match="closed already"):
        await store.load("")

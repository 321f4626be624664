"""The SQLite file: what is refused, in which words, and that it is left as it was."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from llmgw import __version__
from llmgw.plane.store.backup import copies
from llmgw.plane.store.sqlite import SqliteStore, StoreUnusable, reading, schemas

pytestmark = pytest.mark.real

#: How often a migration is killed, at moments spread over all of it.
KILLS = 24

MIGRATES = """
import sys, trio
from llmgw.plane.store.sqlite import SqliteStore, schemas
async def main():
    async with await SqliteStore.open(sys.argv[1], steps=(*schemas(), *sys.argv[2:])):
        pass
trio.run(main)
"""
KILLED = """
import os, sys, trio
from llmgw.plane.store.sqlite import SqliteStore, schemas
async def main():
    await SqliteStore.open(sys.argv[1], steps=(*schemas(), *sys.argv[2:]))
    os.kill(os.getpid(), 9)
trio.run(main)
"""

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


async def _run(code: str, path: Path | str, *words: str) -> int:
    """Killed, and not asked, when it is cancelled."""

    async def kill(process: trio.Process) -> None:
        process.kill()

    argv = [sys.executable, "-c", code, str(path), *words]
    ended = await trio.run_process(argv, check=False, stderr=subprocess.DEVNULL, deliver_cancel=kill)
    return ended.returncode


def _bytes(folder: Path, but: tuple[str, ...] = ()) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in _files(folder) if file.name not in but}


async def _written_by(release: str, path: Path, steps: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("llmgw.plane.store.sqlite.__version__", release)
        async with await SqliteStore.open(path, steps=steps) as store:
            await store.commit({release: b"1"})


async def _version(path: Path) -> int:
    def read() -> int:
        with reading(path) as db:
            return int(db.execute("pragma user_version").fetchone()[0])

    return await trio.to_thread.run_sync(read)


async def test_a_second_plane_is_refused_with_the_firsts_pid(tmp_path: Path) -> None:
    path = tmp_path / "plane.db"
    async with await SqliteStore.open(path) as store:
        with pytest.raises(StoreUnusable, match=f"another plane \\(pid {os.getpid()}\\)"):
            await SqliteStore.open(path)
        await store.commit({"still": b"1"})
    async with await SqliteStore.open(path):
        pass


async def test_a_store_that_is_closed_is_free_though_a_child_that_is_just_being_started_has_its_lock_open(
    tmp_path: Path,
) -> None:
    store = await SqliteStore.open(tmp_path / "plane.db")
    as_the_child_has_it = os.dup(store._lock)
    try:
        await store.aclose()
        async with await SqliteStore.open(tmp_path / "plane.db"):
            pass
    finally:
        os.close(as_the_child_has_it)


async def test_a_newer_releases_file_is_refused_by_its_name_and_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, newer = tmp_path / "plane.db", len(schemas()) + 1
    await _written_by("0.3.0", path, (*schemas(), MORE), monkeypatch)
    await _written_by("0.3.1", path, (*schemas(), MORE), monkeypatch)
    before = _bytes(tmp_path)
    with pytest.raises(StoreUnusable) as refused:
        await SqliteStore.open(path)
    assert str(refused.value) == (
        f"{path} was written by llmgw 0.3.0 (state version {newer}; this one, {__version__}, knows {newer - 1}): "
        "upgrade this plane to 0.3.0, or restore an older backup"
    )
    assert _bytes(tmp_path) == before
    assert [file.name for file in _files(tmp_path)] == ["plane.db", "plane.db.lock"]


async def test_a_newer_releases_file_of_a_plane_that_was_killed_is_refused_and_not_touched(tmp_path: Path) -> None:
    """What says that it is newer is still in the write-ahead log alone."""
    path = tmp_path / "plane.db"
    async with await SqliteStore.open(path) as store:
        await store.commit({"a": b"1"})
    assert await _run(KILLED, path, MORE) == -9
    assert (tmp_path / "plane.db-wal").stat().st_size
    before = _bytes(tmp_path, but=("plane.db-shm", "plane.db.lock"))
    with pytest.raises(StoreUnusable, match=rf"state version {len(schemas()) + 1}; this one, .* goes back"):
        await SqliteStore.open(path)
    assert _bytes(tmp_path, but=("plane.db-shm", "plane.db.lock")) == before


async def test_the_refusal_names_the_copy_that_leads_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plane.db"
    async with await SqliteStore.open(path) as store:
        await store.commit({"a": b"1"})
    await _written_by("0.3.0", path, (*schemas(), MORE), monkeypatch)
    (copy,) = copies(path)
    with pytest.raises(StoreUnusable, match=f"`llmgw-plane restore {copy}` goes back to before the upgrade"):
        await SqliteStore.open(path)


async def test_an_older_releases_file_is_migrated_and_copied_first(tmp_path: Path) -> None:
    path, version = tmp_path / "plane.db", len(schemas())
    async with await SqliteStore.open(path) as store:
        await store.commit({"a": b"1"})
    async with await SqliteStore.open(path, steps=(*schemas(), MORE)) as store:
        assert dict((await store.load("")).values) == {"a": b"2"}
    (copy,) = copies(path)
    assert copy.name.startswith(f"plane.db.v{version}-")
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    # It is a state of its own, which a plane that knows no more than that can open.
    async with await SqliteStore.open(copy) as store:
        assert dict((await store.load("")).values) == {"a": b"1"}


async def test_a_state_of_the_first_release_is_migrated(tmp_path: Path) -> None:
    path = tmp_path / "plane.db"
    async with await SqliteStore.open(path, steps=schemas()[:1]) as store:
        revision = await store.commit({"a": b"1", "b": b"2"})
        await store.commit({}, ["b"])
    async with await SqliteStore.open(path) as store:
        assert dict((await store.load("")).values) == {"a": b"1"}
        assert [change.key for change in await store.changes(revision)] == ["b"]
    with sqlite3.connect(path) as db:
        assert db.execute("select release, schema from releases").fetchall() == [(__version__, len(schemas()))]
    db.close()
    assert len(copies(path)) == 1


async def test_a_new_state_is_copied_nowhere(tmp_path: Path) -> None:
    async with await SqliteStore.open(tmp_path / "plane.db"):
        assert copies(tmp_path / "plane.db") == ()


#: Some seconds of work in one statement each, so that a kill finds the migration at it.
SLOW = (
    "create table later (key text primary key, value blob);\n"
    "insert into later select key, value from entries;\n"
    "update entries set value = zeroblob(300);\n"
    "create index later_by_value on later (value);\n",
    "update entries set value = cast('new ' || key as blob);\ndrop table later;\n",
)


@pytest.mark.slow
async def test_a_migration_killed_at_any_moment_leaves_the_old_state_or_a_new_one(tmp_path: Path) -> None:
    path, kept = tmp_path / "plane.db", {f"key {n:05}": b"old %d" % n for n in range(20_000)}
    async with await SqliteStore.open(path) as store:
        await store.commit(kept)
    first = len(schemas())
    whole = {
        first: kept,
        first + 1: {key: bytes(300) for key in kept},
        first + 2: {key: f"new {key}".encode() for key in kept},
    }
    began = trio.current_time()
    assert await _run(MIGRATES, shutil.copy(path, tmp_path / "unharmed.db"), *SLOW) == 0
    took, found = trio.current_time() - began, list[int]()
    # A machine that is slower now than it was then needs later moments, too: twice, three times as late.
    while len(found) < KILLS or not min(found) == first < max(found):
        n = len(found)
        assert n < 5 * KILLS, found
        place = tmp_path / str(n)
        place.mkdir()
        victim = place / "plane.db"
        shutil.copy(path, victim)
        with trio.move_on_after(took * (n % KILLS + 1) / (KILLS + 1) * (1 + n // KILLS)):
            # Cancelled: the process is killed.
            await _run(MIGRATES, victim, *SLOW)
        found.append(version := await _version(victim))
        async with await SqliteStore.open(victim, steps=(*schemas(), *SLOW)[:version]) as store:
            assert dict((await store.load("")).values) == whole[version], f"killed at {n}, version {version}"
        # And it can go on from there, with the old state still at hand.
        async with await SqliteStore.open(victim, steps=(*schemas(), *SLOW)) as store:
            assert dict((await store.load("")).values) == whole[first + 2]
        assert copies(victim)
        assert {file.name.split(".v")[0] for file in _files(place)} == {"plane.db", "plane.db.lock"}
        shutil.rmtree(place)


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

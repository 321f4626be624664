"""`llmgw-plane backup` and `restore`: all of a plane in one file, and back, also beside one that runs."""

from __future__ import annotations

import os
import sqlite3
import stat
import tarfile
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio

from llmgw.cli import plane
from llmgw.errors import BadInput, Conflict, NotFound
from llmgw.plane.backup import BESIDE, STATE, backup, restore
from llmgw.plane.init import init
from llmgw.plane.restored import LEAP
from llmgw.plane.settings import PlaneSettings, find, load
from llmgw.plane.store.records import EPOCH
from llmgw.plane.store.sqlite import SqliteStore, StoreUnusable, schemas

pytestmark = pytest.mark.real


def settings(directory: Path) -> PlaneSettings:
    return load(find(None, directory), directory=directory)


def write(path: Path, values: Mapping[str, bytes], steps: tuple[str, ...] | None = None) -> None:
    async def commit() -> None:
        async with await SqliteStore.open(path, steps=steps) as store:
            await store.commit(values)

    trio.run(commit)


def stored(path: Path) -> dict[str, bytes]:
    async def load() -> dict[str, bytes]:
        async with await SqliteStore.open(path) as store:
            return dict((await store.load("")).values)

    return trio.run(load)


def epoch(number: int) -> dict[str, bytes]:
    return {EPOCH: msgspec.json.encode(number)}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "plane"
    init(made)
    (made / "models.toml").write_text("# none yet\n")
    write(made / "plane.db", {"models/a": b"1"} | epoch(5))
    return made


def test_a_backup_holds_everything_and_comes_back_on_an_empty_machine(directory: Path, tmp_path: Path) -> None:
    made = backup(settings(directory), tmp_path / "plane.tar")
    assert made.files == (STATE, *BESIDE)
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o600
    fresh = tmp_path / "elsewhere" / "plane"
    done = restore(lambda: settings(fresh), made.path)
    assert set(done.files) == set(BESIDE)
    assert (done.kept, done.aside, done.epoch) == ((), None, 5 + LEAP)
    for name in BESIDE:
        assert (fresh / name).read_bytes() == (directory / name).read_bytes(), name
        assert stat.S_IMODE((fresh / name).stat().st_mode) == stat.S_IMODE((directory / name).stat().st_mode), name
    assert stored(fresh / "plane.db") == {"models/a": b"1"} | epoch(5 + LEAP)
    assert plane(["check", "--dir", str(fresh)]) == 0


def test_a_backup_is_made_while_a_plane_runs_and_a_restore_is_refused(directory: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with await SqliteStore.open(directory / "plane.db") as store:
            await store.commit({"models/b": b"2"})  # in the write-ahead log alone
            made = await trio.to_thread.run_sync(backup, settings(directory), tmp_path)
            assert made.path.name.startswith("llmgw-")
            before = (directory / "plane.db").read_bytes()
            with pytest.raises(StoreUnusable, match=f"in use by another plane \\(pid {os.getpid()}\\)"):
                await trio.to_thread.run_sync(restore, partial(settings, directory), made.path)
            assert (directory / "plane.db").read_bytes() == before
            await store.commit({"models/c": b"3"})

    trio.run(run)
    (made,) = tmp_path.glob("*.tar")
    done = restore(lambda: settings(directory), made)
    assert stored(directory / "plane.db") == {"models/a": b"1", "models/b": b"2"} | epoch(5 + LEAP)
    assert done.aside is not None
    assert stored(done.aside) == {"models/a": b"1", "models/b": b"2", "models/c": b"3"} | epoch(5)


def test_identity_and_settings_that_are_there_stay_and_are_named(directory: Path, tmp_path: Path) -> None:
    made = backup(settings(directory), tmp_path / "plane.tar")
    (directory / "plane.toml").write_text('name = "another"\nstore = "other.db"\n')
    (directory / "models.toml").unlink()
    done = restore(lambda: settings(directory), made.path)
    assert (done.files, done.kept) == (("models.toml",), ("plane.toml",))
    assert settings(directory).name == "another"
    assert "models/a" in stored(directory / "other.db")


def test_the_settings_of_the_backup_say_where_the_state_lies(directory: Path, tmp_path: Path) -> None:
    (directory / "plane.toml").write_text('store = "deep/state.db"\n')
    (directory / "deep").mkdir()
    (directory / "plane.db").rename(directory / "deep" / "state.db")
    made = backup(settings(directory), tmp_path / "plane.tar")
    restore(lambda: settings(tmp_path / "fresh"), made.path)
    assert "models/a" in stored(tmp_path / "fresh" / "deep" / "state.db")


def test_the_epoch_passes_that_of_the_state_that_is_replaced(directory: Path, tmp_path: Path) -> None:
    made = backup(settings(directory), tmp_path / "plane.tar")
    write(directory / "plane.db", epoch(70_000))
    assert restore(lambda: settings(directory), made.path).epoch == 70_000 + LEAP


def test_the_copy_of_a_migration_goes_back_and_is_not_migrated(directory: Path) -> None:
    path = directory / "plane.db"
    write(path, {"models/new": b"2"}, (*schemas(), "create table later (x);"))
    (copy,) = directory.glob("plane.db.v*.bak")
    restore(lambda: settings(directory), copy)
    assert copy.exists()
    assert "models/new" not in stored(path)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("pragma user_version").fetchone() == (len(schemas()),)


def test_a_damaged_state_is_set_aside_as_it_is(directory: Path, tmp_path: Path) -> None:
    made = backup(settings(directory), tmp_path / "plane.tar")
    (directory / "plane.db").write_bytes(b"SQLite format 3\x00" + os.urandom(9000))
    damaged = (directory / "plane.db").read_bytes()
    done = restore(lambda: settings(directory), made.path)
    assert done.aside is not None
    assert done.aside.read_bytes() == damaged
    assert "models/a" in stored(directory / "plane.db")


def test_a_backup_of_another_fleet_is_refused(directory: Path, tmp_path: Path) -> None:
    made = backup(settings(directory), tmp_path / "plane.tar")
    init(tmp_path / "other")
    with pytest.raises(Conflict, match="is of another fleet"):
        restore(lambda: settings(tmp_path / "other"), made.path)
    assert not (tmp_path / "other" / "plane.db").exists()


def test_a_backup_of_a_newer_release_is_refused_and_nothing_is_changed(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("llmgw.plane.store.sqlite.__version__", "9.1.0")
        write(directory / "plane.db", {}, (*schemas(), "create table later (x);"))
    made = backup(settings(directory), tmp_path / "plane.tar")
    with pytest.raises(BadInput, match=r"plane\.tar was written by llmgw 9\.1\.0 \(state version .* release that made"):
        restore(lambda: settings(tmp_path / "fresh"), made.path)
    assert not (tmp_path / "fresh").exists()


@pytest.mark.parametrize("content", [b"", b"hello", b"SQLite format 3\x00", bytes(10240)])
def test_a_file_that_is_no_backup_is_refused(directory: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "what").write_bytes(content)
    before = (directory / "plane.db").read_bytes()
    with pytest.raises(BadInput, match="what") as refused:
        restore(lambda: settings(directory), tmp_path / "what")
    assert "\n" not in str(refused.value)
    assert (directory / "plane.db").read_bytes() == before


def test_a_backup_that_was_cut_off_is_refused(directory: Path, tmp_path: Path) -> None:
    made = backup(settings(directory), tmp_path / "plane.tar")
    made.path.write_bytes(made.path.read_bytes()[:9000])
    with pytest.raises(BadInput, match="is damaged"):
        restore(lambda: settings(tmp_path / "fresh"), made.path)


def test_an_entry_of_a_backup_leads_nowhere_else(directory: Path, tmp_path: Path) -> None:
    made = backup(settings(directory), tmp_path / "plane.tar")
    with tarfile.open(made.path, "a") as archive:
        for name in ("../escaped", "/escaped", "plane.toml"):
            entry = tarfile.TarInfo(name)
            if name == "plane.toml":
                entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(entry)
    restore(lambda: settings(tmp_path / "deep" / "fresh"), made.path)
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["fresh"]
    assert not (tmp_path / "deep" / "fresh" / "plane.toml").is_symlink()


def test_a_directory_that_is_not_there_is_not_taken_for_the_name_of_a_backup(directory: Path, tmp_path: Path) -> None:
    assert plane(["backup", "--dir", str(directory), f"{tmp_path}/nowhere/"]) == NotFound.exit_status
    assert not (tmp_path / "nowhere").exists()


def test_a_gateway_without_a_planes_directory_does_not_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plane(["gateway", "--dir", str(tmp_path / "nowhere")]) == NotFound.exit_status
    assert "there is no plane in" in capsys.readouterr().err


def test_the_commands_say_what_they_did(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plane.tar"
    assert plane(["backup", "--dir", str(directory), str(file)]) == 0
    told = capsys.readouterr()
    assert told.out.startswith(f"{file}: ")
    assert "It holds the CA's key" in told.err
    assert plane(["restore", "--dir", str(directory), str(file)]) == 0
    told = capsys.readouterr()
    assert "The state that was there lies in" in told.out
    assert f"The epoch is {5 + LEAP} now" in told.out
    assert plane(["backup", "--dir", str(tmp_path / "nowhere"), str(file)]) == BadInput.exit_status
    assert "is this the plane's directory?" in capsys.readouterr().err

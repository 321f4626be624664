"""A copy of the state's file: whole, durable and checked, made while a plane writes or before a migration.

A copy is one file without a write-ahead log, so that it can be put in the state's place as it is.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from llmgw.errors import LlmgwError
from llmgw.files import PRIVATE

#: Copies made before migrations that stay beside the state; older ones are removed.
KEPT = 5
#: Never taken from the last of a disk, in bytes.
MARGIN = 1 << 20


class BackupFailed(LlmgwError):
    """A copy of the state could not be made, and nothing was begun that needs one."""

    code, http_status = "backup", 503


def before_migration(
    path: Path, db: sqlite3.Connection, version: int, *, wall: Callable[[], float] = time.time
) -> Path:
    """Copy the state beside itself before it is migrated from `version`; where the copy lies.

    One that holds the same already is enough, so that a migration which fails again and again does not push the other
    copies out. Raises BackupFailed, also when there is no room for the copy and for what a migration may write.
    """
    size = _size(db)
    beside = copies(path)
    # The caller has the state's lock: what is unfinished is of a plane that was killed while it copied.
    for unfinished in path.parent.glob(f".{path.name}.v*.new*"):
        unfinished.unlink(missing_ok=True)
    for copy in reversed(beside):
        if _gist(copy) == (version, _revision(db)) and _digest_of(copy) == _digest(db):
            return copy
    try:
        free = shutil.disk_usage(path.parent).free
    except OSError as error:
        raise BackupFailed(f"{path.parent} cannot be looked at: {error.strerror}") from None
    if free < 2 * size + MARGIN:
        raise BackupFailed(
            f"{path} must be migrated, and its disk has {free >> 20} MiB free: {(2 * size + MARGIN) >> 20} MiB are "
            "needed for a copy of it first and for the migration",
            remedy="free some space and start again; nothing was changed",
        )
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(wall()))
    copy = path.with_name(f"{path.name}.v{version}-{stamp}.bak")
    copy_to(db, copy)
    for old in [one for one in beside if one != copy][: -(KEPT - 1)]:
        old.unlink(missing_ok=True)
    return copy


def copies(path: Path) -> tuple[Path, ...]:
    """The copies that migrations have left beside a state, oldest first."""

    def stamp(copy: Path) -> str:
        return copy.name.rpartition("-")[2]

    return tuple(sorted(path.parent.glob(f"{path.name}.v*-*.bak"), key=stamp))


def copy_before(path: Path, version: int) -> Path | None:
    """The newest copy that a plane can open which knows the schema up to `version`."""
    fitting = [copy for copy in copies(path) if (gist := _gist(copy)) is not None and gist[0] <= version]
    return fitting[-1] if fitting else None


def copy_to(db: sqlite3.Connection, into: Path) -> None:
    """Copy an open state to a file, which is there whole or not at all. Raises BackupFailed."""
    fresh = into.with_name(f".{into.name}.{os.getpid()}.new")
    try:
        fresh.unlink(missing_ok=True)
        os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE))
        with closing(sqlite3.connect(fresh, isolation_level=None)) as copy:
            db.backup(copy)
            copy.execute("pragma journal_mode = delete")
            (verdict,) = copy.execute("pragma quick_check(1)").fetchone()
        if verdict != "ok":
            raise BackupFailed(
                f"{into} was not made: what was copied is damaged ({verdict})",
                remedy="look at the disk (`dmesg`), and restore an older backup",
            )
        _sync(fresh, os.O_RDWR)
        os.replace(fresh, into)
        _sync(into.parent, os.O_RDONLY | os.O_DIRECTORY)
    except (OSError, sqlite3.Error) as error:
        words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BackupFailed(f"{into} cannot be written: {words}", remedy="nothing was changed") from error
    finally:
        for leftover in (fresh, fresh.with_name(f"{fresh.name}-journal")):
            leftover.unlink(missing_ok=True)


def _size(db: sqlite3.Connection) -> int:
    """Of the state with its write-ahead log, in bytes."""
    (pages,) = db.execute("pragma page_count").fetchone()
    (size,) = db.execute("pragma page_size").fetchone()
    return int(pages * size)


def _revision(db: sqlite3.Connection) -> int:
    (revision,) = db.execute("select value from meta where name = 'revision'").fetchone()
    return int(revision)


def _gist(copy: Path) -> tuple[int, int] | None:
    """The schema's version and the revision in a copy; None for a file that is none."""
    try:
        with closing(_readable(copy)) as db:
            (version,) = db.execute("pragma user_version").fetchone()
            return int(version), _revision(db)
    except (sqlite3.Error, TypeError):
        return None


def _digest_of(copy: Path) -> bytes:
    with closing(_readable(copy)) as db:
        return _digest(db)


def _digest(db: sqlite3.Connection) -> bytes:
    """Of all that is stored."""
    digest = hashlib.sha256()
    for row in db.execute("select key, value, revision from entries order by key"):
        digest.update(repr(row).encode())
    return digest.digest()


def _readable(copy: Path) -> sqlite3.Connection:
    """A file that nobody writes, opened without leaving a trace of it."""
    return sqlite3.connect(f"{copy.absolute().as_uri()}?mode=ro&immutable=1", uri=True)


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

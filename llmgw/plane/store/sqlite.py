"""The default store: one SQLite file beside the plane's configuration.

WAL with synchronous=FULL, since a placement must have reached the disk before a node hears of it (D4). Every
call runs in a thread, one at a time. A lock file keeps a second plane away; the kernel drops it with the
process, so that a plane killed with SIGKILL leaves nothing stale behind.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from importlib import resources
from pathlib import Path
from typing import TypeVar

import structlog
import trio

from llmgw import __version__
from llmgw.errors import LlmgwError
from llmgw.plane.store import Change, Snapshot
from llmgw.plane.store.backup import before_migration, copy_before
from llmgw.plane.store.memory import REMEMBERED, moved, pruned

T = TypeVar("T")

log = structlog.get_logger("llmgw.store")

#: "llgw": marks a file as ours, so that a foreign database is never taken for an empty one.
APPLICATION = 0x6C6C6777
#: Sorts after every character that a key may hold.
_LAST = "\U0010ffff"
#: What every SQLite file begins with.
MAGIC = b"SQLite format 3\x00"


class StoreUnusable(LlmgwError):
    """The state cannot be read or written: what is wrong with the file, and what to do."""

    code, http_status = "store", 503


def schemas() -> tuple[str, ...]:
    """The schema's steps, oldest first: step n makes version n out of version n - 1."""
    folder = resources.files("llmgw.plane.store") / "schema"
    return tuple(
        file.read_text() for file in sorted(folder.iterdir(), key=lambda f: f.name) if file.name.endswith(".sql")
    )


class SqliteStore:
    """The map in a file. Use as `async with await SqliteStore.open(path) as store:`, or call `aclose`."""

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: int, remembered: int) -> None:
        self._path = path
        self._connection = connection
        self._lock = lock
        self._remembered = remembered
        self._turn = trio.CapacityLimiter(1)
        self._closed = False

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str],
        *,
        steps: tuple[str, ...] | None = None,
        remembered: int = REMEMBERED,
        busy: float = 5.0,
    ) -> SqliteStore:
        """Open or make the file. Raises StoreUnusable and leaves the file as it was when it is not for us.

        `busy` is for how many seconds a tool that has the file locked for a moment is waited for.
        """
        file = Path(path)
        connection, lock = await trio.to_thread.run_sync(_open, file, schemas() if steps is None else steps, busy)
        return cls(file, connection, lock, remembered)

    async def __aenter__(self) -> SqliteStore:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def load(self, prefix: str) -> Snapshot:
        def read(db: sqlite3.Connection) -> Snapshot:
            rows = db.execute(
                "select key, value from entries where key >= ? and key < ? and value is not null order by key",
                (prefix, prefix + _LAST),
            )
            return Snapshot(_meta(db, "revision"), {key: bytes(value) for key, value in rows})

        return await self._run(read)

    async def commit(
        self, puts: Mapping[str, bytes], deletes: Iterable[str] = (), *, if_revision: int | None = None
    ) -> int:
        writes, gone = dict(puts), [key for key in deletes if key not in puts]

        def write(db: sqlite3.Connection) -> int:
            revision = _meta(db, "revision")
            if if_revision is not None and if_revision != revision:
                raise moved(revision, if_revision)
            gone_now = [
                key for key in gone if db.execute("select 1 from entries where key = ?", (key,)).fetchone() is not None
            ]
            if not writes and not gone_now:
                return revision
            revision += 1
            upsert = (
                "insert into entries (key, value, revision) values (?, ?, ?)"
                " on conflict (key) do update set value = excluded.value, revision = excluded.revision"
            )
            db.executemany(upsert, [(key, bytes(value), revision) for key, value in writes.items()])
            db.executemany(upsert, [(key, None, revision) for key in gone_now])
            db.execute("update meta set value = ? where name = 'revision'", (revision,))
            horizon = revision - self._remembered
            if horizon >= _meta(db, "pruned") + self._remembered:
                db.execute("delete from entries where value is null and revision <= ?", (horizon,))
                db.execute("update meta set value = ? where name = 'pruned'", (horizon,))
            return revision

        return await self._run(write, writes=True)

    async def changes(self, since: int) -> tuple[Change, ...]:
        def read(db: sqlite3.Connection) -> tuple[Change, ...]:
            if since < _meta(db, "pruned"):
                raise pruned(since)
            rows = db.execute(
                "select key, value, revision from entries where revision > ? order by revision, key", (since,)
            )
            return tuple(
                Change(key, None if value is None else bytes(value), revision) for key, value, revision in rows
            )

        return await self._run(read)

    async def aclose(self) -> None:
        """Close the file and give up the lock. Closing twice is no error."""
        if self._closed:
            return
        self._closed = True
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._connection.close, limiter=self._turn)
        release(self._lock)

    async def _run(self, work: Callable[[sqlite3.Connection], T], *, writes: bool = False) -> T:
        def transaction() -> T:
            db = self._connection
            try:
                db.execute("begin immediate" if writes else "begin")
                try:
                    result = work(db)
                except BaseException:
                    db.execute("rollback")
                    raise
                db.execute("commit")
                return result
            except sqlite3.Error as error:
                if db.in_transaction:
                    db.rollback()
                raise _unusable(self._path, error) from error

        if self._closed:
            raise StoreUnusable(f"the state in {self._path} is closed already")
        return await trio.to_thread.run_sync(transaction, limiter=self._turn)


def _meta(db: sqlite3.Connection, name: str) -> int:
    (value,) = db.execute("select value from meta where name = ?", (name,)).fetchone()
    return int(value)


def _unusable(path: Path, error: Exception) -> StoreUnusable:
    text = str(error)
    for words, what, remedy in _CAUSES:
        if any(word in text for word in words):
            return StoreUnusable(f"{path} {what}", remedy=remedy)
    return StoreUnusable(f"{path} cannot be used: {text}")


_OWNER = "check the owner and the mode of the file and its folder"
#: Words of SQLite's messages, what they mean to an operator, and what to do.
_CAUSES = (
    (("locked", "busy"), "is locked by another process", "stop the other plane, or the tool that has it open"),
    (("full",), "cannot be written: the disk is full", "free some space; the plane itself tries again"),
    (("I/O error",), "cannot be read or written: disk I/O error", "is the disk full (`df`), or broken (`dmesg`)?"),
    (("readonly", "unable to open"), "cannot be written", _OWNER),
    (("not a database", "malformed"), "is damaged or is no SQLite file", "restore it from a backup, or move it away"),
)


def _open(path: Path, steps: tuple[str, ...], busy: float) -> tuple[sqlite3.Connection, int]:
    lock = hold(path)
    try:
        return _connect(path, steps, busy), lock
    except BaseException:
        release(lock)
        raise


def hold(path: Path) -> int:
    """Take the lock of a state's file, and make its directory; the open lock file, to be given to `release`.

    Raises StoreUnusable that names the plane which has it.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StoreUnusable(
            f"the state directory {path.parent} cannot be used: {error.strerror}",
            remedy="make it writable for this user",
        ) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(lock, 20, 0).decode("ascii", "replace").strip() or "another process"
            raise StoreUnusable(
                f"{path} is in use by another plane (pid {holder})", remedy="one plane a file: stop the other one first"
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        return lock
    except BaseException:
        os.close(lock)
        raise


def release(lock: int) -> None:
    """Give the lock up. Said, and not left to the closing: a child that is just being started has the open file too."""
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def _connect(path: Path, steps: tuple[str, ...], busy: float) -> sqlite3.Connection:
    try:
        # The mode is set before SQLite sees the file: what is in it is for the plane's user alone.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise StoreUnusable(
            f"{path} cannot be written: {error.strerror}",
            remedy="check the owner and the mode of the file and its folder",
        ) from error
    look(path, len(steps), busy)
    connection: sqlite3.Connection | None = None
    try:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=busy)
        version = _number(connection, "user_version")
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = full")
        _migrate(path, connection, version, steps)
        _sign(connection, len(steps))
        return connection
    except sqlite3.Error as error:
        if connection is not None:
            connection.close()
        raise _unusable(path, error) from error
    except BaseException:
        if connection is not None:
            connection.close()
        raise


def look(path: Path, newest: int, busy: float = 5.0) -> int:
    """The schema's version of a file that a plane which knows versions up to `newest` may open; 0 for an empty one.

    Raises StoreUnusable for any other. The file is as it was in either case.
    """
    try:
        with open(path, "rb") as file:
            header = file.read(100)
    except OSError as error:
        raise StoreUnusable(f"{path} cannot be read: {error.strerror}", remedy=_OWNER) from error
    if not header:
        return 0
    # Read from the header and not through SQLite, which may write even when it only looks.
    if not header.startswith(MAGIC) or len(header) < 100:
        raise StoreUnusable(f"{path} is no SQLite file", remedy="restore it from a backup, or move it away")
    _ours(path, int.from_bytes(header[60:64], "big"), int.from_bytes(header[68:72], "big"), newest, busy)
    try:
        # Looked at again: the newest header may be in the write-ahead log.
        with reading(path, busy) as db:
            version, application = _number(db, "user_version"), _number(db, "application_id")
    except sqlite3.Error as error:
        raise _unusable(path, error) from error
    _ours(path, version, application, newest, busy)
    return version


@contextmanager
def reading(path: Path, busy: float = 5.0) -> Iterator[sqlite3.Connection]:
    """A file to be looked into. Nothing is written, and no log is folded into it. Raises sqlite3.Error."""
    log_file = Path(f"{path}-wal")
    # A file without a log is not opened as one of a running plane: that would begin a log beside it.
    still = "" if log_file.exists() and log_file.stat().st_size else "&immutable=1"
    url = f"{path.absolute().as_uri()}?mode=ro{still}"
    with closing(sqlite3.connect(url, uri=True, isolation_level=None, timeout=busy)) as db:
        yield db


def _number(db: sqlite3.Connection, pragma: str) -> int:
    return int(db.execute(f"pragma {pragma}").fetchone()[0])


def _ours(path: Path, version: int, application: int, newest: int, busy: float) -> None:
    if application != APPLICATION and (application or version):
        raise StoreUnusable(f"{path} is the database of another program", remedy="choose another file")
    if version > newest:
        writer = _writer(path, busy)
        copy = copy_before(path, newest)
        back = f"`llmgw-plane restore {copy}` goes back to before the upgrade" if copy else "restore an older backup"
        raise StoreUnusable(
            f"{path} was written by {f'llmgw {writer}' if writer else 'a newer llmgw'} (state version {version}; "
            f"this one, {__version__}, knows {newest})",
            remedy=f"upgrade this plane{f' to {writer}' if writer else ''}, or {back}",
        )


def _writer(path: Path, busy: float) -> str:
    """The release that made the schema what it is: the first that knew it; "" when the file does not say."""
    try:
        with reading(path, busy) as db:
            row = db.execute("select release from releases order by schema desc, clock limit 1").fetchone()
    except sqlite3.Error:
        return ""
    return str(row[0]) if row else ""


def _migrate(path: Path, db: sqlite3.Connection, version: int, steps: tuple[str, ...]) -> None:
    """Bring a file from its version to the newest, each step a transaction: killed at any moment, it is old or new."""
    if version == len(steps):
        return
    if version == 0 and db.execute("select count(*) from sqlite_master").fetchone()[0]:
        raise StoreUnusable(f"{path} is the database of another program", remedy="choose another file")
    if version:
        copy = before_migration(path, db, version)
        log.info("the state is migrated", path=str(path), version=version, to=len(steps), copy=str(copy))
    for number in range(version, len(steps)):
        db.executescript(
            f"begin immediate;\n{steps[number]}\npragma application_id = {APPLICATION};\n"
            f"pragma user_version = {number + 1};\ncommit;"
        )


def _sign(db: sqlite3.Connection, version: int) -> None:
    """Write down that this release opened the file, where the schema has a place for it."""
    if db.execute("select 1 from sqlite_master where name = 'releases'").fetchone() is None:
        return
    known = db.execute("select schema from releases where release = ?", (__version__,)).fetchone()
    if known is None or known[0] < version:
        upsert = "insert into releases values (?, ?, ?) on conflict (release) do update set schema = excluded.schema"
        db.execute(upsert, (__version__, version, time.time()))

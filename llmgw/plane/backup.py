"""Everything of a plane that cannot be seen again in one file, and back: `llmgw-plane backup` and `restore`.

A backup is a tar of the state as of one moment and of what makes this plane this plane: the CA with its key, the
certificates, the tokens of administrators, the settings. It is made while the plane runs.
"""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs
import trio

from llmgw import pki
from llmgw.errors import BadInput, Conflict, LlmgwError
from llmgw.files import PRIVATE, PUBLIC, make_directory, read_whole, write_whole
from llmgw.plane.own import ADMIN, ADMIN_TOKEN, CA, CA_KEY, SERVER
from llmgw.plane.restored import epoch_in, raise_epoch
from llmgw.plane.settings import PlaneSettings
from llmgw.plane.store.backup import copy_to
from llmgw.plane.store.sqlite import MAGIC, StoreUnusable, hold, look, reading, release, schemas

#: Where the state lies in a backup, whatever the settings call it.
STATE = "state.db"
SETTINGS, MODELS = "plane.toml", "models.toml"
#: What lies beside the state; the first is asked for its fleet before anything is put back.
BESIDE = (CA, CA_KEY, SERVER, ADMIN, ADMIN_TOKEN, SETTINGS, MODELS)
SECRET = (CA_KEY, SERVER, ADMIN, ADMIN_TOKEN)
#: A file beside the state is never larger, in bytes.
MOST = 64 << 20


@attrs.frozen
class Backup:
    """What was written, and what is in it."""

    path: Path
    bytes: int
    files: tuple[str, ...]
    missing: tuple[str, ...] = ()


@attrs.frozen
class Restored:
    """What was put where; `aside` is where the state that was there before lies now."""

    epoch: int
    files: tuple[str, ...]
    kept: tuple[str, ...]
    aside: Path | None


def backup(settings: PlaneSettings, into: Path, *, wall: Callable[[], float] = time.time) -> Backup:
    """Write a backup to a file, or under a name with the time into a directory; the plane may run meanwhile.

    Raises LlmgwError; what was at that path before is replaced by a whole backup or left alone.
    """
    state = settings.path(settings.store)
    if not state.is_file():
        raise BadInput(f"{state} is not there", remedy="is this the plane's directory? see --dir and --config")
    look(state, sys.maxsize)
    if into.is_dir():
        into /= f"llmgw-{settings.name}-{_stamp(wall)}.tar"
    found = {name: place for name in BESIDE if (place := _place(settings, name)).is_file()}
    into = into.absolute()
    fresh = into.with_name(f".{into.name}.{os.getpid()}.new")
    try:
        with TemporaryDirectory(prefix=".llmgw-backup-", dir=into.parent) as folder:
            copy = Path(folder) / STATE
            # Opened as the plane does, which may start this very moment.
            with closing(sqlite3.connect(state, isolation_level=None)) as db:
                copy_to(db, copy)
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "wb") as file:
                with tarfile.open(fileobj=file, mode="w") as archive:
                    _add(archive, STATE, copy, wall())
                    for name, place in found.items():
                        _add(archive, name, place, wall())
                file.flush()
                os.fsync(file.fileno())
        os.replace(fresh, into)
        _sync_directory(into.parent)
    except (OSError, sqlite3.Error) as error:
        words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise LlmgwError(f"no backup was made: {into}: {words}") from None
    finally:
        fresh.unlink(missing_ok=True)
    missing = tuple(name for name in (CA_KEY, CA) if name not in found and not settings.insecure)
    return Backup(into, into.stat().st_size, (STATE, *found), missing)


def restore(settings: Callable[[], PlaneSettings], source: Path, *, wall: Callable[[], float] = time.time) -> Restored:
    """Put a backup in place: a tar of `backup`, or a copy of the state alone such as a migration leaves.

    The state that is there is set aside. Identity and settings are put back where they are missing, and never over
    others; `settings` reads them again then. The epoch is raised above any that agents can have obeyed (see
    `restored`). Raises LlmgwError while a plane runs here, for a backup of another fleet, and for a state that is too
    new; nothing is changed then.
    """
    directory = settings().directory
    made = not directory.exists()
    make_directory(directory)
    try:
        with _opened(source, directory) as (fresh, beside):
            version = _version(fresh, source)
            _same_fleet(directory, beside, source)
            back = _put_back(directory, beside, only=(SETTINGS,))
            now = settings()
            state = now.path(now.store)
            lock = hold(state)
            try:
                # Before it takes the other's place: a restore that is cut off leaves no state that agents refuse.
                at_least = epoch_in(state) if state.is_file() else 0
                epoch = trio.run(partial(raise_epoch, fresh, at_least=at_least, steps=schemas()[:version]))
                aside = _set_aside(state, wall) if state.is_file() and state.stat().st_size else None
                for leftover in (f"{state}-wal", f"{state}-shm"):
                    Path(leftover).unlink(missing_ok=True)
                _move(fresh, state)
            finally:
                release(lock)
    except BaseException:
        if made:
            shutil.rmtree(directory, ignore_errors=True)
        raise
    back += _put_back(directory, beside, now)
    kept = [name for name, data in beside.items() if _place(now, name).read_bytes() != data]
    return Restored(epoch, back, tuple(kept), aside)


def _put_back(
    directory: Path, beside: dict[str, bytes], settings: PlaneSettings | None = None, *, only: tuple[str, ...] = BESIDE
) -> tuple[str, ...]:
    """Write what is not there."""
    back = []
    for name in only:
        place = _place(settings, name) if settings is not None else directory / name
        if name in beside and not place.exists():
            write_whole(place, beside[name], PRIVATE if name in SECRET else PUBLIC)
            back.append(name)
    return tuple(back)


def _move(fresh: Path, state: Path) -> None:
    try:
        os.replace(fresh, state)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise LlmgwError(f"{state} cannot be written: {error.strerror}") from None
        write_whole(state, fresh.read_bytes(), PRIVATE)
    _sync_directory(state.parent)


def _place(settings: PlaneSettings, name: str) -> Path:
    match name:
        case "models.toml":
            return settings.path(settings.models)
        case "admin.token":
            return settings.path(settings.admin_tokens)
        case _:
            return settings.directory / name


def _add(archive: tarfile.TarFile, name: str, place: Path, clock: float) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = place.stat().st_size, PRIVATE, int(clock)
    with place.open("rb") as file:
        archive.addfile(entry, file)


@contextmanager
def _opened(source: Path, near: Path) -> Iterator[tuple[Path, dict[str, bytes]]]:
    """The state of a backup as a file near where it will be, and what lies beside it."""
    try:
        with source.open("rb") as file:
            head = file.read(len(MAGIC))
    except OSError as error:
        raise BadInput(f"{source} cannot be read: {error.strerror}") from None
    with TemporaryDirectory(prefix=".llmgw-restore-", dir=near) as folder:
        fresh = Path(folder) / STATE
        try:
            if head == MAGIC:
                _version(source, source)
                with reading(source) as db:
                    copy_to(db, fresh)
                yield fresh, {}
                return
            beside = _unpack(source, fresh)
        except (OSError, sqlite3.Error, tarfile.TarError) as error:
            raise BadInput(
                f"{source} is no backup, or is damaged: {str(error).splitlines()[0].rstrip(':')}",
                remedy="`llmgw-plane backup` makes one",
            ) from None
        yield fresh, beside


def _unpack(source: Path, fresh: Path) -> dict[str, bytes]:
    """Only the names that a backup has are looked for, so that no entry can lead elsewhere."""
    beside: dict[str, bytes] = {}
    with tarfile.open(source, "r:*") as archive:
        for entry in archive:
            content = archive.extractfile(entry) if entry.isreg() else None
            if content is None:
                continue
            if entry.name == STATE:
                with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "wb") as file:
                    shutil.copyfileobj(content, file)
                    file.flush()
                    os.fsync(file.fileno())
            elif entry.name in BESIDE and entry.size <= MOST:
                beside[entry.name] = content.read()
    if not fresh.exists():
        raise tarfile.TarError(f"it has no {STATE}")
    return beside


def _version(fresh: Path, source: Path) -> int:
    """The schema's version of a backup's state. Raises BadInput for one that this release cannot open."""
    try:
        version = look(fresh, len(schemas()))
    except StoreUnusable as error:
        words = error.what.replace(str(fresh), f"the state in {source}")
        raise BadInput(words, remedy="restore it with the release that made it, or take an older backup") from None
    if not version:
        raise BadInput(f"{source} holds no state of a plane", remedy="`llmgw-plane backup` makes backups")
    return version


def _same_fleet(directory: Path, beside: dict[str, bytes], source: Path) -> None:
    """A state whose certificates another CA has issued would lock every node out."""
    here = directory / CA
    if CA not in beside or not here.exists():
        return
    theirs = pki.fingerprint(pki.read_certificate(beside[CA], f"{source}: {CA}"))
    ours = pki.fingerprint(pki.read_certificate(read_whole(here), str(here)))
    if ours != theirs:
        raise Conflict(
            f"{source} is of another fleet (its CA is {theirs}, the one in {directory} is {ours})",
            remedy="restore it into an empty directory: --dir",
        )


def _set_aside(state: Path, wall: Callable[[], float]) -> Path:
    """The state that is there, with what is still in its write-ahead log, under another name."""
    aside = state.with_name(f"{state.name}.before-restore-{_stamp(wall)}")
    try:
        with closing(sqlite3.connect(state, isolation_level=None)) as db:
            copy_to(db, aside)
    except (sqlite3.Error, LlmgwError):
        # Damaged, perhaps: that is what restores are for. It is kept as it is.
        shutil.copyfile(state, aside)
        if (log := Path(f"{state}-wal")).exists():
            shutil.copyfile(log, f"{aside}-wal")
    return aside


def _stamp(wall: Callable[[], float]) -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(wall()))


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

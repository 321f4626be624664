"""The folder in which installed engines stand side by side, and what may go from it (C8).

A folder `ENGINE-VERSION` with a record in it is an installed engine, and nothing else is. One that is being made ends
in `.partial`, one that is being removed in `.removing`: whatever is left of either goes at the next start. All of this
blocks on the disk: call it in a thread.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs
import msgspec
from msgspec import Struct

from llmgw.errors import LlmgwError
from llmgw.files import alone, make_directory, write_whole
from llmgw.node.engines.places import Whereabouts
from llmgw.node.installs.packages import KINDS, canonical, file_name

RECORD = "llmgw-install.json"
PARTIAL, REMOVING = ".partial", ".removing"
_CACHE, _LOCK = ".cache", ".lock"
#: Of a script that pip or uv wrote, so much is looked at: they are a few hundred bytes.
_MOST_SCRIPT = 1 << 20
#: Seconds between two notes that an engine is in use.
_USED_EVERY = 60.0


class Record(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of an installed engine. `program` is relative to its folder, `tried` says what it passed.

    `mark` is the program's as it was tried: another program, or another CPU, is tried again. `used` is when something
    last wanted or ran it, in Unix seconds.
    """

    engine: str
    version: str
    package: str = ""
    program: str = ""
    tried: str = ""
    mark: str = ""
    made: float = 0.0
    used: float = 0.0


@attrs.frozen
class Kept:
    """An installed engine."""

    folder: Path
    record: Record

    @property
    def place(self) -> Whereabouts:
        return place_of(self.folder, self.record.engine, self.record.version, self.record.program)

    @property
    def whole(self) -> bool:
        """Whether its Python is still there: one that the system replaced by a newer takes it along."""
        return (self.folder / "bin" / "python").exists() and os.access(self.place.command[0], os.X_OK)


def place_of(folder: Path, engine: str, version: str, program: str) -> Whereabouts:
    """An engine in a virtual environment as a program to be run."""
    path = folder / program
    if engine == "llamacpp":
        # Beside the server lie the libraries that it loads by name.
        return Whereabouts((str(path),), version, {"LD_LIBRARY_PATH": str(path.parent)})
    # Kernels are compiled while it runs, by a ninja that was installed with it.
    return Whereabouts((str(path),), version, {"PATH": f"{folder / 'bin'}:{os.environ.get('PATH', os.defpath)}"})


class Shelf:
    """The folder of installed engines."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def make(self) -> None:
        """Raises LlmgwError."""
        make_directory(self.root, 0o755)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While the block runs no other agent that was given the same folder makes or removes anything in it.

        Raises Conflict that names who does, LlmgwError where the folder cannot be written.
        """
        with alone(self.root / _LOCK, "another agent that installs engines"):
            yield

    @property
    def cache(self) -> Path:
        """Where installers keep what they downloaded, for another try."""
        return self.root / _CACHE

    def folder(self, engine: str, version: str) -> Path:
        return self.root / file_name(engine, version)

    def partial(self, engine: str, version: str) -> Path:
        return self.root / (file_name(engine, version) + PARTIAL)

    def all(self) -> tuple[Kept, ...]:
        """Every installed engine, by name."""
        found = (self._kept(path) for path in self._folders())
        return tuple(kept for kept in found if kept is not None)

    def kept(self, engine: str, version: str) -> Kept | None:
        return self._kept(self.folder(engine, version))

    def write(self, folder: Path, record: Record) -> None:
        """Raises LlmgwError."""
        write_whole(folder / RECORD, msgspec.json.format(msgspec.json.encode(record), indent=1))

    def publish(self, partial: Path, engine: str, version: str) -> Kept:
        """Make a finished installation one that counts, in one step. Raises OSError."""
        folder = self.folder(engine, version)
        if os.path.lexists(folder):
            self._away(folder)
        os.rename(partial, folder)
        descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        kept = self._kept(folder)
        assert kept is not None
        return kept

    def used(self, kept: Kept, now: float | None = None) -> None:
        """Note that an engine is wanted or running; often called, seldom written."""
        now = time.time() if now is None else now
        if not 0 <= now - kept.record.used < _USED_EVERY:
            try:
                self.write(kept.folder, msgspec.structs.replace(kept.record, used=now))
            except LlmgwError:
                return  # a full disk: it is noted the next time

    def free(self) -> int | None:
        """Bytes that this user may still write; None where that cannot be told."""
        try:
            room = os.statvfs(self.root)
        except OSError:
            return None
        return room.f_bavail * room.f_frsize

    # --- what goes -----------------------------------------------------------------------------------------

    def sweep(self) -> tuple[str, ...]:
        """Remove what an earlier agent left half-made or half-removed; the names of it. Raises as `alone` does."""
        gone = [path.name for path in self._folders() if path.name.endswith((PARTIAL, REMOVING))]
        if gone:
            with self.alone():
                for name in gone:
                    self.discard(self.root / name)
        return tuple(gone)

    def discard(self, path: Path) -> None:
        """Remove a folder of ours that is no installed engine. A link is removed and not followed."""
        if path.parent != self.root:
            raise ValueError(f"{path} is not in {self.root}")
        if path.is_symlink():
            with suppress(OSError):
                path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)

    def remove(self, kept: Kept) -> str:
        """Remove an installed engine that nobody uses; "" when it is gone, else why it stays."""
        folder = kept.folder
        if folder.parent != self.root or folder.is_symlink():
            return f"{folder} is not a folder of this agent's"
        try:
            with self.alone():
                self._away(folder)
        except OSError as error:
            return f"{error.filename or folder}: {error.strerror or error}"
        except LlmgwError as error:
            return error.what
        return ""

    def forget_downloads(self) -> None:
        """What installers downloaded goes, unless another agent is using it."""
        if self.cache.is_dir():
            with suppress(LlmgwError), self.alone():
                self.discard(self.cache)

    def _away(self, folder: Path) -> None:
        # Renamed first: a removal that is cut short must not leave half of an engine that looks whole.
        gone = folder.with_name(folder.name + REMOVING)
        self.discard(gone)
        os.rename(folder, gone)
        self.discard(gone)

    # --- the folder ----------------------------------------------------------------------------------------

    def _folders(self) -> Iterator[Path]:
        try:
            entries = sorted(self.root.iterdir())
        except OSError:
            return
        for path in entries:
            try:
                if stat.S_ISDIR(os.lstat(path).st_mode):
                    yield path
            except OSError:
                continue

    def _kept(self, folder: Path) -> Kept | None:
        if folder.name.endswith((PARTIAL, REMOVING)) or folder.is_symlink():
            return None
        try:
            record = msgspec.json.decode((folder / RECORD).read_bytes(), type=Record)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        if folder.name != file_name(record.engine, record.version) or record.engine not in KINDS:
            return None
        # A record is a file that anybody with the right to write it may have changed.
        inside = Path(os.path.normpath(folder / record.program))
        return Kept(folder, record) if folder in inside.parents else None


def site_packages(folder: Path) -> Path | None:
    """A virtual environment's folder of packages."""
    return next(iter(sorted(folder.glob("lib/python3*/site-packages"))), None)


def version_of(folder: Path, package: str) -> str:
    """The version of a package in a virtual environment; "" when it is not there."""
    packages = site_packages(folder)
    for name in sorted(os.listdir(packages)) if packages is not None else ():
        bare, _, rest = name.partition("-")
        if rest.endswith(".dist-info") and canonical(bare) == canonical(package):
            return rest.removesuffix(".dist-info")
    return ""


def program_of(folder: Path, engine: str, names: Collection[str]) -> str:
    """An engine's program in a virtual environment, relative to it; "" when there is none.

    Of llama.cpp the server itself, which packages carry among their data, and not the script that starts it.
    """
    packages = site_packages(folder)
    if engine == "llamacpp" and packages is not None:
        for place, folders, files in os.walk(packages):
            folders.sort()
            for name in names:
                if name in files and os.access(os.path.join(place, name), os.X_OK):
                    return str(Path(place, name).relative_to(folder))
    for name in names:
        if os.access(folder / "bin" / name, os.X_OK):
            return f"bin/{name}"
    return ""


def moved(folder: Path, to: Path) -> None:
    """Let a virtual environment's scripts name the place that it is about to have. Raises OSError."""
    old, new = str(folder).encode(), str(to).encode()
    for path in [*(folder / "bin").iterdir(), folder / "pyvenv.cfg"]:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > _MOST_SCRIPT:
            continue
        data = path.read_bytes()
        if old in data and b"\0" not in data:
            mode = stat.S_IMODE(path.stat().st_mode)
            path.write_bytes(data.replace(old, new))
            path.chmod(mode)


__all__ = [
    "Kept",
    "Record",
    "Shelf",
    "moved",
    "place_of",
    "program_of",
    "site_packages",
    "version_of",
]

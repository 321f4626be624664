"""What belongs to a source: names, sizes and digests. Only against this list are weights ever complete (C8, DL01).

It is written before the first byte is fetched and names one commit, so that a fetch that goes on after a day, or
while the hub answers errors, goes on with the same files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct, structs

from llmgw.files import write_whole
from llmgw.sources import key, safe


class File(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One file. `digest` is "sha256:HEX", "git:HEX" (the SHA-1 of a git blob), or "" where nobody says one.

    `checked` is the size and the modification time (ns) of the blob when its digest was last found right.
    """

    name: str
    size: int
    digest: str = ""
    checked: tuple[int, int] | None = None


class Manifest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All files of a source. `entry` is what an engine is given, below the snapshot; "" is the snapshot itself.

    `came_from` is the node that gave the last of the files, "" where they came from the source itself.
    """

    source: str
    folder: str
    revision: str
    files: tuple[File, ...]
    entry: str = ""
    reference: str = ""
    came_from: str = ""

    @property
    def bytes(self) -> int:
        """Of all files; one that stands there under two names counts once."""
        return sum({blob_name(self, file): file.size for file in self.files}.values())

    def checked(self, file: File, stamp: tuple[int, int]) -> Manifest:
        """The same with a file noted as found right."""
        marked = (structs.replace(f, checked=stamp) if f.name == file.name else f for f in self.files)
        return structs.replace(self, files=tuple(marked))


class Hash(Protocol):
    def update(self, data: bytes | bytearray | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


def unchecked(manifest: Manifest) -> Manifest:
    """Somebody else's manifest: nothing of it has been found right here."""
    files = tuple(structs.replace(file, checked=None) for file in manifest.files)
    return structs.replace(manifest, files=files, came_from="")


def hash_of(file: File) -> Hash | None:
    """A fresh hash of the kind that the file's digest is; None where there is none."""
    kind = file.digest.partition(":")[0]
    if kind == "sha256":
        return hashlib.sha256()
    if kind == "git":
        return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    return None


def blob_name(manifest: Manifest, file: File) -> str:
    """A blob's name in the cache: its digest, as hubs' caches have it."""
    if file.digest:
        return file.digest.partition(":")[2]
    return hashlib.sha256(f"{manifest.revision}/{file.name}".encode()).hexdigest()


class Manifests:
    """The manifests of a cache, one file each."""

    def __init__(self, root: Path) -> None:
        self.directory = root / ".llmgw" / "manifests"

    def path(self, source: str) -> Path:
        return self.directory / f"{key(source)}.json"

    def read(self, source: str) -> Manifest | None:
        """None when there is none, or none that can be read: it is then asked for anew."""
        return _read(self.path(source))

    def write(self, manifest: Manifest) -> None:
        """Raises LlmgwError."""
        write_whole(self.path(manifest.source), msgspec.json.encode(manifest))

    def remove(self, source: str) -> None:
        self.path(source).unlink(missing_ok=True)

    def all(self) -> Iterator[Manifest]:
        for path in sorted(self.directory.glob("*.json")):
            if (found := _read(path)) is not None and self.path(found.source) == path:
                yield found


def _read(path: Path) -> Manifest | None:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return sound(found)


def sound(found: Manifest) -> Manifest | None:
    """The manifest, if all that it names lies where such things lie in a cache; else None."""
    names = [found.folder, found.revision, *(file.name for file in found.files)]
    names += [name for name in (found.entry, found.reference) if name]
    flat = "/" not in found.folder and "/" not in found.revision
    blobs = all(safe(blob_name(found, file)) and "/" not in blob_name(found, file) for file in found.files)
    # It becomes paths: one that somebody wrote by hand must not lead elsewhere.
    return found if flat and blobs and all(map(safe, names)) and not found.folder.startswith(".") else None

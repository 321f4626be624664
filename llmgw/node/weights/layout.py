"""Where the files of a source lie in the cache, and what of them is there. Blocks on the disk: call it in a thread."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

import attrs

from llmgw.node.engines.contents import Contents, read_contents
from llmgw.node.weights.manifest import File, Manifest, Manifests, blob_name
from llmgw.wire.facts import Weights

PARTIAL = ".partial"


def folder(root: Path, manifest: Manifest) -> Path:
    return root / manifest.folder


def blob(root: Path, manifest: Manifest, file: File) -> Path:
    return folder(root, manifest) / "blobs" / blob_name(manifest, file)


def partial(root: Path, manifest: Manifest, file: File) -> Path:
    """Where a file grows until it is whole and found right."""
    whole = blob(root, manifest, file)
    return whole.with_name(whole.name + PARTIAL)


def snapshot(root: Path, manifest: Manifest) -> Path:
    return folder(root, manifest) / "snapshots" / manifest.revision


def entry(root: Path, manifest: Manifest) -> Path:
    """What an engine is given."""
    return snapshot(root, manifest) / manifest.entry


def stamp(path: Path) -> tuple[int, int] | None:
    """Size and modification time of a file that is a plain one; None when there is none."""
    try:
        seen = path.lstat()
    except OSError:
        return None
    return (seen.st_size, seen.st_mtime_ns) if stat.S_ISREG(seen.st_mode) else None


def prepare(root: Path) -> None:
    """Make the cache's own folders. Raises OSError."""
    for name in ("manifests", "locks"):
        (root / ".llmgw" / name).mkdir(parents=True, exist_ok=True)


def point(root: Path, manifest: Manifest, file: File) -> None:
    """Let the file's name in the snapshot lead to its blob. Raises OSError."""
    at, to = snapshot(root, manifest) / file.name, blob(root, manifest, file)
    relative = os.path.relpath(to, at.parent)
    if at.is_symlink() and os.readlink(at) == relative:
        return
    at.parent.mkdir(parents=True, exist_ok=True)
    fresh = at.with_name(f".{at.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    os.symlink(relative, fresh)
    os.replace(fresh, at)


def refer(root: Path, manifest: Manifest) -> None:
    """Note which commit a branch or tag was, as hubs' caches do. Raises OSError."""
    if manifest.reference and manifest.reference != manifest.revision:
        path = folder(root, manifest) / "refs" / manifest.reference
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(manifest.revision)


@attrs.frozen
class There:
    """What of a source lies on the disk: bytes of whole and partial files, and the files that are not known whole."""

    bytes: int
    missing: tuple[File, ...]


def look(root: Path, manifest: Manifest) -> There:
    """Compare the disk with the manifest: sizes, and whether a blob is still as it was when it was checked."""
    have, missing, seen = 0, list[File](), set[Path]()
    for file in manifest.files:
        at = blob(root, manifest, file)
        found = stamp(at)
        whole = found is not None and found == file.checked and found[0] == file.size
        if not whole or stamp_of_pointer(root, manifest, file) != found:
            missing.append(file)
        if at in seen:
            continue
        seen.add(at)
        if found is not None and found[0] == file.size:
            have += file.size
        elif (part := stamp(partial(root, manifest, file))) is not None:
            have += min(part[0], file.size)
    return There(have, tuple(missing))


def stamp_of_pointer(root: Path, manifest: Manifest, file: File) -> tuple[int, int] | None:
    """The stamp of what the file's name in the snapshot leads to; None when it leads nowhere."""
    try:
        seen = (snapshot(root, manifest) / file.name).stat()
    except OSError:
        return None
    return seen.st_size, seen.st_mtime_ns


def free_bytes(root: Path) -> int:
    """Raises OSError."""
    room = os.statvfs(root)
    return room.f_bavail * room.f_frsize


def free_files(root: Path) -> int | None:
    """How many more files its file system can hold; None where it does not count them. Raises OSError."""
    room = os.statvfs(root)
    return room.f_favail if room.f_files else None


def drop_partials(root: Path, manifest: Manifest) -> int:
    """Remove what a fetch left unfinished; the bytes that were given back. Never raises."""
    freed = 0
    for file in manifest.files:
        path = partial(root, manifest, file)
        found = stamp(path)
        try:
            path.unlink()
        except OSError:
            continue
        freed += found[0] if found is not None else 0
    return freed


def facts(root: Path, manifest: Manifest) -> Weights:
    """One source as the plane is told of it, whether it is in use left out."""
    there = look(root, manifest)
    error, model = "", Contents(entry(root, manifest))
    if not there.missing:
        model = read_contents(model.path)
        error = "; ".join(fault.text for fault in model.faults)
    return Weights(
        source=manifest.source,
        path=str(entry(root, manifest)),
        bytes=there.bytes,
        total_bytes=manifest.bytes,
        complete=not there.missing and not error,
        error=error,
        revision=manifest.revision,
        came_from=manifest.came_from,
        context=model.context,
        heads=model.heads,
        layers=model.layers,
        kv_bytes_per_token=model.kv_bytes_per_token,
        dtype=model.dtype,
    )


def survey(root: Path, manifests: Manifests, errors: Iterable[Weights] = ()) -> tuple[Weights, ...]:
    """Everything in the cache that has a manifest, and `errors` of sources that have none, by source."""
    found = {weights.source: weights for weights in errors}
    found |= {manifest.source: facts(root, manifest) for manifest in manifests.all()}
    return tuple(found[source] for source in sorted(found))

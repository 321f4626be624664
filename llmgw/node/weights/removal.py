"""Removes a source from the cache, after checking once more that it may go (C8).

A proposal comes from the plane, which knows what is wanted. What this node knows better is checked here: that a path
is in the cache and not a link out of it, that no shard and no process uses it, that nobody fetches into it, and that
no other source shares a file.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

import attrs

from llmgw.node.weights import layout
from llmgw.node.weights.lock import attempt
from llmgw.node.weights.manifest import Manifest, Manifests


@attrs.define
class Outcome:
    """What went (or would go, on a dry run) and what stayed: source or path -> why. Sizes in bytes."""

    removed: list[str] = attrs.field(factory=list)
    kept: dict[str, str] = attrs.field(factory=dict)
    freed: int = 0


def remove(root: Path, sources: Collection[str], in_use: Collection[str], dry_run: bool) -> Outcome:
    """Remove each source, or say why not. Blocks; never raises for what a disk may hold."""
    outcome, manifests = Outcome(), Manifests(root)
    held = _held(root)
    for source in dict.fromkeys(sources):
        manifest = manifests.read(source)
        if manifest is None:
            outcome.kept[source] = "it is not in this node's cache"
            continue
        if source in in_use:
            outcome.kept[source] = "a shard on this node uses it"
            continue
        try:
            with attempt(root, manifest.folder) as mine:
                if not mine:
                    outcome.kept[source] = "it is being fetched"
                    continue
                _one(root, manifests, manifest, held, dry_run, outcome)
        except OSError as error:
            outcome.kept[source] = f"{error.filename or root}: {error.strerror or error}"
    return outcome


def _one(
    root: Path, manifests: Manifests, manifest: Manifest, held: dict[str, int], dry_run: bool, outcome: Outcome
) -> None:
    folder = layout.folder(root, manifest)
    if reason := _outside(root, folder):
        outcome.kept[manifest.source] = reason
        return
    others = [m for m in manifests.all() if m.folder == manifest.folder and m.source != manifest.source]
    shared = {layout.blob(root, m, file): m.source for m in others for file in m.files}
    names = {layout.snapshot(root, m) / file.name for m in others for file in m.files}
    pointers = [layout.snapshot(root, manifest) / file.name for file in manifest.files]
    mine = [pointer for pointer in pointers if pointer not in names]
    blobs = dict.fromkeys(layout.blob(root, manifest, file) for file in manifest.files)
    partials = [layout.partial(root, manifest, file) for file in manifest.files]
    for path in (*blobs, *partials):
        if pid := held.get(str(path.resolve())):
            outcome.kept[manifest.source] = f"process {pid} has {path.name} open"
            return
    elsewhere = _led_to(folder, set(mine))
    going = list[Path]()
    for path in (*blobs, *(p for p in partials if p.with_name(p.name.removesuffix(layout.PARTIAL)) not in shared)):
        if not os.path.lexists(path):
            continue
        if path in shared:
            outcome.kept[str(path)] = f"{shared[path]} needs it too"
        elif path in elsewhere:
            outcome.kept[str(path)] = "another snapshot in the cache needs it too"
        elif path.is_symlink():
            outcome.kept[str(path)] = f"it is a link to {os.readlink(path)}"
        elif reason := _outside(root, path):
            outcome.kept[str(path)] = reason
        else:
            going.append(path)
    freed = sum(found[0] for path in going if (found := layout.stamp(path)) is not None)
    if not dry_run:
        # The list goes first: files without a list are never taken for a model, a list without files would be.
        manifests.remove(manifest.source)
        for path in mine:
            if path.is_symlink() and not _outside(root, path.parent):
                path.unlink()
        for path in going:
            path.unlink()
        _tidy(folder, manifest)
    outcome.removed.append(manifest.source)
    outcome.freed += freed


def _outside(root: Path, path: Path) -> str:
    """Why a path is not inside the cache; "" when it is. Links are followed: the cache's own root may be one."""
    real, home = path.resolve(), root.resolve()
    return "" if home in real.parents else f"{path} is not in the cache {root}: it leads to {real}"


def _led_to(folder: Path, but: Collection[Path]) -> set[Path]:
    """Blobs that snapshots still lead to, the links in `but` left out: other programs may have made some."""
    found = set[Path]()
    for place, _, names in os.walk(folder / "snapshots", followlinks=False):
        for name in names:
            path = Path(place, name)
            if path not in but and path.is_symlink():
                found.add(Path(os.path.normpath(path.parent / os.readlink(path))))
    return found


def _tidy(folder: Path, manifest: Manifest) -> None:
    """Remove folders that are empty now, and a reference to a commit that is gone."""
    snapshot = folder / "snapshots" / manifest.revision
    for place, _, _ in os.walk(snapshot, topdown=False, followlinks=False):
        _rmdir(Path(place))
    if manifest.reference and not snapshot.exists():
        reference = folder / "refs" / manifest.reference
        if reference.is_file() and not reference.is_symlink() and reference.read_text() == manifest.revision:
            reference.unlink()
    for name in (f"refs/{Path(manifest.reference).parent}", "refs", "snapshots", "blobs", ""):
        _rmdir(folder / name)


def _rmdir(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:
        return  # not empty, or not there


def _held(root: Path) -> dict[str, int]:
    """Files below the cache that some process of this machine has open or mapped, and its pid."""
    home = str(root.resolve()) + "/"
    found: dict[str, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            for path in _open_files(entry):
                if path.startswith(home):
                    found.setdefault(path, int(entry.name))
    return found


def _open_files(process: Path) -> Iterator[str]:
    try:
        for handle in os.listdir(process / "fd"):
            yield os.readlink(process / "fd" / handle)
    except OSError:
        pass  # it ended, or is another user's: its maps may still be readable
    try:
        with (process / "maps").open(errors="surrogateescape") as maps:
            for line in maps:
                words = line.rstrip("\n").split(maxsplit=5)
                if len(words) == 6:
                    yield words[5]
    except OSError:
        return

"""The file systems that matter to a node: where weights and records lie.

`statvfs` of a dead network mount blocks: call this in a thread.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from llmgw.node import files
from llmgw.node.view import View
from llmgw.wire.facts import Disk

_octal = re.compile(r"\\([0-7]{3})")


def disks(view: View) -> tuple[Disk, ...]:
    """The disks of the weights cache and of the agent's state; a folder that is not there yet counts as its parent."""
    wanted = (("weights", view.weights), ("state", view.state))
    found = (disk(purpose, path, view) for purpose, path in wanted if path is not None)
    return tuple(each for each in found if each is not None)


def disk(purpose: str, path: Path, view: View) -> Disk | None:
    """The file system under one path; None when nothing on the way to it can be read."""
    for existing in (path, *path.parents):
        try:
            room = os.statvfs(existing)
            place = existing.resolve(strict=True)
        except (OSError, RuntimeError, ValueError):
            continue
        mount, kind, device = mounted(files.text(view.at("proc/self/mountinfo")) or "", str(place))
        return Disk(
            purpose=purpose,
            path=str(path),
            mount=mount,
            device=device,
            filesystem=kind,
            total_bytes=room.f_blocks * room.f_frsize,
            free_bytes=room.f_bavail * room.f_frsize,
        )
    return None


def mounted(mountinfo: str, path: str) -> tuple[str, str, str]:
    """(mount point, file system, device) that a path lies on, by proc(5)'s mountinfo; later mounts hide earlier."""
    best = ("", "", "")
    for line in mountinfo.splitlines():
        own, mark, rest = line.partition(" - ")
        words, after = own.split(" "), rest.split(" ")
        if not mark or len(words) < 5 or len(after) < 2:
            continue
        point = _octal.sub(lambda found: chr(int(found[1], 8)), words[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):
            best = (point, after[0], after[1])
    return best

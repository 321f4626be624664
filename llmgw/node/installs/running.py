"""Who uses an installed engine: shards, by their command lines, and whatever else runs on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import attrs

from llmgw.node.installs.shelf import Kept


@attrs.frozen
class Running:
    """A shard that is not stopped: its engine and its command line, none while it is still being prepared."""

    shard: str
    engine: str
    argv: tuple[str, ...] = ()


def holder(kept: Kept, shards: Iterable[Running]) -> str:
    """Who uses an installed engine: a shard, or any process of this machine; "" when nobody does (blocks)."""
    for shard in shards:
        if shard.engine == kept.record.engine and not shard.argv:
            return f"shard {shard.shard}, which is being prepared"
        if any(_inside(word, kept.folder) for word in shard.argv[:2]):
            return f"shard {shard.shard}"
    for name in os.listdir("/proc"):
        if name.isdigit() and name != str(os.getpid()) and _runs(Path("/proc", name), kept.folder):
            return f"process {name}"
    return ""


def _runs(process: Path, folder: Path) -> bool:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0", 4)[:4]
        if any(_inside(os.fsdecode(word), folder) for word in words):
            return True
        return _inside(os.readlink(process / "exe"), folder)
    except OSError:
        return False


def _inside(word: str, folder: Path) -> bool:
    return word.startswith(f"{folder}/")

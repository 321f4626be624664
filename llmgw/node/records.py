"""What a node writes down of each shard, so that a later agent knows the engine again (C2).

One file for each shard, written beside and renamed, flushed to the disk with its folder. A file that cannot be read
is set aside and reported; it never keeps the agent from starting.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec
from msgspec import Struct

from llmgw.errors import BadInput
from llmgw.files import PRIVATE, write_whole
from llmgw.wire.agent import ShardStatus
from llmgw.wire.facts import ModelName, ReplicaId, ShardId, ShardSpec

_MOST_NAME = 180


class Record(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run of one shard. `started` is in clock ticks since boot, `boot` the boot it belongs to.

    `ready` and `draining` and `stopping` are how far it came; `last` is how it ended, if it did. `pid` 0 says that
    there was no process yet.
    """

    shard: ShardId
    replica: ReplicaId
    model: ModelName
    generation: int
    token: str
    spec: ShardSpec
    boot: str = ""
    pid: int = 0
    started: int = 0
    argv: tuple[str, ...] = ()
    argv_hash: str = ""
    ports: dict[str, int] = {}
    run: str = ""
    log: str = ""
    clock: float = 0.0
    scope: str = ""  # the cgroup of its own, where systemd made one
    oom_kills: int = 0
    ready: bool = False
    draining: bool = False
    stopping: bool = False
    last: ShardStatus | None = None


def argv_hash(argv: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(argv).encode(errors="surrogateescape")).hexdigest()[:16]


def file_name(shard: ShardId) -> str:
    """A shard's name as the name of a file, whatever is in it. Raises BadInput for one that no file can have."""
    name = quote(shard, safe="")
    if name.startswith("."):
        name = "%2E" + name[1:]
    if not name or len(name) > _MOST_NAME:
        raise BadInput(f"the shard's name {shard[:60]!r} cannot be the name of a file", remedy="use a shorter name")
    return name


def shard_name(name: str) -> ShardId:
    return ShardId(unquote(name))


def decode(data: bytes) -> Record | None:
    """A record from a file; None for anything else."""
    try:
        record = msgspec.json.decode(data, type=Record)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    return record if record.shard and record.token else None


class Records:
    """The folder of records. All methods may block on the disk for milliseconds: call them in a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, shard: ShardId) -> Path:
        return self._folder / f"{file_name(shard)}.json"

    def write(self, record: Record) -> None:
        """Durable when it returns, and nobody else's to read: arguments and environments hold keys.

        Raises OSError, LlmgwError.
        """
        path = self._path(record.shard)
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, msgspec.json.format(msgspec.json.encode(record), indent=1), PRIVATE)

    def remove(self, shard: ShardId) -> None:
        self._path(shard).unlink(missing_ok=True)
        self._flush()

    def _flush(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def load(self) -> tuple[tuple[Record, ...], tuple[Path, ...]]:
        """All records, and the files that were none: those are set aside under another name and kept.

        A disk that takes nothing keeps no agent from starting: it is told by the first shard that needs it.
        """
        found: list[Record] = []
        broken: list[Path] = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                record = decode(path.read_bytes())
            except OSError:
                record = None
            if record is not None and path.name == f"{file_name(record.shard)}.json":
                found.append(record)
                continue
            aside = path.with_suffix(".broken")
            try:
                path.replace(aside)
            except OSError:
                aside = path
            broken.append(aside)
        for leftover in self._folder.glob(".*.new"):
            with suppress(OSError):
                leftover.unlink()
        return tuple(found), tuple(broken)

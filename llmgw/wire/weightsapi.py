"""What the admin API answers about weights: what each node's cache holds, and what was or would be removed from it.

Every key is always there; fields are only ever added, each with a default. Sizes are bytes, ages seconds.
"""

from __future__ import annotations

from msgspec import Struct

from llmgw.wire.apicommon import API


class HeldView(Struct, frozen=True, kw_only=True):
    """A model's files on a node. `needed_by` says what keeps them from being removed, "" when nothing does.

    `idle` is for how long no shard there has used them; null where that is not known. `came_from` is the node that gave
    the last of the files, "" where they came from the source itself.
    """

    source: str = ""
    revision: str = ""
    path: str = ""
    bytes: int = 0
    total_bytes: int | None = None
    complete: bool = False
    in_use: bool = False
    fetching: bool = False
    idle: float | None = None
    needed_by: str = ""
    error: str = ""
    came_from: str = ""


class CacheView(Struct, frozen=True, kw_only=True):
    """A node's cache. With an `error` the node could not be asked, and `weights` are what it told last.

    `shared_at` is where other nodes may have them, "" where they may not.
    """

    node: str = ""
    path: str = ""
    free_bytes: int | None = None
    total_bytes: int | None = None
    weights: tuple[HeldView, ...] = ()
    error: str = ""
    shared_at: str = ""


class WeightsReply(Struct, frozen=True, kw_only=True):
    """The caches, by node. `warnings` are sentences: sources of which nodes hold different commits."""

    api: int = API
    nodes: tuple[CacheView, ...] = ()
    warnings: tuple[str, ...] = ()


class RemovalView(Struct, frozen=True, kw_only=True):
    """What a node removed, or would: sources. `kept` are sources and paths with the reason why they stay."""

    node: str = ""
    removed: tuple[str, ...] = ()
    kept: dict[str, str] = {}
    freed_bytes: int = 0
    error: str = ""


class RemovalReply(Struct, frozen=True, kw_only=True):
    """By node. On a dry run nothing was removed."""

    api: int = API
    dry_run: bool = True
    nodes: tuple[RemovalView, ...] = ()

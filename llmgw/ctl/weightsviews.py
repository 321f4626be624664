"""The nodes' caches, and what goes from them, as tables. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from llmgw.ctl.client import Answer
from llmgw.ctl.show import Cell, Column, age, clean, columns, of, size, word, words
from llmgw.wire.weightsapi import CacheView, HeldView, RemovalReply, WeightsReply

_HELD = (
    Column("NODE"),
    Column("SOURCE", prose=True),
    Column("STATE"),
    Column("BYTES", right=True),
    Column("USED", extra=2),
    Column("NEEDED BY", extra=1),
    Column("REVISION", extra=4),
    Column("FROM", extra=5),
)
_DISKS = (
    Column("NODE"),
    Column("FREE", right=True),
    Column("CACHE", extra=1),
    Column("SHARED AT", extra=3),
    Column("TOLD EARLIER", extra=2),
)


def caches(answer: Answer, width: int) -> RenderableType:
    """Every model in every cache, and below it the disks."""
    reply = answer.read(WeightsReply)
    rows = [_held(cache, held) for cache in reply.nodes for held in cache.weights]
    parts: list[RenderableType] = [columns(_HELD, rows, nothing="No weights are in any cache.", width=width)]
    disks = [
        (
            cache.node,
            of(size(cache.free_bytes), size(cache.total_bytes)),
            cache.path,
            clean(cache.shared_at),
            Text(clean(cache.error), "yellow"),
        )
        for cache in reply.nodes
        if cache.total_bytes is not None or cache.error
    ]
    if disks:
        parts += [Text(""), columns(_DISKS, disks, nothing="", width=width)]
    for failure in (f"{cache.node}: {_failure(held)}" for cache in reply.nodes for held in cache.weights if held.error):
        parts += [Text(""), Text(failure, "red")]
    for warning in reply.warnings:
        parts += [Text(""), Text(f"Warning: {clean(warning)}.", "yellow")]
    return Group(*parts)


def _held(cache: CacheView, held: HeldView) -> tuple[Cell, ...]:
    state = "complete" if held.complete else "fetching" if held.fetching else "failed" if held.error else "partial"
    there = size(held.bytes) if held.complete else of(size(held.bytes), size(held.total_bytes))
    used = "now" if held.in_use else f"{age(held.idle)} ago" if held.idle is not None and not held.fetching else ""
    return (
        cache.node,
        clean(held.source),
        word(state),
        there,
        used,
        clean(held.needed_by),
        clean(held.revision[:12]),
        clean(held.came_from),
    )


def _failure(held: HeldView) -> str:
    """Below the table, where there is room for it at any width; most say of which source they speak."""
    return clean(held.error if held.source in held.error else f"{held.source}: {held.error}")


_GOING = (Column("NODE"), Column(""), Column("SOURCE OR FILE"), Column("WHY", prose=True))


def removals(reply: RemovalReply, width: int, sources: tuple[str, ...] = ()) -> RenderableType:
    """What went or would go, what stays and why, and how much room that makes; `sources` if only of these."""
    rows = list(_going(reply))
    freed = size(sum(node.freed_bytes for node in reply.nodes))
    count = sum(len(node.removed) for node in reply.nodes)
    if not count:
        last = "Nothing can be removed."
    elif reply.dry_run:
        last = f"{freed} would be freed. Nothing was removed yet: add --yes."
    else:
        last = f"{freed} freed."
    nothing = f"No cache that was asked has {' or '.join(sources)}." if sources else "No weights are in any cache."
    table = columns(_GOING, rows, nothing=nothing, width=width)
    return Group(table, Text(""), Text(last))


def _going(reply: RemovalReply) -> Iterator[tuple[Cell, ...]]:
    verb = Text("would go" if reply.dry_run else "removed", "yellow")
    for node in reply.nodes:
        if node.error:
            yield node.node, Text("not asked", "red"), "", clean(node.error)
        for source in node.removed:
            yield node.node, verb, clean(source), ""
        for name, reason in sorted(node.kept.items()):
            yield node.node, words("stays"), clean(name), clean(reason)

"""Replicas and their members, one line each. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.text import Text

from llmgw.ctl.client import Answer
from llmgw.ctl.show import Cell, Column, age, clean, columns, number, percent, progress, size, word, words
from llmgw.wire.replicaapi import ReplicasReply, ReplicaView, ShardView

_REPLICAS = (
    Column("REPLICA"),
    Column("STATE", prose=True),
    Column("NODE"),
    Column("PORT", right=True, extra=2),
    Column("AGE", right=True, extra=3),
    Column("RESTARTS", right=True, extra=3),
    Column("CPU", right=True, extra=5),
    Column("MEMORY", right=True, extra=6),
    Column("IN FLIGHT", right=True, extra=4),
    Column("MODEL", extra=8),
    Column("REVISION", right=True, extra=7),
    Column("WAITS FOR", extra=2, prose=True),
    Column("WARNING", extra=1, prose=True),
    Column("LAST FAILURE", extra=1, prose=True),
)


def replicas(answer: Answer, width: int) -> RenderableType:
    return replica_table(answer.read(ReplicasReply).replicas, width)


def replica_table(found: Iterable[ReplicaView], width: int) -> RenderableType:
    return columns(_REPLICAS, map(_replica, found), nothing="no replica is placed", width=width)


def _replica(replica: ReplicaView) -> tuple[Cell, ...]:
    loads = [shard.cpu_percent for shard in replica.shards if shard.cpu_percent is not None]
    memory = [shard.rss_bytes for shard in replica.shards if shard.rss_bytes is not None]
    coming = next((shard.progress for shard in replica.shards if shard.progress is not None), None)
    retry = min((shard.retry_in for shard in replica.shards if shard.retry_in is not None), default=None)
    return (
        replica.id,
        words(
            word(replica.state),
            progress(coming),
            f"again in {age(retry)}" if retry is not None else "",
        ),
        "+".join(replica.nodes),
        number(replica.port),
        age(replica.age),
        str(replica.restarts) if replica.restarts else "",
        percent(sum(loads)) if loads else "",
        size(sum(memory)) if memory else "",
        number(replica.in_flight),
        replica.model,
        f"{replica.revision}, outdated" if replica.outdated else "",
        clean(replica.waiting),
        Text(clean(replica.warning), style="red"),
        clean(replica.cause),
    )


_SHARDS = (
    Column("SHARD"),
    Column("STATE", prose=True),
    Column("NODE"),
    Column("FOR", right=True, extra=3),
    Column("GEN", right=True, extra=5),
    Column("PORT", right=True, extra=2),
    Column("PID", right=True, extra=4),
    Column("CPU", right=True, extra=6),
    Column("MEMORY", right=True, extra=6),
    Column("RESTARTS", right=True, extra=3),
    Column("LAST FAILURE", extra=1, prose=True),
)


def members(answer: Answer, width: int) -> RenderableType:
    """Every member of every replica, in one line each."""
    shards = (shard for replica in answer.read(ReplicasReply).replicas for shard in replica.shards)
    return shard_table(shards, width, nothing="no replica is placed")


def shard_table(found: Iterable[ShardView], width: int, *, nothing: str = "", here: str = "") -> RenderableType:
    """Shards in one line each; their node is left out where all are `here`."""
    heads = [head for head in _SHARDS if not here or head.title != "NODE"]
    rows = (
        [cell for head, cell in zip(_SHARDS, shard(one), strict=True) if not here or head.title != "NODE"]
        for one in found
    )
    return columns(heads, rows, nothing=nothing, width=width)


def shard(one: ShardView) -> tuple[Cell, ...]:
    failure = one.last_failure
    return (
        one.id,
        words(
            word(one.state),
            "" if one.want == "run" else f"to {one.want}",
            progress(one.progress),
            f"again in {age(one.retry_in)}" if one.retry_in is not None else "",
            f"{age(one.stop_in)} left" if one.stop_in is not None else "",
        ),
        one.node,
        age(one.state_age),
        str(one.generation),
        number(one.port),
        str(one.pid or "") + (" adopted" if one.adopted else ""),
        percent(one.cpu_percent),
        size(one.rss_bytes),
        str(one.restarts) if one.restarts else "",
        clean(failure.cause or failure.signal) if failure else "",
    )

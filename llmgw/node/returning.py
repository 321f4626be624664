"""What an earlier agent left behind, looked at by a later one: its records, its processes, its probes (C2).

Reading /proc may take some milliseconds for each process: call `returned` and `orphans` in a thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import trio

from llmgw.node import processes
from llmgw.node.adopt import Known, Verdict, verify
from llmgw.node.book import Life
from llmgw.node.ending import kill
from llmgw.node.engines import environment
from llmgw.node.processes import Seen
from llmgw.node.records import Record
from llmgw.wire.agent import ShardStatus
from llmgw.wire.control import StartShard, StopShard
from llmgw.wire.facts import ModelName, ReplicaId, ShardId, ShardState


def returned(records: Iterable[Record]) -> tuple[Life, ...]:
    """Every record held against what runs now."""
    boot = processes.boot_id()
    return tuple(_back(record, boot) for record in records)


def _back(record: Record, boot: str) -> Life:
    order = StartShard(
        shard=record.shard,
        replica=record.replica,
        model=record.model,
        generation=record.generation,
        spec=record.spec,
    )
    if record.last is not None:
        return Life(order, record.last, record)
    seen = processes.look(record.pid) if record.pid else None
    verdict = verify(record, seen, processes.environment(record.pid) if record.pid else None, boot)
    state = ShardState.STARTING
    if verdict.known is Known.UNSURE:
        state = ShardState.UNKNOWN
    elif verdict.known is Known.GONE or record.stopping:
        state = ShardState.STOPPING
    elif record.ready:
        state = ShardState.DRAINING if record.draining else ShardState.READY
    status = ShardStatus(
        shard=record.shard,
        replica=record.replica,
        model=record.model,
        generation=record.generation,
        state=state,
        port=record.ports.get("http", 0) if state.alive and verdict.known is not Known.GONE else 0,
        pid=(record.pid or None) if verdict.known is not Known.GONE else None,
        adopted=True,
        detail=verdict.text,
        clock=time.time(),
        command=record.argv,
    )
    life = Life(order, status, record, draining=record.draining, adopted=True)
    if record.stopping:
        life.wish = StopShard(shard=record.shard, generation=record.generation)
    if verdict.known is Known.UNSURE:
        life.unsure, life.pid = verdict, record.pid
    if verdict.known is Known.GONE:
        life.gone = verdict.text
    return life


def orphans(state: Path, tokens: set[str]) -> tuple[Life, ...]:
    """Processes that an agent with this state directory started and that no record accounts for, one for each shard."""
    found: dict[ShardId, Life] = {}
    for seen, env in _marked(state):
        shard, generation = ShardId(env.get(environment.SHARD, "")), env.get(environment.GENERATION, "")
        known = environment.PROBE in env or env.get(environment.TOKEN, "") in tokens
        if known or not shard or shard in found or not (generation.isascii() and generation.isdigit()):
            continue
        why = f"process {seen.pid} ({seen.name}) was started for it, but there is no record of it"
        status = ShardStatus(
            shard=shard,
            replica=ReplicaId(""),
            model=ModelName(""),
            generation=int(generation),
            state=ShardState.UNKNOWN,
            pid=seen.pid,
            detail=why,
            clock=time.time(),
        )
        order = StopShard(shard=shard, generation=int(generation))
        found[shard] = Life(order, status, unsure=Verdict(Known.UNSURE, why), pid=seen.pid)
    return tuple(found.values())


async def end_left_probes(state: Path) -> None:
    """End what an agent that was killed had started and is no engine: probes, bandwidth tests, scans (SD03)."""

    def end() -> None:
        for seen, env in _marked(state):
            # What this agent has started by now carries the same mark.
            if env.get(environment.PROBE) and not processes.descends(seen, os.getpid()):
                kill(seen)

    await trio.to_thread.run_sync(end)


def _marked(state: Path) -> Iterator[tuple[Seen, dict[str, str]]]:
    """The living processes with this state directory's mark, oldest first, with their environments."""
    everybody = processes.everyone()
    pids = processes.carrying(environment.STATE, str(state), everybody)
    for seen in sorted((everybody[pid] for pid in pids), key=lambda seen: (seen.started, seen.pid)):
        if seen.alive:
            yield seen, processes.environment(seen.pid) or {}

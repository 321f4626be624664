"""The log of the first failure of a replica of several nodes stays on the node where it happened."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from llmgw.wire.agent import ShardStatus
from llmgw.wire.control import StopShard
from llmgw.wire.facts import ShardState
from tests.engines import Watching
from tests.gangs import agents, orders, shard
from tests.ports import free_ports

pytestmark = pytest.mark.real

READY, FAILED, STOPPED = ShardState.READY, ShardState.FAILED, ShardState.STOPPED


async def ready(node: Watching, generation: int, ports: list[int]) -> int:
    node.shards.start(orders(2, generation, ports=ports)[1])
    status = await node.until(lambda s: s.state is READY and s.generation == generation)
    assert status.pid is not None
    return status.pid


def ended(generation: int) -> Callable[[ShardStatus], bool]:
    return lambda status: status.state is STOPPED and status.generation == generation


async def test_members_that_end_with_others_do_not_push_out_the_log_of_the_first_failure(tmp_path: Path) -> None:
    ports = free_ports(1)
    async with agents(tmp_path, 2) as nodes:
        follower = nodes[1]
        os.kill(await ready(follower, 1, ports), signal.SIGKILL)
        await follower.until(FAILED)
        for generation in range(2, 10):
            await ready(follower, generation, ports)
            # The leader has failed: the plane ends what is left of the attempt, then begins the next one.
            follower.shards.stop(StopShard(shard=shard(1), generation=generation))
            await follower.until(ended(generation))
        runs, ended_runs = (
            sorted(path.stem for path in (tmp_path / "node-1/logs").glob(f"*/*.{kind}")) for kind in ("log", "end")
        )
    assert runs[0] == "1", runs
    assert "2" not in runs
    assert ended_runs == runs, "the next order came while a failure was written down"

import os
import signal
from pathlib import Path

import httpx
import pytest

from llmgw.node import processes
from llmgw.wire.control import StopShard
from llmgw.wire.facts import ShardState
from tests.engines import SHARD, order, running, shards

pytestmark = pytest.mark.real

READY, FAILED, STOPPED, STARTING = ShardState.READY, ShardState.FAILED, ShardState.STOPPED, ShardState.STARTING


async def chat(port: int) -> str:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        answer = await client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body)
        return str(answer.raise_for_status().json()["choices"][0]["message"]["content"])


async def test_a_started_engine_becomes_ready_and_answers(tmp_path: Path) -> None:
    async with running(shards(tmp_path)) as told:
        told.shards.start(order())
        ready = await told.until(READY)
        assert await chat(ready.port) != ""
        assert ready.pid is not None
        assert ready.command[1:3] == ("-m", order().spec.source)
        assert set(told.shards.pids()[SHARD]) == {ready.pid}
        assert [str(status.state) for status in told.seen] == ["starting", "starting", "ready"]


async def test_a_killed_engine_is_told_within_a_second_with_signal_and_last_lines(tmp_path: Path) -> None:
    async with running(shards(tmp_path)) as told:
        told.shards.start(order())
        ready = await told.until(READY)
        assert ready.pid is not None
        os.kill(ready.pid, signal.SIGKILL)
        failed = await told.until(FAILED, within=1.0)
        assert failed.signal == "SIGKILL"
        assert failed.cause_code == "killed"
        assert failed.lines != ()
        assert told.shards.pids() == {}


async def test_a_stop_leaves_nothing(tmp_path: Path) -> None:
    async with running(shards(tmp_path)) as told:
        told.shards.start(order())
        ready = await told.until(READY)
        told.shards.stop(StopShard(shard=SHARD, generation=1))
        await told.until(STOPPED)
        assert ready.pid is not None
        assert processes.look(ready.pid) is None
        assert told.shards.statuses() == ()
        assert list((tmp_path / "shards").iterdir()) == []
        with pytest.raises(httpx.ConnectError):
            await chat(ready.port)

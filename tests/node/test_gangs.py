"""Replicas of several nodes with real processes: a leader and its followers, each under an agent of its own."""

import os
import signal
from pathlib import Path

import httpx
import pytest
import trio

from llmgw.node import processes
from llmgw.node.health import Patience
from llmgw.wire.control import StopShard
from llmgw.wire.facts import ShardState
from tests.engines import Watching
from tests.gangs import agents, free_ports, orders, shard

pytestmark = pytest.mark.real

READY, FAILED, STOPPED = ShardState.READY, ShardState.FAILED, ShardState.STOPPED
QUICK = Patience(period=0.2, probe=0.5, token=10.0)


async def started(nodes: list[Watching], generation: int = 1, ports: list[int] | None = None) -> list[int]:
    """Start as the plane does: the followers first, the leader when they are ready. Everybody's process, by rank."""
    given = orders(len(nodes), generation, ports=ports)
    pids: list[int] = []
    for node, order in reversed(list(zip(nodes, given, strict=True))):
        node.shards.start(order)
        status = await node.until(lambda s: s.state is READY and s.generation == generation)
        assert status.pid is not None
        pids.append(status.pid)
    return pids[::-1]


async def chat(port: int) -> str:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        body = {"model": "six", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        answer = await client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body)
        return str(answer.raise_for_status().json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("members", [2, 3])
async def test_a_replica_of_several_nodes_answers_with_every_member_at_work(tmp_path: Path, members: int) -> None:
    ports = free_ports(members - 1)
    async with agents(tmp_path, members) as nodes:
        pids = await started(nodes, ports=ports)
        leader = nodes[0].seen[-1]
        assert leader.network == "RPC: " + ", ".join(f"127.0.0.1:{port}" for port in ports)
        assert leader.warning == ""
        assert await chat(leader.port) != ""
        follower = nodes[1].seen[-1]
        assert follower.port == 0
        assert follower.command[1:] == ("-H", "127.0.0.1", "-p", str(ports[0]), "-t", "1", "-d", "CPU")
        log = nodes[0].shards._means.logs.evidence(shard(0), _run(nodes[0]))
        holding = [line for line in log if "model buffer size" in line]
        assert len(holding) == members, "every member, the leader's own CPU too, holds a part of the weights"

        for rank, node in enumerate(nodes):
            node.shards.stop(StopShard(shard=shard(rank), generation=1))
            await node.until(STOPPED)
        assert all(processes.look(pid) is None for pid in pids)


def _run(node: Watching):  # type: ignore[no-untyped-def]
    from llmgw.node.runs import RunName

    life = next(iter(node.shards._book.lives.values()))
    assert life.record is not None
    run = RunName.parse(life.record.run)
    assert run is not None
    return run


async def test_when_a_follower_is_killed_the_leader_fails_within_the_time_of_a_probe_and_says_why(
    tmp_path: Path,
) -> None:
    async with agents(tmp_path, patience=QUICK) as nodes:
        _, follower = await started(nodes)
        before = trio.current_time()
        os.kill(follower, signal.SIGKILL)
        assert (await nodes[1].until(FAILED, within=2)).signal == "SIGKILL"
        failed = await nodes[0].until(FAILED, within=10)
        assert trio.current_time() - before < QUICK.probe * 2 + 2
        assert failed.cause_code == "peer-lost"
        assert "went away" in failed.cause
        assert nodes[0].shards.pids() == {}


async def test_a_leader_whose_peer_is_not_there_is_refused_before_it_loads_and_the_peer_is_named(
    tmp_path: Path,
) -> None:
    here, absent = free_ports(2)
    async with agents(tmp_path, 3) as nodes:
        given = orders(3, ports=[here, absent])
        nodes[1].shards.start(given[1])
        await nodes[1].until(READY)
        nodes[0].shards.start(given[0])
        failed = await nodes[0].until(FAILED)
        assert failed.cause_code == "peer-missing"
        assert f"127.0.0.1:{absent}" in failed.detail
        assert f"127.0.0.1:{here}" not in failed.detail
        assert "1 of 2 peers answered" in failed.detail
        assert failed.command == ()
        assert nodes[0].shards.pids() == {}

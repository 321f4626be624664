"""One replica over two nodes by a real vLLM on the CPU, through the whole product. Opt-in: it takes minutes.

    python -m llmgw.tinyhf DIR
    pytest tests/e2e/test_vllm.py -s --vllm VENV/bin/vllm --vllm-model DIR

VENV is one in which vLLM's CPU build is installed: what a node makes of `vllm = "0.32.0"` by itself will do.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from llmgw.demo.processes import call, leftovers
from tests.e2e.rig import Rig, patient, rig
from tests.leftovers import end

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.vllm]

#: Silence is judged as it is shipped: two vLLMs that import at once keep small machines busy for a minute.
SETTINGS = """
[judgement]
settle = "3s"
quiet = "3s"
"""
MODEL = """
[[models]]
name = "tiny"
engine = "vllm"
source = "{source}"
nodes = 2
network = "tcp"
context = 1024
args = ["--enforce-eager", "--max-num-seqs", "4"]
resources = {{ cpu_threads = 1, memory = "3GiB" }}
"""
#: Seconds from the order to the first answer, on a machine that has more to do.
READY = 600.0
#: A token is asked for within 30 s of the last one; with room for a slow machine.
TOLD = 90.0


@pytest.fixture
async def fleet(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    program, model = request.config.getoption("--vllm"), request.config.getoption("--vllm-model")
    async with rig(tmp_path, 0, settings=SETTINGS) as made:
        for name in ("n1", "n2"):
            await made.join(name)
            config = tmp_path / name / "node.toml"
            config.write_text(config.read_text() + f'\n[engines.vllm]\ncommand = ["{program}"]\n')
            await made.start_node(name)
        answer = await made.api.post("apply", content=MODEL.format(source=model))
        assert answer.status_code == 200, answer.text
        yield made


async def ctl(fleet: Rig, *words: str) -> str:
    return await call("llmgw", "ctl", "--dir", str(fleet.directory), *words, env=fleet.env)


async def members(fleet: Rig) -> list[dict[str, Any]]:
    """The members of the one replica by rank."""
    return sorted((await fleet.shards()).values(), key=lambda shard: int(shard["rank"]))


def engines(fleet: Rig, shard: str = "") -> list[int]:
    """Every living process of an engine of this fleet, or of one shard: servers, cores, workers, trackers."""
    found = []
    for pid in leftovers(fleet.mark):
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(value.startswith(f"LLMGW_SHARD={shard}".encode()) for value in variables):
            found.append(pid)
    return found


async def served(fleet: Rig, generation: int) -> list[dict[str, Any]]:
    """Wait until both members are ready at a generation and a chat is answered; the members."""

    async def up() -> bool:
        found = await members(fleet)
        assert all(shard["generation"] <= generation for shard in found), [shard["detail"] for shard in found]
        return [(shard["state"], shard["generation"]) for shard in found] == [("ready", generation)] * 2

    took = await fleet.until(up, within=READY, every=0.5, what=f"both members are ready at generation {generation}")
    began = time.monotonic()
    async with patient(120) as client:
        answer = await fleet.chat(client)
    assert answer.status_code == 200, answer.text
    text = answer.json()["choices"][0]["message"]["content"]
    assert text.strip()
    print(f"generation {generation}: ready after {took:.0f} s, a chat took {time.monotonic() - began:.1f} s: {text!r}")
    return await members(fleet)


async def test_a_replica_over_two_nodes_serves_begins_again_as_one_and_leaves_nothing(fleet: Rig) -> None:
    first = await served(fleet, 1)
    assert {shard["node"] for shard in first} == {"n1", "n2"}
    shown = await ctl(fleet, "replica", str((await fleet.replicas())[0]["id"]))
    print(shown)
    assert "gloo over lo" in shown
    assert "GLOO_SOCKET_IFNAME" in shown

    # A follower's engine ends: its own agent sees that, and the whole replica begins again.
    os.kill(int(first[1]["pid"]), signal.SIGKILL)
    second = await served(fleet, 2)
    assert not {shard["pid"] for shard in first} & {shard["pid"] for shard in second}

    # Nobody sees it, for that agent stands still: only a token tells the leader's, whose engine says on /health all the
    # while that it is well.
    follower = fleet.nodes[str(second[1]["node"])]
    follower.send_signal(signal.SIGSTOP)
    end(engines(fleet, str(second[1]["id"])))

    async def told() -> bool:
        failure = (await members(fleet))[0]["last_failure"]
        return failure is not None and failure["generation"] == 2 and failure["node"] == second[0]["node"]

    took = await fleet.until(told, within=TOLD, every=0.2, what="the leader's agent finds it out")
    failure = (await members(fleet))[0]["last_failure"]
    print(f"found out after {took:.1f} s: {failure['cause']}")
    # Its engine fails at the token that it is asked for, and ends by itself, with code 0, before or after the second.
    assert "another member of the replica went away" in failure["cause"]
    assert any("Connection closed by peer" in line for line in failure["lines"])
    follower.send_signal(signal.SIGCONT)
    await served(fleet, 3)

    await ctl(fleet, "scale", "tiny", "0")

    async def gone() -> bool:
        return await fleet.replicas() == [] and not engines(fleet)

    took = await fleet.until(gone, within=60, what="nothing is left")
    print(f"gone after {took:.1f} s")
    assert [(await fleet.node(name))["shards"] for name in ("n1", "n2")] == [0, 0]

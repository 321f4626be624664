"""What an agent that was killed leaves running beside its engines (SD03)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from subprocess import PIPE

import pytest
import trio

from llmgw.node import processes
from llmgw.node.engines.environment import PROBE, STATE
from llmgw.node.returning import end_left_probes
from llmgw.node.run import run
from tests.engines import until
from tests.leftovers import end, marked

pytestmark = pytest.mark.real

AGENT = """
import sys, trio
from pathlib import Path
from llmgw.node import main
from llmgw.node.run import run
from llmgw.node.settings import NodeSettings

main._mark_tools(NodeSettings(directory=Path(sys.argv[1])))
trio.run(lambda: run(["sleep", "1000"], limit=1000))
"""


def names(pids: Iterable[int]) -> list[str]:
    return sorted(seen.name for seen in map(processes.look, pids) if seen is not None)


async def test_a_bandwidth_test_of_a_killed_agent_is_ended_by_the_next_one(tmp_path: Path) -> None:
    agent = await trio.lowlevel.open_process([sys.executable, "-c", AGENT, str(tmp_path)], env=dict(os.environ))
    try:
        await until(lambda: bool(marked(tmp_path)), within=60)
    finally:
        agent.kill()
        await agent.wait()
    (tool,) = marked(tmp_path)
    with processes.Handle(tool) as handle:
        await end_left_probes(tmp_path)
        with trio.fail_after(60):
            await handle.ended()
    assert not marked(tmp_path)


async def test_what_this_agent_has_started_itself_is_left_alone(tmp_path: Path) -> None:
    env = {STATE: str(tmp_path), PROBE: "1"}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(run, ["sh", "-c", "sleep 1000; true"], limit=1000, env=env))
        # One that is just becoming `sleep` bears no mark for a moment.
        await until(lambda: names(marked(tmp_path)) == ["sh", "sleep"])
        before = marked(tmp_path)
        await end_left_probes(tmp_path)
        assert marked(tmp_path) == before
        nursery.cancel_scope.cancel()


async def test_an_installation_under_way_is_not_cut_short(tmp_path: Path) -> None:
    orphan = await trio.lowlevel.open_process(
        ["sh", "-c", "sleep 1000 & echo $!"], stdout=PIPE, env={**os.environ, STATE: str(tmp_path), PROBE: ""}
    )
    assert orphan.stdout is not None
    pid = int(await orphan.stdout.receive_some())
    try:
        await orphan.wait()
        await until(lambda: names(marked(tmp_path)) == ["sleep"])
        await end_left_probes(tmp_path)
        assert marked(tmp_path) == {pid}
    finally:
        end([pid])
        await orphan.stdout.aclose()

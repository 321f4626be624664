import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trio

from llmgw.node import processes
from llmgw.wire.control import DrainShard, StopShard
from llmgw.wire.facts import ShardState
from tests.engines import SHARD, order, until
from tests.leftovers import alive, end_marked, marked
from tests.supervisor import agent

pytestmark = pytest.mark.real

SLEEPING = {"PROGRAM": "import time; time.sleep(1000)"}


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A state directory; whatever still carries its mark afterwards is killed."""
    yield tmp_path
    end_marked(tmp_path)


def noted(state: Path, word: str) -> bool:
    (path,) = (state / "shards").glob("*.json")
    return word in json.loads(path.read_text())


async def test_an_engine_outlives_its_killed_agent_and_the_next_one_adopts_it_without_a_failed_request(
    state: Path,
) -> None:
    answers: list[int] = []
    asking = trio.CancelScope()

    async def ask_on(port: int) -> None:
        with asking:
            async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
                body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4}
                url = f"http://127.0.0.1:{port}/v1/completions"
                while True:
                    answers.append((await client.post(url, json=body)).status_code)

    async with agent(state) as first:
        assert await first.adopted() == ()
        await first.give(order(7))
        ready = await first.told("ready")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_on, ready.port)
            await first.kill()
            async with agent(state) as second:
                (adopted,) = await second.adopted()
                assert (adopted.state, adopted.pid, adopted.port, adopted.generation) == (
                    "ready",
                    ready.pid,
                    ready.port,
                    7,
                )
                assert adopted.adopted is True
                so_far = len(answers)
                await until(lambda: len(answers) >= so_far + 5)
                assert set(answers) == {200}
                assert marked(state) == {ready.pid}
                asking.cancel()
                await second.give(StopShard(shard=SHARD, generation=7))
                await second.told("stopped")
                assert marked(state) == set()


async def test_the_end_of_an_adopted_engine_is_told_and_its_status_is_not_invented(state: Path) -> None:
    async with agent(state) as first:
        await first.give(order(1, engine="python", env=SLEEPING))
        ready = await first.told("ready")
        await first.kill()
    async with agent(state) as second:
        (adopted,) = await second.adopted()
        assert adopted.pid == ready.pid
        assert ready.pid is not None
        os.kill(ready.pid, signal.SIGKILL)
        failed = await second.told("failed")
        assert (failed.exit_code, failed.signal) == (None, "")
        assert "nobody saw" in failed.detail


async def test_an_engine_that_died_while_no_agent_watched_is_told_as_failed_with_its_worker_cleared_away(
    state: Path,
) -> None:
    program = "import os, time; os.fork() or os.setsid(); time.sleep(1000)"
    async with agent(state) as first:
        await first.give(order(1, engine="python", env={"PROGRAM": program}))
        ready = await first.told("ready")
        assert ready.pid is not None
        await until(lambda: len(marked(state)) == 2)
        await first.kill()
    os.kill(ready.pid, signal.SIGKILL)
    await until(lambda: ready.pid is not None and not alive(ready.pid))
    async with agent(state) as second:
        await second.adopted()
        failed = await second.told("failed")
        assert failed.cause_code == "ended-unseen"
        assert marked(state) == set()


async def test_a_failure_is_told_again_by_a_later_agent(state: Path) -> None:
    async with agent(state) as first:
        await first.give(order(1, engine="python", env={"PROGRAM": "raise SystemExit(9)"}))
        failed = await first.told("failed")
        await until(lambda: noted(state, "last"))
        await first.kill()
    async with agent(state) as second:
        (again,) = await second.adopted()
        assert again == failed


#: It leaves on the first SIGTERM after the file GO is there.
HEEDING_IN_TIME = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os.path.exists(os.environ["GO"]) and os._exit(0))
print("set", flush=True)
while True:
    time.sleep(1000)
"""


async def test_an_agent_killed_while_it_stops_a_shard_is_followed_by_one_that_goes_on_stopping(state: Path) -> None:
    env = {"PROGRAM": HEEDING_IN_TIME, "GO": str(state / "go")}
    async with agent(state) as first:
        await first.give(order(1, engine="python", env=env, grace=600.0))
        await first.told("ready")
        (log,) = (state / "logs").glob("*/*.log")
        await until(lambda: log.read_text() == "set\n")
        await first.give(StopShard(shard=SHARD, generation=1))
        await first.told("stopping")
        await until(lambda: noted(state, "stopping"))
        await first.kill()
    (state / "go").touch()
    async with agent(state) as second:
        await second.adopted()
        await second.told("stopped")
        assert marked(state) == set()


async def test_an_engine_still_loading_is_adopted_and_becomes_ready(state: Path) -> None:
    program = Path(__file__).with_name("slow_engine.py").read_text()
    async with agent(state, "--asking") as first:
        await first.give(order(1, engine="python", env={"PROGRAM": program, "GO": str(state / "go")}))
        started = await first.told("starting")
        while started.pid is None:
            started = await first.told("starting")
        await first.kill()
    async with agent(state, "--asking") as second:
        (adopted,) = await second.adopted()
        assert (adopted.state, adopted.pid) == ("starting", started.pid)
        (state / "go").touch()
        assert (await second.told("ready")).pid == started.pid


async def test_an_engine_whose_time_passed_while_no_agent_asked_it_is_asked_before_it_is_given_up(state: Path) -> None:
    program = Path(__file__).with_name("slow_engine.py").read_text()
    async with agent(state, "--asking") as first:
        await first.give(order(1, engine="python", env={"PROGRAM": program, "GO": str(state / "go")}))
        started = await first.told("starting")
        while started.pid is None:
            started = await first.told("starting")
        await first.kill()
    seen = processes.look(started.pid)
    assert seen is not None
    (state / "go").touch()
    (path,) = (state / "shards").glob("*.json")
    record = json.loads(path.read_text())
    await until(lambda: bool(processes.listeners(record["ports"]["http"])))
    # As if its time had been short.
    path.write_text(json.dumps({**record, "spec": {**record["spec"], "ready_within": 3.0}}))
    await until(lambda: processes.age(seen) > 3.1)
    async with agent(state, "--asking") as second:
        await second.adopted()
        assert (await second.told("ready")).pid == started.pid


async def test_draining_is_remembered(state: Path) -> None:
    async with agent(state) as first:
        await first.give(order(1, engine="python", env=SLEEPING))
        await first.told("ready")
        await first.give(DrainShard(shard=SHARD, generation=1))
        await first.told("draining")
        await until(lambda: noted(state, "draining"))
        await first.kill()
    async with agent(state) as second:
        assert [status.state for status in await second.adopted()] == [ShardState.DRAINING]


async def test_a_process_whose_token_does_not_fit_is_reported_and_left_alone(state: Path) -> None:
    async with agent(state) as first:
        await first.give(order(1, engine="python", env=SLEEPING))
        ready = await first.told("ready")
        await first.kill()
    assert ready.pid is not None
    (path,) = (state / "shards").glob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "token": "another"}))
    async with agent(state) as second:
        (status,) = await second.adopted()
        assert (status.state, status.pid) == (ShardState.UNKNOWN, ready.pid)
        await second.give(StopShard(shard=SHARD, generation=1))
        await second.told("unknown")
        assert processes.look(ready.pid) is not None
        os.kill(ready.pid, signal.SIGKILL)
        await second.told("stopped")


async def test_an_engine_whose_record_is_broken_is_reported_and_no_second_one_starts_beside_it(state: Path) -> None:
    async with agent(state) as first:
        await first.give(order(1, engine="python", env=SLEEPING))
        ready = await first.told("ready")
        await first.kill()
    assert ready.pid is not None
    (path,) = (state / "shards").glob("*.json")
    path.write_bytes(b"\0\0 garbage")
    async with agent(state) as second:
        (status,) = await second.adopted()
        assert (status.state, status.pid, status.shard) == (ShardState.UNKNOWN, ready.pid, SHARD)
        await second.give(order(2, engine="python", env=SLEEPING))
        await second.told("unknown")
        assert marked(state) == {ready.pid}
        os.kill(ready.pid, signal.SIGKILL)
        started = await second.told("ready")
        assert started.generation == 2
        await until(lambda: marked(state) == {started.pid})  # it may still be becoming the engine, and bear no mark
    assert path.with_suffix(".broken").exists()


SURVIVED = """
import os, sys, time
reading, writing = os.pipe()
if not os.fork():
    os.setuid(65534)
    os.write(writing, b"x")
    time.sleep(1000)
os.read(reading, 1)
print("another user's", flush=True)
while not os.path.exists(os.environ["GO"]):
    time.sleep(0.02)
raise SystemExit(3)
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="root may have others' processes")
async def test_an_engine_that_leaves_a_process_which_nothing_ends_says_so_instead_of_ready(state: Path) -> None:
    """As a worker that hangs in a driver, here by a user whom this agent may not signal."""
    without_kill = ("setpriv", "--bounding-set=-kill", "--inh-caps=-kill")
    async with agent(state, by=without_kill) as agent_:
        await agent_.give(order(1, engine="python", env={"PROGRAM": SURVIVED, "GO": str(state / "go")}))
        ready = await agent_.told("ready")
        assert ready.pid is not None
        (log,) = (state / "logs").glob("*/*.log")
        await until(lambda: "another user's" in log.read_text())
        (state / "go").touch()
        stopping = await agent_.told("stopping")
        while not stopping.detail:  # it may only take its time
            stopping = await agent_.told("stopping")
        (left,) = marked(state)
        assert f"do not end even by SIGKILL: {left} (" in stopping.detail
        os.kill(left, signal.SIGKILL)
        failed = await agent_.told("failed")
        assert (failed.exit_code, marked(state)) == (3, set())


async def test_the_agents_stdin_gate_keeps_an_engine_from_running_without_a_record(state: Path) -> None:
    """An agent that dies between fork and record leaves a process that never becomes the engine."""
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from llmgw.node.launch import launch\n"
        "def die(seen):\n"
        "    print(seen.pid, flush=True); os._exit(1)\n"
        f"launch(['/bin/touch', {str(state / 'ran')!r}], dict(os.environ), '/', Path({str(state / 'log')!r}), die)\n"
    )
    done = await trio.run_process([sys.executable, "-c", program], capture_stdout=True, check=False)
    await until(lambda: not alive(int(done.stdout)))
    assert not (state / "ran").exists()

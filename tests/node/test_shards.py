import os
import signal
import sys
from itertools import groupby
from pathlib import Path

import httpx
import pytest
import trio

from llmgw.node import ending, processes
from llmgw.node.engines import Asking
from llmgw.node.shards import Shards
from llmgw.wire.control import DrainShard, StopShard
from llmgw.wire.facts import ShardId, ShardState
from tests.engines import SHARD, order, running, shards, tiny_model, until
from tests.leftovers import alive
from tests.ports import of_an_agent

pytestmark = pytest.mark.real

READY, FAILED, STOPPED, STARTING = ShardState.READY, ShardState.FAILED, ShardState.STOPPED, ShardState.STARTING


def states(known: Shards) -> dict[ShardId, ShardState]:
    return {status.shard: status.state for status in known.statuses()}


async def chat(port: int) -> str:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
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


async def test_a_killed_engine_is_told_with_signal_and_last_lines(tmp_path: Path) -> None:
    async with running(shards(tmp_path)) as told:
        told.shards.start(order())
        ready = await told.until(READY)
        assert ready.pid is not None
        os.kill(ready.pid, signal.SIGKILL)
        failed = await told.until(FAILED)
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


IGNORING = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pid = os.fork()
if pid == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
    time.sleep(1000)
print("child", pid, flush=True)
os.waitpid(pid, 0)
time.sleep(1000)
"""


async def test_a_process_that_ignores_sigterm_and_a_child_that_left_its_session_are_both_ended(tmp_path: Path) -> None:
    async with running(shards(tmp_path)) as told:
        told.shards.start(order(engine="python", env={"PROGRAM": IGNORING}, grace=0.5))
        ready = await told.until(READY)
        record = told.shards._book.lives[SHARD].record
        assert record is not None
        await until(lambda: any(seen.session != ready.pid for seen in ending.belonging(record).values()))
        everyone = ending.belonging(record)
        told.shards.stop(StopShard(shard=SHARD, generation=1))
        await told.until(STOPPED)
        assert ending.belonging(record) == {}
        assert not any(alive(pid) for pid in everyone)


#: Its worker has a session of its own and nothing in its environment: only its parent tells whose it is.
NAMELESS = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True, env={})
time.sleep(600)
"""


async def test_a_worker_that_only_its_parent_tells_of_is_ended_though_the_parent_goes_first(tmp_path: Path) -> None:
    async with running(shards(tmp_path)) as told:
        told.shards.start(order(engine="python", env={"PROGRAM": NAMELESS}, grace=2.0))
        await told.until(READY)
        record = told.shards._book.lives[SHARD].record
        assert record is not None
        await until(lambda: len(ending.belonging(record)) == 2)
        everyone = ending.belonging(record)
        told.shards.stop(StopShard(shard=SHARD, generation=1))
        await told.until(STOPPED)
        assert not any(alive(pid) for pid in everyone)


async def test_a_newer_generation_replaces_the_older_after_stopping_it(tmp_path: Path) -> None:
    async with running(shards(tmp_path)) as told:
        told.shards.start(order(1))
        first = await told.until(READY)
        told.shards.start(order(2))
        second = await told.until(lambda status: status.state is READY and status.generation == 2)
        # A state is told again when there is more to say of it.
        states = [key for key, _ in groupby((status.generation, str(status.state)) for status in told.seen)]
        assert states == [(1, "starting"), (1, "ready"), (1, "stopping"), (2, "starting"), (2, "ready")]
        assert first.pid is not None
        assert processes.look(first.pid) is None
        assert second.pid != first.pid


async def test_the_same_start_again_tells_the_state_and_an_older_one_changes_nothing(tmp_path: Path) -> None:
    async with running(shards(tmp_path)) as told:
        told.shards.start(order(3))
        ready = await told.until(READY)
        told.shards.start(order(3))
        assert await told.until(READY) == ready
        told.shards.start(order(2))
        assert await told.until(READY) == ready
        told.shards.stop(StopShard(shard=SHARD, generation=2))
        assert await told.until(READY) == ready


async def test_a_failed_shard_is_not_started_again_by_the_same_generation_but_by_the_next(tmp_path: Path) -> None:
    async with running(shards(tmp_path)) as told:
        told.shards.start(order(1, engine="python", env={"PROGRAM": "raise SystemExit(3)"}))
        failed = await told.until(FAILED)
        assert failed.exit_code == 3
        told.shards.start(order(1, engine="python", env={"PROGRAM": "raise SystemExit(3)"}))
        assert await told.until(FAILED) == failed
        told.shards.start(order(2))
        await told.until(READY)


async def test_a_failed_shard_keeps_no_weights_until_it_is_ordered_anew(tmp_path: Path) -> None:
    async with running(shards(tmp_path)) as told:
        told.shards.start(order(1, engine="python", env={"PROGRAM": "raise SystemExit(3)"}))
        assert told.shards.sources() == {order().spec.source}
        await told.until(FAILED)
        assert told.shards.sources() == frozenset()
        told.shards.start(order(2))
        assert told.shards.sources() == {order().spec.source}
        await told.until(READY)
        assert told.shards.sources() == {order().spec.source}


async def test_an_engine_that_leaves_by_itself_with_code_0_has_failed(tmp_path: Path) -> None:
    async with running(shards(tmp_path)) as told:
        told.shards.start(order(engine="python", env={"PROGRAM": "print('bye')"}))
        failed = await told.until(FAILED)
        assert (failed.exit_code, failed.cause_code, failed.lines) == (0, "ended", ("bye",))


async def test_a_model_that_was_cut_off_is_refused_before_anything_starts(tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_model().read_bytes()[:-100_000])
    async with running(shards(tmp_path / "state")) as told:
        told.shards.start(order(source=str(cut)))
        failed = await told.until(FAILED)
        assert failed.cause_code == "broken-weights"
        assert "cut off" in failed.detail
        assert failed.pid is None


async def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    async with running(shards(tmp_path)) as told:
        told.shards.start(order(engine="vllm"))
        failed = await told.until(FAILED)
        assert failed.cause_code == "engine-missing"
        told.shards.start(order(2, engine="nonsense"))
        assert "nonsense" in (await told.until(lambda s: s.state is FAILED and s.generation == 2)).detail


async def test_a_stop_while_an_engine_loads_ends_it(tmp_path: Path) -> None:
    asking = Asking(token=False)
    async with running(shards(tmp_path, asking=asking)) as told:
        told.shards.start(order(engine="python", env={"PROGRAM": "import time; time.sleep(1000)"}))
        started = await told.until(lambda status: status.pid is not None)
        told.shards.stop(StopShard(shard=SHARD, generation=1))
        await told.until(STOPPED)
        assert started.pid is not None
        assert processes.look(started.pid) is None


async def test_an_engine_that_is_not_ready_in_time_has_failed_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    async with running(shards(tmp_path, asking=Asking(token=False))) as told:
        told.shards.start(order(engine="python", env={"PROGRAM": "import time; time.sleep(1000)"}, ready_within=0.5))
        started = await told.until(lambda status: status.pid is not None)
        failed = await told.until(FAILED)
        assert failed.cause_code == "not-ready"
        assert started.pid is not None
        assert processes.look(started.pid) is None


LOSING = """
import http.server, json, socket, sys
port = int(sys.argv[1])
if port % 2 == 0:
    raise OSError(98, "Address already in use")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": "tiny"}]}).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


async def test_a_port_lost_to_another_is_tried_again_with_the_next(tmp_path: Path) -> None:
    ports = of_an_agent(1)[:10]
    async with running(shards(tmp_path, asking=Asking(token=False), ports=ports)) as told:
        told.shards.start(order(engine="python", env={"PROGRAM": LOSING}))
        ready = await told.until(READY)
        assert ready.port % 2 == 1
        assert sorted(path.name for path in (tmp_path / "logs").glob("*/*.log")) == ["1.2.log", "1.log"]


async def test_a_stranger_on_the_port_is_not_taken_for_the_engine(tmp_path: Path) -> None:
    """Somebody takes the port between our choice and the engine's: its answers must not make the engine ready."""
    asking = Asking(token=False)
    supervised = shards(tmp_path, asking=asking)
    async with running(supervised) as told:
        told.shards.start(order(engine="python", env={"PROGRAM": "import time; time.sleep(1000)"}))
        started = await told.until(lambda status: status.pid is not None)
        stranger = await trio.lowlevel.open_process(
            [sys.executable, "-c", LOSING.replace("% 2 == 0", "< 0"), str(started.port)]
        )
        try:
            moved = await told.until(lambda status: status.pid not in (None, started.pid))
            assert moved.state is STARTING
            assert moved.port != started.port
        finally:
            stranger.kill()
            await stranger.wait()


async def test_engines_started_together_get_ports_of_their_own(tmp_path: Path) -> None:
    async with running(shards(tmp_path)) as told:
        names = [ShardId(f"tiny/{n}/0") for n in range(3)]
        for name in names:
            told.shards.start(order(shard=name))
        ready = [await told.until(READY) for _ in names]
        assert len({status.port for status in ready}) == 3


async def test_of_eight_started_together_the_one_that_fails_fails_alone(tmp_path: Path) -> None:
    sleeping, failing = {"PROGRAM": "import time; time.sleep(1000)"}, {"PROGRAM": "raise SystemExit(3)"}
    async with running(shards(tmp_path)) as told:
        names = [ShardId(f"m/{n}/0") for n in range(8)]
        for name in names:
            told.shards.start(order(shard=name, engine="python", env=failing if name == names[3] else sleeping))
        failed = await told.until(FAILED)
        others = {name: READY for name in names if name != names[3]}
        await until(lambda: states(told.shards) == others | {failed.shard: FAILED})
        assert (failed.shard, failed.exit_code) == (names[3], 3)
        assert len({status.port for status in told.shards.statuses() if status.state is READY}) == 7


async def test_an_engine_inherits_no_descriptor_of_the_agents(tmp_path: Path) -> None:
    look = "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))); raise SystemExit(3)"
    with (tmp_path / "secret").open("w") as secret:
        os.set_inheritable(secret.fileno(), True)
        async with running(shards(tmp_path)) as told:
            told.shards.start(order(engine="python", env={"PROGRAM": look}))
            # 3 is the listing's own.
            assert (await told.until(FAILED)).lines == ("[0, 1, 2, 3]",)


async def test_a_drained_shard_says_so_and_goes_on_serving(tmp_path: Path) -> None:
    async with running(shards(tmp_path)) as told:
        told.shards.start(order())
        await told.until(READY)
        told.shards.drain(DrainShard(shard=SHARD, generation=1))
        draining = await told.until(ShardState.DRAINING)
        assert await chat(draining.port)


async def test_a_stop_of_something_that_is_not_here_is_answered(tmp_path: Path) -> None:
    async with running(shards(tmp_path)) as told:
        told.shards.stop(StopShard(shard=SHARD, generation=4))
        stopped = await told.until(STOPPED)
        assert (stopped.shard, stopped.generation) == (SHARD, 4)


async def test_a_name_that_could_leave_the_directory_stays_inside_it(tmp_path: Path) -> None:
    async with running(shards(tmp_path / "state")) as told:
        told.shards.start(order(engine="python", shard=ShardId("../../x"), env={"PROGRAM": "print(1)"}))
        await told.until(FAILED)
        assert os.listdir(tmp_path) == ["state"]
        told.shards.start(order(engine="python", shard=ShardId("x" * 300), env={"PROGRAM": "print(1)"}))
        assert (await told.until(lambda s: s.state is FAILED and len(s.shard) == 300)).cause_code == "bad-name"


async def test_a_state_directory_that_cannot_be_written_fails_the_shard_and_nothing_runs(tmp_path: Path) -> None:
    async with running(shards(tmp_path)) as told:
        (tmp_path / "shards").write_text("in the way")
        told.shards.start(order(engine="python", env={"PROGRAM": "import time; time.sleep(1000)"}))
        failed = await told.until(FAILED)
        assert failed.cause_code == "cannot-start"
        assert told.shards.pids() == {}
        (tmp_path / "shards").unlink()

import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
import trio
from msgspec import structs
from trio.testing import MockClock

from llmgw.node import ending, processes
from llmgw.node.ending import clear, gpus_returned
from llmgw.node.prepare import memory_there
from llmgw.node.records import Record
from llmgw.wire.facts import GpuProcess
from tests.node.engines.specs import FACTS, GPUS, spec
from tests.node.test_records import record


class Holders:
    """A driver that shows one answer after the other, then the last for ever."""

    def __init__(self, *answers: tuple[GpuProcess, ...]) -> None:
        self._answers = list(answers)
        self.asked = 0

    async def __call__(self) -> tuple[GpuProcess, ...]:
        self.asked += 1
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


OURS = GpuProcess(GPUS[0], 100, "VLLM::Worker", 60 << 30)
FOREIGN = GpuProcess(GPUS[0], 900, "python", 50 << 30)
ELSEWHERE = GpuProcess(GPUS[3], 901, "python", 50 << 30)


@pytest.fixture
def run() -> Record:
    return structs.replace(record(pid=100), spec=spec("vllm", gpus=1))


async def test_a_shard_is_stopped_only_once_its_gpu_memory_is_back(run: Record, autojump_clock: MockClock) -> None:
    holders, told = Holders((OURS, ELSEWHERE), (OURS,), ()), list[str]()
    assert await gpus_returned(run, frozenset({100, 101}), holders, told.append) == ""
    assert (holders.asked, told) == (3, [])


async def test_memory_that_does_not_come_back_is_told_by_pid(run: Record, autojump_clock: MockClock) -> None:
    told = list[str]()
    await gpus_returned(run, frozenset({100}), Holders(*[(OURS,)] * 12, ()), told.append)
    assert "100 (VLLM::Worker, 61440 MiB on GPU-00000000" in told[0]


async def test_who_else_holds_memory_there_is_named_and_not_waited_for(run: Record, autojump_clock: MockClock) -> None:
    words = await gpus_returned(run, frozenset({100}), Holders((FOREIGN, ELSEWHERE)), lambda words: None)
    assert "900 (python" in words
    assert "901" not in words


async def test_a_start_waits_for_memory_that_was_just_given_up(autojump_clock: MockClock) -> None:
    wanted = spec("vllm", gpus=1, gpu_memory=40 << 30)
    assert await memory_there(wanted, FACTS, Holders((FOREIGN,), (FOREIGN,), ())) is None
    failure = await memory_there(wanted, FACTS, Holders((FOREIGN,)))
    assert failure is not None
    assert failure.code == "gpu-memory-taken"
    assert "900 (python)" in failure.detail


async def test_more_memory_than_the_host_has_free_is_refused(autojump_clock: MockClock) -> None:
    failure = await memory_there(spec("llamacpp", memory=1 << 60), FACTS, None)
    assert failure is not None
    assert failure.code == "not-enough-memory"
    assert await memory_there(spec("llamacpp", memory=1 << 20), FACTS, None) is None


#: An engine in Python: its memory is shared with a worker, and its name told.
SHARING = """
import multiprocessing, os, time
from multiprocessing.shared_memory import SharedMemory

def work(name):
    shared = SharedMemory(name=name)
    print(shared.name, flush=True)
    time.sleep(100)

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    shared = SharedMemory(create=True, size=1 << 20)
    multiprocessing.Process(target=work, args=(shared.name,)).start()
    time.sleep(100)
"""


def shared_memory(name: str) -> bool:
    return Path("/dev/shm", name).exists()


async def resumed(pid: int, after: float) -> None:
    await trio.sleep(after)
    os.kill(pid, signal.SIGCONT)


@pytest.mark.real
@pytest.mark.parametrize(
    ("first", "slow"),
    [
        pytest.param(True, False, id="its first process was killed"),
        pytest.param(False, False, id="it is killed whole"),
        pytest.param(False, True, id="what gives it back takes its time"),
    ],
)
async def test_an_engine_that_is_killed_leaves_no_shared_memory(
    first: bool, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "_DIES_WITHIN", 60.0)
    # Not by `-c`: what is spawned reads the program again.
    with NamedTemporaryFile("w", suffix=".py") as program:
        program.write(SHARING)
        program.flush()
        words = [sys.executable, program.name]
        engine = await trio.lowlevel.open_process(words, stdout=subprocess.PIPE, start_new_session=True)
        assert engine.stdout is not None
        with trio.fail_after(120):
            name = (await engine.stdout.receive_some()).decode().strip()
            assert shared_memory(name)
            seen = processes.look(engine.pid)
            assert seen is not None
            run = record(pid=engine.pid, started=seen.started)
            if first:
                engine.send_signal(signal.SIGKILL)
            async with trio.open_nursery() as nursery:
                if slow:
                    (tracker,) = filter(ending._tidying, ending.belonging(run))
                    os.kill(tracker, signal.SIGSTOP)
                    nursery.start_soon(resumed, tracker, 2.0)
                await clear(run, grace=0, stubborn=print)
        assert not shared_memory(name)
        await engine.wait()
        await engine.stdout.aclose()

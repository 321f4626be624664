"""The kernel in memory against this machine's own: the same orders and deaths, the same course (C2 to C6)."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import pytest
import trio
import trio.testing

from benchmarks.crash.kernel import HERE, Kernel, Process, in_memory
from benchmarks.crash.machines import PaperShards
from llmgw.node import processes
from llmgw.node.engines import environment
from llmgw.node.shards import Shards
from llmgw.wire.control import DrainShard, StartShard, StopShard
from llmgw.wire.facts import ShardState
from tests.engines import FACTS, SHARD, order, shards
from tests.leftovers import alive, end_marked

Told = tuple[int, str]
#: After each step: what was told meanwhile, what is so now, how many engines live.
Course = list[tuple[str, list[Told], list[Told], int]]

SLEEPING = {"PROGRAM": "import time; time.sleep(1000)"}
LASTING = (ShardState.READY, ShardState.DRAINING, ShardState.FAILED)


class Machine(Protocol):
    """Where agents run: the real one, or one in memory."""

    def agent(self) -> Shards: ...
    def engines(self) -> list[int]: ...
    def kill(self, pid: int) -> None: ...
    def agent_left(self) -> None: ...


class Real:
    """This machine; engines are Python programs that sleep."""

    def __init__(self, state: Path) -> None:
        self._state = state

    def agent(self) -> Shards:
        return shards(self._state)

    def engines(self) -> list[int]:
        everybody = processes.everyone()
        marked = processes.carrying(environment.STATE, str(self._state), everybody)
        return [pid for pid in marked if everybody[pid].alive and everybody[pid].name != "sh"]

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        while alive(pid):  # it ends a moment later, and until then all would seem to be at rest
            time.sleep(0.001)

    def agent_left(self) -> None:
        return


class Unwatched:
    """Kills no agent at any step."""

    def began(self, kernel: Kernel, process: Process) -> None:
        return

    def at(self, end: str) -> tuple[Kernel, Process] | None:
        return None

    def leads(self, kernel: Kernel, process: Process) -> None:
        return

    def step(self, kernel: Kernel, name: str) -> bool:
        return False


class InMemory:
    """A kernel in memory, as the crash matrix has it."""

    def __init__(self, seed: int) -> None:
        self.kernel = Kernel("n1", random.Random(seed), Unwatched())
        self.kernel.troubled = False

    def agent(self) -> Shards:
        self.kernel.agent_began()
        return PaperShards(self.kernel, lambda: FACTS)

    def engines(self) -> list[int]:
        return [process.seen.pid for process in self.kernel.engines()]

    def kill(self, pid: int) -> None:
        self.kernel.end(self.kernel.processes[pid], None, signal.SIGKILL)

    def agent_left(self) -> None:
        self.kernel.agent_ended()


def settled(agent: Shards, machine: Machine) -> bool:
    """Whether everything that was ordered has come to its end."""
    lives = agent._book.lives.values()
    return len(machine.engines()) == sum(life.status.state is not ShardState.FAILED for life in lives) and all(
        isinstance(life.wish, StartShard)
        and life.wish.generation == life.status.generation
        and life.status.state in LASTING
        and not (life.draining and life.status.state is ShardState.READY)
        for life in lives
    )


async def rest(agent: Shards, machine: Machine) -> None:
    """Wait until it is at rest, and what was told of that is heard."""
    with trio.fail_after(60):
        while not settled(agent, machine):  # noqa: ASYNC110 - processes of two kernels tell nobody
            await trio.sleep(0.01)
        await trio.sleep(0.05)


@asynccontextmanager
async def agent_on(machine: Machine, told: list[Told]) -> AsyncIterator[Shards]:
    """One agent on it, killed when the block ends: what it started stays."""
    agent = machine.agent()
    with agent.changes.subscribe() as changes:
        async with trio.open_nursery() as nursery:

            async def listen() -> None:
                async for status in changes:
                    now_is = (status.generation, str(status.state))
                    if not told or told[-1] != now_is:
                        told.append(now_is)

            nursery.start_soon(agent.run)
            nursery.start_soon(listen)
            await agent.adopted.wait()
            yield agent
            nursery.cancel_scope.cancel()
    machine.agent_left()


async def play(machine: Machine, steps: list[str]) -> Course:
    """Carry the steps out one by one, each to its end."""
    course: Course = []
    told: list[Told] = []
    heard = 0
    waiting = iter(steps)
    step = next(waiting, None)
    while step is not None:
        async with agent_on(machine, told) as agent:
            await rest(agent, machine)
            while step is not None:
                word, _, number = step.partition(" ")
                match word:
                    case "start":
                        agent.start(order(int(number), engine="python", env=SLEEPING))
                    case "stop":
                        agent.stop(StopShard(shard=SHARD, generation=int(number)))
                    case "drain":
                        agent.drain(DrainShard(shard=SHARD, generation=int(number)))
                    case "kill":
                        for pid in machine.engines():
                            machine.kill(pid)
                await rest(agent, machine)
                now_is = [(s.generation, str(s.state)) for s in agent.statuses()]
                course.append((step, told[heard:], now_is, len(machine.engines())))
                heard = len(told)
                step = next(waiting, None)
                if word in ("crash", "crash-and-kill"):
                    break
        if word == "crash-and-kill":
            for pid in machine.engines():
                machine.kill(pid)
    return course


def drawn(seed: int) -> list[str]:
    rng = random.Random(seed)
    steps, newest = ["start 1"], 1
    for _ in range(9):
        word = rng.choice(["start", "start", "again", "older", "stop", "drain", "kill", "crash", "crash-and-kill"])
        if word == "start":
            newest += 1
        number = max(1, newest - 1) if word == "older" else newest
        kind = {"again": "start", "older": rng.choice(["start", "stop", "drain"])}.get(word, word)
        steps.append(f"{kind} {number}" if kind in ("start", "stop", "drain") else kind)
    return steps


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    end_marked(tmp_path)


async def in_memory_course(seed: int) -> Course:
    machine = InMemory(seed)
    HERE.set(machine.kernel)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(machine.kernel.run)
        await trio.testing.wait_all_tasks_blocked()
        course = await play(machine, drawn(seed))
        nursery.cancel_scope.cancel()
    return course


@pytest.mark.real
@pytest.mark.parametrize("seed", range(8))
def test_the_kernel_in_memory_takes_the_course_of_the_real_one(seed: int, state: Path) -> None:
    real = trio.run(play, Real(state), drawn(seed))
    assert [step for step, *_ in real] == drawn(seed)
    with in_memory():
        pretended = trio.run(in_memory_course, seed, clock=trio.testing.MockClock(autojump_threshold=0))
    assert pretended == real


def test_a_stop_that_comes_while_an_unseen_end_is_looked_into_is_no_failure_of_the_agent() -> None:
    """The crash matrix found it: the order had become a stop by the time that the failure was to be told."""
    failures: list[str] = []

    async def stopped_after(delay: float) -> None:
        machine = InMemory(1)
        HERE.set(machine.kernel)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(machine.kernel.run)
            await trio.testing.wait_all_tasks_blocked()
            await play(machine, ["start 1", "crash-and-kill"])
            agent = machine.agent()
            with agent.changes.subscribe() as changes:
                nursery.start_soon(agent.run)
                await agent.adopted.wait()
                await trio.sleep(delay)
                agent.stop(StopShard(shard=SHARD, generation=1))
                async for status in changes:
                    failures.append(status.cause_code)
                    if status.state is ShardState.STOPPED:
                        break
            nursery.cancel_scope.cancel()

    with in_memory():
        for milliseconds in range(60):
            trio.run(stopped_after, milliseconds / 1000, clock=trio.testing.MockClock(autojump_threshold=0))
    assert "internal" not in failures
    assert "ended-unseen" in failures

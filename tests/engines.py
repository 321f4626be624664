"""Shared by tests of engines: a tiny model, a stand-in engine that does as its environment says, an agent to
supervise them.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import trio

from llmgw.log import Ring
from llmgw.node.engines import Asking, Command, Objection, Seat
from llmgw.node.engines.causes import Cause, Ended, probable
from llmgw.node.engines.contents import Contents
from llmgw.node.engines.installed import Installed
from llmgw.node.engines.known import TORCH
from llmgw.node.engines.llamacpp import LlamaCpp
from llmgw.node.health import Patience
from llmgw.node.logs import Logs
from llmgw.node.shards import Shards
from llmgw.tinymodel import write_tiny
from llmgw.wire.agent import Register, ShardStatus
from llmgw.wire.control import StartShard
from llmgw.wire.facts import Cpu, Host, ModelName, NodeId, ReplicaId, Resources, ShardId, ShardSpec, ShardState
from tests.leftovers import end
from tests.ports import of_an_agent

FACTS = Register(node=NodeId("here"), version="1", host=Host(cpu=Cpu(threads=4), memory_bytes=64 << 30))
SHARD = ShardId("tiny/0/0")


async def until(condition: Callable[[], bool], within: float = 30.0) -> None:
    """Wait for something outside this process (a file, a process) that can tell nobody that it changed."""
    with trio.fail_after(within):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)


@cache
def tiny_model() -> Path:
    """One model for the whole test run."""
    return write_tiny(Path(mkdtemp(prefix="llmgw-test-model-")) / "tiny.gguf")


def order(
    generation: int = 1,
    *,
    engine: str = "llamacpp",
    source: str | None = None,
    shard: ShardId = SHARD,
    args: Sequence[str] = (),
    env: dict[str, str] | None = None,
    grace: float = 5.0,
    ready_within: float = 60.0,
    context: int | None = 512,
) -> StartShard:
    """An order to start a shard of a model called tiny."""
    spec = ShardSpec(
        engine=engine,
        model=ModelName("tiny"),
        source=source or str(tiny_model()),
        args=tuple(args),
        env=env or {},
        resources=Resources(cpu_threads=1),
        context=context,
        grace=grace,
        ready_within=ready_within,
    )
    return StartShard(
        shard=shard, replica=ReplicaId("tiny/0"), model=ModelName("tiny"), generation=generation, spec=spec
    )


class PythonEngine:
    """An engine whose program is the Python text in the profile's PROGRAM, run with the port as its argument."""

    name = "python"

    def __init__(self, asking: Asking | None = None) -> None:
        self._asking = asking

    def ports(self, spec: ShardSpec) -> tuple[str, ...]:
        return ("http",)

    def weights(self, spec: ShardSpec) -> bool:
        return True

    def validate(self, spec: ShardSpec, facts: Register, contents: Contents | None) -> tuple[Objection, ...]:
        return ()

    def command(self, spec: ShardSpec, seat: Seat) -> Command:
        return Command((*seat.found.command, "-c", spec.env["PROGRAM"], str(seat.ports["http"]), *spec.args))

    def asking(self, spec: ShardSpec) -> Asking | None:
        return self._asking

    def cause(self, lines: Sequence[str], ended: Ended) -> Cause | None:
        return probable(TORCH, lines, ended)


def shards(
    state: Path, *, asking: Asking | None = None, ports: range | None = None, patience: Patience | None = None
) -> Shards:
    """An agent's shards, with llama.cpp and the stand-in engine."""
    installed = Installed([LlamaCpp(), PythonEngine(asking)], commands={"python": (sys.executable,)}, state=state)
    return Shards(
        state,
        installed=installed,
        logs=Logs(state / "logs", Ring()),
        facts=lambda: FACTS,
        ports=ports or of_an_agent(),
        scopes=False,
        patience=patience,
        give_up_grace=0.5,
    )


class Watching:
    """What shards have told, and a way to wait for more."""

    def __init__(self, shards: Shards, told: trio.MemoryReceiveChannel[ShardStatus]) -> None:
        self.shards = shards
        self._told = told
        self.seen: list[ShardStatus] = []

    async def until(self, wanted: Callable[[ShardStatus], bool] | ShardState, within: float = 60.0) -> ShardStatus:
        """The next status like that; fails loudly with what came instead."""
        try:
            with trio.fail_after(within):
                while True:
                    status = await self._told.receive()
                    self.seen.append(status)
                    if status.state is wanted if isinstance(wanted, ShardState) else wanted(status):
                        return status
        except trio.TooSlowError:
            states = [(s.generation, str(s.state), s.detail, s.lines[-3:]) for s in self.seen]
            raise AssertionError(f"waited {within} s for {wanted}; told were {states}") from None


@asynccontextmanager
async def running(shards: Shards) -> AsyncIterator[Watching]:
    """The shards' tasks run in the block. Afterwards every engine that they left is killed by its record."""
    try:
        with shards.changes.subscribe() as told:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(shards.run)
                await shards.adopted.wait()
                yield Watching(shards, told)
                nursery.cancel_scope.cancel()
    finally:
        end(pid for pids in shards.pids().values() for pid in pids)

"""An agent's shards in a process of their own, to be killed: `python -m tests.supervisor STATE FIRST STOP`.

Its ports are those from FIRST on and below STOP. Orders come as lines of JSON on standard input, statuses go as lines
of JSON to standard output; the first line tells what was adopted.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import PIPE

import msgspec
import structlog
import trio

from llmgw.node.engines import Asking
from llmgw.wire.agent import ShardStatus
from llmgw.wire.control import DrainShard, StartShard, StopShard
from tests.engines import shards
from tests.ports import of_an_agent

Order = StartShard | StopShard | DrainShard


async def main(state: Path, ports: range) -> None:
    supervised = shards(state, ports=ports, asking=Asking(token=False) if "--asking" in sys.argv else None)

    async def obey() -> None:
        async with trio.lowlevel.FdStream(sys.stdin.fileno()) as stream:
            source = Lines(stream)
            while (line := await source.next()) is not None:
                match msgspec.json.decode(line, type=Order):
                    case StartShard() as order:
                        supervised.start(order)
                    case StopShard() as order:
                        supervised.stop(order)
                    case DrainShard() as order:
                        supervised.drain(order)

    with supervised.changes.subscribe() as changes:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervised.run)
            await supervised.adopted.wait()
            print(msgspec.json.encode(supervised.statuses()).decode(), flush=True)
            nursery.start_soon(obey)
            async for status in changes:
                print(msgspec.json.encode(status).decode(), flush=True)


class Lines:
    """Whole lines of a stream."""

    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self._stream = stream
        self._rest = b""

    async def next(self) -> bytes | None:
        """The next line; None at the end."""
        while b"\n" not in self._rest:
            data = await self._stream.receive_some()
            if not data:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line


class Agent:
    """A supervisor as its tests see it."""

    def __init__(self, process: trio.Process) -> None:
        assert process.stdout is not None
        self.process = process
        self._lines = Lines(process.stdout)

    async def _line(self) -> bytes:
        line = await self._lines.next()
        assert line is not None, "the supervisor ended"
        return line

    async def adopted(self) -> tuple[ShardStatus, ...]:
        return msgspec.json.decode(await self._line(), type=tuple[ShardStatus, ...])

    async def give(self, order: Order) -> None:
        assert self.process.stdin is not None
        await self.process.stdin.send_all(msgspec.json.encode(order) + b"\n")

    async def told(self, state: str, within: float = 60) -> ShardStatus:
        with trio.fail_after(within):
            while True:
                line = await self._line()
                if line.startswith(b"{"):
                    status = msgspec.json.decode(line, type=ShardStatus)
                    if status.state == state:
                        return status

    async def kill(self) -> None:
        """As a crash: without a chance to clean up."""
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def agent(state: Path, *words: str, by: Sequence[str] = (), ports: range | None = None) -> AsyncIterator[Agent]:
    """A supervisor; killed when the block ends. What it started lives on. `by` is a command that executes the rest.

    Its engines' ports are of this process: they stay taken when it has ended.
    """
    allowed = ports or of_an_agent()
    process = await trio.lowlevel.open_process(
        [*by, sys.executable, "-m", "tests.supervisor", str(state), str(allowed.start), str(allowed.stop), *words],
        stdin=PIPE,
        stdout=PIPE,
    )
    try:
        yield Agent(process)
    finally:
        if process.returncode is None:
            process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
        assert process.stdin is not None
        assert process.stdout is not None
        await process.stdin.aclose()
        await process.stdout.aclose()


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    trio.run(main, Path(sys.argv[1]), range(int(sys.argv[2]), int(sys.argv[3])))

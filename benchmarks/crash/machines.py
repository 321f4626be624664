"""A node of the simulation: its machine, and agents on it one after the other, each with shipped shards and stream."""

from __future__ import annotations

import errno
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import attrs
import msgspec
import trio

from benchmarks.crash.kernel import HERE, Kernel, Killed
from benchmarks.crash.ledger import Ledger
from benchmarks.crash.wires import DIAL_WITHIN, Absence, Way, Wire, connection
from llmgw.backoff import Backoff
from llmgw.cell import Cell
from llmgw.node.answers import Say
from llmgw.node.book import Book
from llmgw.node.engines import Asking, Command, Found, Listens, Objection, Seat
from llmgw.node.engines.causes import Cause, Ended
from llmgw.node.engines.contents import Contents
from llmgw.node.engines.installed import Installed
from llmgw.node.engines.wires import rpc_peers
from llmgw.node.feed import Feed
from llmgw.node.health import Patience
from llmgw.node.logs import Logs
from llmgw.node.records import Record, Records, decode, file_name
from llmgw.node.runs import RunName
from llmgw.node.shards import Shards
from llmgw.node.stream import Duties, Outdated, PlaneStream, Timing
from llmgw.node.tcp import Ports
from llmgw.wire.agent import GANGS, Heartbeat, Register, ShardStatus
from llmgw.wire.control import (
    DrainShard,
    Goodbye,
    LogsReply,
    LogsRequest,
    Registered,
    StartShard,
    StopShard,
)
from llmgw.wire.facts import Cpu, EngineInstall, Gid, Host, NodeId, Port, ShardId, ShardSpec

#: Silence is judged four times as fast as in a real fleet, and so are the streams.
TIMING = Timing(registered_within=5.0, ping_every=4.0, pong_within=4.0, silent_after=10.0)
GIB = 1 << 30
PORTS = range(21000, 29000)


class PaperRecords(Records):
    """The folder of records on the kernel's disk; an agent may be killed before and after each change of it."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(Path("/nowhere"))
        self._kernel = kernel

    def write(self, record: Record) -> None:
        if self._kernel.killed or self._kernel.watcher.step(self._kernel, "record"):
            return
        self._check()
        self._kernel.disk[file_name(record.shard)] = msgspec.json.encode(record)

    def _check(self) -> None:
        if trio.current_time() < self._kernel.full_until:
            raise OSError(errno.ENOSPC, "No space left on device")

    def remove(self, shard: ShardId) -> None:
        if self._kernel.killed or self._kernel.watcher.step(self._kernel, "removing"):
            return
        self._check()
        self._kernel.disk.pop(file_name(shard), None)
        self._kernel.watcher.step(self._kernel, "removed")

    def load(self) -> tuple[tuple[Record, ...], tuple[Path, ...]]:
        found = [decode(data) for _, data in sorted(self._kernel.disk.items())]
        return tuple(record for record in found if record is not None), ()


class PaperEngine:
    """An engine that only ever says on which port it listens, and whom it leads."""

    name = "llamacpp"

    def ports(self, spec: ShardSpec) -> tuple[str, ...]:
        return ("rpc",) if spec.rank else ("http",)

    def weights(self, spec: ShardSpec) -> bool:
        return True

    def validate(self, spec: ShardSpec, facts: Register, contents: Contents | None) -> tuple[Objection, ...]:
        return ()

    def command(self, spec: ShardSpec, seat: Seat) -> Command:
        (port,) = seat.ports.values()
        return Command((*seat.found.command, *rpc_peers(spec), str(port)))

    def asking(self, spec: ShardSpec) -> Asking | Listens:
        return Listens("rpc") if spec.rank else Asking(token=len(spec.peers) > 1)

    def cause(self, lines: Sequence[str], ended: Ended) -> Cause | None:
        return None

    # As `Installed` has them.

    def adapter(self, engine: str) -> PaperEngine:
        return self

    async def found(self, engine: str, version: str = "", waiting: Callable[[str], None] | None = None) -> Found:
        await trio.lowlevel.checkpoint()
        return Found("llamacpp", ("llama-server",))


class NoLogs:
    """Logs that hold nothing."""

    def begin(self, shard: ShardId, run: RunName) -> Path:
        return Path("/nowhere")

    def end(self, *_: object) -> None: ...
    def trim(self) -> None: ...
    def forget(self) -> None: ...

    def last_lines(self, *_: object) -> tuple[str, ...]:
        return ()

    def evidence(self, *_: object) -> list[str]:
        return []


class PaperShards(Shards):
    """The shipped shards, with their records on the kernel's disk."""

    def __init__(self, kernel: Kernel, facts: Callable[[], Register]) -> None:
        engine, logs = PaperEngine(), cast(Logs, NoLogs())
        super().__init__(
            Path("/nowhere"),
            installed=cast(Installed, engine),
            logs=logs,
            facts=facts,
            scopes=False,
            patience=Patience(period=15.0, refused=3, probe=4.0, token=5.0),
            give_up_grace=0.5,
        )
        self._records = PaperRecords(kernel)
        taken = {process.port for process in kernel.engines()}
        ports = Ports(PORTS, after=PORTS.start + 10 * kernel.life, free=lambda port: port not in taken)
        self._means = attrs.evolve(self._means, records=self._records, ports=ports)
        self._book = Book(self._records, logs)
        self._book.changes = PaperFeed(kernel)


class PaperFeed(Feed[ShardStatus]):
    """The shipped feed; the agent may be killed when it has just told something, before that leaves it."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = kernel

    def put(self, item: ShardStatus) -> None:
        super().put(item)
        self._kernel.watcher.step(self._kernel, "told")


class NoBeats:
    """Heartbeats with nothing in them: that they come is what counts."""

    async def next(self) -> Heartbeat:
        await trio.lowlevel.checkpoint()
        return Heartbeat()


Accept = Callable[[Wire, str], bool]


class Machine:
    """One node. Its agent is killed and comes back; what it started stays, and so does its disk."""

    def __init__(self, name: str, seed: int, ledger: Ledger, accept: Accept) -> None:
        self.name = NodeId(name)
        self.rng = random.Random(f"{seed} {name}")
        self.kernel = Kernel(name, random.Random(f"{seed} {name} kernel"), ledger)
        ledger.kernels[name] = self.kernel
        self.up, self.down = Way(self.rng), Way(self.rng)
        self.hardware = Cell(0)
        self.epoch = 0
        self.absence = Absence(self.rng.uniform(0.0, 1.0))
        self.armed: dict[str, int] = {}
        self._ledger, self._accept = ledger, accept
        self._scope = trio.CancelScope()
        self._wire: Wire | None = None

    @property
    def runs(self) -> bool:
        return self.kernel.life % 2 == 1 and not self.kernel.killed

    def kill_agent(self, back_after: float) -> None:
        self.absence.last(back_after)
        self.kernel.killed = True
        self._scope.cancel()

    def cut_stream(self) -> None:
        if self._wire is not None:
            self._wire.die()

    def step(self, name: str) -> bool:
        """A step that the agent has reached; True when it is killed at it."""
        left = self.armed.get(name)
        if left is None or self.kernel.killed:
            return False
        if left > 1:
            self.armed[name] = left - 1
            return False
        del self.armed[name]
        self.kill_agent(self.rng.choice((0.1, 2.0, 10.0, 30.0)))
        return True

    async def run(self) -> None:
        """One agent after the other, for ever."""
        HERE.set(self.kernel)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.kernel.run)
            while True:
                await self.absence.over()
                self.kernel.agent_began()
                with trio.CancelScope() as self._scope:
                    try:
                        await self._agent()
                    except* Killed:
                        pass
                if self._wire is not None:
                    self._wire.die()
                    self._wire = None
                self.kernel.agent_ended()

    async def _agent(self) -> None:
        newest = [self.register(())]
        shards = PaperShards(self.kernel, lambda: newest[0])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(shards.run)
            nursery.start_soon(self._keep_stream, shards, newest)

    def register(self, shards: tuple[ShardStatus, ...]) -> Register:
        # Tables of GIDs make a Register so long that it must go in parts.
        rows = tuple(Gid(n, f"fe80:0000:0000:0000:0000:0000:0000:{n:04x}", "RoCE v2", "eth0") for n in range(250))
        ports = tuple(Port(device=f"mlx5_{n}", gids=rows) for n in range(12)) if self.hardware.value % 2 else ()
        return Register(
            node=self.name,
            version="1",
            features=(GANGS,),
            address=f"{self.name}.example",
            host=Host(hostname=self.name, cpu=Cpu(threads=4), memory_bytes=64 * GIB),
            ports=ports,
            installs=(EngineInstall(engine="llamacpp", version="1"),),
            shards=shards,
            epoch=self.epoch,
            engine_ports=(PORTS.start, PORTS.stop - 1),
        )

    async def _keep_stream(self, shards: Shards, newest: list[Register]) -> None:
        async def register() -> Register:
            await shards.adopted.wait()
            await trio.sleep(self.rng.choice((0.0, 0.01, 0.3)))  # the survey
            newest[0] = self.register(shards.statuses())
            return newest[0]

        async def logs(_request: LogsRequest, _say: Say) -> LogsReply:
            await trio.sleep(self.rng.choice((0.0, 1.0, 20.0)))
            return LogsReply()

        def command(order: object) -> None:
            match order:
                case StartShard():
                    shards.start(order)
                case StopShard():
                    shards.stop(order)
                case DrainShard():
                    shards.drain(order)
                case _:
                    return  # there is nothing to install or to fetch

        answers: Mapping[Any, Callable[[Any, Say], Awaitable[Any]]] = {LogsRequest: logs}
        duties = Duties(
            register=register,
            beats=lambda told: NoBeats(),
            hardware=self._hardware,
            changes=shards.changes.subscribe,
            command=command,
            obey=self._obey,
            renewals=None,
            answers=answers,
        )
        backoff, attempt = Backoff(cap=8.0), -1
        await trio.sleep(backoff.delay(0, self.rng.random()))
        while True:
            began = trio.current_time()
            goodbye = await self._carry(duties)
            attempt = backoff.after(attempt, trio.current_time() - began)
            await trio.sleep(backoff.delay(attempt, self.rng.random(), retry_after=min(2.0, goodbye.retry_after)))

    async def _carry(self, duties: Duties) -> Goodbye:
        with trio.move_on_after(DIAL_WITHIN):
            await self.up.passage()
            await self.down.passage()
            mine, theirs = connection(self.up, self.down)
            if self._accept(theirs, f"{self.name}.example:{self.rng.randint(30000, 60000)}"):
                self._wire = mine
                mine.sent = lambda: self._ledger.step(self.kernel, "sent")
        if self._wire is None:
            return Goodbye(code="unreachable", reason="no plane answers")
        try:
            return await PlaneStream(mine, duties, TIMING).run()
        finally:
            if not self.kernel.killed:
                mine.close()
            else:
                mine.die()
            self._wire = None

    def _obey(self, registered: Registered) -> None:
        if registered.epoch < self.epoch:
            raise Outdated(f"epoch {registered.epoch} is below {self.epoch}")
        self.epoch = registered.epoch

    def _hardware(self) -> AsyncIterator[int]:
        return self.hardware.values()


def change(machine: Machine) -> None:
    """The hardware has changed: the node registers again over the stream it has."""
    machine.hardware.set(machine.hardware.value + 1)

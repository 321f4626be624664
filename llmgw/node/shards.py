"""The shards of this node: what the plane orders of each, and what is told of them (C2 to C6).

Engines outlive all of this. A shard's task (see `tend`) lives in the daemon's nursery, so no stream's end touches it
(SE05); when the daemon ends, the engine goes on until a later agent finds its record and adopts it (see `returning`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import structlog
import trio

from llmgw.node import processes
from llmgw.node.book import Book, Life, nothing
from llmgw.node.ending import GpuHolders
from llmgw.node.engines.installed import Installed
from llmgw.node.feed import Feed
from llmgw.node.health import Patience
from llmgw.node.installs.running import Running
from llmgw.node.launch import confined, scopes_work
from llmgw.node.logs import Logs
from llmgw.node.prepare import Fetch, Means
from llmgw.node.records import Records
from llmgw.node.returning import end_left_probes, orphans, returned
from llmgw.node.tcp import Ports
from llmgw.node.tend import drain, tend
from llmgw.wire.agent import Register, ShardStatus
from llmgw.wire.control import DrainShard, StartShard, StopShard
from llmgw.wire.facts import Grade, Problem, ShardId, ShardState

log = structlog.get_logger(__name__)

_MOST_STOPPED = 256
_TRIM_SECONDS = 10.0
_FORGET_TURNS = 360  # once an hour


class Shards:
    """Starts, watches, adopts and stops engines.

    Commands are synchronous, idempotent and return at once; what comes of them is told in `changes`. `run` must be
    running, in a nursery that lives as long as the daemon.
    """

    def __init__(
        self,
        directory: Path,
        *,
        installed: Installed,
        logs: Logs,
        facts: Callable[[], Register],
        ports: range = range(21000, 23000),
        listen: str = "127.0.0.1",
        holders: GpuHolders | None = None,
        fetch: Fetch | None = None,
        scopes: bool | None = None,
        patience: Patience | None = None,
        give_up_grace: float = 5.0,
    ) -> None:
        """`directory` is the agent's own. `scopes` None: scopes of systemd, where they work."""
        self._state = directory.absolute()
        self._records = Records(self._state / "shards")
        self._scopes = scopes
        self._means = Means(
            state=self._state,
            installed=installed,
            logs=logs,
            ports=Ports(ports),
            records=self._records,
            facts=facts,
            listen=listen,
            holders=holders,
            fetch=fetch,
            scopes=bool(scopes),
            patience=patience or Patience(),
            grace=give_up_grace,
        )
        self._book = Book(self._records, logs)
        self._stopped: dict[ShardId, ShardStatus] = {}
        self._nursery: trio.Nursery | None = None
        self._early: list[StartShard | StopShard | DrainShard] = []
        self._broken: tuple[Path, ...] = ()
        self._confined = False
        #: Set once everything that an earlier agent left running is known again: register after it.
        self.adopted = trio.Event()

    # --- what is ---------------------------------------------------------------------------------------

    @property
    def changes(self) -> Feed[ShardStatus]:
        """Every change of every shard, to be subscribed to for the length of a stream."""
        return self._book.changes

    def statuses(self) -> tuple[ShardStatus, ...]:
        """Every shard that is not stopped, for Register."""
        return tuple(life.status for life in self._book.lives.values())

    def sources(self) -> frozenset[str]:
        """The weights that shards here use or are about to: none of them may be removed (C8).

        One that has failed uses nothing before it is ordered anew: the plane may have done without it long since.
        """
        return frozenset(
            life.order.spec.source
            for life in self._book.lives.values()
            if life.running or life.status.state.alive or life.wish.generation > life.status.generation
        )

    def running(self) -> tuple[Running, ...]:
        """What every shard runs or is about to: no engine of it may be removed."""
        return tuple(
            Running(shard, life.order.spec.engine, life.status.command)
            for shard, life in self._book.lives.items()
            if life.status.state.alive
        )

    def pids(self) -> Mapping[ShardId, frozenset[int]]:
        """Every process of each running shard. Reads /proc once; some milliseconds."""
        running = {
            shard: life.record
            for shard, life in self._book.lives.items()
            if life.running and life.record is not None and life.record.pid
        }
        everybody = processes.everyone() if running else {}
        return {
            shard: frozenset(
                processes.members(
                    record.pid,
                    record.started,
                    everybody,
                    of_scope=processes.in_scope(Path(record.scope)) if record.scope else (),
                )
            )
            for shard, record in running.items()
        }

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What an operator must look at: records that cannot be read, processes that cannot be verified."""
        found = [
            Problem(
                subject="node",
                code=f"broken-record:{path.name}",
                grade=Grade.WARN,
                text=f"the record {path} cannot be read; it was set aside",
                remedy="look whether an engine runs that no shard accounts for, then remove the file",
            )
            for path in self._broken
        ]
        if self._confined:
            found.append(
                Problem(
                    subject="node",
                    code="engines-confined",
                    grade=Grade.WARN,
                    text="systemd makes no scopes here: engines live in the agent's unit, and end when that restarts",
                    remedy="look why `systemd-run --scope true` fails as the agent's user, or set KillMode=process",
                )
            )
        found += [
            Problem(
                subject="node",
                code=f"wires:{shard}",
                grade=Grade.WARN,
                text=f"shard {shard}: {life.wires.warning}",
            )
            for shard, life in self._book.lives.items()
            if life.running and life.wires.warning
        ]
        found += [
            Problem(
                subject="node",
                code=f"unverified:{shard}",
                grade=Grade.WARN,
                text=f"shard {shard}: {life.unsure.text}",
                remedy=f"look at process {life.pid}; end it by hand if it is an engine that nobody needs",
            )
            for shard, life in self._book.lives.items()
            if life.unsure is not None
        ]
        return tuple(found)

    # --- commands --------------------------------------------------------------------------------------

    def start(self, order: StartShard) -> None:
        """Run a shard at a generation (C4). The same again tells its state, and an older one that of the newer."""
        if self._nursery is None:
            self._early.append(order)
            return
        life = self._book.lives.get(order.shard)
        if life is None:
            status = ShardStatus(
                shard=order.shard,
                replica=order.replica,
                model=order.model,
                generation=order.generation,
                state=ShardState.STARTING,
                clock=time.time(),
            )
            self._stopped.pop(order.shard, None)
            self._live(Life(order, status))
        elif order.generation > life.generation:
            life.draining = False
            life.want(order)
            if life.unsure is not None:  # that must end first, by itself or by hand
                self.changes.put(life.status)
        else:
            if order.generation < life.generation:
                log.warning("an old start was refused", shard=order.shard, generation=order.generation)
            self.changes.put(life.status)

    def stop(self, order: StopShard) -> None:
        """Stop a shard if its generation is at most the order's. One that is not there is told as stopped."""
        if self._nursery is None:
            self._early.append(order)
            return
        life = self._book.lives.get(order.shard)
        if life is None:
            self.changes.put(self._stopped.get(order.shard) or nothing(order))
        elif order.generation < life.generation or isinstance(life.wish, StopShard):
            self.changes.put(life.status)
        else:
            life.want(order)
            if life.unsure is not None:
                self.changes.put(life.status)

    def drain(self, order: DrainShard) -> None:
        """Take no new traffic: the gateways see the state. The engine goes on with what it has."""
        if self._nursery is None:
            self._early.append(order)
            return
        life = self._book.lives.get(order.shard)
        if life is None:
            self.changes.put(self._stopped.get(order.shard) or nothing(order))
        elif order.generation < life.generation or life.draining or isinstance(life.wish, StopShard):
            self.changes.put(life.status)
        else:
            life.draining = True
            self._nursery.start_soon(drain, life, order.why, self._book)

    # --- tasks -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Adopt what runs, then carry out commands, for ever. Cancelled, it leaves every engine running."""
        async with trio.open_nursery() as nursery:
            if self._scopes is None:
                works = await trio.to_thread.run_sync(scopes_work)
                self._means = attrs.evolve(self._means, scopes=works)
                if not works:
                    self._confined = await trio.to_thread.run_sync(confined, *processes.service_of_own())
            self._nursery = nursery
            try:
                await self._adopt()
                self.adopted.set()
                await self._keep_logs_small()
            finally:
                self._nursery = None

    async def _adopt(self) -> None:
        """Know again what an earlier agent left (C2). What cannot be verified is reported and left alone."""
        await end_left_probes(self._state)
        records, self._broken = await trio.to_thread.run_sync(self._records.load)
        for path in self._broken:
            log.error("a record cannot be read and was set aside", path=str(path))
        early, self._early = self._early, []
        for life in await trio.to_thread.run_sync(returned, records):
            if life.record is not None and life.running:
                self._means.ports.keep(life.status.shard, life.record.ports)
            if life.gone:
                log.warning("a shard's engine is gone", shard=life.status.shard, why=life.gone)
            elif life.unsure is not None:
                log.warning("a process cannot be verified", shard=life.status.shard, why=life.unsure.text)
            elif life.running:
                log.info("adopted", shard=life.status.shard, generation=life.generation, pid=life.status.pid)
            self._live(life)
        for life in await trio.to_thread.run_sync(orphans, self._state, {record.token for record in records}):
            if life.status.shard not in self._book.lives:
                log.warning("a process without a record is left alone", shard=life.status.shard, pid=life.pid)
                self._live(life)
        for order in early:
            match order:
                case StartShard():
                    self.start(order)
                case StopShard():
                    self.stop(order)
                case DrainShard():
                    self.drain(order)

    def _live(self, life: Life) -> None:
        assert self._nursery is not None
        self._book.lives[life.status.shard] = life
        self._nursery.start_soon(self._tend, life)

    async def _tend(self, life: Life) -> None:
        await tend(life, self._means, self._book)
        self._stopped[life.status.shard] = life.status
        while len(self._stopped) > _MOST_STOPPED:
            self._stopped.pop(next(iter(self._stopped)))

    async def _keep_logs_small(self) -> None:
        turn = 0
        while True:
            await trio.to_thread.run_sync(self._means.logs.trim)
            if turn % _FORGET_TURNS == 0:
                await trio.to_thread.run_sync(self._means.logs.forget)
            turn += 1
            await trio.sleep(_TRIM_SECONDS)

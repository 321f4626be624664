"""The shards of this node: what the plane wants of each, and the task that makes it so (C2 to C6).

Engines outlive all of this. A shard's task lives in the daemon's nursery, so no stream's end touches it (SE05); when the
daemon ends, the task is cancelled and the engine goes on, until a later agent finds the record and adopts it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import structlog
import trio
from msgspec import structs

from llmgw.errors import LlmgwError
from llmgw.node import processes
from llmgw.node.adopt import Known, Verdict, verify
from llmgw.node.ending import GpuHolders, belonging, clear, gpus_returned
from llmgw.node.engines import environment
from llmgw.node.engines.installed import Installed
from llmgw.node.feed import Feed
from llmgw.node.health import Patience
from llmgw.node.launch import scopes_work
from llmgw.node.logs import Logs
from llmgw.node.processes import Handle, Seen
from llmgw.node.records import Record, Records, file_name
from llmgw.node.runs import RunEnd, RunName
from llmgw.node.serve import Failure, Fetch, Means, attend, begin, prepare
from llmgw.node.tcp import Ports
from llmgw.wire.agent import Register, ShardStatus
from llmgw.wire.control import DrainShard, StartShard, StopShard
from llmgw.wire.facts import Grade, ModelName, Problem, Progress, ReplicaId, ShardId, ShardSpec, ShardState

log = structlog.get_logger(__name__)

_ATTEMPTS = 3
_MOST_STOPPED = 256
_TRIM_SECONDS = 10.0


@attrs.define(eq=False)
class Life:
    """One shard, from its first order until it is stopped. `wish` is the newest order; `record` the run there is, if any."""

    wish: StartShard | StopShard
    status: ShardStatus
    record: Record | None = None
    draining: bool = False
    adopted: bool = False
    ready_at: float | None = None
    unsure: Verdict | None = None
    pid: int = 0  # of a process that cannot be verified
    scope: trio.CancelScope | None = None
    woken: trio.Event = attrs.field(factory=trio.Event)

    def want(self, wish: StartShard | StopShard) -> None:
        """Replace the wish and end whatever served the older one."""
        self.wish = wish
        woken, self.woken = self.woken, trio.Event()
        woken.set()
        if self.scope is not None:
            self.scope.cancel()


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
        """`directory` is the agent's own; `scopes` None uses scopes of systemd where that works."""
        self._state = directory.absolute()
        self._records = Records(self._state / "shards")
        self._scopes = scopes
        self._means = Means(
            self._state,
            installed,
            logs,
            self._records,
            Ports(ports),
            facts,
            listen,
            holders,
            fetch,
            bool(scopes),
            patience or Patience(),
            give_up_grace,
        )
        self._lives: dict[ShardId, Life] = {}
        self._stopped: dict[ShardId, ShardStatus] = {}
        self._nursery: trio.Nursery | None = None
        self._writing = trio.Lock()
        self._early: list[StartShard | StopShard | DrainShard] = []
        self._broken: tuple[Path, ...] = ()
        #: Set once everything that an earlier agent left running is known again: register after it.
        self.adopted = trio.Event()
        self.changes: Feed[ShardStatus] = Feed()

    # --- what is ---------------------------------------------------------------------------------------

    def statuses(self) -> tuple[ShardStatus, ...]:
        """Every shard that is not stopped, for Register."""
        return tuple(life.status for life in self._lives.values())

    def pids(self) -> Mapping[ShardId, frozenset[int]]:
        """Every process of each running shard. Reads /proc once; some milliseconds."""
        running = {
            shard: life.record for shard, life in self._lives.items() if life.record is not None and life.record.pid
        }
        if not running:
            return {}
        everybody = processes.everyone()
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
            if record.last is None
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
        found += [
            Problem(
                subject="node",
                code=f"unverified:{shard}",
                grade=Grade.WARN,
                text=f"shard {shard}: {life.unsure.text}",
                remedy=f"look at process {life.pid}; end it by hand if it is an engine that nobody needs",
            )
            for shard, life in self._lives.items()
            if life.unsure is not None
        ]
        return tuple(found)

    # --- commands --------------------------------------------------------------------------------------

    def start(self, order: StartShard) -> None:
        """Run a shard at a generation (C4). The same again tells its state; an older one is refused by telling the newer."""
        if self._nursery is None:
            self._early.append(order)
            return
        life = self._lives.get(order.shard)
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
            return
        known = max(life.wish.generation, life.status.generation)
        if order.generation > known:
            life.draining = False
            life.want(order)
            if life.unsure is not None:  # it must end first, by itself or by hand
                self.changes.put(life.status)
            return
        if order.generation < known:
            log.warning("an old start was refused", shard=order.shard, generation=order.generation, known=known)
        self.changes.put(life.status)

    def stop(self, order: StopShard) -> None:
        """Stop a shard if its generation is at most the order's. One that is not there is told as stopped."""
        if self._nursery is None:
            self._early.append(order)
            return
        life = self._lives.get(order.shard)
        if life is None:
            self.changes.put(self._stopped.get(order.shard) or _nothing(order))
        elif order.generation < max(life.wish.generation, life.status.generation) or isinstance(life.wish, StopShard):
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
        life = self._lives.get(order.shard)
        if life is None:
            self.changes.put(self._stopped.get(order.shard) or _nothing(order))
            return
        if order.generation >= life.status.generation and not life.draining and isinstance(life.wish, StartShard):
            life.draining = True
            self._nursery.start_soon(self._drain, life, order.why)
            return
        self.changes.put(life.status)

    # --- tasks -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Adopt what runs, then carry out commands, for ever. Cancelled, it leaves every engine running."""
        async with trio.open_nursery() as nursery:
            if self._scopes is None:
                works = await trio.to_thread.run_sync(scopes_work)
                self._means = attrs.evolve(self._means, scopes=works)
            await self._adopt(nursery)
            self.adopted.set()
            early, self._early = self._early, []
            for order in early:
                match order:
                    case StartShard():
                        self.start(order)
                    case StopShard():
                        self.stop(order)
                    case DrainShard():
                        self.drain(order)
            try:
                while True:
                    await trio.to_thread.run_sync(self._means.logs.trim)
                    await trio.sleep(_TRIM_SECONDS)
            finally:
                self._nursery = None

    def _live(self, life: Life) -> None:
        assert self._nursery is not None
        self._lives[life.status.shard] = life
        self._nursery.start_soon(self._guarded, life)

    async def _guarded(self, life: Life) -> None:
        """A shard's task. Whatever goes wrong in it is that shard's failure and nobody else's."""
        while True:
            woken = life.woken
            try:
                await self._life(life)
                return
            except Exception as error:
                log.exception("a shard's task failed", shard=life.status.shard)
                life.scope = None
                if life.record is not None and life.record.last is None:
                    # Nobody would watch it any more, and a second one beside it must never be.
                    await clear(life.record, grace=self._means.grace, stubborn=lambda words: None)
                self._means.ports.release(life.status.shard)
                failure = Failure(
                    "internal", f"the agent itself failed: {error!r}", "its log says more (`llmgw ctl logs`)"
                )
                self._fail(life, _order_of(life), failure)
                await self._write(life.record)
            await woken.wait()

    async def _life(self, life: Life) -> None:
        while True:
            wish = life.wish
            if life.unsure is not None:
                await self._unsure(life)
                continue
            if isinstance(wish, StopShard):
                await self._stop(life, wish)
                if life.wish is wish:
                    return
                continue
            if life.record is not None and life.record.generation < wish.generation:
                if life.record.last is None:
                    await self._put_down(life, None)
                life.record, life.adopted = None, False
                continue  # what is wanted may have changed meanwhile
            woken = life.woken
            with trio.CancelScope() as life.scope:
                if life.record is None or life.record.last is None:
                    await self._serve(life, wish)
            life.scope = None
            if life.wish is wish:
                await woken.wait()

    # --- serving ---------------------------------------------------------------------------------------

    async def _serve(self, life: Life, order: StartShard) -> None:
        """Start and attend; returns when the shard has failed."""
        attempt = 1
        while True:
            if life.record is None:
                self._tell(life, ShardState.STARTING, order=order)
                failure = await self._begin(life, order, attempt)
            else:
                failure = None
            if failure is None:
                assert life.record is not None
                engine = self._means.installed.adapter(order.spec.engine)
                if engine is None:
                    failure = Failure(
                        "engine-missing",
                        f"this agent knows no engine called {order.spec.engine!r}",
                        "upgrade the agent",
                    )
                else:
                    failure = await attend(
                        life.record,
                        engine,
                        self._means,
                        serving=life.record.ready,
                        ready=lambda: self._ready(life),
                        note=lambda words: self._tell(life, life.status.state, detail=words),
                    )
            run = self._end_run(life)
            self._means.ports.release(order.shard)
            lost = failure.code == "port-in-use" and life.ready_at is None and life.record is not None
            if lost and attempt < _ATTEMPTS and "http" not in order.spec.ports:
                log.warning("a port was lost, trying others", shard=order.shard, attempt=attempt, detail=failure.detail)
                await self._finish_run(order.shard, run, True, 0.0)
                life.record, attempt = None, attempt + 1
                continue
            held = 0.0 if life.ready_at is None else trio.current_time() - life.ready_at
            self._fail(life, order, failure)
            await self._write(life.record)
            await self._finish_run(order.shard, run, True, held)
            return

    async def _begin(self, life: Life, order: StartShard, attempt: int) -> Failure | None:
        def fetching(progress: Progress) -> None:
            self._tell(life, ShardState.FETCHING, order=order, progress=progress)

        try:
            file_name(order.shard)
        except LlmgwError as error:
            return Failure("bad-name", error.what, error.remedy)
        prepared = await prepare(order, self._means, fetching)
        if isinstance(prepared, Failure):
            return prepared

        def keep(record: Record) -> None:
            life.record, life.ready_at = record, None

        run = RunName(order.generation, attempt)
        failure = await begin(order, prepared, run, self._means, keep)
        if failure is None:
            self._tell(life, ShardState.STARTING, order=order)
        return failure

    async def _ready(self, life: Life) -> None:
        """It serves. Written before it is told: a later agent must not take a serving engine for a loading one."""
        assert life.record is not None
        life.ready_at = trio.current_time()
        scope = processes.scope_of(life.record.pid)
        life.record = structs.replace(life.record, ready=True, scope=str(scope or ""))
        await self._write(life.record)
        self._tell(life, ShardState.DRAINING if life.draining else ShardState.READY)

    async def _drain(self, life: Life, why: str) -> None:
        if life.record is not None:
            life.record = structs.replace(life.record, draining=True)
            await self._write(life.record)
        if life.status.state is ShardState.READY and life.draining:
            self._tell(life, ShardState.DRAINING, detail=why)

    def _fail(self, life: Life, order: StartShard, failure: Failure) -> None:
        ended = failure.ended
        self._tell(
            life,
            ShardState.FAILED,
            order=order,
            exit_code=ended.exit_code if ended is not None else None,
            signal=ended.signal_name if ended is not None else "",
            cause=failure.cause or failure.text,
            cause_code=failure.code,
            detail=failure.detail,
            lines=failure.lines,
        )
        record = life.record or Record(
            shard=order.shard,
            replica=order.replica,
            model=order.model,
            generation=order.generation,
            token="-",
            spec=order.spec,
        )
        life.record = structs.replace(record, last=life.status)

    # --- stopping --------------------------------------------------------------------------------------

    async def _stop(self, life: Life, order: StopShard) -> None:
        shard = life.status.shard
        detail = order.why
        if life.record is not None and life.record.last is None:
            detail = await self._put_down(life, order.grace) or order.why
        if life.wish is not order:
            life.record = None
            return
        await self._forget(shard)
        self._lives.pop(shard, None)
        self._tell(life, ShardState.STOPPED, detail=detail)
        self._stopped[shard] = life.status
        while len(self._stopped) > _MOST_STOPPED:
            self._stopped.pop(next(iter(self._stopped)))

    async def _put_down(self, life: Life, grace: float | None) -> str:
        """End the run of a life and forget it; who else holds memory on its GPUs, in words."""
        record = life.record
        assert record is not None
        scope = record.scope or str(processes.scope_of(record.pid) or "")
        record = life.record = structs.replace(record, stopping=True, scope=scope)
        self._tell(life, ShardState.STOPPING)
        # Written first: an agent that dies now must go on stopping and not serve again.
        await self._write(record)

        def stubborn(words: str) -> None:
            self._tell(life, ShardState.STOPPING, detail=words)

        pids = frozenset(await trio.to_thread.run_sync(belonging, record))
        await clear(record, grace=record.spec.grace if grace is None else grace, stubborn=stubborn)
        held = await gpus_returned(record, pids, self._means.holders, stubborn)
        run = self._end_run(life)
        self._means.ports.release(record.shard)
        await self._forget(record.shard)
        await self._finish_run(record.shard, run, False, 0.0)
        life.record = None
        return held

    # --- adopting --------------------------------------------------------------------------------------

    async def _adopt(self, nursery: trio.Nursery) -> None:
        records, self._broken = await trio.to_thread.run_sync(self._records.load)
        for path in self._broken:
            log.error("a record cannot be read and was set aside", path=str(path))
        boot = processes.boot_id()
        self._nursery = nursery
        for record in records:
            seen = processes.look(record.pid) if record.pid else None
            verdict = verify(record, seen, processes.environment(record.pid) if record.pid else None, boot)
            self._resume(record, verdict)
        await self._orphans({record.token for record in records})

    def _resume(self, record: Record, verdict: Verdict) -> None:
        order = StartShard(
            shard=record.shard,
            replica=record.replica,
            model=record.model,
            generation=record.generation,
            spec=record.spec,
        )
        state = ShardState.STARTING
        if verdict.known is Known.UNSURE:
            state = ShardState.UNKNOWN
        elif record.ready:
            state = ShardState.DRAINING if record.draining else ShardState.READY
        status = ShardStatus(
            shard=record.shard,
            replica=record.replica,
            model=record.model,
            generation=record.generation,
            state=state,
            port=record.ports.get("http", 0),
            pid=record.pid or None,
            adopted=True,
            command=record.argv,
            clock=time.time(),
        )
        life = Life(order, status, record, draining=record.draining, adopted=True)
        if record.last is not None:
            life.status = record.last
            self._live(life)
            return
        if record.stopping:
            life.wish = StopShard(shard=record.shard, generation=record.generation)
        self._means.ports.keep(record.shard, record.ports)
        if record.ready:
            life.ready_at = trio.current_time()
        if verdict.known is Known.UNSURE:
            life.unsure, life.pid = verdict, record.pid
            life.status = structs.replace(status, detail=verdict.text)
            log.warning(
                "a process cannot be verified and is left alone", shard=record.shard, pid=record.pid, why=verdict.text
            )
        elif verdict.known is Known.OURS:
            log.info("adopted", shard=record.shard, generation=record.generation, pid=record.pid)
        else:
            log.warning("a shard's engine is gone", shard=record.shard, why=verdict.text)
            # Its number may be another process's by now: only its token still finds what is left of it.
            life.record = structs.replace(record, pid=0, started=0)
            self._live_gone(life, verdict)
            return
        self._live(life)

    def _live_gone(self, life: Life, verdict: Verdict) -> None:
        assert self._nursery is not None
        self._lives[life.status.shard] = life
        life.status = structs.replace(life.status, state=ShardState.STOPPING, pid=None)
        self._nursery.start_soon(self._guarded_gone, life, verdict)

    async def _guarded_gone(self, life: Life, verdict: Verdict) -> None:
        """What an engine that ended unseen has left behind goes first; then the end is told."""
        record = life.record
        assert record is not None
        await clear(record, grace=0.0, stubborn=lambda words: self._tell(life, ShardState.STOPPING, detail=words))
        run = RunName.parse(record.run)
        self._means.ports.release(record.shard)
        if isinstance(life.wish, StartShard) and life.wish.generation == record.generation:
            lines: tuple[str, ...] = ()
            failure = Failure("ended-unseen", verdict.text, "the log may say why")
            engine = self._means.installed.adapter(record.spec.engine)
            if run is not None and record.pid == 0 and engine is not None:
                lines = await trio.to_thread.run_sync(self._means.logs.last_lines, record.shard, run, 20)
            self._fail(life, life.wish, attrs.evolve(failure, lines=lines))
            await self._write(life.record)
        else:
            life.record = None
        await self._finish_run(record.shard, run, True, 0.0)
        await self._guarded(life)

    async def _orphans(self, tokens: set[str]) -> None:
        """Processes that carry our mark and that no record accounts for: reported, never ended. Left probes are ended."""

        def search() -> list[tuple[Seen, dict[str, str]]]:
            everybody = processes.everyone()
            found = []
            for pid in processes.carrying(environment.STATE, str(self._state), everybody):
                env = processes.environment(pid) or {}
                if everybody[pid].alive and env.get(environment.TOKEN, "") not in tokens:
                    found.append((everybody[pid], env))
            return sorted(found, key=lambda one: (one[0].started, one[0].pid))

        for seen, env in await trio.to_thread.run_sync(search):
            if environment.PROBE in env:
                record = Record(
                    shard=ShardId("-"),
                    replica=ReplicaId("-"),
                    model=ModelName("-"),
                    generation=0,
                    token="-",
                    spec=ShardSpec(engine="-", model=ModelName("-"), source="-"),
                    pid=seen.pid,
                    started=seen.started,
                )
                await clear(record, grace=0.0, stubborn=lambda words: None)
                continue
            shard = ShardId(env.get(environment.SHARD, ""))
            generation = env.get(environment.GENERATION, "")
            if not shard or shard in self._lives or not generation.isdigit():
                continue
            verdict = Verdict(
                Known.UNSURE, f"process {seen.pid} ({seen.name}) was started for it, but there is no record of it"
            )
            status = ShardStatus(
                shard=shard,
                replica=ReplicaId(""),
                model=ModelName(""),
                generation=int(generation),
                state=ShardState.UNKNOWN,
                pid=seen.pid,
                detail=verdict.text,
                clock=time.time(),
            )
            log.warning("a process without a record is left alone", shard=shard, pid=seen.pid)
            order = StopShard(shard=shard, generation=int(generation))
            self._live(Life(order, status, unsure=verdict, pid=seen.pid))

    async def _unsure(self, life: Life) -> None:
        """Wait beside a process that cannot be verified until it ends by itself or by hand."""
        try:
            with Handle(life.pid) as handle:
                await handle.ended()
        except ProcessLookupError:
            pass
        life.unsure = None
        if life.record is not None:
            life.record = structs.replace(life.record, pid=0, started=0)
            await clear(
                life.record, grace=0.0, stubborn=lambda words: self._tell(life, ShardState.STOPPING, detail=words)
            )
        self._means.ports.release(life.status.shard)
        if (
            isinstance(life.wish, StartShard)
            and life.record is not None
            and life.wish.generation == life.record.generation
        ):
            self._fail(
                life, life.wish, Failure("ended-unseen", f"process {life.pid}, which could not be verified, has ended")
            )
            await self._write(life.record)
        else:
            life.record = None

    # --- small things ----------------------------------------------------------------------------------

    def _tell(
        self,
        life: Life,
        state: ShardState,
        *,
        order: StartShard | None = None,
        detail: str = "",
        cause: str = "",
        cause_code: str = "",
        exit_code: int | None = None,
        signal: str = "",
        lines: tuple[str, ...] = (),
        progress: Progress | None = None,
    ) -> None:
        """Replace the shard's status and tell it."""
        record = life.record if life.record is not None and life.record.last is None else None
        before = life.status
        of = order or record or before
        life.status = ShardStatus(
            shard=before.shard,
            replica=of.replica,
            model=of.model,
            generation=of.generation,
            state=state,
            port=record.ports.get("http", 0) if record is not None and state.alive else 0,
            pid=(record.pid or None) if record is not None else None,
            adopted=life.adopted,
            exit_code=exit_code,
            signal=signal,
            cause=cause,
            cause_code=cause_code,
            detail=detail,
            lines=lines,
            progress=progress,
            clock=time.time(),
            command=record.argv if record is not None else (),
        )
        if (before.state, before.detail) != (state, detail):
            log.info(
                "shard",
                shard=before.shard,
                generation=of.generation,
                state=str(state),
                was=str(before.state),
                **({"detail": detail} if detail else {}),
            )
        self.changes.put(life.status)

    def _end_run(self, life: Life) -> RunName | None:
        return RunName.parse(life.record.run) if life.record is not None else None

    async def _finish_run(self, shard: ShardId, run: RunName | None, failed: bool, held: float) -> None:
        if run is None:
            return
        try:
            await trio.to_thread.run_sync(self._means.logs.end, shard, run, RunEnd(failed, held))
        except OSError as error:
            log.warning("the end of a run could not be noted", shard=shard, error=str(error))

    async def _write(self, record: Record | None) -> None:
        if record is None:
            return
        life = self._lives.get(record.shard)
        try:
            async with self._writing:
                # An older state of the same record must not be written over a newer one, nor after the shard was forgotten.
                if life is not None and life.record is not None and life.record.token == record.token:
                    await trio.to_thread.run_sync(self._records.write, life.record)
        except (OSError, LlmgwError) as error:
            log.error("a record could not be written", shard=record.shard, error=str(error))

    async def _forget(self, shard: ShardId) -> None:
        try:
            async with self._writing:
                await trio.to_thread.run_sync(self._records.remove, shard)
        except (OSError, LlmgwError) as error:
            log.error("a record could not be removed", shard=shard, error=str(error))


def _order_of(life: Life) -> StartShard:
    """What the shard was last started with, as far as that is known."""
    if isinstance(life.wish, StartShard):
        return life.wish
    spec = life.record.spec if life.record is not None else ShardSpec(engine="", model=life.status.model, source="")
    status = life.status
    return StartShard(
        shard=status.shard, replica=status.replica, model=status.model, generation=status.generation, spec=spec
    )


def _nothing(order: StopShard | DrainShard) -> ShardStatus:
    return ShardStatus(
        shard=order.shard,
        replica=ReplicaId(""),
        model=ModelName(""),
        generation=order.generation,
        state=ShardState.STOPPED,
        detail="there is no such shard on this node",
        clock=time.time(),
    )

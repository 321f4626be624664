"""What is known of each shard, and telling it: in memory, on the disk, to whoever has a stream open."""

from __future__ import annotations

import time

import attrs
import structlog
import trio

from llmgw.errors import LlmgwError
from llmgw.node.adopt import Verdict
from llmgw.node.engines.wires import Wires
from llmgw.node.feed import Feed
from llmgw.node.logs import Logs
from llmgw.node.records import Record, Records
from llmgw.node.runs import RunEnd, RunName
from llmgw.wire.agent import ShardStatus
from llmgw.wire.control import DrainShard, StartShard, StopShard
from llmgw.wire.facts import ModelName, Progress, ReplicaId, ShardId, ShardSpec, ShardState

log = structlog.get_logger(__name__)


@attrs.define(eq=False)
class Life:
    """One shard, from its first order until it is stopped.

    `wish` is the newest order; `record` the run there is, if any. Of an earlier agent's run, `gone` says why its engine
    is not there any more, and `unsure` that it cannot be told whether process `pid` is it.
    """

    wish: StartShard | StopShard
    status: ShardStatus
    record: Record | None = None
    draining: bool = False
    adopted: bool = False
    ready_at: float | None = None
    gone: str = ""
    unsure: Verdict | None = None
    pid: int = 0
    wires: Wires = Wires()
    scope: trio.CancelScope | None = None
    woken: trio.Event = attrs.field(factory=trio.Event)

    def want(self, wish: StartShard | StopShard) -> None:
        """Replace the wish and end whatever served the older one."""
        self.wish = wish
        woken, self.woken = self.woken, trio.Event()
        woken.set()
        if self.scope is not None:
            self.scope.cancel()

    @property
    def running(self) -> bool:
        """Whether there is a run that may have processes."""
        return self.record is not None and self.record.last is None

    @property
    def generation(self) -> int:
        """The newest generation that was ordered or seen."""
        return max(self.wish.generation, self.status.generation)

    @property
    def order(self) -> StartShard:
        """What the shard was last started with, as far as that is known."""
        if isinstance(self.wish, StartShard):
            return self.wish
        status = self.status
        spec = self.record.spec if self.record is not None else ShardSpec(engine="", model=status.model, source="")
        return StartShard(
            shard=status.shard, replica=status.replica, model=status.model, generation=status.generation, spec=spec
        )


class Book:
    """Keeps the shards' states. Telling is synchronous; what goes to the disk is awaited."""

    def __init__(self, records: Records, logs: Logs) -> None:
        self._records = records
        self._logs = logs
        self._writing = trio.Lock()
        self.lives: dict[ShardId, Life] = {}
        self.changes: Feed[ShardStatus] = Feed()

    def tell(
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
        record = life.record if life.running else None
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
            network=life.wires.network if record is not None and state.alive else "",
            warning=life.wires.warning if record is not None and state.alive else "",
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

    async def end_run(
        self, shard: ShardId, record: Record | None, *, failed: bool, held: float = 0.0, replaced: bool = False
    ) -> None:
        """Note how a run ended, for its log's sake."""
        run = RunName.parse(record.run) if record is not None else None
        if run is None:
            return
        try:
            await trio.to_thread.run_sync(self._logs.end, shard, run, RunEnd(failed, held, replaced))
        except OSError as error:
            log.warning("the end of a run could not be noted", shard=shard, error=str(error))

    async def write(self, life: Life) -> None:
        """Put a life's record on the disk as it is when its turn has come, if it still has that record then."""
        token = life.record.token if life.record is not None else None
        try:
            async with self._writing:
                # Never an older state over a newer one, nor anything after the shard was forgotten.
                if life.record is not None and life.record.token == token:
                    await trio.to_thread.run_sync(self._records.write, life.record)
        except (OSError, LlmgwError) as error:
            log.error("a record could not be written", shard=life.status.shard, error=str(error))

    async def forget(self, shard: ShardId) -> None:
        """Remove a shard's record."""
        try:
            async with self._writing:
                await trio.to_thread.run_sync(self._records.remove, shard)
        except (OSError, LlmgwError) as error:
            log.error("a record could not be removed", shard=shard, error=str(error))


def nothing(order: StopShard | DrainShard) -> ShardStatus:
    """The answer to an order for a shard that this node does not have."""
    return ShardStatus(
        shard=order.shard,
        replica=ReplicaId(""),
        model=ModelName(""),
        generation=order.generation,
        state=ShardState.STOPPED,
        detail="there is no such shard on this node",
        clock=time.time(),
    )

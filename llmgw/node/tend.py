"""One shard's task: what the newest order wants, made so (C3 to C6).

It ends the older run before it begins a newer one, so there are never two of a shard; it goes on when streams come
and go (SE05); cancelled, as when the daemon ends, it leaves the engine running for a later agent.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import structlog
import trio
from msgspec import structs

from llmgw.errors import LlmgwError
from llmgw.node import processes
from llmgw.node.book import Book, Life
from llmgw.node.ending import belonging, clear, gpus_returned
from llmgw.node.engines.wires import Wires
from llmgw.node.prepare import LAST_LINES, Failure, Means, prepare
from llmgw.node.processes import Handle
from llmgw.node.records import Record, file_name
from llmgw.node.rehearse import rehearse
from llmgw.node.runs import RunName
from llmgw.node.serve import attend, begin
from llmgw.wire.control import StartShard, StopShard
from llmgw.wire.facts import Progress, ShardState

log = structlog.get_logger(__name__)

#: A follower has no streams of its own to finish, and SGLang's does not heed SIGTERM: the most it is given, in seconds.
FOLLOWER_GRACE = 10.0
#: How often a start is tried again because somebody else took its port.
ATTEMPTS = 3


async def tend(life: Life, means: Means, book: Book) -> None:
    """Do what is wanted of a shard, until it is stopped. What goes wrong here is this shard's failure alone."""
    while True:
        woken = life.woken
        try:
            await _follow(life, means, book)
            return
        except Exception as error:
            log.exception("a shard's task failed", shard=life.status.shard)
            life.scope = None
            if life.record is not None and life.running:
                # Nobody would watch it any more, and a second one beside it must never be.
                await clear(life.record, grace=means.grace, stubborn=_stubborn(life, book))
            means.ports.release(life.status.shard)
            failure = Failure("internal", f"the agent itself failed: {error!r}", "its log says more (`llmgw ctl logs`)")
            _fail(life, life.order, failure, book)
            await book.write(life)
        await woken.wait()


async def _follow(life: Life, means: Means, book: Book) -> None:
    """Follow one wish after the other; returns when the shard was stopped and nothing newer is wanted."""
    while True:
        wish = life.wish
        if life.gone:
            why, life.gone = life.gone, ""
            await _unseen(life, why, means, book)
        elif life.unsure is not None:
            await _unsure(life, means, book)
        elif isinstance(wish, StopShard):
            if await _stop(life, wish, means, book):
                return
        elif life.record is not None and life.record.generation < wish.generation:
            if life.running:
                await _put_down(life, None, means, book)
            life.record, life.adopted = None, False
        else:
            woken = life.woken
            with trio.CancelScope() as life.scope:
                if life.record is None or life.running:
                    await _serve(life, wish, means, book)
            life.scope = None
            if life.wish is wish:
                await woken.wait()


async def _serve(life: Life, order: StartShard, means: Means, book: Book) -> None:
    """Start and attend; returns when the shard has failed."""
    attempt = 1
    while True:
        if life.record is None:
            book.tell(life, ShardState.STARTING, order=order)
            failure = await _begin(life, order, attempt, means, book)
        else:
            failure = None
        if failure is None:
            assert life.record is not None
            engine = means.installed.adapter(order.spec.engine)
            if engine is None:
                failure = Failure(
                    "engine-missing",
                    f"this agent knows no engine called {order.spec.engine!r}",
                    "upgrade the agent",
                )
            else:
                if life.record.ready and life.ready_at is None:
                    life.ready_at = trio.current_time()  # adopted
                failure = await attend(
                    life.record,
                    engine,
                    means,
                    serving=life.record.ready,
                    ready=lambda: _ready(life, book),
                    note=lambda words: book.tell(life, life.status.state, detail=words),
                    wired=lambda wires: _wired(life, wires, book),
                    stubborn=_stubborn(life, book),
                )
        means.ports.release(order.shard)
        lost = failure.code == "port-in-use" and life.ready_at is None and life.record is not None
        # A number that the plane gave is known to other members: it chooses again for all of them.
        if lost and attempt < ATTEMPTS and not order.spec.ports and len(order.spec.peers) < 2:
            log.warning("a port was lost, trying others", shard=order.shard, attempt=attempt, detail=failure.detail)
            await book.end_run(order.shard, life.record, failed=True)
            life.record, attempt = None, attempt + 1
            continue
        held = 0.0 if life.ready_at is None else trio.current_time() - life.ready_at
        # Also when the next order comes on the news of it: a run whose end is not noted would seem to go on for ever.
        with trio.CancelScope(shield=True):
            _fail(life, order, failure, book)
            await book.write(life)
            await book.end_run(order.shard, life.record, failed=True, held=held)
        return


async def _begin(life: Life, order: StartShard, attempt: int, means: Means, book: Book) -> Failure | None:
    def fetching(progress: Progress) -> None:
        book.tell(life, ShardState.FETCHING, order=order, progress=progress)

    try:
        file_name(order.shard)
    except LlmgwError as error:
        return Failure("bad-name", error.what, error.remedy)

    def waiting(words: str) -> None:
        book.tell(life, ShardState.STARTING, order=order, detail=words)

    prepared = await prepare(order, means, fetching, waiting)
    if isinstance(prepared, Failure):
        return prepared

    if (refused := await rehearse(order, prepared, means)) is not None:
        return refused

    def keep(record: Record) -> None:
        life.record, life.ready_at, life.wires = record, None, Wires()

    run = RunName(order.generation, attempt)
    failure = await begin(order, prepared, run, means, keep)
    if failure is None:
        book.tell(life, ShardState.STARTING, order=order)
    return failure


async def _ready(life: Life, book: Book) -> None:
    """It serves. Written before it is told: a later agent must not take a serving engine for a loading one."""
    assert life.record is not None
    life.ready_at = trio.current_time()
    scope = processes.scope_of(life.record.pid)
    life.record = structs.replace(life.record, ready=True, scope=str(scope or ""))
    await book.write(life)
    book.tell(life, ShardState.DRAINING if life.draining else ShardState.READY)


def _wired(life: Life, wires: Wires, book: Book) -> None:
    """Tell what the members of the replica talk over; that it is not what was meant is no end: it serves, slowly."""
    life.wires = wires
    if wires.warning:
        log.warning("not the network that was meant", shard=life.status.shard, warning=wires.warning)
    book.tell(life, life.status.state, detail=life.status.detail)


async def drain(life: Life, why: str, book: Book) -> None:
    """Let the gateways see that nothing new may come. Written before it is told, as readiness is."""
    if life.record is not None:
        life.record = structs.replace(life.record, draining=True)
        await book.write(life)
    if life.status.state is ShardState.READY and life.draining:
        book.tell(life, ShardState.DRAINING, detail=why)


def _fail(life: Life, order: StartShard, failure: Failure, book: Book) -> None:
    """Tell a failure; the record to keep it for a later agent is the caller's to write."""
    ended = failure.ended
    book.tell(
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


async def _stop(life: Life, order: StopShard, means: Means, book: Book) -> bool:
    """Stop the shard; False when something newer was wanted meanwhile."""
    shard, detail = life.status.shard, order.why
    if life.running:
        detail = await _put_down(life, order.grace, means, book) or order.why
    else:
        await book.forget(shard)
    life.record = None
    if life.wish is not order:
        return False
    book.lives.pop(shard, None)
    book.tell(life, ShardState.STOPPED, detail=detail)
    return True


async def _put_down(life: Life, grace: float | None, means: Means, book: Book) -> str:
    """End the run of a life and forget it; who else holds memory on its GPUs, in words."""
    record = life.record
    assert record is not None
    scope = record.scope or str(processes.scope_of(record.pid) or "")
    record = life.record = structs.replace(record, stopping=True, scope=scope)
    book.tell(life, ShardState.STOPPING)
    # Written first: an agent that dies now must go on stopping and not serve again.
    await book.write(life)
    stubborn = _stubborn(life, book)
    pids = frozenset(await trio.to_thread.run_sync(belonging, record))
    given = record.spec.grace if grace is None else grace
    await clear(record, grace=min(given, FOLLOWER_GRACE) if record.spec.rank else given, stubborn=stubborn)
    held = await gpus_returned(record, pids, means.holders, stubborn)
    means.ports.release(record.shard)
    life.record = None
    await book.forget(record.shard)
    served = 0.0 if life.ready_at is None else trio.current_time() - life.ready_at
    # A member of several nodes is most often ended because another one has failed: that is no good end of a crash loop.
    replaced = isinstance(life.wish, StartShard) or len(record.spec.peers) > 1
    await book.end_run(record.shard, record, failed=False, held=served, replaced=replaced)
    return held


def _stubborn(life: Life, book: Book) -> Callable[[str], None]:
    return lambda words: book.tell(life, ShardState.STOPPING, detail=words)


async def _unsure(life: Life, means: Means, book: Book) -> None:
    """Wait beside a process that cannot be verified until it ends by itself or by hand."""
    with suppress(ProcessLookupError), Handle(life.pid) as handle:
        await handle.ended()
    life.unsure = None
    await _unseen(life, f"process {life.pid}, which could not be verified, has ended", means, book)


async def _unseen(life: Life, why: str, means: Means, book: Book) -> None:
    """Take note that a run ended while nobody could watch it. What it left behind goes first; then the end is told."""
    record = life.record
    if record is None:
        return
    # Its number may be another process's by now: only its token still finds what is left of it.
    life.record = record = structs.replace(record, pid=0, started=0)
    await clear(record, grace=0.0, stubborn=_stubborn(life, book))
    means.ports.release(record.shard)
    wish = life.wish  # as it is now: while the log is read it may become a stop
    if isinstance(wish, StartShard) and wish.generation == record.generation:
        run = RunName.parse(record.run)
        lines: tuple[str, ...] = ()
        if run is not None:
            lines = await trio.to_thread.run_sync(means.logs.last_lines, record.shard, run, LAST_LINES)
        failure = Failure("ended-unseen", why, "the log may say why", lines=lines)
        _fail(life, wish, failure, book)
        await book.write(life)
    else:
        life.record = None
    await book.end_run(record.shard, record, failed=True)

"""One run of one shard: prepared, started, waited for, watched, and what is said of its end (C3, C5).

These are steps; which of them follows when a plane changes its mind is in `shards`.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import attrs
import trio
from msgspec import structs

from llmgw.errors import LlmgwError
from llmgw.node import files, processes
from llmgw.node.ending import GpuHolders, belonging, clear
from llmgw.node.engines import Asking, Command, Engine, Seat, source_of
from llmgw.node.engines.causes import Ended
from llmgw.node.engines.contents import Contents, read_contents
from llmgw.node.engines.environment import engine_environment, smallest_memory
from llmgw.node.engines.installed import Installed
from llmgw.node.health import Answer, Course, Dead, Line, Patience, judge
from llmgw.node.launch import NEVER_STARTED, launch, scope_command
from llmgw.node.logs import Logs
from llmgw.node.processes import Handle, Seen
from llmgw.node.records import Record, Records, argv_hash
from llmgw.node.runs import RunName
from llmgw.node.tcp import Ports
from llmgw.wire.agent import Register
from llmgw.wire.control import StartShard
from llmgw.wire.facts import Progress, ShardSpec

#: How many last lines of output a failure carries.
LAST_LINES = 20
_MEMORY_SECONDS = 30.0


class Fetch(Protocol):
    """Brings a source's files onto this node and tells how far it is. Raises LlmgwError."""

    def __call__(self, spec: ShardSpec, tell: Callable[[Progress], None]) -> Awaitable[Path]: ...


@attrs.frozen
class Means:
    """What a run needs of its node."""

    state: Path
    installed: Installed
    logs: Logs
    records: Records
    ports: Ports
    facts: Callable[[], Register]
    listen: str
    holders: GpuHolders | None
    fetch: Fetch | None
    scopes: bool
    patience: Patience
    grace: float  # of an engine that is given up, in seconds

    @property
    def reached_at(self) -> str:
        """Where the agent itself asks engines for their health."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.listen, self.listen)


@attrs.frozen
class Failure:
    """Why a run did not come to be or did not last."""

    code: str
    text: str
    remedy: str = ""
    ended: Ended | None = None
    lines: tuple[str, ...] = ()
    cause: str = ""

    @property
    def detail(self) -> str:
        return f"{self.text}: {self.remedy}" if self.remedy else self.text


@attrs.frozen
class Prepared:
    engine: Engine
    command: Command
    ports: dict[str, int]
    model: str


async def prepare(order: StartShard, means: Means, fetching: Callable[[Progress], None]) -> Prepared | Failure:
    """Check everything that can be checked before minutes are spent, reserve ports, and make the command."""
    spec, facts = order.spec, means.facts()
    engine = means.installed.adapter(spec.engine)
    if engine is None:
        return Failure("engine-missing", f"this agent knows no engine called {spec.engine!r}", "upgrade the agent")
    try:
        found = await means.installed.found(spec.engine)
    except LlmgwError as error:
        return Failure("engine-missing", error.what, error.remedy)
    if spec.engine_version and found.version and spec.engine_version != found.version:
        what = f"{spec.engine} {spec.engine_version} was asked for and this node has {found.version}"
        return Failure("engine-version", what, "install that version, or ask for none")
    path, hub, revision = source_of(spec.source)
    if path is None and means.fetch is not None:
        try:
            path = await means.fetch(spec, fetching)
        except LlmgwError as error:
            return Failure("missing-weights", error.what, error.remedy)
    contents: Contents | None = None
    if path is not None:
        contents = await trio.to_thread.run_sync(read_contents, path)
    if objections := engine.validate(spec, facts, contents):
        return Failure(objections[0].code, "; ".join(map(str, objections)))
    if (short := await memory_there(spec, facts, means.holders)) is not None:
        return short
    try:
        # Not in a thread: two shards must not choose at the same time, and it takes microseconds.
        ports = means.ports.take(order.shard, engine.ports, spec.ports)
    except LlmgwError as error:
        return Failure("port-in-use", error.what, error.remedy)
    threads = spec.resources.cpu_threads or min(8, max(1, facts.host.cpu.threads))
    seat = Seat(
        found,
        means.listen,
        ports,
        str(contents.path) if contents is not None else hub,
        "" if contents is not None else revision,
        facts.address or means.reached_at,
        threads,
        smallest_memory(spec, facts.gpus),
    )
    return Prepared(engine, engine.command(spec, seat), ports, seat.model)


async def memory_there(spec: ShardSpec, facts: Register, holders: GpuHolders | None) -> Failure | None:
    """Whether the memory that was asked for is free now; what was just given up may take a moment to come back."""
    failure: Failure | None = None
    with trio.move_on_after(_MEMORY_SECONDS):
        while True:
            if not spec.gpus:
                failure = _host_memory(spec)
            elif holders is not None and spec.resources.gpu_memory_bytes:
                failure = await _gpu_memory(spec, facts, holders)
            if failure is None:
                return None
            await trio.sleep(0.5)
    return failure


def _host_memory(spec: ShardSpec) -> Failure | None:
    fields = files.fields(files.text("/proc/meminfo"))
    available = files.kilobytes(fields.get("MemAvailable"))
    if available is None or spec.resources.memory_bytes <= available:
        return None
    what = (
        f"{spec.resources.memory_bytes >> 20} MiB of memory were asked for and {available >> 20} MiB are available now"
    )
    return Failure("not-enough-memory", what, "ask for less, or place less on this node")


async def _gpu_memory(spec: ShardSpec, facts: Register, holders: GpuHolders) -> Failure | None:
    there = await holders()
    for gpu in facts.gpus:
        if gpu.uuid not in spec.gpus or gpu.memory_bytes is None:
            continue
        mine = [process for process in there if process.gpu == gpu.uuid]
        held = sum(process.memory_bytes or 0 for process in mine)
        if gpu.memory_bytes - held < spec.resources.gpu_memory_bytes:
            who = ", ".join(f"{process.pid} ({process.name})" for process in mine)
            what = f"GPU {gpu.uuid} has {gpu.memory_bytes - held >> 20} MiB free of {spec.resources.gpu_memory_bytes >> 20} wanted"
            return Failure("gpu-memory-taken", what, f"held by {who}")
    return None


async def begin(
    order: StartShard, prepared: Prepared, run: RunName, means: Means, keep: Callable[[Record], None]
) -> Failure | None:
    """Start the process. `keep` gets its record, durable already, before the process becomes the engine."""
    token = secrets.token_hex(16)
    spec = order.spec
    env = engine_environment(
        os.environ,
        prepared.command.env,
        spec,
        shard=order.shard,
        generation=order.generation,
        token=token,
        state=str(means.state),
    )
    scope = scope_command(f"llmgw-engine-{token[:16]}.scope", user=os.geteuid() != 0) if means.scopes else ()

    def start() -> None:
        log = means.logs.begin(order.shard, run)
        record = Record(
            shard=order.shard,
            replica=order.replica,
            model=order.model,
            generation=order.generation,
            token=token,
            spec=spec,
            boot=processes.boot_id(),
            argv=prepared.command.argv,
            argv_hash=argv_hash(prepared.command.argv),
            ports=prepared.ports,
            run=str(run),
            log=str(log),
            clock=time.time(),
            oom_kills=processes.oom_kills(),
        )

        def note(seen: Seen) -> None:
            whole = structs.replace(record, pid=seen.pid, started=seen.started)
            means.records.write(whole)
            keep(whole)

        launch(prepared.command.argv, env, prepared.command.cwd, log, note, scope)

    try:
        await trio.to_thread.run_sync(start)
    except (OSError, LlmgwError) as error:
        words = (
            error.what
            if isinstance(error, LlmgwError)
            else f"{error.strerror or error} ({error.filename or means.state})"
        )
        return Failure("cannot-start", f"the engine could not be started: {words}", "check the agent's state directory")
    return None


async def attend(
    record: Record,
    engine: Engine,
    means: Means,
    *,
    serving: bool,
    ready: Callable[[], Awaitable[None]],
    note: Callable[[str], None],
) -> Failure:
    """Stay with a running engine until it is at its end; why it came to that. `ready` is called once it serves.

    `serving` says that it was ready before (an adopted one). `note` is told what is odd and not yet an end, "" when it
    is well again. When this returns no process of the run is left.
    """
    try:
        handle = Handle(record.pid)
    except ProcessLookupError:
        return await _epitaph(record, engine, means, Ended(), None)
    with handle:
        dead: Dead | None = None

        async def keep_asking() -> None:
            nonlocal dead
            asking = engine.asking(record.spec)
            if asking is None:
                await ready()
                return
            async with Line(asking, means.reached_at, record.ports["http"]) as line:
                if not serving:
                    dead = await until_ready(record, line, means)
                    if dead is None:
                        await ready()
                if dead is None:
                    dead = await until_dead(record, line, means.patience, note)
            nursery.cancel_scope.cancel()

        async def notice_the_end() -> None:
            await handle.ended()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(notice_the_end)
            nursery.start_soon(keep_asking)
        code, number = handle.reap()
    if dead is None or code is not None or number is not None:
        ended = Ended(code, number, oom_kills=max(0, processes.oom_kills() - record.oom_kills))
        return await _epitaph(record, engine, means, ended, dead)
    return await _epitaph(record, engine, means, None, dead)


async def _epitaph(record: Record, engine: Engine, means: Means, ended: Ended | None, dead: Dead | None) -> Failure:
    """Clear away what is left of a run, then say what is to be said of it."""
    run = RunName.parse(record.run) or RunName(record.generation)
    await clear(record, grace=0.0 if ended is not None else means.grace, stubborn=lambda words: None)
    if ended is not None and ended.exit_code == NEVER_STARTED and not means.logs.last_lines(record.shard, run, 1):
        return Failure("cannot-start", "the agent ended before the engine was started", ended=ended)
    lines = await trio.to_thread.run_sync(means.logs.last_lines, record.shard, run, LAST_LINES)
    evidence = await trio.to_thread.run_sync(means.logs.evidence, record.shard, run)
    cause = engine.cause(evidence, ended or Ended(ours=True))
    if dead is not None and ended is None:
        code, text, remedy = dead.code, dead.text, dead.remedy
        if cause is not None and code != "port-in-use":
            text = f"{text}; {cause.text}"
        return Failure(code, f"given up: {text}", remedy, lines=lines, cause=text)
    ended = ended or Ended()
    if cause is None:
        return Failure("unknown", str(ended), "the log may say why", ended, lines)
    return Failure(cause.code, f"{ended}; probably {cause.text}", cause.remedy, ended, lines, cause.text)


async def until_ready(record: Record, line: Line, means: Means) -> Dead | None:
    """Wait until the engine serves its model; None when it does, else why it never will."""
    spec = record.spec
    seen = processes.look(record.pid)
    spent = processes.age(seen) if seen is not None else 0.0  # an adopted one has had part of its time
    pause, deadline = 0.03, trio.current_time() + max(0.0, spec.ready_within - spent)
    said = "nobody listened on its port"
    while trio.current_time() < deadline:
        answer = await line.ask()
        if answer is not Answer.REFUSED:
            if (other := await trio.to_thread.run_sync(stranger, record)) is not None:
                return Dead(
                    "port-in-use",
                    f"port {record.ports['http']} was taken by {other}",
                    "give the agent a range of its own",
                )
            said = f"its health check said: {answer.value}"
        if answer is Answer.WELL:
            answer, names = await line.serves(record.model)
            said = f"it serves {', '.join(names) or 'nothing'} and not {record.model}"
            if answer is Answer.WELL and line.asking.token:
                answer = await line.token(record.model, max(line.asking.timeout, deadline - trio.current_time()))
                said = f"it made no token: {answer.value}"
            if answer is Answer.WELL:
                return None
        await trio.sleep(pause)
        pause = min(pause * 1.5, 1.0)
    return Dead(
        "not-ready",
        f"not ready within {spec.ready_within:.0f} s; {said}",
        "give it more time by ready_within, or look at its log",
    )


def stranger(record: Record) -> str | None:
    """Who else listens on the run's port; None while it is only its own processes, or when that cannot be seen."""
    port = record.ports["http"]
    open_sockets = processes.listeners(port, record.pid)
    if not open_sockets:
        return None
    own: set[int] = set()
    for pid in belonging(record):
        if (theirs := processes.sockets(pid)) is None:
            return None  # not allowed to look: the name that it serves must do
        own |= theirs
    foreign = open_sockets - own
    if not foreign:
        return None
    for pid, seen in processes.everyone().items():
        if foreign & (processes.sockets(pid) or frozenset()):
            return f"process {pid} ({seen.name})"
    return "another process"


async def until_dead(record: Record, line: Line, patience: Patience, note: Callable[[str], None]) -> Dead:
    """Ask a serving engine for its health, for as long as it is not beyond hope."""
    course = Course(well_at=trio.current_time(), moved_at=trio.current_time())
    noted = False
    while True:
        answer = await line.ask()
        counters = await line.counters() if answer is Answer.WELL else None
        course, dead = judge(course, answer, counters, trio.current_time(), line.asking, patience)
        if dead is not None and dead.code == "stalled":
            # The counters may lie (a metric renamed, a prompt of an hour); a token does not.
            if await line.token(record.model, patience.stalled) is Answer.WELL:
                course, dead = attrs.evolve(course, moved_at=trio.current_time()), None
        if dead is not None:
            return dead
        odd = answer is not Answer.WELL and course.in_a_row >= 2
        if odd and not noted:
            note(f"{answer.value} (asked {course.in_a_row} times)")
        elif noted and answer is Answer.WELL:
            note("")
        noted = odd or (noted and answer is not Answer.WELL)
        await trio.sleep(patience.period)


__all__ = [
    "Asking",
    "Failure",
    "Fetch",
    "Means",
    "Prepared",
    "attend",
    "begin",
    "memory_there",
    "prepare",
    "stranger",
    "until_dead",
    "until_ready",
]

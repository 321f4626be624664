"""One run of one shard: started, waited for, watched, and what is said of its end (C3, C5).

These are steps; which of them follows when the plane changes its mind is in `tend`.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial

import attrs
import trio
from msgspec import structs

from llmgw.errors import LlmgwError
from llmgw.log import redact
from llmgw.node import processes
from llmgw.node.ending import Stubborn, belonging, clear
from llmgw.node.engines import Engine, Listens
from llmgw.node.engines.causes import Ended, telling
from llmgw.node.engines.environment import engine_environment
from llmgw.node.engines.wires import Wires
from llmgw.node.health import TOKEN_AGAIN, Answer, Course, Dead, Line, Patience, judge, unproved
from llmgw.node.launch import NEVER_STARTED, launch, scope_command
from llmgw.node.prepare import LAST_LINES, Failure, Means, Prepared
from llmgw.node.processes import Handle, Seen
from llmgw.node.records import Record, argv_hash
from llmgw.node.runs import RunName
from llmgw.node.wiring import Wiring
from llmgw.wire.control import StartShard

#: An engine whose time passed while no agent asked it may serve since then: it has so many seconds to show it.
ASKED_ANEW = 30.0


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
    wired: Callable[[Wires], None],
    stubborn: Stubborn,
) -> Failure:
    """Stay with a running engine until it is at its end; why it came to that. `ready` is called once it serves.

    `serving` says that it was ready before (an adopted one). `note` is told what is odd and not yet an end, "" when it
    is well again; `wired` what a member of a replica of several nodes talks over; `stubborn` what of it does not end.
    When this returns no process of the run is left.
    """
    wiring = Wiring(record, wired)
    epitaph = partial(_epitaph, record, engine, means, stubborn)
    try:
        handle = Handle(record.pid)
    except ProcessLookupError:
        return await epitaph(Ended(), None)
    with handle:
        dead: Dead | None = None

        async def keep_asking() -> None:
            nonlocal dead
            asking = engine.asking(record.spec)
            if asking is None:
                await ready()
                return
            if isinstance(asking, Listens):
                dead = await listening(record, asking, means, serving=serving, ready=ready)
                nursery.cancel_scope.cancel()
                return
            async with Line(asking, means.reached_at, record.ports["http"]) as line:
                if not serving:
                    dead = await until_ready(record, line, means) or await wiring.complete()
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
            nursery.start_soon(partial(wiring.follow, serving=serving))
        code, number = handle.reap()
    if dead is None or code is not None or number is not None:
        ended = Ended(code, number, oom_kills=max(0, processes.oom_kills() - record.oom_kills))
        return await epitaph(ended, dead)
    return await epitaph(None, dead)


async def _epitaph(
    record: Record, engine: Engine, means: Means, stubborn: Stubborn, ended: Ended | None, dead: Dead | None
) -> Failure:
    """Clear away what is left of a run, then say what is to be said of it."""
    run = RunName.parse(record.run) or RunName(record.generation)
    await clear(record, grace=0.0 if ended is not None else means.grace, stubborn=stubborn)
    if ended is not None and ended.exit_code == NEVER_STARTED and not means.logs.last_lines(record.shard, run, 1):
        return Failure("cannot-start", "the agent ended before the engine was started", ended=ended)
    lines = await trio.to_thread.run_sync(means.logs.last_lines, record.shard, run, LAST_LINES)
    evidence = await trio.to_thread.run_sync(means.logs.evidence, record.shard, run)
    cause = engine.cause(evidence, ended or Ended(ours=True))
    lines = tuple(map(redact, telling(lines, evidence, cause)))
    if dead is not None and ended is None:
        code, text, remedy = dead.code, dead.text, dead.remedy
        if cause is not None and code != "port-in-use":
            text = f"{text}; {cause.text}"
            if code == "token-failed":
                code, remedy = cause.code, cause.remedy  # that it made no token says less than why
        return Failure(code, f"given up: {text}", remedy, lines=lines, cause=text)
    ended = ended or Ended()
    if cause is None:
        return Failure("unknown", str(ended), "the log may say why", ended, lines)
    return Failure(cause.code, f"{ended}; probably {cause.text}", cause.remedy, ended, lines, cause.text)


def time_left(record: Record) -> float:
    """Seconds that a run still has for becoming ready; an adopted one has had part of them."""
    seen, within = processes.look(record.pid), record.spec.ready_within
    return max(min(within, ASKED_ANEW), within - (processes.age(seen) if seen is not None else 0.0))


async def until_ready(record: Record, line: Line, means: Means) -> Dead | None:
    """Wait until the engine serves its model; None when it does, else why it never will."""
    spec = record.spec
    pause, deadline = 0.03, trio.current_time() + time_left(record)
    said = "nobody listened on its port"
    while trio.current_time() < deadline:
        answer = await line.ask()
        if answer is not Answer.REFUSED:
            if (other := await trio.to_thread.run_sync(stranger, record, "http")) is not None:
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


async def listening(
    record: Record, asking: Listens, means: Means, *, serving: bool, ready: Callable[[], Awaitable[None]]
) -> Dead:
    """Stay with a member that has no HTTP: it is ready once it listens, and has failed when it no longer does.

    Its port is looked at and not tried: see `Listens`.
    """
    port = record.ports[asking.port]
    deadline = trio.current_time() + time_left(record)
    deaf, pause = 0, 0.03
    while True:
        if (other := await trio.to_thread.run_sync(stranger, record, asking.port)) is not None:
            return Dead(
                "port-in-use", f"port {port} was taken by {other}", "keep the agent's range of ports for engines alone"
            )
        if await trio.to_thread.run_sync(processes.listeners, port, record.pid):
            deaf = 0
            if not serving:
                await ready()
                serving = True
        elif serving and (deaf := deaf + 1) >= means.patience.refused:
            return Dead("not-listening", f"its process lives but nobody listens on port {port}", "look at its log")
        elif not serving and trio.current_time() >= deadline:
            return Dead(
                "not-ready",
                f"not ready within {record.spec.ready_within:.0f} s; nobody listened on port {port}",
                "look at its log",
            )
        await trio.sleep(means.patience.period if serving else pause)
        pause = min(pause * 1.5, 1.0)


def stranger(record: Record, purpose: str) -> str | None:
    """Who else listens on a port of the run; None while it is only its own processes, or when that cannot be seen."""
    port = record.ports[purpose]
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
    """Ask a serving engine for its health, and one that leads others for tokens, while it is not beyond hope."""
    dead: list[Dead] = []

    async def first(verdict: Awaitable[Dead]) -> None:
        dead.append(await verdict)
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(first, until_unwell(record, line, patience, note))
        if len(record.spec.peers) > 1 and line.asking.token:
            nursery.start_soon(first, until_no_token(record, line, patience))
    return dead[0]


async def until_no_token(record: Record, line: Line, patience: Patience) -> Dead:
    """Have a token made whenever nobody else did for a while; returns when that fails."""
    known, failed = await line.counters(), 0
    while True:
        await trio.sleep(patience.probe if not failed else min(TOKEN_AGAIN, patience.probe))
        before = await line.counters()
        if before is not None and known is not None and before.tokens > known.tokens:
            known, failed = before, 0
            continue
        asked = trio.current_time()
        answer = await line.token(record.model, patience.token)
        took = trio.current_time() - asked
        known = await line.counters() or before
        failed = failed + 1 if answer is not Answer.WELL else 0
        if (dead := unproved(answer, took, before, known, failed, patience.token)) is not None:
            return dead


async def until_unwell(record: Record, line: Line, patience: Patience, note: Callable[[str], None]) -> Dead:
    """Ask a serving engine how it is, for as long as it is not beyond hope."""
    course = Course(well_at=trio.current_time(), moved_at=trio.current_time())
    noted = False
    while True:
        answer = await line.ask()
        counters = await line.counters() if answer is Answer.WELL else None
        course, dead = judge(course, answer, counters, trio.current_time(), line.asking, patience)
        if dead is not None:
            if await reprieved(line, record.model, dead, patience) is not Answer.WELL:
                return dead
            course = attrs.evolve(course, well_at=trio.current_time(), moved_at=trio.current_time())
        odd = answer is not Answer.WELL and course.in_a_row >= 2
        if odd and not noted:
            note(f"{answer.value} (asked {course.in_a_row} times)")
        elif noted and answer is Answer.WELL:
            note("")
        noted = odd or (noted and answer is not Answer.WELL)
        await trio.sleep(patience.period)


async def reprieved(line: Line, model: str, dead: Dead, patience: Patience) -> Answer:
    """The last question before an engine is given up, where load may explain what was seen; WELL: it lives."""
    match dead.code:
        case "stalled":
            # Counters may lie (a metric renamed, a prompt of an hour) or be switched off; a token does not.
            return await line.token(model, patience.stalled)
        case "hung":
            # Under a load that lasts health waits in a queue behind the requests: it gets as long as a token.
            return await line.ask(patience.token)
    return Answer.UNWELL

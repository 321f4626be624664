"""Everything about a run that can be decided before it starts: what is wrong with it, its ports, its command."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import attrs
import trio

from llmgw.errors import LlmgwError
from llmgw.node import files
from llmgw.node.ending import GpuHolders
from llmgw.node.engines import Command, Engine, Objection, Seat, source_of
from llmgw.node.engines.causes import Ended
from llmgw.node.engines.contents import Contents, read_contents
from llmgw.node.engines.environment import smallest_memory
from llmgw.node.engines.installed import Installed
from llmgw.node.health import Patience
from llmgw.node.logs import Logs
from llmgw.node.records import Records
from llmgw.node.tcp import Ports
from llmgw.node.weights.errors import FetchFailed
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


async def prepare(
    order: StartShard, means: Means, fetching: Callable[[Progress], None], waiting: Callable[[str], None]
) -> Prepared | Failure:
    """Check everything that can be checked before minutes are spent, reserve ports, and make the command.

    `waiting` is told in words while the engine itself is still being installed.
    """
    spec, facts = order.spec, means.facts()
    engine = means.installed.adapter(spec.engine)
    if engine is None:
        return Failure("engine-missing", f"this agent knows no engine called {spec.engine!r}", "upgrade the agent")
    try:
        found = await means.installed.found(spec.engine, spec.engine_version, waiting)
    except LlmgwError as error:
        return Failure("engine-missing", error.what, error.remedy)
    if spec.engine_version and found.version and spec.engine_version != found.version:
        what = f"{spec.engine} {spec.engine_version} was asked for and this node has {found.version}"
        return Failure("engine-version", what, "install that version, or ask for none")
    path, hub, revision = source_of(spec.source)
    reads = engine.weights(spec)
    if reads and path is None and means.fetch is not None:
        try:
            path = await means.fetch(spec, fetching)
        except LlmgwError as error:
            code = error.code if isinstance(error, FetchFailed) else "missing-weights"
            return Failure(code, error.what, error.remedy)
    contents: Contents | None = None
    if reads and path is not None:
        contents = await trio.to_thread.run_sync(read_contents, path)
    if objections := engine.validate(spec, facts, contents):
        return Failure(objections[0].code, "; ".join(map(str, objections)))
    if (short := await memory_there(spec, facts, means.holders)) is not None:
        return short
    try:
        # Not in a thread: two shards must not choose at the same time, and it takes microseconds.
        ports = means.ports.take(order.shard, engine.ports(spec), spec.ports)
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
        contents.layers if contents is not None else None,
    )
    command = engine.command(spec, seat)
    if isinstance(command, Objection):
        means.ports.release(order.shard)
        return Failure(command.code, command.text, command.remedy)
    return Prepared(engine, command, ports, seat.model)


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
            free, wanted = gpu.memory_bytes - held >> 20, spec.resources.gpu_memory_bytes >> 20
            what = f"GPU {gpu.uuid} has {free} MiB free and {wanted} MiB were asked for"
            return Failure("gpu-memory-taken", what, f"held by {who}")
    return None

"""A machine's kernel in memory: processes that outlive whoever started them, and a disk, on the clock of the run.

It stands below the agent's real code at the seam through which that code sees any kernel: `node.processes`, `launch`,
`killpg`, an engine's HTTP, and threads. Everything above (orders, records, adoption, stopping) is what is shipped.
`tests/faults/test_kernel.py` gives the same orders and deaths to it and to the machine's own kernel.
"""

from __future__ import annotations

import math
import random
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar
from unittest import mock

import attrs
import trio

from llmgw.node import ending, processes, serve, tend
from llmgw.node.engines import Asking, environment
from llmgw.node.health import Answer
from llmgw.node.processes import Seen
from llmgw.wire.facts import ShardId

T = TypeVar("T")

#: The kernel that the task which asks runs on. Tasks inherit it from the one that started them.
HERE: ContextVar[Kernel] = ContextVar("HERE")


@attrs.define(eq=False)
class Process:
    """One process. `child_of` is the life of the agent that may ask for its status; None: nobody may.

    `peers` are the ends that it leads, where it leads a replica of several nodes; `led` the processes that it found
    there when it loaded, `over` their machines.
    """

    seen: Seen
    env: Mapping[str, str]
    port: int
    child_of: int | None
    peers: tuple[str, ...] = ()
    led: tuple[Process, ...] = ()
    over: tuple[Kernel, ...] = ()
    gate: bool = True
    alive: bool = True
    serves_at: float = 0.0
    how: tuple[int | None, int | None] = (None, None)
    ended: trio.Event = attrs.field(factory=trio.Event)

    @property
    def shard(self) -> ShardId:
        return ShardId(self.env[environment.SHARD])

    @property
    def generation(self) -> int:
        return int(self.env[environment.GENERATION])


class Watcher(Protocol):
    """Is told when an engine begins, which is the moment in which two of one shard would exist."""

    def began(self, kernel: Kernel, process: Process) -> None: ...
    def at(self, end: str) -> tuple[Kernel, Process] | None:
        """Who listens there, on whatever machine."""
        ...

    def leads(self, kernel: Kernel, process: Process) -> None:
        """A leader has loaded its model over the peers that it found."""
        ...

    def step(self, kernel: Kernel, name: str) -> bool:
        """A step of the agent at which it may be killed; True: it was, just now."""
        ...


class Kernel:
    """Processes and the disk of one machine. `troubled` kernels let engines fail now and then."""

    def __init__(self, name: str, rng: random.Random, watcher: Watcher) -> None:
        self.name, self.rng, self.watcher = name, rng, watcher
        self.processes: dict[int, Process] = {}
        self.disk: dict[str, bytes] = {}
        self.boot = 1
        self.life = 0  # which agent runs now: the children of earlier ones are init's
        self.killed = False  # the agent was, and only runs on to its next checkpoint
        self.troubled = True
        self.cut_until = 0.0  # of the clock: no engine here reaches one elsewhere
        self.full_until = 0.0  # of the clock: the disk takes nothing, and removes nothing
        self._pid = 100
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        async with trio.open_nursery() as self._nursery:
            await trio.sleep_forever()

    @property
    def cut(self) -> bool:
        return trio.current_time() < self.cut_until

    def engines(self) -> list[Process]:
        return [process for process in self.processes.values() if process.alive and not process.gate]

    def end(self, process: Process, code: int | None = None, number: int | None = None) -> None:
        if not process.alive:
            return
        process.alive, process.how = False, (code, number)
        process.seen = attrs.evolve(process.seen, state="Z")
        if process.child_of != self.life:
            del self.processes[process.seen.pid]
        process.ended.set()

    def agent_began(self) -> None:
        self.life += 1
        self.killed = False

    def agent_ended(self) -> None:
        """Who waits at a gate leaves; zombies go to init, which lays them to rest."""
        self.life += 1
        for process in list(self.processes.values()):
            if process.alive and process.gate:
                self.end(process, 75)
            elif not process.alive:
                self.processes.pop(process.seen.pid, None)

    def reboot(self) -> None:
        self.boot += 1
        for process in list(self.processes.values()):
            self.end(process, None, signal.SIGKILL)
        self.processes.clear()

    # --- what a process does by itself -------------------------------------------------------------------

    def launch(
        self, env: Mapping[str, str], port: int, record: Callable[[Seen], None], peers: tuple[str, ...] = ()
    ) -> Seen:
        """Start a process that becomes the engine only once its record is on the disk."""
        assert self._nursery is not None
        self._pid += 1
        began = int(trio.current_time() * 100)
        seen = Seen(self._pid, "llama-server", "S", 1, self._pid, self._pid, began)
        process = Process(seen, dict(env), port, self.life, peers)
        self.processes[self._pid] = process
        if self.watcher.step(self, "gate"):
            return seen
        try:
            record(seen)
        except OSError:
            self.end(process, None, signal.SIGKILL)
            self.processes.pop(seen.pid, None)
            raise
        if self.killed or self.watcher.step(self, "recorded"):
            return seen
        process.gate = False
        loads = self.rng.uniform(0.1, 3.0)
        process.serves_at = math.inf if peers else trio.current_time() + loads
        self.watcher.began(self, process)
        if peers:
            self._nursery.start_soon(self._lead, process, loads)
        if self.troubled and self.rng.random() < 0.12:
            self._nursery.start_soon(self._fail, process, self.rng.uniform(0.0, 4.0))
        self.watcher.step(self, "started")
        return seen

    async def _fail(self, process: Process, after: float) -> None:
        with trio.move_on_after(after):
            await process.ended.wait()
        self.end(process, 1)

    async def _lead(self, process: Process, loads: float) -> None:
        """As llama.cpp leads others: without one of them it does not come to serve; when one goes, it may or may not
        notice, but the next token ends it; and when it goes itself, a follower may die of that.
        """
        assert self._nursery is not None
        with trio.move_on_after(loads):
            await process.ended.wait()
        found = [self.watcher.at(peer) for peer in process.peers]
        there = [one for one in found if one is not None and not (self.cut or one[0].cut)]
        if not process.alive or len(there) < len(found):
            self.end(process, 1)
            return
        process.led = tuple(follower for _, follower in there)
        process.over = tuple(kernel for kernel, _ in there)
        process.serves_at = trio.current_time()
        self.watcher.leads(self, process)
        async with trio.open_nursery() as nursery:

            async def gone(event: trio.Event) -> None:
                await event.wait()
                nursery.cancel_scope.cancel()

            for follower in (process, *process.led):
                nursery.start_soon(gone, follower.ended)
        if process.alive and self.rng.random() < 0.5:
            await self._fail(process, self.rng.uniform(0.0, 3.0))
        await process.ended.wait()
        for where, follower in there:
            if follower.alive and self.rng.random() < 0.3:
                where.end(follower, None, signal.SIGPIPE)

    async def _finish(self, process: Process) -> None:
        await trio.sleep(self.rng.choice([0.01, 0.3, 2.0, 20.0]))  # some outlive every grace
        self.end(process, 0)

    def signal(self, process: Process, number: int) -> None:
        assert self._nursery is not None
        if number == signal.SIGKILL:
            self.end(process, None, number)
        elif process.alive:
            self._nursery.start_soon(self._finish, process)


# --- the seam ------------------------------------------------------------------------------------------------


def _process(pid: int) -> Process:
    """Raises ProcessLookupError."""
    process = HERE.get().processes.get(pid)
    if process is None:
        raise ProcessLookupError(pid)
    return process


class Handle:
    """A hold on one process, as `processes.Handle`."""

    def __init__(self, pid: int) -> None:
        self.pid, self._kernel, self._process = pid, HERE.get(), _process(pid)

    def close(self) -> None:
        return

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        return

    async def ended(self) -> None:
        await self._process.ended.wait()

    def send(self, number: signal.Signals) -> bool:
        if self._process.alive:
            self._kernel.signal(self._process, number)
        return self._process.alive

    def reap(self) -> tuple[int | None, int | None]:
        if self._process.alive or self._process.child_of != self._kernel.life:
            return None, None
        self._kernel.processes.pop(self.pid, None)
        return self._process.how


def _look(pid: int) -> Seen | None:
    process = HERE.get().processes.get(pid)
    return process.seen if process is not None else None


def _everyone() -> dict[int, Seen]:
    return {pid: process.seen for pid, process in HERE.get().processes.items()}


def _environment(pid: int) -> dict[str, str] | None:
    process = HERE.get().processes.get(pid)
    return dict(process.env) if process is not None else None


def _carrying(name: str, value: str, everybody: Iterable[int]) -> Iterator[int]:
    for pid in everybody:
        process = HERE.get().processes.get(pid)
        if process is not None and process.alive and process.env.get(name) == value:
            yield pid


def _age(seen: Seen) -> float:
    return max(0.0, trio.current_time() - seen.started / 100)


def _killpg(group: int, number: int) -> None:
    HERE.get().signal(_process(group), number)


def _launch(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    log: Path,
    record: Callable[[Seen], None],
    scope: Sequence[str] = (),
) -> Seen:
    return HERE.get().launch(env, int(argv[-1]), record, tuple(argv[1:-1]))


def _listeners(port: int, pid: int | str = "self") -> frozenset[int]:
    now = trio.current_time()
    return frozenset(p.seen.pid for p in HERE.get().engines() if p.port == port and p.serves_at <= now)


def _sockets(pid: int) -> frozenset[int]:
    return frozenset({pid})


def _connected(pid: int) -> frozenset[str] | None:
    process = HERE.get().processes.get(pid)
    if process is None:
        return None
    return frozenset(end for end, peer in zip(process.peers, process.led, strict=False) if peer.alive)


class Line:
    """An engine's HTTP: it is well once it serves, until it ends."""

    def __init__(self, asking: Asking, address: str, port: int) -> None:
        self.asking, self._port, self._kernel = asking, port, HERE.get()

    async def __aenter__(self) -> Line:
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    async def ask(self, within: float | None = None) -> Answer:
        await trio.sleep(0.002)
        now = trio.current_time()
        serving = any(p.port == self._port and p.serves_at <= now for p in self._kernel.engines())
        return Answer.WELL if serving else Answer.REFUSED

    async def serves(self, model: str) -> tuple[Answer, tuple[str, ...]]:
        return await self.ask(), (model,)

    async def token(self, model: str, within: float) -> Answer:
        for process in self._kernel.engines():
            if process.port != self._port:
                continue
            if process.led and (self._kernel.cut or any(kernel.cut for kernel in process.over)):
                await trio.sleep(within)  # what it asks of its peers gets no answer, and no refusal
                return Answer.SLOW
            if not all(peer.alive for peer in process.led):
                self._kernel.end(process, None, signal.SIGABRT)
        return await self.ask()

    async def counters(self) -> None:
        return None


class Killed(BaseException):
    """The agent was killed in the middle of what it shields against its being cancelled."""


async def _in_a_thread(work: Callable[..., T], *args: Any, **_how: object) -> T:
    """As a thread: what was begun is done even if nobody waits any more, and it takes its time."""
    kernel = HERE.get()
    await trio.sleep(kernel.rng.choice((0.0, 0.001, 0.01)))
    await _unless_killed(kernel)
    result = work(*args)
    with trio.CancelScope(shield=True):
        await trio.sleep(kernel.rng.choice((0.0, 0.001, 0.01)))
    await _unless_killed(kernel)
    return result


async def _unless_killed(kernel: Kernel) -> None:
    if kernel.killed:
        await trio.lowlevel.checkpoint()  # cancelled, unless that is shielded against
        raise Killed


@contextmanager
def in_memory() -> Iterator[None]:
    """While the block runs, agents of this process run on the kernel of their own task and on no other."""
    fakes: list[tuple[object, str, object]] = [
        (processes, "look", _look),
        (processes, "everyone", _everyone),
        (processes, "environment", _environment),
        (processes, "carrying", _carrying),
        (processes, "age", _age),
        (processes, "boot_id", lambda: str(HERE.get().boot)),
        (processes, "oom_kills", lambda: 0),
        (processes, "scope_of", lambda pid: None),
        (processes, "listeners", _listeners),
        (processes, "sockets", _sockets),
        (processes, "connected", _connected),
        (processes, "Handle", Handle),
        (ending, "Handle", Handle),
        (serve, "Handle", Handle),
        (tend, "Handle", Handle),
        (ending, "os", SimpleNamespace(killpg=_killpg)),
        (serve, "launch", _launch),
        (serve, "Line", Line),
        (trio.to_thread, "run_sync", _in_a_thread),
    ]
    with ExitStack() as stack:
        for where, name, fake in fakes:
            stack.enter_context(mock.patch.object(where, name, fake))
        yield

"""One schedule, run from the first fault to a fleet that has come to rest again, and what was seen meanwhile."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import attrs
import structlog
import trio
import trio.testing

from benchmarks.crash.kernel import Kernel, in_memory
from benchmarks.crash.ledger import Ledger, orphans
from benchmarks.crash.machines import Machine, change
from benchmarks.crash.planes import Plane
from benchmarks.crash.schedule import Fault, Schedule
from llmgw.plane.gang import replicas
from llmgw.plane.store import records
from llmgw.plane.world import Shard, Stage, World
from llmgw.wire.facts import NodeId

#: Seconds of the run's clock in which a fleet must have come to rest after the last fault.
REST_WITHIN = 240.0
#: And then it must stay as it is.
STAY = 15.0

MODEL = """
[[models]]
name = "{name}"
engine = "llamacpp"
source = "hf://example/{name}"
replicas = {replicas}
context = {context}
grace = "{grace}s"
resources = {{ cpu_threads = 1 }}
"""


@attrs.define
class Outcome:
    """What one run showed. `lost` and `orphans` are what was still missing, or still there, when time was up."""

    seed: int
    events: int = 0
    gangs: int = 0  # leaders that came to serve over their followers
    duplicates: list[str] = attrs.field(factory=list)
    lost: list[str] = attrs.field(factory=list)
    orphans: list[str] = attrs.field(factory=list)
    wrongs: list[str] = attrs.field(factory=list)
    rest: float = 0.0  # seconds from the last fault until the fleet was at rest
    commands: list[str] = attrs.field(factory=list)

    @property
    def fine(self) -> bool:
        return not (self.duplicates or self.lost or self.orphans or self.wrongs)

    def __str__(self) -> str:
        found = [
            f"  {kind}: {text}" for kind in ("duplicates", "lost", "orphans", "wrongs") for text in getattr(self, kind)
        ]
        return "\n".join([f"seed {self.seed}: at rest after {self.rest:.1f} s", *found])


def models_text(number: int) -> str:
    """A models.toml, drawn by a number: two models of up to three replicas, small enough for two nodes."""
    rng = random.Random(number)
    text = ""
    for name in ("alpha", "beta"):
        replicas = rng.choice((0, 1, 1, 2, 2, 3))
        if replicas or rng.random() < 0.5:
            context = rng.choice((512, 1024))
            text += MODEL.format(name=name, replicas=replicas, context=context, grace=rng.choice((1, 5)))
    return text


def wide_text(number: int, nodes: int) -> str:
    """Another one, with a model whose replicas are of several nodes, and one beside it of single ones."""
    rng = random.Random(number)
    each, context = rng.randint(2, min(3, nodes)), rng.choice((512, 1024))
    text = MODEL.format(name="wide", replicas=rng.choice((1, 1, 2)), context=context, grace=rng.choice((1, 5)))
    text += f'nodes = {each}\nready_within = "15s"\n'
    if rng.random() < 0.7:
        text += MODEL.format(name="alpha", replicas=rng.randint(0, 2), context=512, grace=1)
    return text


class Simulation:
    """A plane, its machines and what happens to them. Without `jumps` the machine's clock goes as it should."""

    def __init__(self, schedule: Schedule, *, jumps: bool = True) -> None:
        self.schedule, self._jumps = schedule, jumps
        self.ledger = Ledger(on_step=self._step)
        self.plane = Plane(schedule.seed, self.ledger)
        self.machines = {name: Machine(name, schedule.seed, self.ledger, self.plane.accept) for name in schedule.nodes}
        self._nursery: trio.Nursery

    def _step(self, kernel: Kernel, name: str) -> bool:
        return self.machines[kernel.name].step(name)

    async def run(self) -> Outcome:
        outcome = Outcome(self.schedule.seed)
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self.plane.run)
            for machine in self.machines.values():
                self._nursery.start_soon(machine.run)
            for fault in self.schedule.faults:
                await trio.sleep_until(fault.at)
                self.ledger.events += 1
                self._do(fault)
            await trio.sleep(self.schedule.lingers)
            await self._heal()
            await self._rest(outcome)
            self._nursery.cancel_scope.cancel()
        outcome.events, outcome.gangs = self.ledger.events, self.ledger.gangs
        outcome.duplicates, outcome.wrongs = self.ledger.duplicates, self.ledger.wrongs
        outcome.commands = self.ledger.commands
        if self.plane.asking:
            outcome.wrongs.append(f"{self.plane.asking} waits were left open")
        return outcome

    # --- faults ------------------------------------------------------------------------------------------

    def _do(self, fault: Fault) -> None:
        machine = self.machines.get(fault.node) or next(iter(self.machines.values()))
        plane, node = self.plane, machine.name
        match fault.kind:
            case "plane killed":
                plane.kill(fault.seconds)
            case "plane killed at":
                plane.armed[fault.step] = 1 + fault.number % 3
            case "plane frozen":
                # It neither reads nor writes, and its loop stands in the middle of a commit.
                plane.store.slow_until = trio.current_time() + fault.seconds
                for each in self.machines.values():
                    self._for(fault.seconds, each, up=True, down=True)
            case "store slow":
                plane.store.slow_until = trio.current_time() + fault.seconds
            case "store fails":
                plane.store.fails_until = trio.current_time() + fault.seconds
            case "agent killed":
                machine.kill_agent(fault.seconds)
            case "agent killed at":
                machine.armed[fault.step] = 1 + fault.number % 3
            case "engine killed":
                running = machine.kernel.engines()
                if running:
                    machine.kernel.end(running[fault.number % len(running)], None, 9)
            case "machine reboots":
                machine.kill_agent(fault.seconds)
                machine.kernel.reboot()
            case "disk full":
                machine.kernel.full_until = trio.current_time() + fault.seconds
            case "cut off":
                self._for(fault.seconds, machine, up=True, down=True, engines=True)
            case "cannot speak":
                self._for(fault.seconds, machine, up=True)
            case "cannot hear":
                self._for(fault.seconds, machine, down=True)
            case "all cut off":
                for each in self.machines.values():
                    self._for(fault.seconds, each, up=True, down=True, engines=True)
            case "stream cut":
                machine.cut_stream()
            case "network slow":
                self._set_for(fault.seconds, machine, delay=random.Random(fault.number).uniform(0.1, 3.0))
            case "frames repeated":
                self._set_for(fault.seconds, machine, repeats=True)
            case "wall clock jumps":
                if self._jumps:
                    plane.wall += random.Random(fault.number).choice((-1, 1)) * 10.0 ** (fault.number % 9)
            case "hardware changes":
                change(machine)
            case "apply":
                if plane.fleet is not None:
                    plane.operate(plane.fleet.apply, models_text(fault.number))
            case "apply wide":
                if plane.fleet is not None:
                    plane.operate(plane.fleet.apply, wide_text(fault.number, len(self.machines)))
            case "cordon" | "uncordon":
                if plane.fleet is not None:
                    plane.operate(plane.fleet.cordon, node, fault.kind == "cordon")
            case "drain" | "undrain":
                if plane.fleet is not None:
                    plane.operate(plane.fleet.drain, node, fault.kind == "drain")
            case "forget":
                if plane.fleet is not None:
                    known = plane.fleet.world.value.nodes.get(node)
                    if known is not None and not known.connected:  # the API refuses to forget another
                        plane.operate(plane.forget, node)
            case "ask":
                plane.operate(plane.ask, node)
            case _:
                raise ValueError(f"no fault is called {fault.kind!r}")

    def _for(
        self, seconds: float, machine: Machine, *, up: bool = False, down: bool = False, engines: bool = False
    ) -> None:
        ways = [way for way, on in ((machine.up, up), (machine.down, down)) if on]
        if engines:
            machine.kernel.cut_until = max(machine.kernel.cut_until, trio.current_time() + seconds)

        async def later() -> None:
            for way in ways:
                way.set(blocked=True)
            await trio.sleep(seconds)
            for way in ways:
                way.set(blocked=False)

        self._nursery.start_soon(later)

    def _set_for(
        self, seconds: float, machine: Machine, *, delay: float | None = None, repeats: bool | None = None
    ) -> None:
        async def later() -> None:
            for way in (machine.up, machine.down):
                way.set(delay=delay, repeats=repeats)
            await trio.sleep(seconds)
            for way in (machine.up, machine.down):
                way.set(delay=0.001, repeats=False)

        self._nursery.start_soon(later)

    # --- coming to rest ----------------------------------------------------------------------------------

    async def _heal(self) -> None:
        """The end of all that goes wrong. What operators wanted last is wanted still; every node may be used."""
        plane = self.plane
        plane.armed.clear()
        plane.store.slow_until = plane.store.fails_until = 0.0
        plane.absence.call()
        for machine in self.machines.values():
            machine.armed.clear()
            machine.kernel.troubled = False
            machine.kernel.full_until = machine.kernel.cut_until = 0.0
            machine.absence.call()
            for way in (machine.up, machine.down):
                way.set(blocked=False, delay=0.001, repeats=False)
        if not plane.runs:
            await trio.sleep(0.1)
        self._nursery.start_soon(self._allow_all)

    async def _allow_all(self) -> None:
        """Operators let every node be used again, as soon as a plane listens to them."""
        while True:
            fleet = self.plane.fleet
            if fleet is not None:
                for node in fleet.world.value.nodes.values():
                    if node.draining or node.cordoned:
                        self.plane.operate(fleet.drain, node.id, False)
                        self.plane.operate(fleet.cordon, node.id, False)
            await trio.sleep(1.0)

    async def _rest(self, outcome: Outcome) -> None:
        began = trio.current_time()
        since: float | None = None
        at_rest: tuple[object, ...] = ()
        while trio.current_time() < began + REST_WITHIN:
            now_is = self._at_rest()
            if now_is is None:
                since = None
            elif since is None or now_is != at_rest:
                since, at_rest = trio.current_time(), now_is
            elif trio.current_time() - since >= STAY:
                outcome.rest = since - began
                if self._waits():
                    outcome.wrongs.append(f"{self._waits()} waits were left open on streams")
                return
            await trio.sleep(0.5)
        outcome.rest = trio.current_time() - began
        fleet = self.plane.fleet
        if fleet is None:
            outcome.wrongs.append("there is no plane")
            return
        outcome.orphans += orphans(self.ledger, fleet.world.value)
        outcome.lost += self._missing(fleet.world.value)
        if not outcome.orphans and not outcome.lost:
            outcome.wrongs.append("it never came to rest")

    def _waits(self) -> int:
        hub = self.plane.hub
        return 0 if hub is None else sum(len(stream._waits) for stream in hub._streams.values())

    def _at_rest(self) -> tuple[object, ...] | None:
        """Everything that runs, when it is exactly what is wanted; None else."""
        fleet = self.plane.fleet
        if fleet is None:
            return None
        world = fleet.world.value
        if world.strays or world.settling_until is not None or any(self._missing(world)):
            return None
        if any(n.stage is not Stage.READY or not n.connected or n.draining or n.cordoned for n in world.nodes.values()):
            return None
        placed = {(s.node, s.id, s.generation) for s in world.shards.values()}
        running = sorted((kernel.name, p.shard, p.generation, p.seen.pid) for kernel, p in self.ledger.live())
        if len(running) != len(placed) or {entry[:3] for entry in running} != placed:
            return None
        for _, process in self.ledger.live():
            if len(process.led) != len(process.peers) or not all(peer.alive for peer in process.led):
                return None  # the next token will show it
        return tuple(running)

    def _missing(self, world: World) -> list[str]:
        """Wanted and not there: replicas that are not placed, or not ready, or that nobody runs."""
        missing: list[str] = []
        for model in world.models.values():
            there = replicas(s for s in world.shards.values() if s.model == model.name)
            good = [r for r in there if r.runs and r.ready and r.sound and r.revision == model.revision]
            good = [r for r in good if len(r.members) == model.profile.nodes]
            if len(good) != model.replicas or len(there) != model.replicas:
                states = [
                    f"{s.id}@{s.node} {s.want.value} {s.state.value} r{s.revision}" for r in there for s in r.members
                ]
                missing.append(f"{model.name}: {model.replicas} of revision {model.revision} wanted, there is {states}")
        missing += [
            f"{s.id} of a model that nobody wants" for s in world.shards.values() if s.model not in world.models
        ]
        missing += [f"node {name} is not known" for name in self.machines if NodeId(name) not in world.nodes]
        return missing


class _Listening:
    """Drops every log line, and keeps those that say that the code itself failed."""

    def __init__(self, failed: Callable[[str], None]) -> None:
        self._failed = failed

    def __call__(self, _logger: object, _method: str, words: structlog.typing.EventDict) -> structlog.typing.EventDict:
        if words.get("exc_info"):
            error = sys.exc_info()[1]
            self._failed(f"{words.get('event')}: {error!r}")
        raise structlog.DropEvent


def heeds_the_clock(schedule: Schedule) -> bool:
    """Whether the jumps of the machine's clock change the course of a schedule.

    One thing they may change: how long what drains may still finish when a plane comes back, which is stored by that
    clock. So here what drains is stopped then.
    """

    def forgetful(*args: Any) -> Shard:
        return attrs.evolve(stored(*args), want_at=None)

    stored: Callable[..., Shard] = records._shard
    with mock.patch.object(records, "_shard", forgetful):
        return simulate(schedule).commands != simulate(schedule, jumps=False).commands


def simulate(schedule: Schedule, *, jumps: bool = True) -> Outcome:
    """Run one schedule. The same schedule takes the same course each time, in processes of one PYTHONHASHSEED."""
    simulation = Simulation(schedule, jumps=jumps)
    before = structlog.get_config()
    structlog.configure(
        processors=[_Listening(simulation.ledger.wrong)],
        wrapper_class=structlog.make_filtering_bound_logger(40),
        cache_logger_on_first_use=False,
    )
    # As hypothesis-trio does: tasks that are ready together run in an order that the seed decides.
    core = trio._core._run
    core._r.seed(schedule.seed)
    try:
        with in_memory(), mock.patch.object(core, "_ALLOW_DETERMINISTIC_SCHEDULING", True):
            return trio.run(simulation.run, clock=trio.testing.MockClock(autojump_threshold=0))
    finally:
        structlog.configure(**before)

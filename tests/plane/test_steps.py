"""The pure planner as a state machine: whatever nodes, operators and networks do, in any order.

The nodes here are the truth: each has what it runs, obeys the commands that reach it, and reports. A partitioned
node goes on running, and hears and says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from immutables import Map
from msgspec.structs import replace

from llmgw.plane import operate
from llmgw.plane import steps as steps_module
from llmgw.plane.converge import commands
from llmgw.plane.expiry import expire
from llmgw.plane.fold import fold
from llmgw.plane.gang import replicas
from llmgw.plane.models import revised
from llmgw.plane.plan import plan
from llmgw.plane.steps import Start, enact
from llmgw.plane.store.records import Stored, world_of
from llmgw.plane.world import Model, Profile, Settings, Stage, Want, World
from llmgw.wire.agent import Heartbeat
from llmgw.wire.control import DrainShard, FetchWeights, StartShard, StopShard
from llmgw.wire.facts import NodeId, ShardId, ShardState
from tests.plane.worlds import CLOCK, model, profile, register, status

RULES = Settings(believe=100.0)
NAMES = ("n1", "n2", "n3", "n4")
GPUS, THREADS = 2, 4


@pytest.fixture(autouse=True)
def few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of most shards that are no more only the highest generation of all is known."""
    monkeypatch.setattr(steps_module, "KEPT", 2)


def an_engine(gpus: int, threads: int, args: str, nodes: int) -> Profile:
    made = profile(gpus=gpus, threads=threads, args=(args,), nodes=nodes)
    return replace(made, network="tcp", ready_within=40.0)


@attrs.define
class Machine:
    """A node as it really is."""

    name: str
    reachable: bool = True
    stream: int = 0
    runs: dict[str, tuple[int, ShardState]] = attrs.field(factory=dict)
    highest: dict[str, int] = attrs.field(factory=dict)
    starts: list[tuple[str, int]] = attrs.field(factory=list)

    def obey(self, command: object) -> None:
        match command:
            case StartShard(shard=shard, generation=generation):
                if generation < self.highest.get(shard, 0):
                    return  # an older generation is refused (C4)
                if shard in self.runs and self.runs[shard][0] == generation:
                    return
                self.highest[shard] = generation
                self.runs[shard] = (generation, ShardState.STARTING)
                self.starts.append((shard, generation))
            case StopShard(shard=shard, generation=generation):
                if shard in self.runs and self.runs[shard][0] <= generation:
                    self.runs[shard] = (self.runs[shard][0], ShardState.STOPPED)
            case DrainShard(shard=shard, generation=generation):
                if self.runs.get(shard) == (generation, ShardState.READY):
                    self.runs[shard] = (generation, ShardState.DRAINING)


class Planner(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.world = World()
        self.machines: dict[str, Machine] = {}
        self.placed: dict[tuple[str, int], str] = {}
        self.streams = 0

    # What happens ----------------------------------------------------------------------------------------

    @initialize(count=st.integers(1, 3))
    def some_nodes(self, count: int) -> None:
        for name in NAMES[:count]:
            self.joins(name)

    @rule(name=st.sampled_from(NAMES))
    def joins(self, name: str) -> None:
        """A node joins, or comes back after a partition, or its agent restarts: all of them register."""
        machine = self.machines.setdefault(name, Machine(name))
        machine.reachable = True
        self.streams += 1
        machine.stream = self.streams
        running = [status(shard, generation, state) for shard, (generation, state) in sorted(machine.runs.items())]
        message = register(name, gpu=GPUS, threads=THREADS, shards=running, engine_ports=(20_000, 20_999))
        self.world, _ = fold(self.world, NodeId(name), message, self.now, CLOCK, RULES, stream=machine.stream)

    @precondition(lambda self: self.machines)
    @rule(name=st.sampled_from(NAMES))
    def is_cut_off(self, name: str) -> None:
        if name in self.machines:
            self.machines[name].reachable = False

    @rule(seconds=st.sampled_from([0.5, 5.0, 16.0, 40.0, 95.0]))
    def time_passes(self, seconds: float) -> None:
        """Reachable nodes are heard all the while; the silent ones are judged."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 5.0)
            for machine in self.machines.values():
                if machine.reachable:
                    self.world, _ = fold(self.world, NodeId(machine.name), Heartbeat(), self.now, CLOCK, RULES)
            self.world, _ = expire(self.world, self.now, CLOCK, RULES)

    @rule(
        wanted=st.dictionaries(
            st.sampled_from(["a", "b", "c"]),
            st.tuples(
                st.integers(0, 4),
                st.integers(0, 2),
                st.integers(0, 3),
                st.sampled_from(["", "--x", "--y"]),
                st.sampled_from([1, 1, 2, 3, 4]),
                st.integers(0, 2),
            ),
        )
    )
    def models_are_applied(self, wanted: dict[str, tuple[int, int, int, str, int, int]]) -> None:
        models = tuple(
            replace(model(name, replicas, of=an_engine(gpus, threads, args, nodes)), surge=surge)
            for name, (replicas, gpus, threads, args, nodes, surge) in sorted(wanted.items())
        )
        self.world, _ = operate.want(self.world, revised(self.world.models, models), CLOCK)

    @rule(name=st.sampled_from(NAMES), on=st.booleans(), drain=st.booleans())
    def an_operator_cordons_or_drains(self, name: str, on: bool, drain: bool) -> None:
        if NodeId(name) in self.world.nodes:
            change = operate.drain if drain else operate.cordon
            self.world, _ = change(self.world, NodeId(name), on, CLOCK)

    @rule(name=st.sampled_from(NAMES), state=st.sampled_from(ShardState), which=st.integers(0, 5))
    def an_engine_does_something(self, name: str, state: ShardState, which: int) -> None:
        machine = self.machines.get(name)
        if machine is None or not machine.runs:
            return
        shard = sorted(machine.runs)[which % len(machine.runs)]
        generation, before = machine.runs[shard]
        if before.alive:
            machine.runs[shard] = (generation, state)
            self.report(machine, shard)

    @rule()
    def every_engine_goes_on(self) -> None:
        for machine in self.machines.values():
            for shard, (generation, state) in machine.runs.items():
                if state in (ShardState.STARTING, ShardState.FETCHING):
                    machine.runs[shard] = (generation, ShardState.READY)
                    self.report(machine, shard)
                elif state is ShardState.STOPPING:
                    machine.runs[shard] = (generation, ShardState.STOPPED)
                    self.report(machine, shard)

    @rule()
    def the_plane_restarts(self) -> None:
        """All that is kept goes through the store, and every reachable node registers again."""
        puts, _, _ = Stored().difference(self.world)
        self.world = world_of(puts, self.now, CLOCK)
        for name, machine in self.machines.items():
            if machine.reachable:
                self.joins(name)

    @rule()
    def the_plane_decides(self) -> None:
        before = self.world
        decided = plan(before, self.now, RULES)
        assert decided == plan(before, self.now, RULES), "deterministic"
        assert decided.steps == plan(shuffled(before), self.now, RULES).steps, "whatever the order of the maps"
        for step in decided.steps:
            if isinstance(step, Start):
                key = (step.shard.id, step.shard.generation)
                assert key not in self.placed, "no generation is given out twice"
                self.placed[key] = step.shard.node
                old = before.shards.get(step.shard.id)
                assert old is None or old.generation < step.shard.generation
        self.world = enact(before, decided.steps, self.now, CLOCK)
        self.no_rollout_takes_more_than_it_may(before, self.world)
        assert plan(self.world, self.now, RULES).steps == (), "deciding twice changes nothing"

    @rule()
    def commands_are_told(self) -> None:
        told = sorted(commands(self.world).items(), key=lambda item: item[0])
        self.a_leader_starts_last(command for _, command in told)
        for (node, _), command in told:
            machine = self.machines[node]
            assert not isinstance(command, FetchWeights)
            if machine.reachable and self.world.nodes[node].stream == machine.stream:
                machine.obey(command)
                self.report(machine, command.shard)
                if command.shard not in machine.runs:
                    word = status(command.shard, command.generation, ShardState.STOPPED)  # "there is no such shard"
                    self.world, _ = fold(self.world, NodeId(machine.name), word, self.now, CLOCK, RULES)

    @rule(rounds=st.integers(1, 4))
    def all_goes_on(self, rounds: int) -> None:
        """What a plane and its nodes do when nobody disturbs them."""
        for _ in range(rounds):
            self.the_plane_decides()
            self.commands_are_told()
            self.every_engine_goes_on()
            self.time_passes(5.0)

    def report(self, machine: Machine, shard: str) -> None:
        if machine.reachable and shard in machine.runs:
            generation, state = machine.runs[shard]
            word = status(shard, generation, state)
            self.world, _ = fold(self.world, NodeId(machine.name), word, self.now, CLOCK, RULES)

    # What always holds -----------------------------------------------------------------------------------

    def a_leader_starts_last(self, told: Iterable[object]) -> None:
        generations: dict[str, set[int]] = {}
        for command in told:
            if isinstance(command, StartShard):
                generations.setdefault(command.replica, set()).add(command.generation)
                if command.spec.rank == 0:
                    followers = [s for s in self.world.shards.values() if s.replica == command.replica and s.rank]
                    assert len(followers) == max(1, len(command.spec.peers)) - 1
                    assert all(f.generation == command.generation for f in followers)
                    assert all(f.state is ShardState.READY for f in followers)
        assert all(len(told_to_run) == 1 for told_to_run in generations.values())

    @staticmethod
    def no_rollout_takes_more_than_it_may(before: World, after: World) -> None:
        for name, wanted in after.models.items():
            reachable = {id for id, node in before.nodes.items() if node.stage is not Stage.LOST}
            serving = {
                r.id
                for r in replicas(before.shards.values())
                if r.model == name and r.runs and r.ready and not r.broken and set(r.nodes) <= reachable
            }
            left = [r for r in replicas(after.shards.values()) if r.id in serving and r.runs and r.ready]
            assert len(left) >= min(len(serving), wanted.replicas - 1)

    @invariant()
    def the_members_of_a_replica_that_runs_are_one_attempt(self) -> None:
        for replica in replicas(self.world.shards.values()):
            assert replica.runs or all(member.want is not Want.RUN for member in replica.members)
            if replica.runs:
                assert replica.sound
                assert len(set(replica.nodes)) == len(replica.nodes)
                assert len({tuple(map(str, member.spec.peer_ports)) for member in replica.members}) == 1

    @invariant()
    def no_gpu_and_no_thread_is_promised_twice(self) -> None:
        for node in self.world.nodes:
            here = [s for s in self.world.shards.values() if s.node == node]
            promised = [uuid for shard in here for uuid in shard.spec.gpus]
            assert len(promised) == len(set(promised))
            assert all(len(s.spec.gpus) == s.spec.resources.gpus for s in here)
            assert sum(s.spec.resources.cpu_threads for s in here) <= THREADS
            ports = [number for shard in here for number in shard.spec.ports.values()]
            assert len(ports) == len(set(ports))

    @invariant()
    def no_model_has_more_shards_to_run_than_a_surge_allows(self) -> None:
        for name, wanted in self.world.models.items():
            running = [s for s in self.world.shards.values() if s.model == name and s.want is Want.RUN]
            assert len({s.id for s in running}) == len(running)
            current = [s for s in running if s.revision == wanted.revision]
            members = wanted.profile.nodes
            assert len(current) <= (max(wanted.replicas, 1) + len(running)) * members

    @invariant()
    def a_generation_was_started_on_one_node_only(self) -> None:
        seen: dict[tuple[str, int], str] = {}
        for machine in self.machines.values():
            for start in machine.starts:
                assert seen.setdefault(start, machine.name) == machine.name

    def teardown(self) -> None:
        """When everybody is back and all is quiet, what runs is what is wanted, once."""
        for name, machine in self.machines.items():
            for shard, (generation, state) in machine.runs.items():
                if state in (ShardState.DRAINING, ShardState.STOPPING, ShardState.UNKNOWN):
                    machine.runs[shard] = (generation, ShardState.FAILED)  # it did so unasked, and is at its end
            self.joins(name)
        for _ in range(60):
            self.time_passes(16.0)
            self.the_plane_decides()
            self.commands_are_told()
            self.every_engine_goes_on()
        claimed = {(s.node, s.id): s.generation for s in self.world.shards.values()}
        for machine in self.machines.values():
            for shard, (generation, state) in machine.runs.items():
                if state.alive:
                    assert claimed.get((NodeId(machine.name), ShardId(shard))) == generation, (
                        "never two, and no stray left"
                    )
        assert len(self.world.strays) == 0
        for name, wanted in self.world.models.items():
            running = [r for r in replicas(self.world.shards.values()) if r.model == name]
            unplaced = plan(self.world, self.now, RULES).unplaced.get(name)
            if unplaced is None:
                assert len(running) == wanted.replicas
                assert all(r.ready and r.runs and r.revision == wanted.revision for r in running)
                assert all(r.leader.spec.args == wanted.profile.args for r in running)


def shuffled(world: World) -> World:
    """The same world, its maps built in the opposite order."""
    return attrs.evolve(
        world,
        nodes=Map(dict(sorted(world.nodes.items(), reverse=True))),
        shards=Map(dict(sorted(world.shards.items(), reverse=True))),
        models=Map(dict(sorted(world.models.items(), reverse=True))),
    )


class Several(Planner):
    """The same with models of several nodes, whose profiles change again and again."""

    @initialize(
        nodes=st.integers(2, 4),
        replicas=st.integers(1, 2),
        surge=st.integers(0, 2),
        gpus=st.integers(0, 1),
        other=st.integers(0, 2),
    )
    def replicas_of_several_nodes_are_wanted(
        self, nodes: int, replicas: int, surge: int, gpus: int, other: int
    ) -> None:
        for name in NAMES:
            self.joins(name)
        several = replace(model("a", replicas, of=an_engine(gpus, 1, "", nodes)), surge=surge)
        self.wanted: tuple[Model, ...] = (several, model("b", other, of=an_engine(0, 2, "", 1)))
        self.models_are_applied()
        self.all_goes_on(4)

    @rule(args=st.sampled_from(["", "--x", "--y"]))
    def a_profile_changes(self, args: str) -> None:
        several, *rest = self.wanted
        self.wanted = (replace(several, profile=replace(several.profile, args=(args,))), *rest)
        self.models_are_applied()

    @rule(replicas=st.integers(0, 2), nodes=st.sampled_from([2, 2, 3, 4]))
    def it_is_scaled(self, replicas: int, nodes: int) -> None:
        several, *rest = self.wanted
        self.wanted = (replace(several, replicas=replicas, profile=replace(several.profile, nodes=nodes)), *rest)
        self.models_are_applied()

    @rule(shard=st.integers(0, 11), state=st.sampled_from([ShardState.FAILED, ShardState.FAILED, ShardState.STOPPED]))
    def a_member_ends(self, shard: int, state: ShardState) -> None:
        alive = [
            (machine, id)
            for _, machine in sorted(self.machines.items())
            for id, (_, now) in sorted(machine.runs.items())
            if now.alive and id.startswith("a-")
        ]
        if alive:
            machine, id = alive[shard % len(alive)]
            machine.runs[id] = (machine.runs[id][0], state)
            self.report(machine, id)

    def models_are_applied(self) -> None:
        self.world, _ = operate.want(self.world, revised(self.world.models, self.wanted), CLOCK)


TestSeveral = Several.TestCase
TestSeveral.settings = settings(max_examples=40, stateful_step_count=25, suppress_health_check=list(HealthCheck))

TestPlanner = Planner.TestCase
TestPlanner.settings = settings(max_examples=80, stateful_step_count=30, suppress_health_check=list(HealthCheck))

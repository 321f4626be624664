"""The plane's own rules followed to their end on a copy of the world, with nodes that do what they are told. Pure.

Nothing is guessed that the plane decides: silence (expiry.py), plan, steps and commands are the ones it lives by. What
nodes do is taken as ideal: who is connected stays so and does what it is told at once, every start succeeds, what ends
gives back what it held, what hangs already does not end, and what is silent now stays silent. Models that are loaded
now are asked for as before.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
from immutables import Map
from msgspec.structs import replace

from llmgw.plane import attempts, converge, drains, idle
from llmgw.plane.changes import given_back
from llmgw.plane.checks import brought
from llmgw.plane.event import Event
from llmgw.plane.expiry import expire, silence_allowed
from llmgw.plane.gang import ends_by, mates
from llmgw.plane.plan import plan
from llmgw.plane.steps import Start, Step, enact, told
from llmgw.plane.world import DEFAULT, ENDED, Settings, Shard, Stage, Unplaced, Want, World, seen
from llmgw.wire.agent import ShardStatus
from llmgw.wire.control import DrainShard, FetchWeights, StartShard, StopShard
from llmgw.wire.facts import ModelName, NodeId, ReplicaId, ShardId, ShardState, Weights

#: Rounds of a plane are this far apart at least, in seconds.
APART = 0.01
#: A time is over so many seconds later, however sums of seconds are rounded.
OVER = 1e-6


@attrs.frozen
class Moment:
    """Something that happens, `at` seconds from now at the earliest: how long starts take is not known."""

    at: float
    kind: str
    text: str


@attrs.frozen
class Gap:
    """From when until when (seconds from now) a model that serves now has no ready replica; None: to the end."""

    model: ModelName
    begin: float
    end: float | None


class Course:
    """The copy on its way. `living` are the nodes that do what they are told, `dead` those that are gone for good."""

    def __init__(self, world: World, now: float, settings: Settings = DEFAULT) -> None:
        self.world, self.now, self.settings, self.began = world, now, settings, now
        self.moments: list[Moment] = []
        self.first: dict[ReplicaId, tuple[float, str]] = {}  # the first step of a replica: when, and why
        self.unplaced: Map[ModelName, Unplaced] = world.unplaced
        self.living = {id for id, node in world.nodes.items() if node.stage is Stage.READY and node.connected}
        self.dead: set[NodeId] = set()
        self._hung = {s.id for s in world.shards.values() if (due := ends_by(world, s)) is not None and due <= now}
        self._awake = [n for n, m in world.models.items() if m.idle and idle.wanted(world, m, now)]
        self.had = self.ready()
        self._served = {name for name, ready in self.had.items() if ready}
        self._without: dict[ModelName, float] = {}
        self._gaps: list[Gap] = []

    # What follows -------------------------------------------------------------------------------------------

    def follow(self, rounds: int) -> bool:
        """Follow the rules until nothing moves any more. False when so many rounds were not enough."""
        looked = False
        for _ in range(rounds):
            before = self.world
            look_again = self._round()
            if self._moved(before):
                looked = False
                self.now += APART  # what follows from something comes after what happened with it
                continue
            due = [at for at in self._due() if at > self.now]
            if due:
                self.now = min(due) + OVER
            elif look_again is not None and look_again > self.now and not looked:
                self.now, looked = look_again, True
            else:
                return True
        return False

    def _moved(self, before: World) -> bool:
        world, nodes = self.world, self.world.nodes
        if world.shards is not before.shards or world.strays is not before.strays or world.ahead != before.ahead:
            return True
        return any(nodes[id].stage is not node.stage for id, node in before.nodes.items() if id not in self.living)

    def _round(self) -> float | None:
        """What the plane does in one round, and what its nodes do at once."""
        self._beat()
        self.world, events = expire(self.world, self.now, 0.0, self.settings)
        for event in events:
            self.say(event)
        self.world = idle.kept(self.world, self.now)
        decided = plan(self.world, self.now, self.settings)
        for step in decided.steps:
            self.say(told(step, self.world, 0.0))
            self._note(step)
        self.world = attrs.evolve(enact(self.world, decided.steps, self.now, 0.0), ahead=decided.ahead)
        self.unplaced = decided.unplaced
        self.watch()
        for (node, _), command in sorted(converge.commands(self.world).items()):
            if node in self.living:
                self._obey(node, command)
        self._go_on()
        self.watch()
        return decided.look_again

    def _beat(self) -> None:
        """Heartbeats, and requests for what is loaded."""
        nodes = self.world.nodes
        late = {id: attrs.evolve(nodes[id], heard_at=self.now) for id in self.living if nodes[id].heard_at != self.now}
        if late:
            self.world = attrs.evolve(self.world, nodes=nodes.update(late))
        if self._awake:
            self.world, _ = idle.asked(self.world, self._awake, self.now, 0.0)

    def _obey(self, node: NodeId, command: converge.Command) -> None:
        match command:
            case StartShard(shard=id, generation=generation):
                shard = self.world.shards[id]
                self.tell(node, _status(shard, generation, ShardState.READY))
                self._fetched(shard.node, shard.spec.source, shard.spec.resources.disk_bytes)
            case FetchWeights(source=source):
                self._fetched(node, source, self.world.ahead.get((node, source), 0))
            case DrainShard(shard=id, generation=generation):
                self.tell(node, _status(self.world.shards[id], generation, ShardState.DRAINING))
            case StopShard(shard=id, generation=generation):
                self._ended(node, id, generation)

    def _go_on(self) -> None:
        """What is on its way already comes to its end."""
        for shard in sorted(self.world.shards.values(), key=lambda s: s.id):
            if shard.node not in self.living or shard.status is None or shard.status.generation != shard.generation:
                continue
            if shard.want is Want.RUN and shard.state in (ShardState.STARTING, ShardState.FETCHING):
                self.tell(shard.node, replace(shard.status, state=ShardState.READY, port=shard.status.port or 1))
                self._fetched(shard.node, shard.spec.source, shard.spec.resources.disk_bytes)
            elif shard.state is ShardState.STOPPING and shard.id not in self._hung:
                self._ended(shard.node, shard.id, shard.generation)

    def tell(self, node: NodeId, status: ShardStatus) -> None:
        self.world, _ = attempts.tell(self.world, node, status, self.now, 0.0, self.settings)

    def _ended(self, node: NodeId, id: ShardId, generation: int) -> None:
        shard, stray = self.world.shards.get(id), self.world.strays.get((node, id))
        known = stray.status if stray is not None else None
        if shard is not None and shard.node == node and shard.generation == generation:
            status = _status(shard, generation, ShardState.STOPPED)
        elif known is not None:
            status = replace(known, state=ShardState.STOPPED)
        else:
            return
        here = self.world.nodes[node]
        gpus = shard.spec.gpus if shard is not None and shard.node == node else ()
        self.world = attrs.evolve(self.world, nodes=self.world.nodes.set(node, given_back(here, id, gpus)))
        self.tell(node, status)

    def _fetched(self, id: NodeId, source: str, size: int) -> None:
        """The weights are there now, and take their room."""
        node = self.world.nodes[id]
        if node.facts is None or brought(node, source):
            return
        disks = tuple(
            replace(disk, free_bytes=max(0, disk.free_bytes - size)) if disk.purpose == "weights" else disk
            for disk in node.facts.host.disks
        )
        kept = tuple(w for w in node.facts.weights if w.source != source)
        facts = replace(
            node.facts,
            host=replace(node.facts.host, disks=disks),
            weights=(*kept, Weights(source=source, bytes=size, complete=True, in_use=True)),
        )
        self.world = attrs.evolve(self.world, nodes=self.world.nodes.set(node.id, attrs.evolve(node, facts=facts)))

    def _due(self) -> Iterator[float]:
        """When something happens by itself: back-off, a drain's end, silence, the plane's own doubts."""
        world = self.world
        for shard in world.shards.values():
            if shard.want is Want.DRAIN and shard.want_at is not None:
                yield shard.want_at + drains.of_replica(world, (shard, *mates(world, shard)), self.settings)
            elif shard.want is Want.RUN and shard.state in ENDED and shard.not_before is not None:
                yield shard.not_before
        allowed = silence_allowed(len(world.nodes), self.settings)
        for id, node in world.nodes.items():
            if id not in self.living and node.stage is not Stage.LOST:
                since = node.stage_at if node.heard_at is None else node.heard_at
                yield since + allowed
                yield since + self.settings.lost_after
        if world.frozen is not None:
            yield world.frozen.until
        if world.settling_until is not None:
            yield world.settling_until

    # What is seen of it -------------------------------------------------------------------------------------

    def ready(self) -> dict[ModelName, int]:
        """Ready replicas by model: every member is, and none lies on a machine that is gone."""
        whole: dict[ReplicaId, bool] = {}
        of: dict[ReplicaId, ModelName] = {}
        for shard in self.world.shards.values():
            good = shard.node not in self.dead and seen(shard, self.world.nodes.get(shard.node)) is ShardState.READY
            whole[shard.replica] = good and whole.get(shard.replica, True)
            of[shard.replica] = shard.model
        found: dict[ModelName, int] = {}
        for replica, good in whole.items():
            found[of[replica]] = found.get(of[replica], 0) + good
        return found

    def gaps(self) -> Iterator[Gap]:
        yield from self._gaps
        for name, since in sorted(self._without.items()):
            yield Gap(name, since - self.began, None)

    def watch(self) -> None:
        now_ready = self.ready()
        for name in sorted(self._served):
            model = self.world.models.get(name)
            if now_ready.get(name, 0):
                if (since := self._without.pop(name, None)) is not None:
                    self._gaps.append(Gap(name, since - self.began, self.now - self.began))
            elif model is not None and model.replicas:
                self._without.setdefault(name, self.now)

    def say(self, event: Event) -> None:
        self.moments.append(Moment(self.now - self.began, event.kind, event.text))

    def _note(self, step: Step) -> None:
        shard = step.shard if isinstance(step, Start) else self.world.shards.get(step.shard)
        if shard is not None:
            self.first.setdefault(shard.replica, (self.now - self.began, step.why))


def _status(shard: Shard, generation: int, state: ShardState) -> ShardStatus:
    """What a node says of a shard that it was told of."""
    port = shard.spec.ports.get("http", 0) or (shard.status.port if shard.status is not None else 0) or 1
    return ShardStatus(
        shard=shard.id, replica=shard.replica, model=shard.model, generation=generation, state=state, port=port
    )

"""What should be done next: `plan(world, now)` -> steps with reasons, what cannot be placed, when to look again.

Pure and deterministic (D5). A plan changes nothing; `enact` (steps.py) makes the world in which its steps are
decided, and planning in that world finds nothing more to do. Commands follow from the world (converge.py), not from
the steps, so that one which got lost is simply sent again.

The rules, in the order in which they apply to a model:
a lost node's shards move on at the next generation (D4); a draining node's are replaced first and then drained;
a new profile goes through the replicas one by one; what has failed starts again after its back-off, on its node
while that makes sense; what is missing is placed; what is too much goes, the worst first.
"""

from __future__ import annotations

import attrs
from immutables import Map

from llmgw.plane.attempts import EVERYWHERE
from llmgw.plane.checks import Need
from llmgw.plane.place import Choice, Rooms
from llmgw.plane.steps import Drain, GiveUp, Plan, Start, Step, Stop, enact
from llmgw.plane.why import nearest, smallest
from llmgw.plane.world import DEFAULT, ENDED, Model, Node, Reason, Settings, Shard, Stage, Unplaced, Want, World, slug
from llmgw.wire.facts import ModelName, ReplicaId, ShardId, ShardSpec, ShardState

#: Rounds of one plan: each lets what the one before freed be used.
_ROUNDS = 8

#: How soon to look again for room that nobody announces (memory that is freed), in seconds.
AGAIN = 5.0


def plan(world: World, now: float, settings: Settings = DEFAULT) -> Plan:
    """What to do in this world. Nothing is placed while the plane settles (D3)."""
    if world.settling_until is not None and now < world.settling_until:
        return Plan((), world.unplaced, world.settling_until)
    steps: tuple[Step, ...] = ()
    for _ in range(_ROUNDS):
        found = _Planner(world, now, settings).plan()
        if not found.steps:
            return attrs.evolve(found, steps=steps)
        # What moved or went made room, perhaps for a model whose turn was over.
        steps += found.steps
        world = enact(world, found.steps, now, 0.0)
    return Plan(steps, found.unplaced, now)


class _Planner:
    """The state of one round: the rooms as they fill up, the steps so far."""

    def __init__(self, world: World, now: float, settings: Settings) -> None:
        self.world, self.now, self.settings = world, now, settings
        self.steps: list[Step] = []
        self.unplaced: dict[ModelName, Unplaced] = {}
        self.again: float | None = None
        self.refused: dict[Need, tuple[Reason, ...]] = {}
        self.ids = {shard.replica for shard in world.shards.values()}
        self.newest: dict[ShardId, int] = {}
        for (_, id), stray in world.strays.items():
            self.newest[id] = max(self.newest.get(id, 0), stray.status.generation)
        self._dropped: list[Shard] = []
        self._rooms: Rooms | None = None

    @property
    def rooms(self) -> Rooms:
        # Made only when something is to be placed: a settled fleet is planned without looking at its rooms.
        if self._rooms is None:
            self._rooms = Rooms(self.world, self.now)
            for shard in self._dropped:
                self._rooms.release(shard)
        return self._rooms

    def plan(self) -> Plan:
        by_model: dict[ModelName, list[Shard]] = {name: [] for name in self.world.models}
        for shard in sorted(self.world.shards.values(), key=_order):
            if shard.want is not Want.RUN:
                self._going(shard)
            elif shard.model in by_model:
                by_model[shard.model].append(shard)
            else:
                self._leave(shard, "its model is wanted no more")
        for name in sorted(by_model):
            self._model(self.world.models[name], by_model[name])
        return Plan(tuple(self.steps), Map(self.unplaced), self.again)

    # What is on its way out -------------------------------------------------------------------------------

    def _going(self, shard: Shard) -> None:
        node = self.world.nodes.get(shard.node)
        if node is None or node.stage is Stage.LOST:
            self._drop(shard, f"{shard.node} is {'not known' if node is None else 'lost'}")
        elif shard.status is not None and shard.state in ENDED:
            self._drop(shard, f"it has {shard.state.value}")
        elif shard.want is Want.DRAIN:
            due = self.now if shard.want_at is None else shard.want_at + self.settings.drain
            if shard.state not in (ShardState.READY, ShardState.DRAINING) or due <= self.now:
                self.steps.append(Stop(shard.id, shard.why or "it is drained"))
            else:
                self._look(due)
        elif shard.status is None and node.connected and node.facts is not None:
            # Unwanted before a word of it came, and told to stop meanwhile: after a while there is nothing to stop.
            since = max(node.facts_at or 0.0, shard.want_at if shard.want_at is not None else 0.0)
            silent_until = since + 2 * self.settings.resend
            if silent_until <= self.now:
                self._drop(shard, "its node never heard of it")
            else:
                self._look(silent_until)

    def _leave(self, shard: Shard, why: str) -> None:
        """Out, with the grace that its state deserves."""
        node = self.world.nodes.get(shard.node)
        if node is None or node.stage is Stage.LOST or (shard.state in ENDED and shard.status is not None):
            self._drop(shard, why)
        elif shard.state is ShardState.READY:
            self.steps.append(Drain(shard.id, why))
            self._look(self.now + self.settings.drain)
        else:
            self.steps.append(Stop(shard.id, why))

    def _drop(self, shard: Shard, why: str) -> None:
        self.steps.append(GiveUp(shard.id, why))
        self._dropped.append(shard)
        self.ids.discard(shard.replica)
        self.newest[shard.id] = max(self.newest.get(shard.id, 0), shard.generation)
        if self._rooms is not None:
            self._rooms.release(shard)

    def _look(self, at: float) -> None:
        self.again = at if self.again is None else min(self.again, at)

    # One model --------------------------------------------------------------------------------------------

    def _model(self, model: Model, shards: list[Shard]) -> None:
        staying: list[Shard] = []
        draining: list[Shard] = []
        outdated: list[Shard] = []
        displaced: list[Shard] = []
        for shard in shards:
            node = self.world.nodes.get(shard.node)
            if node is None or node.stage is Stage.LOST:
                displaced.append(shard)
            elif node.draining:
                draining.append(shard)
            elif shard.revision != model.revision:
                outdated.append(shard)
            else:
                staying.append(shard)

        # Too many: the worst go first.
        staying.sort(key=lambda s: (_worth(s, self.world.nodes.get(s.node)), _order(s)))
        while len(staying) > model.replicas:
            self._leave(staying.pop(), f"{model.replicas} replicas are wanted")
        staying.sort(key=_order)
        for shard in staying:
            self._again(model, shard)

        # A lost node's shards: the same ids at the next generation, elsewhere.
        room_for = model.replicas - len(staying)
        unmoved = 0
        for shard in displaced:
            if room_for <= 0:
                self._drop(shard, f"{shard.node} is lost, and {model.replicas} replicas are wanted")
                continue
            room_for -= 1
            choice = self._choose(model)
            if choice is None:
                unmoved += 1
            else:
                self._start(model, shard, choice, f"{shard.node} is lost; {choice.why}", moved=True)

        # On draining nodes and with an older profile: whatever serves stays until its replacement does.
        missing = room_for
        leaving = draining + outdated
        gone = [s for s in leaving if s.state is not ShardState.READY]
        for shard in gone:
            self._leave(shard, _why_leaving(shard, model, self.world))
        serving = [s for s in leaving if s.state is ShardState.READY]
        ready = sum(s.state is ShardState.READY for s in staying)
        surplus = ready + len(serving) - model.replicas
        for shard in serving[: max(0, min(surplus, len(serving)))]:
            self._leave(shard, _why_leaving(shard, model, self.world))
        serving = serving[max(0, surplus) :]

        absent = max(0, missing - len(serving))
        ahead = min(sum(s in draining for s in serving), missing - absent)
        placed = self._place(model, absent + ahead)
        if placed == absent + ahead:
            self._roll(model, staying, [s for s in serving if s in outdated], missing - absent - ahead, bool(placed))
        short = unmoved + absent + ahead - placed
        if short:
            reasons = self._refused(Need.of(model))
            wanted = model.replicas
            change = smallest(reasons, Need.of(model))
            standing = max(0, wanted - unmoved - max(0, absent - placed))
            self.unplaced[model.name] = Unplaced(model.name, wanted, standing, nearest(reasons), change)
            self._look(self.now + AGAIN)

    def _roll(self, model: Model, staying: list[Shard], outdated: list[Shard], missing: int, started: bool) -> None:
        """One step of a rolling change: one replica of the new profile more, or one of the old less to make room.

        It goes on only when every replica of the new profile is ready, so a profile that does not start stops it.
        """
        if not outdated or missing <= 0 or started or any(s.state is not ShardState.READY for s in staying):
            return
        if self._place(model, 1):
            return
        need = Need.of(model)
        for shard in outdated:
            if self.rooms.here((shard,), need) is not None and not self._cordoned(shard):
                self._leave(shard, f"room is needed for revision {model.revision} of its profile")
                return
        reasons = self._refused(need)
        change = smallest(reasons, need)
        self.unplaced[model.name] = Unplaced(model.name, model.replicas, model.replicas - 1, nearest(reasons), change)
        self._look(self.now + AGAIN)

    def _cordoned(self, shard: Shard) -> bool:
        node = self.world.nodes.get(shard.node)
        return node is not None and node.cordoned

    def _again(self, model: Model, shard: Shard) -> None:
        """The next attempt of a shard that has ended, when it is due; and what outgrew our records (D4)."""
        node = self.world.nodes[shard.node]
        stray = self.world.strays.get((shard.node, shard.id))
        if stray is not None and stray.status.generation > shard.generation:
            why = f"{node.id} runs generation {stray.status.generation}, which is newer than any that is known here"
            self._next(model, shard, why)
            return
        if shard.status is None or shard.state not in ENDED:
            return
        if shard.not_before is not None and shard.not_before > self.now:
            self._look(shard.not_before)
            return
        cause = f": {shard.status.cause}" if shard.status.cause else ""
        self._next(model, shard, f"it has {shard.state.value}{cause}")

    def _next(self, model: Model, shard: Shard, why: str) -> None:
        need = Need.of(model)
        node = self.world.nodes[shard.node]
        if node.stage is not Stage.READY:
            self._look(self.now + AGAIN)  # silent for a moment: D1 decides whether it is lost
            return
        cause_code = shard.status.cause_code if shard.status is not None else ""
        move = shard.failed_here >= self.settings.move_after and cause_code not in EVERYWHERE
        if move and (choice := self.rooms.choose(need, model.name, avoid=(shard.node,))) is not None:
            why = f"{why}; it failed {shard.failed_here} times in a row on {shard.node}; {choice.why}"
            self._start(model, shard, choice, why, moved=True)
            return
        choice = self.rooms.here((shard,), need)
        if choice is not None:
            self._start(model, shard, choice, why, moved=False)
            return
        choice = self.rooms.choose(need, model.name, avoid=(shard.node,))
        if choice is not None:
            self._start(model, shard, choice, f"{why}; it fits on {shard.node} no more; {choice.why}", moved=True)
            return
        reasons = self._refused(need)
        change = smallest(reasons, need)
        self.unplaced[model.name] = Unplaced(model.name, model.replicas, model.replicas - 1, nearest(reasons), change)
        self._look(self.now + AGAIN)

    # Placing ----------------------------------------------------------------------------------------------

    def _choose(self, model: Model) -> Choice | None:
        if Need.of(model) in self.refused:
            return None  # nothing was released since: it would be refused again
        choice = self.rooms.choose(Need.of(model), model.name)
        if choice is None:
            self._refused(Need.of(model))
        return choice

    def _refused(self, need: Need) -> tuple[Reason, ...]:
        if need not in self.refused:
            self.refused[need] = self.rooms.refused(need)
        return self.refused[need]

    def _place(self, model: Model, count: int) -> int:
        """Place up to `count` new replicas; how many found a node."""
        for done in range(count):
            choice = self._choose(model)
            if choice is None:
                return done
            replica = self._free_id(model.name)
            id = ShardId(f"{replica}-0")
            shard = Shard(
                id=id,
                replica=replica,
                model=model.name,
                rank=0,
                node=choice.members[0].node,
                generation=max(self.world.retired.get(id, 0), self.newest.get(id, 0)) + 1,
                spec=_spec(model, choice),
                revision=model.revision,
                why=choice.why,
            )
            self.steps.append(Start(shard, choice.why))
            self.rooms.hold(shard)
        return count

    def _free_id(self, model: ModelName) -> ReplicaId:
        number = 0
        while (id := ReplicaId(f"{slug(model)}-{number}")) in self.ids:
            number += 1
        self.ids.add(id)
        return id

    def _start(self, model: Model, shard: Shard, choice: Choice, why: str, *, moved: bool) -> None:
        following = attrs.evolve(
            shard,
            node=choice.members[0].node,
            generation=max(shard.generation, self.newest.get(shard.id, 0)) + 1,
            spec=_spec(model, choice),
            revision=model.revision,
            want=Want.RUN,
            why=why,
            status=None,
            status_at=None,
            ready_at=None,
            not_before=None,
            failed_here=0 if moved else shard.failed_here,
        )
        self.steps.append(Start(following, why))
        self.rooms.release(shard)
        self.rooms.hold(following)


def _spec(model: Model, choice: Choice) -> ShardSpec:
    profile = model.profile
    return ShardSpec(
        engine=profile.engine,
        model=model.name,
        source=profile.source,
        engine_version=profile.engine_version,
        args=profile.args,
        env=profile.env,
        resources=profile.resources,
        gpus=choice.members[0].gpus,
        context=profile.context,
        ready_within=profile.ready_within,
        grace=profile.grace,
    )


def _order(shard: Shard) -> tuple[str, int, str]:
    """By model, then by replica number, so that tiny-10 comes after tiny-9."""
    number = shard.replica.rpartition("-")[2]
    return shard.model, int(number) if number.isdecimal() else 0, shard.id


def _worth(shard: Shard, node: Node | None) -> tuple[int, int]:
    """The smaller, the better to keep."""
    if shard.state is ShardState.READY:
        state = 0
    elif shard.state in ENDED:
        state = 2
    else:
        state = 1
    where = 2 if node is None or node.stage is not Stage.READY else int(node.cordoned)
    return (where if where == 2 else 0) + state, where


def _why_leaving(shard: Shard, model: Model, world: World) -> str:
    node = world.nodes.get(shard.node)
    if node is not None and node.draining:
        return f"{shard.node} is being drained"
    return f"it has revision {shard.revision} of its profile, and {model.revision} is wanted"

"""What should be done next: `plan(world, now)` -> steps with reasons, what cannot be placed, when to look again.

Pure and deterministic (D5). A plan changes nothing; `enact` (steps.py) makes the world in which its steps are
decided, and planning in that world finds nothing more to do. Commands follow from the world (converge.py), not from
the steps, so that one which got lost is simply sent again.

The unit is the replica, whose members begin and end together. The rules, in the order in which they apply to a model:
a lost node's replicas move on at the next generation (D4); a draining node's are replaced first and then drained;
a new profile goes through the replicas, some beside the old ones or one by one (rolling.py); what has failed starts
again after its back-off, on its nodes while that makes sense; what is missing is placed; what is too much goes, the
worst first.
"""

from __future__ import annotations

import attrs
from immutables import Map

from llmgw.plane import idle, rollout
from llmgw.plane.attempts import EVERYWHERE
from llmgw.plane.checks import carries
from llmgw.plane.gang import Replica, ended, order, replicas
from llmgw.plane.rolling import Rolling, asks_less
from llmgw.plane.round import AGAIN
from llmgw.plane.steps import Plan, Step, enact
from llmgw.plane.world import DEFAULT, Model, Settings, Stage, World
from llmgw.wire.facts import ModelName, NodeId

#: Rounds of one plan: each lets what the one before freed be used.
_ROUNDS = 8


def plan(world: World, now: float, settings: Settings = DEFAULT) -> Plan:
    """What to do in this world. Nothing is placed while the plane settles (D3)."""
    if world.settling_until is not None and now < world.settling_until:
        return Plan((), world.unplaced, world.settling_until, world.ahead)
    steps: tuple[Step, ...] = ()
    for _ in range(_ROUNDS):
        found = _Planner(world, now, settings).plan()
        if not found.steps:
            return attrs.evolve(found, steps=steps)
        # What moved or went made room, perhaps for a model whose turn was over.
        steps += found.steps
        world = enact(world, found.steps, now, 0.0)
    return Plan(steps, found.unplaced, now, found.ahead)


class _Planner(Rolling):
    """One round of planning, model by model."""

    def plan(self) -> Plan:
        by_model: dict[ModelName, list[Replica]] = {name: [] for name in self.world.models}
        gone: set[ModelName] = set()
        for replica in replicas(self.world.shards.values()):
            if not replica.runs:
                known = self.world.models.get(replica.model)
                if self.going(replica, whole=known is not None and replica.revision != known.revision):
                    gone.add(replica.model)
            elif replica.model in by_model:
                by_model[replica.model].append(replica)
            else:
                self.leave(replica, "its model is wanted no more")
        # What a replica held is first its own model's: it may have gone to make room for its successor.
        for name in sorted(by_model, key=lambda name: (name not in gone, name)):
            self._model(self.world.models[name], by_model[name])
        return Plan(tuple(self.steps), Map(self.unplaced), self.again, Map(self.ahead))

    # One model --------------------------------------------------------------------------------------------

    def _model(self, model: Model, mine: list[Replica]) -> None:
        wanted = idle.wanted(self.world, model, self.now)
        if wanted and model.idle:
            self.look(idle.awake_until(self.world, model))
        enough = f"{wanted} replicas are wanted" if not model.idle or wanted else f"nobody asks for {model.name}"
        staying: list[Replica] = []
        draining: list[Replica] = []
        outdated: list[Replica] = []
        displaced: list[Replica] = []
        hung: list[Replica] = []
        for replica in mine:
            if not replica.sound:
                self.leave(replica, f"the members of {replica.id} do not make one replica: it is placed anew")
            elif self.lost(*replica.nodes):
                displaced.append(replica)
            elif words := self.hangs(replica):
                self.leave(replica, f"{words}, so another replica takes its place")
                hung.append(replica)
            elif self.draining(*replica.nodes):
                draining.append(replica)
            elif replica.revision != model.revision:
                outdated.append(replica)
            else:
                staying.append(replica)

        # Too many: the worst go first.
        if len(staying) > wanted:
            staying.sort(key=lambda r: (self._worth(r), order(r)))
            while len(staying) > wanted:
                self.leave(staying.pop(), enough)
            staying.sort(key=order)
        for replica in staying:
            self._again(model, replica, wanted)
        if len(staying) == len(mine) == wanted:
            return

        # A change that does not come up touches nothing more: what is older stays, and starts again as it was.
        mixed = outdated or any(replica.revision != model.revision for replica in (*draining, *displaced, *hung))
        updated = [*staying, *(r for r in displaced if r.revision == model.revision)]
        paused = bool(mixed) and bool(rollout.paused(updated, self.settings))

        # A lost node's replicas: the same ids at the next generation, elsewhere.
        room_for = wanted - len(staying)
        moved, unmoved, short_of = 0, 0, model
        for replica in displaced:
            lost = next(node for node in replica.nodes if self.lost(node))
            if room_for <= 0:
                self.leave(replica, f"{lost} is lost, and {enough}")
                continue
            as_it_was = (rollout.of_revision(model, replica.revision) if paused else None) or model
            choice = self.places.instead(replica, as_it_was) if replica.gang else self.places.choose(as_it_was)
            if choice is not None:
                why = f"{lost} is lost; {choice.why}"
                self.steps += self.places.again(as_it_was, replica, choice, why, moved=True)
                moved += 1
            elif not paused and room_for <= sum(r.ready for r in (*draining, *outdated)):
                # A change that goes on would wait for it, and nothing else does.
                self.leave(replica, f"{lost} is lost, no other node takes it, and {enough}, which serve without it")
                continue
            else:
                unmoved += 1
                short_of = as_it_was
                self.places.refused(as_it_was)
            room_for -= 1
        for replica in hung if paused else ():
            past = rollout.of_revision(model, replica.revision)
            if room_for > 0 and past is not None and past.revision != model.revision and self.place(past, 1):
                moved, room_for = moved + 1, room_for - 1

        # On draining nodes and with an older profile: whatever serves stays until its replacement does.
        kept = [r for r in outdated if paused and rollout.of_revision(model, r.revision) is not None]
        for replica in kept:
            self._again(rollout.of_revision(model, replica.revision) or model, replica, wanted)
        silent = [r for r in (*draining, *outdated) if r not in kept and self.unheard(r)]
        for replica in (*draining, *outdated):
            if not replica.ready and replica not in kept and replica not in silent:
                self.leave(replica, self._why_leaving(replica, model))
        serving = [r for r in (*draining, *outdated) if r.ready or r in kept or r in silent]
        ready = sum(r.ready for r in staying)
        surplus = ready + sum(r.ready for r in serving) - wanted
        going = [r for r in serving if r.ready][: max(0, surplus)]
        if paused:
            dispensable = sorted((r for r in serving if r in kept), key=lambda r: (r.ready, order(r)))
            going = [r for r in going if r not in kept] + dispensable[: max(0, len(dispensable) - wanted)]
        if surplus >= 0:
            going += silent  # enough serve without those that a plane which has just started has yet to hear of
        for replica in going:
            self.leave(replica, self._why_leaving(replica, model))
        serving = [r for r in serving if r not in going]

        missing = room_for
        absent = max(0, missing - len(serving))
        emptied = [r for r in serving if r in draining]
        if paused:
            lacking = wanted - ready - sum(r in kept for r in serving)
            emptied = self.as_they_were(model, emptied, lacking, wanted)
        ahead = min(len(emptied), missing - absent)
        # More than there were are wanted: as those are that serve, while what should replace them does not start.
        like = (rollout.of_revision(model, max(r.revision for r in kept)) if kept else None) or model
        placed = self.place(like, absent)
        if placed < absent:
            short_of = like
        placed += self.place(model, ahead) if placed == absent else 0
        older = [r for r in serving if r in outdated]
        makes_room = model.name not in self.leaving and all(asks_less(model, r) for r in older)
        if (placed == absent + ahead or makes_room) and not paused:
            unready = placed + moved + (0 if makes_room else unmoved) + sum(not r.ready for r in staying)
            self.roll(model, older, missing - absent - ahead, unready, wanted)
        short = unmoved + absent + ahead - placed
        if short:
            self.refuse(short_of, wanted, max(0, wanted - unmoved - max(0, absent - placed)))

    def _again(self, model: Model, replica: Replica, wanted: int) -> None:
        """The next attempt of a replica whose last one is over, when it is due; or that outgrew our records (D4)."""
        strays = self.world.strays
        for shard in replica.members if strays else ():
            stray = strays.get((shard.node, shard.id))
            if stray is not None and stray.status.generation > shard.generation:
                newer = stray.status.generation
                why = f"{shard.node} runs generation {newer} of {shard.id}, which is newer than any that is known here"
                self._next(model, replica, why, wanted)
                return
        if not replica.broken:
            if (node := self._too_old(replica)) is not None:
                self._next(model, replica, f"the agent of {node} is too old for replicas of several nodes", wanted)
            return
        waits = [shard.not_before for shard in replica.members if shard.not_before is not None]
        if waits and max(waits) > self.now:
            self.look(max(waits))
            return
        blamed = replica.blamed
        how, cause = blamed.state.value, blamed.status.cause if blamed.status is not None else ""
        if not ended(blamed) and blamed.last_failure is not None:
            how, cause = "kept the others waiting", blamed.last_failure.cause
        who = f"{blamed.id} on {blamed.node}" if replica.gang else "it"
        has = "has " if ended(blamed) else ""
        self._next(model, replica, f"{who} {has}{how}{f': {cause}' if cause else ''}", wanted)

    def _too_old(self, replica: Replica) -> NodeId | None:
        """A node whose agent was taken back before it was told of its part, which it is not told any more."""
        for member in replica.members if replica.gang else ():
            node = self.world.nodes.get(member.node)
            if member.status is None and node is not None and node.stage is Stage.READY and not carries(node):
                return node.id
        return None

    def _next(self, model: Model, replica: Replica, why: str, wanted: int) -> None:
        if any(self.world.nodes[node].stage is not Stage.READY for node in replica.nodes):
            self.look(self.now + AGAIN)  # silent for a moment: D1 decides whether it is lost
            return
        blamed, where = replica.blamed, " and ".join(dict.fromkeys(replica.nodes))
        cause_code = blamed.status.cause_code if blamed.status is not None else ""
        if blamed.failed_here >= self.settings.move_after and cause_code not in EVERYWHERE:
            # Of several nodes the one that failed need not be the one at fault: others altogether are tried first.
            for avoid in dict.fromkeys((replica.nodes, (blamed.node,))):
                choice = self.places.instead(replica, model, avoid)
                if choice is not None:
                    why = f"{why}; it failed {blamed.failed_here} times in a row on {where}; {choice.why}"
                    self.steps += self.places.again(model, replica, choice, why, moved=True)
                    return
        choice = self.places.here(replica, model)
        if choice is not None:
            self.steps += self.places.again(model, replica, choice, why, moved=False)
            return
        choice = self.places.instead(replica, model, () if replica.gang else replica.nodes)
        if choice is not None:
            why = f"{why}; it fits on {where} no more; {choice.why}"
            self.steps += self.places.again(model, replica, choice, why, moved=True)
            return
        self.refuse(model, wanted, wanted - 1)

    def _worth(self, replica: Replica) -> tuple[int, int]:
        """The smaller, the better to keep."""
        state = 0 if replica.ready else 2 if replica.broken else 1
        nodes = [self.world.nodes.get(node) for node in replica.nodes]
        away = any(node is None or node.stage is not Stage.READY for node in nodes)
        where = 2 if away else int(any(node is not None and node.cordoned for node in nodes))
        return (where if where == 2 else 0) + state, where

    def _why_leaving(self, replica: Replica, model: Model) -> str:
        for id in replica.nodes:
            node = self.world.nodes.get(id)
            if node is not None and node.draining:
                return f"{id} is being drained"
        return f"it has revision {replica.revision} of its profile, and {model.revision} is wanted"

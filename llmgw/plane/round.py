"""One round of a plan: the places as they fill up, the steps so far, how replicas come and how they leave.

Pure; plan.py says which replicas begin and which leave, and why.
"""

from __future__ import annotations

from llmgw.plane import drains
from llmgw.plane.checks import Need
from llmgw.plane.gang import Replica, ended, hanging, size
from llmgw.plane.nearest import nearest, smallest
from llmgw.plane.places import Places
from llmgw.plane.steps import Drain, GiveUp, Step, Stop
from llmgw.plane.world import Model, Settings, Shard, Stage, Unplaced, Want, World
from llmgw.wire.facts import ModelName, NodeId, ShardState

#: How soon to look again for room that nobody announces (memory that is freed), in seconds.
AGAIN = 5.0


class Round:
    """What is decided so far. `again` is when something may be due; `leaving` names models that something leaves."""

    def __init__(self, world: World, now: float, settings: Settings) -> None:
        self.world, self.now, self.settings = world, now, settings
        self.places = Places(world, now, settings)
        self.steps: list[Step] = []
        self.again: float | None = None
        self.leaving: set[ModelName] = set()
        self.unplaced: dict[ModelName, Unplaced] = {}

    def going(self, replica: Replica, *, whole: bool) -> bool:
        """What a replica still does that is not wanted to run: it finishes what it serves, stops, and is no more.
        Whether nothing is left of it.

        `whole`: it makes room for its successor, which needs all of that at once.
        """
        hung = bool(self.hangs(replica))
        over = {shard.id: why for shard in replica.members if (why := self._over(shard))}
        here = [shard for shard in replica.members if shard.id not in over]
        if not here or not whole or hung or self.lost(*replica.nodes):
            for shard in replica.members:
                if shard.id in over:
                    self.drop(shard, over[shard.id])
        if not here:
            return True
        if not hung:
            self.leaving.add(replica.model)
        # Not heard of yet: the plane has just started, and what the gateways send there goes on.
        finishing = len(here) == len(replica.members) == size(replica.leader) and all(
            shard.want is Want.DRAIN
            and (shard.status is None or shard.state in (ShardState.READY, ShardState.DRAINING))
            for shard in here
        )
        if finishing:
            since, within = replica.leader.want_at, drains.of_replica(self.world, here, self.settings)
            due = self.now if since is None else since + within
            if due > self.now:
                self.look(due)
                return False
        for shard in here:
            if shard.want is Want.DRAIN:
                self.steps.append(Stop(shard.id, shard.why or "it is drained"))
            elif shard.want is Want.RUN:
                self.steps.append(Stop(shard.id, f"the rest of {replica.id} is to stop"))
            elif shard.status is None:
                self._unheard(shard)
        return False

    def _over(self, shard: Shard) -> str:
        """Why nothing is left of a shard, as far as anybody can tell; "" while something is."""
        node = self.world.nodes.get(shard.node)
        if node is None or node.stage is Stage.LOST:
            return f"{shard.node} is {'not known' if node is None else 'lost'}"
        return f"it has {shard.state.value}" if ended(shard) else ""

    def _unheard(self, shard: Shard) -> None:
        """Unwanted before a word of it came, and told to stop meanwhile: after a while there is nothing to stop."""
        node = self.world.nodes[shard.node]
        if not node.connected or node.facts is None:
            return
        since = max(node.facts_at or 0.0, shard.want_at if shard.want_at is not None else 0.0)
        silent_until = since + 2 * self.settings.resend
        if silent_until <= self.now:
            self.drop(shard, "its node never heard of it")
        else:
            self.look(silent_until)

    def leave(self, replica: Replica, why: str) -> None:
        """Out, with the grace that its state deserves."""
        here = []
        for shard in replica.members:
            if self.lost(shard.node) or ended(shard):
                self.drop(shard, why)
            else:
                here.append(shard)
        if not here:
            return
        self.leaving.add(replica.model)
        if (replica.ready or self.unheard(replica)) and len(here) == len(replica.members):
            self.steps += [Drain(shard.id, why) for shard in here]
            self.look(self.now + drains.of_replica(self.world, here, self.settings))
        else:
            self.steps += [Stop(shard.id, why) for shard in here]

    def hangs(self, replica: Replica) -> str:
        """Which process of a replica does not end, in words; "" while none is known not to."""
        found = hanging(self.world, replica)
        if found is None:
            return ""
        if found[0] > self.now:
            self.look(found[0])
            return ""
        return found[1]

    def place(self, model: Model, count: int) -> int:
        """Place up to `count` new replicas; how many found their nodes."""
        for done in range(count):
            choice = self.places.choose(model)
            if choice is None:
                return done
            self.steps += self.places.start(model, choice)
        return max(0, count)

    def refuse(self, model: Model, wanted: int, standing: int) -> None:
        """No node takes a replica of the model; `standing` of those that are wanted have their place."""
        reasons = self.places.refused(model)
        change = smallest(reasons, Need.of(model))
        self.unplaced[model.name] = Unplaced(
            model.name, wanted, standing, nearest(reasons), change, revision=model.revision
        )
        self.look(self.now + AGAIN)

    def drop(self, shard: Shard, why: str) -> None:
        self.steps.append(GiveUp(shard.id, why))
        self.places.drop(shard)

    def look(self, at: float) -> None:
        self.again = at if self.again is None else min(self.again, at)

    def lost(self, *nodes: NodeId) -> bool:
        for node in nodes:
            known = self.world.nodes.get(node)
            if known is None or known.stage is Stage.LOST:
                return True
        return False

    def unheard(self, replica: Replica) -> bool:
        """Whether it may well be serving on a node of which a plane that has just started has not heard a word."""
        return not replica.broken and any(
            member.status is None
            and (node := self.world.nodes.get(member.node)) is not None
            and node.stage is Stage.EXPECTED
            for member in replica.members
        )

    def draining(self, *nodes: NodeId) -> bool:
        return any(self.world.nodes[node].draining for node in nodes)

"""How a round of a plan moves a rolling change on: what comes beside what serves, and what makes room for what. Pure.

rollout.py says how far a change is and whether it is paused.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from llmgw.plane import rollout
from llmgw.plane.checks import Need, brought, installed
from llmgw.plane.gang import Replica
from llmgw.plane.members import Choice
from llmgw.plane.rooms import reads
from llmgw.plane.round import Round
from llmgw.plane.world import Model, Settings, World
from llmgw.wire.facts import NodeId


def asks_less(model: Model, replica: Replica) -> bool:
    """Whether a replica as the model is now takes less than this one, so that a change makes room for what has none."""
    new, old = model.profile.resources, replica.leader.spec.resources
    asked = (model.profile.nodes, new.gpus, new.cpu_threads, new.memory_bytes)
    had = (len(replica.members), old.gpus, old.cpu_threads, old.memory_bytes)
    return asked != had and all(less <= more for less, more in zip(asked, had, strict=True))


class Rolling(Round):
    """One round, with the weights that it has brought to nodes before a change goes on there: `ahead`."""

    def __init__(self, world: World, now: float, settings: Settings) -> None:
        super().__init__(world, now, settings)
        self.ahead: dict[tuple[NodeId, str], int] = {}

    def as_they_were(self, model: Model, emptied: Sequence[Replica], lacking: int, wanted: int) -> list[Replica]:
        """While a rollout is paused, what a drain moves comes again as it was, up to as many as are lacking. The rest
        has the present profile, or one that is known no more."""
        rest: list[Replica] = []
        for replica in emptied:
            past = rollout.of_revision(model, replica.revision)
            if past is None or past.revision == model.revision:
                rest.append(replica)
            elif lacking > 0:
                lacking -= 1
                if not self.place(past, 1):
                    self.refuse(past, wanted, wanted)
        return rest

    def roll(self, model: Model, older: Sequence[Replica], missing: int, unready: int, wanted: int) -> None:
        """The next part of a rolling change: replicas of the new profile more, or one of the old less to make room.

        So many may be on their way at once as the surge says, so a profile that does not start stops it. Where there
        is no room beside the old ones, or none is wanted there, one goes when all the others are ready, and when the
        engine and the weights are where the new one will be: that takes minutes or hours, in which the old one serves.
        """
        if not older or missing <= 0:
            return
        unready += self.place(model, min(missing, model.surge - unready))
        if unready or (model.surge and model.name in self.leaving):
            return  # what leaves makes room in a moment, and as many serve as are wanted
        if any(self.unheard(replica) for replica in older):
            return  # whether it serves is known when its node returns or is lost
        need, waits = Need.of(model), False
        free = self._free(model, need)
        for replica in older if free is None else older[:1]:
            if waits and not self._prepared(replica.nodes, need):
                continue  # as another one does
            choice = free or self._in_place(model, replica)
            if choice is None:
                continue
            if self._prepared(choice.nodes, attrs.evolve(need, version=choice.version or need.version)):
                self.leave(replica, f"room is needed for revision {model.revision} of its profile")
                return
            if not waits:
                for node in self._without_weights(choice.nodes, need):
                    self.ahead[node, need.source] = need.resources.disk_bytes
                    self.places.rooms.bring(node, need.source, need.resources.disk_bytes)
            waits = True
        if not waits:
            self.refuse(model, wanted, wanted - 1)

    def _free(self, model: Model, need: Need) -> Choice | None:
        """Where there is room for a replica as the model is now before an older one leaves: it would go there at once.

        Of nodes that would do, those to which its weights are brought already stay the ones.
        """
        choice = self.places.choose(model)
        ahead = {node for node, source in self.world.ahead if source == need.source}
        if choice is None or not ahead or self._prepared(choice.nodes, need):
            return choice
        rest = [id for id, node in self.world.nodes.items() if id not in ahead and not brought(node, need.source)]
        return self.places.choose(model, rest) or choice

    def _in_place(self, model: Model, replica: Replica) -> Choice | None:
        """Where a replica as the model is now has room only when this one is gone."""
        cordoned = any(self._cordoned(node) for node in replica.nodes)  # which takes its own again, but nothing new
        if not cordoned and (here := self.places.here(replica, model)) is not None:
            return here
        return self.places.instead(replica, model) if replica.gang or model.profile.nodes > 1 else None

    def _prepared(self, nodes: Sequence[NodeId], need: Need) -> bool:
        """Whether a replica could start on these nodes, by rank, as soon as they have room for it."""
        there = all(installed(self.world.nodes[node], need) for node in nodes)
        return there and not self._without_weights(nodes, need)

    def _without_weights(self, nodes: Sequence[NodeId], need: Need) -> list[NodeId]:
        readers = (node for rank, node in enumerate(nodes) if reads(need.engine, rank))
        return [node for node in readers if not brought(self.world.nodes[node], need.source)]

    def _cordoned(self, node: NodeId) -> bool:
        known = self.world.nodes.get(node)
        return known is not None and known.cordoned

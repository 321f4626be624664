"""Where the replicas of one plan go: the rooms as they fill up, ids, generations, and the steps that start them.

Pure; used by one round of plan.py. All members of a replica start in one plan and so in one commit of the store, at
one generation that is higher than any that was ever known of any of them (D4).
"""

from __future__ import annotations

from collections.abc import Collection

import attrs

from llmgw.plane.checks import Need
from llmgw.plane.gang import Replica, member_id, replica_of
from llmgw.plane.members import Choice
from llmgw.plane.place import Rooms
from llmgw.plane.steps import GiveUp, Start, Step
from llmgw.plane.world import Model, Reason, Settings, Shard, Want, World, slug
from llmgw.wire.facts import ModelName, NodeId, ReplicaId, ShardId, ShardSpec, ShardState


class Places:
    """The rooms are made only when something is to be placed: a settled fleet is planned without looking at them."""

    def __init__(self, world: World, now: float, settings: Settings) -> None:
        self._world, self._now, self._settings = world, now, settings
        self._rooms: Rooms | None = None
        self._left: list[Shard] = []
        self._refused: dict[Need, tuple[Reason, ...]] = {}
        self._members: dict[ReplicaId, int] = {}
        for shard in world.shards.values():
            self._members[shard.replica] = self._members.get(shard.replica, 0) + 1
        self._highest: dict[ReplicaId, int] | None = None
        self._ending: set[ReplicaId] | None = None
        self._dropped: dict[ReplicaId, int] = {}

    @property
    def rooms(self) -> Rooms:
        if self._rooms is None:
            self._rooms = Rooms(self._world, self._now, self._settings)
            for shard in self._left:
                self._rooms.release(shard, leaving=True)
        return self._rooms

    # What goes --------------------------------------------------------------------------------------------

    def drop(self, shard: Shard) -> None:
        """A placement is given up. Its replica's id is free when no member is left; what its node measured of it before
        it ended is nobody's load any more."""
        self._left.append(shard)
        self._members[shard.replica] -= 1
        self._dropped[shard.replica] = max(self._dropped.get(shard.replica, 0), shard.generation)
        if self._rooms is not None:
            self._rooms.release(shard, leaving=True)

    # Choosing ---------------------------------------------------------------------------------------------

    def choose(self, model: Model, avoid: Collection[NodeId] = ()) -> Choice | None:
        """Where one more replica goes, to none of `avoid`."""
        need = Need.of(model)
        if need in self._refused:
            return None  # nothing was released since: it would be refused again
        choice = _whole(self.rooms.choose(need, model.name, avoid=avoid), need)
        if choice is None and not avoid:
            self.refused(model)
        return choice

    def here(self, replica: Replica, model: Model) -> Choice | None:
        """The same nodes again, cordoned or not; None when it fits there no more."""
        need = Need.of(model)
        if len(replica.members) != need.nodes:
            return None
        return _whole(self.rooms.here(replica.members, need), need)

    def instead(self, replica: Replica, model: Model, avoid: Collection[NodeId] = ()) -> Choice | None:
        """Where this replica may go while its present places count as free, none of `avoid`."""
        need = Need.of(model)
        if not replica.gang:
            return _whole(self.rooms.choose(need, model.name, avoid=avoid), need)
        for member in replica.members:
            self.rooms.release(member, leaving=True)
        choice = _whole(self.rooms.choose(need, model.name, avoid=avoid), need)
        for member in replica.members:
            self.rooms.hold(member)
        return choice

    def refused(self, model: Model) -> tuple[Reason, ...]:
        """Why no node takes a replica of the model."""
        need = Need.of(model)
        if need not in self._refused:
            self._refused[need] = self.rooms.refused(need)
        return self._refused[need]

    # Starting ---------------------------------------------------------------------------------------------

    def start(self, model: Model, choice: Choice) -> tuple[Step, ...]:
        """A new replica there."""
        replica = self._free_id(model.name)
        generation = self._newest(replica) + 1
        steps = []
        for rank, spec in enumerate(specs(model, choice)):
            shard = Shard(
                id=member_id(replica, rank),
                replica=replica,
                model=model.name,
                rank=rank,
                node=choice.members[rank].node,
                generation=generation,
                spec=spec,
                revision=model.revision,
                why=choice.why,
            )
            self.rooms.hold(shard)
            steps.append(Start(shard, choice.why))
        self._members[replica] = len(steps)
        return tuple(steps)

    def again(self, model: Model, replica: Replica, choice: Choice, why: str, *, moved: bool) -> tuple[Step, ...]:
        """The next attempt of a replica there: all members at the next generation, and none of them left elsewhere."""
        generation = max(replica.generation, self._newest(replica.id)) + 1
        for member in replica.members:
            self.rooms.release(member)
        known = {member.rank: member for member in replica.members}
        like = replica.leader
        steps: list[Step] = []
        for rank, spec in enumerate(specs(model, choice)):
            before = known.pop(rank) if rank in known else attrs.evolve(like, first_failure=None, last_failure=None)
            following = attrs.evolve(
                before,
                id=member_id(replica.id, rank),
                rank=rank,
                node=choice.members[rank].node,
                generation=generation,
                spec=spec,
                revision=model.revision,
                want=Want.RUN,
                why=why,
                status=None,
                status_at=None,
                ready_at=None,
                not_before=None,
                failed_here=0 if moved else like.failed_here,
            )
            if model.revision != replica.revision:
                # Another profile: what the one before met with is no measure of it.
                following = attrs.evolve(following, restarts=0, failed_here=0, first_failure=None, last_failure=None)
            self.rooms.hold(following)
            steps.append(Start(following, why))
        over = f"{replica.id} takes {len(choice.members)} nodes now"
        steps += [GiveUp(member.id, over) for member in known.values()]
        self._members[replica.id] = len(choice.members)
        return tuple(steps)

    def _free_id(self, model: ModelName) -> ReplicaId:
        if self._ending is None:
            strays = self._world.strays.items()
            self._ending = {replica_of(id) for (_, id), one in strays if one.status.state is ShardState.STOPPING}
        number = 0
        while self._members.get(id := ReplicaId(f"{slug(model)}-{number}")) or id in self._ending:
            number += 1  # what still ends may hang, and would be in its way
        return id

    def _newest(self, replica: ReplicaId) -> int:
        """The highest generation of any member that is retired, dropped just now, or runs as a stray."""
        if self._highest is None:
            self._highest = {}
            for id, generation in self._world.retired.items():
                self._heard(id, generation)
            for (_, id), stray in self._world.strays.items():
                self._heard(id, stray.status.generation)
        return max(self._world.floor, self._highest.get(replica, 0), self._dropped.get(replica, 0))

    def _heard(self, id: ShardId, generation: int) -> None:
        assert self._highest is not None
        replica = replica_of(id)
        self._highest[replica] = max(self._highest.get(replica, 0), generation)


def _whole(choice: Choice | None, need: Need) -> Choice | None:
    return choice if choice is not None and len(choice.members) == need.nodes else None


def specs(model: Model, choice: Choice) -> tuple[ShardSpec, ...]:
    """How to run each member of a replica, by rank."""
    profile, members = model.profile, choice.members
    several = len(members) > 1
    peers = tuple(member.address for member in members) if several else ()
    peer_ports = tuple(dict(member.ports) for member in members) if several else ()
    return tuple(
        ShardSpec(
            engine=profile.engine,
            model=model.name,
            source=profile.source,
            engine_version=choice.version or profile.engine_version,
            args=profile.args,
            env=profile.env,
            resources=profile.resources,
            gpus=member.gpus,
            context=profile.context,
            rank=rank,
            peers=peers,
            ports=dict(member.ports),
            ready_within=profile.ready_within,
            grace=profile.grace,
            peer_ports=peer_ports,
            network=dict(member.network),
            rdma=member.rdma,
        )
        for rank, member in enumerate(members)
    )

"""A replica as one thing: the shards that are its members, how it stands, what is wrong with its attempt.

Pure. A replica of one node has one member, and everything here holds for it as well. All members of an attempt carry
the same generation: any that ends, ends the attempt, and the whole replica begins the next one (D4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from llmgw.plane.world import ENDED, Node, Shard, Stage, Stray, Want, World
from llmgw.wire.facts import InstallState, ModelName, NodeId, ReplicaId, ShardId, ShardState

#: How long after `ready_within` the plane still waits, in seconds: a node's own word of a failure says more.
MARGIN = 30.0

#: SIGKILL was long ago when a shard is still ending so many seconds after its grace: it hangs in a driver or a disk.
HANGS = 60.0
_ENDING = (ShardState.STOPPING, ShardState.UNKNOWN)


@attrs.frozen
class Replica:
    """All shards of one replica id, by rank."""

    id: ReplicaId
    members: tuple[Shard, ...]

    @property
    def leader(self) -> Shard:
        """The member with the lowest rank: rank 0 unless that is no more."""
        return self.members[0]

    @property
    def model(self) -> ModelName:
        return self.members[0].model

    @property
    def revision(self) -> int:
        return self.members[0].revision

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return (self.members[0].node,) if len(self.members) == 1 else tuple(member.node for member in self.members)

    @property
    def gang(self) -> bool:
        return size(self.members[0]) > 1 or len(self.members) > 1

    @property
    def runs(self) -> bool:
        """Whether every member is wanted to run."""
        return all(member.want is Want.RUN for member in self.members)

    @property
    def generation(self) -> int:
        return max(member.generation for member in self.members)

    @property
    def sound(self) -> bool:
        """Whether its members make one attempt: every rank once, at one generation, of one model and revision.

        Others come from a store of another version. They are stopped, and placed anew.
        """
        first = self.members[0]
        if len(self.members) == 1:
            return first.rank == 0 and len(first.spec.peers) <= 1
        return (
            tuple(member.rank for member in self.members) == tuple(range(len(self.members)))
            and all(member.id == member_id(self.id, member.rank) for member in self.members)
            and all(len(member.spec.peers) == len(self.members) for member in self.members)
            and len({(member.generation, member.model, member.revision) for member in self.members}) == 1
        )

    @property
    def ready(self) -> bool:
        """Whether it serves, as far as its nodes have said."""
        for member in self.members:
            if member.state is not ShardState.READY:
                return False
        return len(self.members) == 1 or self.sound

    @property
    def broken(self) -> bool:
        """Whether its attempt is over: a member has ended, or it was given up while some of them still run."""
        if len(self.members) == 1:
            return ended(self.members[0])
        return any(ended(member) or counted(member) for member in self.members)

    @property
    def blamed(self) -> Shard:
        """The member that failed first, which is the cause; the others went with it."""
        failed = [member for member in self.members if counted(member)]
        if failed and self.gang:
            return min(failed, key=lambda m: (m.last_failure.clock if m.last_failure else 0.0, m.rank))
        return next((member for member in self.members if ended(member)), self.members[0])


def ended(shard: Shard) -> bool:
    return shard.status is not None and shard.state in ENDED


def counted(shard: Shard) -> bool:
    """Whether a failure of this very attempt is on the shard's record."""
    return shard.last_failure is not None and shard.last_failure.generation == shard.generation


def size(shard: Shard) -> int:
    """How many members the replica of this shard has."""
    return max(1, len(shard.spec.peers))


def member_id(replica: ReplicaId, rank: int) -> ShardId:
    return ShardId(f"{replica}-{rank}")


def replica_of(shard: ShardId) -> ReplicaId:
    """The replica that a shard's id names, known or not."""
    return ReplicaId(shard.rpartition("-")[0])


def mates(world: World, shard: Shard) -> Iterator[Shard]:
    """The other members of a shard's replica, by rank."""
    for rank in range(len(shard.spec.peers)):
        other = world.shards.get(member_id(shard.replica, rank))
        if other is not None and other.id != shard.id and other.replica == shard.replica:
            yield other


def replicas(shards: Iterable[Shard]) -> list[Replica]:
    """Shards by replica: by model, then by number, so that tiny-10 comes after tiny-9."""
    by_id: dict[ReplicaId, list[Shard]] = {}
    for shard in shards:
        by_id.setdefault(shard.replica, []).append(shard)
    found = []
    for id, members in by_id.items():
        if len(members) > 1:
            members.sort(key=lambda member: (member.rank, member.id))
        found.append(Replica(id, tuple(members)))
    found.sort(key=order)
    return found


def order(replica: Replica) -> tuple[str, int, str]:
    number = replica.id.rpartition("-")[2]
    return replica.model, int(number) if number.isdecimal() else 0, replica.id


def leads(world: World, shard: Shard) -> Shard | None:
    """The leading shard of the replica in which this one follows; None where it leads itself, or no leader is left."""
    if shard.rank == 0:
        return None
    leader = world.shards.get(member_id(shard.replica, 0))
    return leader if leader is not None and leader.replica == shard.replica else None


def hears(world: World, id: NodeId) -> bool:
    """Whether a node can be told anything. A lost one with a stream is told when it speaks again, and then at once."""
    node = world.nodes.get(id)
    return node is not None and node.connected and node.stage is not Stage.LOST


def heard(shard: Shard) -> bool:
    """Whether a node has said anything of a shard as it is meant now."""
    return shard.status is not None and shard.status.generation == shard.generation


def in_the_way(world: World, shard: Shard) -> Stray | None:
    """What of an older generation of its replica must end before this member may start.

    That is the leader, wherever it runs, and any other member on this node, whose memory this one is to have. What
    cannot be told to stop is not waited for.
    """
    if size(shard) < 2:
        return None
    leader = member_id(shard.replica, 0)
    found = [
        (key, stray)
        for key, stray in world.strays.items()
        if (key[1] == leader or (key[0] == shard.node and replica_of(key[1]) == shard.replica))
        and key[1] != shard.id
        and stray.status.generation < shard.generation
        and hears(world, key[0])
    ]
    return min(found)[1] if found else None


def ends_by(world: World, shard: Shard) -> float | None:
    """Until when a shard that is ending has to have ended; None for others, and where nothing is heard of its node."""
    if shard.state not in _ENDING or shard.status_at is None or not _speaks(world, shard.node):
        return None
    return shard.status_at + shard.spec.grace + HANGS


def hanging(world: World, replica: Replica) -> tuple[float, str] | None:
    """When it is plain that a replica gets no further, since a process does not end that stands for it or in its way;
    and in words which one.

    Nothing can end such a process but a reboot, and a shard has no second place while it lives (D4).
    """
    found: list[tuple[float, str]] = []
    for member in replica.members:
        if (due := ends_by(world, member)) is not None:
            found.append((due, f"what runs of {member.id} on {member.node} does not end"))
        elif not heard(member) and world.strays:
            stray = world.strays.get((member.node, member.id)) or in_the_way(world, member)
            if stray is not None and stray.status.state in _ENDING and _speaks(world, stray.node):
                words = f"what runs of {stray.status.shard} on {stray.node} does not end"
                found.append((stray.at + member.spec.grace + HANGS, words))
    return min(found, default=None)


def _speaks(world: World, id: NodeId) -> bool:
    node = world.nodes.get(id)
    return node is not None and node.stage is Stage.READY and node.connected


def _waits_for_engine(member: Shard, node: Node) -> bool:
    """Whether a member may still wait for its engine to be installed: that may take an hour, and nobody is late."""
    status = member.status
    if status is None or status.generation != member.generation or status.pid is not None or node.facts is None:
        return False
    installs = node.facts.installs
    return any(i.engine == member.spec.engine and i.state is InstallState.INSTALLING for i in installs)


def overdue(world: World, leader: Shard, now: float) -> tuple[Shard, str] | None:
    """The member for which a replica of several nodes has waited too long, and in words how it stands.

    The time runs from when the last member began to start: fetching weights and waiting for an engine that is being
    installed do not count, and while a node is silent D1 judges it. Members that were told nothing yet wait for
    others, which are the ones to blame.
    """
    members = [leader, *mates(world, leader)]
    if any(member.want is not Want.RUN or ended(member) or counted(member) for member in members):
        return None
    late: Shard | None = None
    began = float("-inf")
    for member in members:
        node = world.nodes.get(member.node)
        if node is None or node.stage is not Stage.READY or not node.connected:
            return None
        state = member.state
        if state is ShardState.FETCHING or _waits_for_engine(member, node):
            return None
        if state is ShardState.READY:
            since = member.ready_at
        else:
            since = member.status_at if heard(member) else member.want_at
            if late is None or late.rank == 0:
                late = member  # the leader only when no follower is: it may still wait for them
        began = max(began, node.stage_at, node.stage_at if since is None else since)
    if late is None or now - began < leader.spec.ready_within + MARGIN:
        return None
    known = heard(late)
    how = late.state.value if known else "not heard of since it was told to start"
    if known and late.status is not None and late.status.detail:
        how += f" ({late.status.detail})"
    elif not known and (older := in_the_way(world, late)) is not None:
        how = f"not told to start while {older.status.shard} of generation {older.status.generation} still runs"
        how += f" on {older.node} ({older.status.state.value})"
    return late, f"{late.id} on {late.node} is {how}"

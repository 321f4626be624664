"""What each node should be told now, and whether it was told already.

The commands follow from the world alone, so that none can be lost: a shard whose status does not show what is
wanted is told again, over each new stream and after a while over the same one. Commands are idempotent (A9).

The members of a replica of several nodes are told in an order: followers start first, the leader when all of them are
ready, and rank 0 stops first, since a follower may not let go of its work before. What is left of an attempt that is
over is told to stop while the next one waits for its time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from llmgw.plane.checks import SILENT_INSTALLS, brought, carries
from llmgw.plane.gang import Replica, heard, hears, in_the_way, replicas, size
from llmgw.plane.world import Node, Shard, Want, World
from llmgw.wire.control import DrainShard, FetchWeights, Provision, StartShard, StopShard
from llmgw.wire.facts import EngineInstall, EnginePackage, NodeId, ShardId, ShardState

#: A fetch has failed, or has long been on its way without a word: so many seconds later it is told again.
FETCH_AGAIN = 300.0

_NO_PACKAGES: Mapping[str, EnginePackage] = {}

Command = StartShard | StopShard | DrainShard | FetchWeights
#: The node, and what the command is about: a shard, or weights that are brought ahead of it.
Key = tuple[NodeId, str]


def commands(world: World) -> dict[Key, Command]:
    """What every connected node should be told of shards, by node and shard."""
    found: dict[Key, Command] = {}
    for key, stray in world.strays.items():
        if hears(world, stray.node):
            found[key] = stop_stray(world, key)
    several: list[Shard] = []
    for shard in world.shards.values():
        if shard.rank or size(shard) > 1:
            several.append(shard)
            continue
        if not hears(world, shard.node):
            continue
        command = _command(shard)
        if command is not None:
            # Over a stop of an older generation: a start replaces what runs there (C4).
            found[shard.node, shard.id] = command
    if several:
        for replica in replicas(several):
            for shard in replica.members:
                if hears(world, shard.node) and (command := _of_several(world, replica, shard)) is not None:
                    found[_key(shard.node, command)] = command
    for node, source in world.ahead:
        if hears(world, node) and not _comes(world.nodes[node], source):
            command = FetchWeights(source=source)
            found[_key(node, command)] = command
    return found


def _key(node: NodeId, command: Command) -> Key:
    return node, f"weights {command.source}" if isinstance(command, FetchWeights) else command.shard


def stop_stray(world: World, key: tuple[NodeId, ShardId]) -> StopShard:
    status = world.strays[key].status
    shard = world.shards.get(key[1])
    why = (
        "nothing claims this shard" if shard is None else f"it belongs to {shard.node} at generation {shard.generation}"
    )
    return StopShard(shard=status.shard, generation=status.generation, why=why)


def provision(
    world: World,
    node: NodeId,
    engines: Iterable[EngineInstall],
    packages: Mapping[str, EnginePackage] = _NO_PACKAGES,
) -> Provision:
    """The engines a node should have, of those it can install: configured ones and those of wanted models (A7).

    Where a package comes from may be all that keeps a node from installing it, such as a build for CPUs: of those the
    node is told, too, and says itself what it cannot have.
    """
    facts = world.nodes[node].facts
    installable = SILENT_INSTALLS if facts is None or facts.installable is None else {*facts.installable, *packages}
    wanted = {(engine.engine, engine.version) for engine in engines}
    asked = {(model.profile.engine, model.profile.engine_version) for model in world.models.values()}
    wanted |= {(engine, version) for engine, version in asked if version}
    # Any version is one of those, where there are some.
    named = {engine for engine, _ in wanted}
    wanted |= {(engine, "") for engine, version in asked if not version and engine not in named}
    return Provision(
        engines=tuple(EngineInstall(engine=e, version=v) for e, v in sorted(wanted) if e in installable),
        preferred={one.engine: one.version for one in engines if one.version},
        packages={engine: package for engine, package in sorted(packages.items()) if engine in installable},
    )


def _command(shard: Shard) -> Command | None:
    match shard.want:
        case Want.RUN:
            return None if heard(shard) else _start(shard)
        case Want.DRAIN:
            return _drain(shard)
        case Want.STOP:
            return _stop(shard, shard.why)


def _of_several(world: World, replica: Replica, shard: Shard) -> Command | None:
    """The same for a member of a replica of several nodes."""
    leads = shard.rank == 0
    match shard.want:
        case Want.RUN if replica.runs and not replica.broken:
            if heard(shard) or in_the_way(world, shard) is not None:
                return None
            if not carries(world.nodes[shard.node]):
                return None  # its agent was taken back since this was placed: it would start an engine by itself
            if not leads:
                return _start(shard)
            if replica.sound and all(member.state is ShardState.READY for member in replica.members[1:]):
                return _start(shard)
            return _fetch(world, shard)
        case Want.DRAIN:
            return _drain(shard) if leads else None
        case _:
            first = replica.leader
            leader_runs = first.rank == 0 and heard(first) and first.state.alive and hears(world, first.node)
            if leader_runs and not leads:
                return None
            why = shard.why if shard.want is Want.STOP else f"generation {shard.generation} of {replica.id} is over"
            return _stop(shard, why)


def _start(shard: Shard) -> StartShard:
    return StartShard(
        shard=shard.id, replica=shard.replica, model=shard.model, generation=shard.generation, spec=shard.spec
    )


def _drain(shard: Shard) -> DrainShard | None:
    if not heard(shard) or shard.state is not ShardState.READY:
        return None
    return DrainShard(shard=shard.id, generation=shard.generation, why=shard.why)


def _stop(shard: Shard, why: str) -> StopShard | None:
    if not shard.state.alive or shard.state is ShardState.STOPPING:
        return None
    return StopShard(shard=shard.id, generation=shard.generation, why=why)


def _fetch(world: World, leader: Shard) -> FetchWeights | None:
    """Weights that the leader's node can fetch while the followers start; one that failed is left to the start."""
    source, node = leader.spec.source, world.nodes[leader.node]
    held = () if node.facts is None else node.facts.weights
    failed = any(weights.source == source and weights.error for weights in held)
    return None if failed or _comes(node, source) else FetchWeights(source=source)


def _comes(node: Node, source: str) -> bool:
    """Whether weights are on a node, or on their way there."""
    held = () if node.facts is None else node.facts.weights
    return brought(node, source) or any(weights.source == source and weights.fetching for weights in held)


@attrs.frozen
class _Sent:
    command: Command
    stream: int
    at: float


class Told:
    """Which commands were sent over which stream, and when."""

    def __init__(self, resend: float) -> None:
        self._resend = resend
        self._sent: dict[Key, _Sent] = {}

    def due(self, wanted: Mapping[Key, Command], world: World, now: float) -> tuple[tuple[NodeId, Command], ...]:
        """Those not sent yet over the node's stream, or so long ago without effect that they are sent again."""
        for key in [key for key in self._sent if key not in wanted]:
            del self._sent[key]
        found: list[tuple[NodeId, Command]] = []
        for key in sorted(wanted):
            command, sent = wanted[key], self._sent.get(key)
            every = self._resend if not isinstance(command, FetchWeights) else max(self._resend, FETCH_AGAIN)
            if (
                sent is None
                or sent.command != command
                or sent.stream != world.nodes[key[0]].stream
                or now - sent.at >= every
            ):
                found.append((key[0], command))
        return tuple(found)

    def sent(self, node: NodeId, command: Command, stream: int, now: float) -> None:
        self._sent[_key(node, command)] = _Sent(command, stream, now)

"""What each node should be told now, and whether it was told already.

The commands follow from the world alone, so that none can be lost: a shard whose status does not show what is
wanted is told again, over each new stream and after a while over the same one. Commands are idempotent (A9).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from llmgw.plane.checks import SILENT_INSTALLS
from llmgw.plane.world import Shard, Stage, Want, World
from llmgw.wire.control import DrainShard, Provision, StartShard, StopShard
from llmgw.wire.facts import EngineInstall, NodeId, ShardId, ShardState

Command = StartShard | StopShard | DrainShard
Key = tuple[NodeId, ShardId]


def commands(world: World) -> dict[Key, Command]:
    """What every connected node should be told of shards, by node and shard."""
    found: dict[Key, Command] = {}
    for key, stray in world.strays.items():
        if _hears(world, stray.node):
            found[key] = stop_stray(world, key)
    for shard in world.shards.values():
        if not _hears(world, shard.node):
            continue
        command = _command(shard)
        if command is not None:
            # Over a stop of an older generation: a start replaces what runs there (C4).
            found[shard.node, shard.id] = command
    return found


def _hears(world: World, id: NodeId) -> bool:
    # A lost node with a stream is told when it speaks again, and then at once.
    node = world.nodes.get(id)
    return node is not None and node.connected and node.stage is not Stage.LOST


def stop_stray(world: World, key: Key) -> StopShard:
    status = world.strays[key].status
    shard = world.shards.get(key[1])
    why = (
        "nothing claims this shard" if shard is None else f"it belongs to {shard.node} at generation {shard.generation}"
    )
    return StopShard(shard=status.shard, generation=status.generation, why=why)


def provision(world: World, node: NodeId, engines: Iterable[EngineInstall]) -> Provision:
    """The engines a node should have, of those it can install: configured ones and those of wanted models (A7)."""
    facts = world.nodes[node].facts
    installable = SILENT_INSTALLS if facts is None or facts.installable is None else facts.installable
    wanted = {(engine.engine, engine.version) for engine in engines}
    for model in world.models.values():
        named = (model.profile.engine, model.profile.engine_version)
        if named[1] or all(engine != named[0] for engine, _ in wanted):
            wanted.add(named)
    return Provision(engines=tuple(EngineInstall(engine=e, version=v) for e, v in sorted(wanted) if e in installable))


def _command(shard: Shard) -> Command | None:
    heard = shard.status is not None and shard.status.generation == shard.generation
    state = shard.state
    match shard.want:
        case Want.RUN:
            if heard:
                return None
            return StartShard(
                shard=shard.id, replica=shard.replica, model=shard.model, generation=shard.generation, spec=shard.spec
            )
        case Want.DRAIN:
            if not heard or state is not ShardState.READY:
                return None
            return DrainShard(shard=shard.id, generation=shard.generation, why=shard.why)
        case Want.STOP:
            if not state.alive or state is ShardState.STOPPING:
                return None
            return StopShard(shard=shard.id, generation=shard.generation, why=shard.why)


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
            if (
                sent is None
                or sent.command != command
                or sent.stream != world.nodes[key[0]].stream
                or now - sent.at >= self._resend
            ):
                found.append((key[0], command))
        return tuple(found)

    def sent(self, node: NodeId, command: Command, stream: int, now: float) -> None:
        self._sent[node, command.shard] = _Sent(command, stream, now)

    def next(self) -> float | None:
        """When the first command is sent again, on the monotonic clock."""
        return min((sent.at for sent in self._sent.values()), default=None)

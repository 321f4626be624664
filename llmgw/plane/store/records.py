"""What of the world is stored, to readable JSON and back. Pure.

Only what cannot be seen again: wanted models, placements with their failures, what operators said of nodes, since
when a problem is there, the highest generations of shards that are no more. What a node tells (status, inventory,
load) is not in it. What engines took of memory at most can be seen again, but only by running them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import msgspec
from immutables import Map
from msgspec import Struct

from llmgw.errors import Conflict
from llmgw.plane.world import Ack, Failure, Inventory, Learned, Model, Node, OpenProblem, Shard, Stage, Want, World
from llmgw.wire.facts import ModelName, NodeId, Problem, ReplicaId, ShardId, ShardSpec

S = TypeVar("S")

#: The prefixes under which the world lies; events and certificates have their own.
MODELS, NODES, SHARDS, RETIRED = "models/", "nodes/", "shards/", "retired/"
LEARNED = "learned/"
FLOOR = "floor/generation"
EPOCH = "plane/epoch"


class AckRecord(Struct, frozen=True, omit_defaults=True):
    subject: str
    code: str
    until_clock: float


class ProblemRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An open problem and since when: its age goes on over a restart of the plane, and it does not open twice."""

    problem: Problem
    first_clock: float
    by_plane: bool = False


class NodeRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node that has joined, and what operators said of it. `lost` outlives a restart, so that nobody waits for it."""

    cordoned: bool = False
    draining: bool = False
    lost: bool = False
    labels: dict[str, str] = {}
    acks: tuple[AckRecord, ...] = ()
    first_clock: float = 0.0
    expected: Inventory | None = None
    problems: tuple[ProblemRecord, ...] = ()
    drain_within: float | None = None


class ShardRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A placement (D4)."""

    replica: ReplicaId
    model: ModelName
    node: NodeId
    generation: int
    spec: ShardSpec
    revision: int
    rank: int = 0
    want: Want = Want.RUN
    why: str = ""
    placed_clock: float = 0.0
    restarts: int = 0
    failed_here: int = 0
    first_failure: Failure | None = None
    last_failure: Failure | None = None
    want_clock: float = 0.0


def node_record(node: Node) -> NodeRecord:
    return NodeRecord(
        cordoned=node.cordoned,
        draining=node.draining,
        lost=node.stage is Stage.LOST,
        labels=dict(sorted(node.labels.items())),
        acks=tuple(AckRecord(*key, until_clock=ack.until_clock) for key, ack in sorted(node.acks.items())),
        first_clock=node.first_clock,
        expected=node.expected,
        problems=tuple(
            ProblemRecord(problem=open_.problem, first_clock=open_.first_clock, by_plane=open_.by_plane)
            for _, open_ in sorted(node.problems.items())
        ),
        drain_within=node.drain_within,
    )


def shard_record(shard: Shard) -> ShardRecord:
    return ShardRecord(
        replica=shard.replica,
        model=shard.model,
        node=shard.node,
        generation=shard.generation,
        spec=shard.spec,
        revision=shard.revision,
        rank=shard.rank,
        want=shard.want,
        why=shard.why,
        placed_clock=shard.placed_clock,
        restarts=shard.restarts,
        failed_here=shard.failed_here,
        first_failure=shard.first_failure,
        last_failure=shard.last_failure,
        want_clock=shard.want_clock,
    )


class Stored:
    """What the store holds of the world, so that a commit writes only what differs.

    Values are compared by identity first: of a thousand shards only those that were replaced are looked at.
    """

    def __init__(self) -> None:
        self._seen: dict[str, object] = {}
        self._bytes: dict[str, bytes] = {}

    def difference(self, world: World) -> tuple[dict[str, bytes], tuple[str, ...], dict[str, object]]:
        """What to put and to delete so that the store holds this world; a mark for `written`."""
        puts: dict[str, bytes] = {}
        seen: dict[str, object] = {}

        def look(key: str, value: object, mark: object, record: Callable[[], object]) -> None:
            seen[key] = mark
            if self._seen.get(key) == mark:
                return
            data = msgspec.json.encode(record())
            if self._bytes.get(key) != data:
                puts[key] = data

        for model in world.models.values():
            look(MODELS + model.name, model, model, lambda model=model: model)  # type: ignore[misc]
        for node in world.nodes.values():
            lost = node.stage is Stage.LOST
            # Loads replace a node with every heartbeat; what is stored of it hardly ever changes.
            steered = (node.cordoned, node.draining, node.drain_within)
            mark = (steered, lost, node.labels, node.acks, node.expected, _gist(node))
            look(NODES + node.id, node, mark, lambda node=node: node_record(node))  # type: ignore[misc]
        for shard in world.shards.values():
            look(SHARDS + shard.id, shard, _Same(shard), lambda shard=shard: shard_record(shard))  # type: ignore[misc]
        for name, learned in world.learned.items():
            look(LEARNED + name, learned, learned, lambda learned=learned: learned)  # type: ignore[misc]
        for id, generation in world.retired.items():
            look(RETIRED + id, generation, generation, lambda generation=generation: generation)  # type: ignore[misc]
        if world.floor:
            look(FLOOR, world.floor, world.floor, lambda: world.floor)
        return puts, tuple(key for key in self._bytes if key not in seen), seen

    def written(self, puts: Mapping[str, bytes], deletes: Iterable[str], seen: dict[str, object]) -> None:
        """The commit of a difference has succeeded."""
        self._seen = seen
        self._bytes.update(puts)
        for key in deletes:
            self._bytes.pop(key, None)

    def loaded(self, values: Mapping[str, bytes]) -> None:
        self._bytes.update(values)


def _gist(node: Node) -> frozenset[tuple[tuple[str, str], str, float]]:
    """Which problems are open, how bad, since when: their words alone are no reason to write."""
    if not node.problems:
        return frozenset()
    return frozenset((key, open_.problem.grade.value, open_.first_clock) for key, open_ in node.problems.items())


class _Same:
    """Equal only to a mark of the very same object."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


def world_of(values: Mapping[str, bytes], now: float, clock: float) -> World:
    """The world as it was stored: nodes are expected back, and nothing was heard of any shard yet.

    Raises Conflict for a record that cannot be read: guessing at placements could make two of one shard.
    """
    models, nodes, shards, retired, learned = {}, {}, {}, {}, {}
    floor = _read(FLOOR, values[FLOOR], int) if FLOOR in values else 0
    for key, value in values.items():
        if key.startswith(MODELS):
            model = _read(key, value, Model)
            models[model.name] = model
        elif key.startswith(NODES):
            id = NodeId(key.removeprefix(NODES))
            nodes[id] = _node(id, _read(key, value, NodeRecord), now, clock)
        elif key.startswith(SHARDS):
            shard = _shard(ShardId(key.removeprefix(SHARDS)), _read(key, value, ShardRecord), now, clock)
            shards[shard.id] = shard
        elif key.startswith(RETIRED):
            retired[ShardId(key.removeprefix(RETIRED))] = _read(key, value, int)
        elif key.startswith(LEARNED):
            learned[key.removeprefix(LEARNED)] = _read(key, value, Learned)
    return World(
        nodes=Map(nodes),
        models=Map(models),
        shards=Map(shards),
        retired=Map(retired),
        floor=floor,
        learned=Map(learned),
        version=1,
    )


def _node(id: NodeId, record: NodeRecord, now: float, clock: float) -> Node:
    acks = {
        (ack.subject, ack.code): Ack(now + ack.until_clock - clock, ack.until_clock)
        for ack in record.acks
        if ack.until_clock > clock
    }
    problems = {
        (kept.problem.subject, kept.problem.code): OpenProblem(
            problem=kept.problem,
            first_at=now + kept.first_clock - clock,
            last_at=now,
            first_clock=kept.first_clock,
            acknowledged_until=ack.until_at if (ack := acks.get((kept.problem.subject, kept.problem.code))) else None,
            by_plane=kept.by_plane,
        )
        for kept in record.problems
    }
    return Node(
        id=id,
        stage=Stage.LOST if record.lost else Stage.EXPECTED,
        stage_at=now,
        cordoned=record.cordoned,
        draining=record.draining,
        drain_within=record.drain_within,
        labels=Map(record.labels),
        acks=Map(acks),
        first_clock=record.first_clock,
        expected=record.expected,
        problems=Map(problems),
    )


def _shard(id: ShardId, record: ShardRecord, now: float, clock: float) -> Shard:
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    # What it still serves has its time, however often the plane starts anew meanwhile.
    finishing = record.want is Want.DRAIN and record.want_clock > 0
    return Shard(id=id, want_at=now - max(0.0, clock - record.want_clock) if finishing else None, **fields)


def _read(key: str, value: bytes, kind: type[S]) -> S:
    try:
        return msgspec.json.decode(value, type=kind)
    except msgspec.MsgspecError as error:
        raise Conflict(
            f"the stored record {key!r} cannot be read: {error}",
            remedy="restore the state from a backup, or upgrade the plane if a newer one wrote it",
        ) from None


__all__ = [
    "EPOCH",
    "FLOOR",
    "LEARNED",
    "MODELS",
    "NODES",
    "RETIRED",
    "SHARDS",
    "NodeRecord",
    "ShardRecord",
    "Stored",
    "world_of",
]

"""What the plane knows and wants, as one frozen value (D5).

A `World` is replaced, never changed; the one that counts lies in a `Cell` with a single writer. Times
named `*_at` are the plane's monotonic clock in seconds, at receipt (D1); times named `*_clock` are
Unix seconds and only ever shown. Pure: no I/O, no clock, no log.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import attrs
from immutables import Map
from msgspec import Struct

from llmgw.wire.agent import Register, ShardStatus
from llmgw.wire.counters import unpack
from llmgw.wire.facts import (
    GpuLoad,
    GpuProcess,
    HostLoad,
    ModelName,
    NodeId,
    PortLoad,
    Problem,
    ReplicaId,
    Resources,
    ShardId,
    ShardLoad,
    ShardSpec,
    ShardState,
)

# --- wanted --------------------------------------------------------------------------------------------


class Profile(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a model is to be run: engine, arguments and what one shard needs.

    `source` is where the weights are; `nodes` is the number of shards of a replica.
    """

    engine: str
    source: str
    engine_version: str = ""
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    resources: Resources = Resources()
    context: int | None = None
    nodes: int = 1
    ready_within: float = 900.0
    grace: float = 30.0
    labels: dict[str, str] = {}  # a node must have these
    network: str = ""  # what joins its nodes: "rdma", "nvlink", "tcp"; "": RDMA or NVLink with GPUs, else TCP
    rails: int = 0  # so many rails must be up on every node; 0: all that its nodes have
    spread: str = ""  # a label by whose values its replicas are spread: "rack"
    apart: tuple[ModelName, ...] = ()  # models that never share a node with it


class Revision(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A profile that a model had, under the number that its shards carry. `clock`: since when."""

    revision: int
    profile: Profile
    clock: float = 0.0


class Model(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model somebody wants served, by so many replicas. `revision` is new with every change of its profile.

    `surge` replicas of a new profile may run beside the old ones while they are replaced; 0: one goes before one comes.
    `idle` unloads it after so many seconds without a request, and a request loads it again; 0: never. `history` holds
    the profiles before this one, the newest last: a roll back takes the last of them.
    """

    name: ModelName
    profile: Profile
    replicas: int = 1
    revision: int = 1
    surge: int = 1
    idle: float = 0.0
    history: tuple[Revision, ...] = ()


# --- nodes ---------------------------------------------------------------------------------------------


class Stage(StrEnum):
    """What silence makes of a node (D1). EXPECTED: known from the store, not yet heard of since we started (D3)."""

    EXPECTED = "expected"
    READY = "ready"
    UNREACHABLE = "unreachable"
    LOST = "lost"


@attrs.frozen
class OpenProblem:
    """A problem that is there now, and since when (B3)."""

    problem: Problem
    first_at: float
    last_at: float
    first_clock: float
    acknowledged_until: float | None = None
    by_plane: bool = False  # the plane found it: the node's own list does not clear it
    gone_at: float | None = None  # found by the plane and not there now: since when (it clears after a while)


class Inventory(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a node has, in numbers that can be compared. Ports are named by role and kind: "fabric ib".

    GPUs count though they cannot be read: the node tells that itself. `ports_up` counts active ports, `slowest` is the
    lowest rate among them in Gb/s, `nvlinks` what the best GPU of a model has up. `clock`: when it was confirmed.
    """

    gpus: dict[str, int] = {}
    ports: dict[str, int] = {}
    ports_up: dict[str, int] = {}
    slowest: dict[str, float] = {}
    nvlinks: dict[str, int] = {}
    memory_bytes: int = 0
    clock: float = 0.0


@attrs.frozen
class Ack:
    """An operator knows of a problem and takes the hardware as it is, until then (both clocks of the plane)."""

    until_at: float
    until_clock: float


@attrs.frozen
class Reading:
    """One port now, its last counters and the ones before, of which `rates.rates` makes numbers per second (B5)."""

    load: PortLoad
    at: float
    counters: Mapping[str, int] = {}
    before: Mapping[str, int] | None = None
    before_at: float = 0.0


@attrs.frozen
class Counts:
    """A node's ports at one moment, as a heartbeat gave them: the states, and the counters still packed."""

    at: float
    ports: tuple[PortLoad, ...]
    packed: bytes | None = None

    def of(self, device: str, number: int, names: tuple[str, ...]) -> tuple[PortLoad, Mapping[str, int]] | None:
        for at, port in enumerate(self.ports):
            if port.device == device and port.number == number:
                if self.packed is None:
                    return port, port.counters
                rows = unpack(self.packed, names)
                return port, rows[at] if at < len(rows) else {}
        return None


@attrs.frozen
class Readings:
    """A node's last two counts. Nothing is unpacked until somebody looks: a heartbeat brings hundreds of counters."""

    last: Counts = Counts(0.0, ())
    before: Counts | None = None
    names: tuple[str, ...] = ()

    def get(self, device: str, number: int) -> Reading | None:
        """A port's reading; None when the last list did not name it."""
        found = self.last.of(device, number, self.names)
        if found is None:
            return None
        earlier = self.before.of(device, number, self.names) if self.before is not None else None
        load, counters = found
        if earlier is None or self.before is None:
            return Reading(load, self.last.at, counters)
        return Reading(load, self.last.at, counters, earlier[1], self.before.at)


@attrs.frozen
class Node:
    """A machine as the plane knows it: what it registered, freshened by heartbeats, and what silence made of it.

    `facts` is the last Register with every list that a heartbeat gave since put in its place.
    """

    id: NodeId
    stage: Stage
    stage_at: float
    facts: Register | None = None
    facts_at: float | None = None
    connected: bool = False
    stream: int = 0  # which stream speaks for the node: the newest one (A6)
    heard_at: float | None = None
    peer_address: str = ""  # where its stream comes from
    cordoned: bool = False
    draining: bool = False
    labels: Map[str, str] = Map()
    load: HostLoad | None = None
    shard_loads: Map[ShardId, ShardLoad] = Map()
    gpu_loads: Map[str, GpuLoad] = Map()
    gpu_processes: tuple[GpuProcess, ...] = ()
    ports: Readings = Readings()
    problems: Map[tuple[str, str], OpenProblem] = Map()  # by (subject, code)
    acks: Map[tuple[str, str], Ack] = Map()  # as problems; one that comes and goes stays quiet
    masters: Map[tuple[str, int], str] = Map()  # the last known master SM's GUID, by port (B6)
    first_clock: float = 0.0
    clock_offset: float | None = None  # the node's wall clock less ours at receipt, in seconds: shown, never used
    expected: Inventory | None = None  # what an operator confirmed that the node has
    suspects: Map[tuple[str, str], float] = Map()  # what the plane finds and does not yet tell -> since when
    drain_within: float | None = None  # seconds that shards leaving it may finish; None: `Settings.drain`

    @property
    def address(self) -> str:
        """Where engines on this node are reached."""
        return (self.facts.address if self.facts else "") or self.peer_address

    @property
    def version(self) -> str:
        return self.facts.version if self.facts else ""


#: States after which there is no process any more.
ENDED = (ShardState.STOPPED, ShardState.FAILED)


# --- shards --------------------------------------------------------------------------------------------


class Want(StrEnum):
    """What the plane wants of a shard it placed."""

    RUN = "run"
    DRAIN = "drain"
    STOP = "stop"


@attrs.frozen
class Failure:
    """How an attempt ended; the first one of a crash loop is kept beside the last."""

    generation: int
    clock: float
    exit_code: int | None
    signal: str
    cause: str
    lines: tuple[str, ...] = ()
    node: str = ""  # where; "" in records of older planes


@attrs.frozen
class Shard:
    """One part of a replica: where it is placed, at which generation, and what was last heard of it.

    Placement (`node`, `generation`, `want`, `spec`, the failures) is stored before any command is sent, so
    that no crash can make two live generations (D4). `status` is the node's own word and is not stored.
    """

    id: ShardId
    replica: ReplicaId
    model: ModelName
    rank: int
    node: NodeId
    generation: int
    spec: ShardSpec
    revision: int  # of the model's profile it was made from
    want: Want = Want.RUN
    why: str = ""
    placed_clock: float = 0.0
    status: ShardStatus | None = None
    status_at: float | None = None
    ready_at: float | None = None
    restarts: int = 0
    not_before: float | None = None  # back-off: no new attempt earlier (monotonic)
    first_failure: Failure | None = None
    last_failure: Failure | None = None
    want_at: float | None = None  # since when `want` is what it is; None: since before the plane started
    failed_here: int = 0  # failures in a row on this node
    want_clock: float = 0.0  # `want_at` on the wall, of what is wanted to go: a restart of the plane moves no deadline

    @property
    def state(self) -> ShardState:
        """The node's word for this generation; STARTING until it said something."""
        if self.status is None or self.status.generation != self.generation:
            return ShardState.STARTING
        return self.status.state


def seen(shard: Shard, node: Node | None) -> ShardState:
    """How a shard stands as far as anybody can tell: UNKNOWN while its node is lost, or has yet to return."""
    if node is None or node.stage is Stage.LOST or (node.stage is Stage.EXPECTED and shard.status is None):
        return ShardState.UNKNOWN
    return shard.state


@attrs.frozen
class Stray:
    """A running shard that no placement claims, or an old generation: to be stopped (A7, D4). `at`: since when so."""

    node: NodeId
    status: ShardStatus
    at: float = 0.0


class Evidence(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the newest bandwidth test between two nodes found. `bad` rails did not work, or far below their ceiling.

    `clock` is the plane's wall clock at the test; its age is shown and judged against `Settings.evidence`. A rail is
    named by both of its ends, "gpu-07 mlx5_0/1". `at` is the moment of `clock` on the plane's monotonic clock.
    """

    clock: float
    bad: tuple[str, ...] = ()
    good: tuple[str, ...] = ()
    text: str = ""
    at: float | None = None
    figures: dict[str, str] = {}  # of bad ends: "12 Gb/s of 400"
    since: dict[str, float] = {}  # of ends that this test left out: the clock of the one that they were in


class Learned(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one shard of a kind took at most, in bytes: per GPU, and of the host's memory. `runs` that were measured."""

    gpu_bytes: int = 0
    memory_bytes: int = 0
    runs: int = 0
    clock: float = 0.0


@attrs.frozen
class Frozen:
    """Why no loss is decided now (D2, D3), since when, and until when if nothing new comes."""

    reason: str
    at: float
    until: float


@attrs.frozen
class World:
    """Everything. `version` grows with each change that matters to placement or routes, not with load."""

    nodes: Map[NodeId, Node] = Map()
    models: Map[ModelName, Model] = Map()
    shards: Map[ShardId, Shard] = Map()
    strays: Map[tuple[NodeId, ShardId], Stray] = Map()
    unplaced: Map[ModelName, Unplaced] = Map()
    frozen: Frozen | None = None
    settling_until: float | None = None  # D3: nothing is placed before, unless all have returned
    version: int = 0
    retired: Map[ShardId, int] = Map()  # the highest generation of shards that are no more: the id may come again (D4)
    floor: int = 0  # no shard that is no more, and is not in `retired`, had a higher generation
    masters_changed: Map[tuple[str, str], float] = Map()  # (from, to) GUIDs -> when: one event a fabric, not a port
    asked: Map[ModelName, float] = Map()  # models that are unloaded when idle -> when one was asked for last
    evidence: Map[tuple[NodeId, NodeId], Evidence] = Map()  # pairs of nodes by name -> the newest bandwidth test
    ahead: Map[tuple[NodeId, str], int] = Map()  # (node, source): brought before a rollout goes on -> bytes of disk
    learned: Map[str, Learned] = Map()  # what engines really took, by `memory.key` of how they were run


@attrs.frozen
class Reason:
    """Why one node does not take a shard: the check, the value there, the value needed, the age of the fact."""

    node: NodeId
    check: str
    value: str
    needed: str
    age: float | None = None  # seconds
    text: str = ""


@attrs.frozen
class Unplaced:
    """A model that has fewer replicas placed than wanted, and why (D7).

    `revision` is the profile that finds no place, which need not be the present one while a rollout is paused; None:
    that one.
    """

    model: ModelName
    wanted: int
    placed: int
    reasons: tuple[Reason, ...] = ()
    smallest_change: str = ""
    revision: int | None = None


@attrs.frozen
class Settings:
    """The numbers by which the plane judges; the defaults are the rules of D. Seconds, unless said otherwise."""

    unreachable_after: float = 15.0  # D1
    lost_after: float = 90.0  # D1
    settle: float = 30.0  # D3
    late: float = 3.0  # D2: how late the plane's own loop may be before it distrusts itself
    quiet: float = 90.0  # D2: after a start or a late loop
    together: float = 30.0  # D2: nodes that fall silent within this time fall silent together
    together_share: float = 0.2  # D2: of the fleet
    together_least: int = 2  # D2: one node alone is never "together"
    believe: float = 300.0  # D2: after so long without another change a common silence is believed
    drain: float = 30.0  # how long a draining shard may finish what it serves
    restart: float = 1.0  # the first delay of a crash loop, doubling
    restart_cap: float = 60.0
    hopeless: float = 30.0  # the first delay when a restart cannot mend the cause
    hopeless_cap: float = 600.0
    stable: float = 120.0  # a shard that was ready so long is no crash loop any more
    move_after: int = 3  # failures in a row on one node before another one is preferred
    evidence: float = 7 * 86400.0  # a bandwidth test older than this keeps no replica away
    pause_after: int = 2  # failures in a row of a new profile's replica pause its rollout
    resend: float = 10.0  # a command that shows no effect is told again
    tick: float = 1.0
    events_kept: int = 10_000


#: The rules as they are without configuration.
DEFAULT = Settings()


def slug(model: ModelName) -> str:
    """A model's name as ids of replicas and shards have it, which become names of files: without a slash."""
    return model.replace("/", "_")

"""Replicas and their members, as the admin API answers them: see `wire.api`."""

from __future__ import annotations

from msgspec import Struct

from llmgw.wire.apicommon import API


class FailureView(Struct, frozen=True, kw_only=True):
    """How one attempt ended, and on which node."""

    generation: int = 0
    clock: float = 0.0
    exit_code: int | None = None
    signal: str = ""
    cause: str = ""
    lines: tuple[str, ...] = ()
    node: str = ""


class ProgressView(Struct, frozen=True, kw_only=True):
    what: str = ""
    done: int = 0
    total: int | None = None


class ShardView(Struct, frozen=True, kw_only=True):
    """One engine process of a replica: where, in which state, since when, and what it uses.

    `want` is what the plane wants of it ("run", "drain", "stop"); `retry_in` is how long a restart still
    waits. `cpu_percent` is of one thread, so may pass 100. `network` is what the engine's log says its replica's
    members talk over, `warning` what is wrong and no end; `stop_in` how long a draining one may go on at most.
    """

    id: str = ""
    replica: str = ""
    model: str = ""
    rank: int = 0
    node: str = ""
    engine: str = ""
    generation: int = 0
    want: str = "run"
    why: str = ""
    state: str = "starting"
    detail: str = ""
    state_age: float | None = None
    ready_age: float | None = None
    placed_clock: float = 0.0
    address: str = ""
    port: int | None = None
    pid: int | None = None
    adopted: bool = False
    gpus: tuple[str, ...] = ()
    cpu_percent: float | None = None
    rss_bytes: int | None = None
    gpu_memory_bytes: int | None = None
    restarts: int = 0
    retry_in: float | None = None
    progress: ProgressView | None = None
    first_failure: FailureView | None = None
    last_failure: FailureView | None = None
    command: tuple[str, ...] = ()
    revision: int = 0
    network: str = ""
    warning: str = ""
    stop_in: float | None = None


class ReplicaView(Struct, frozen=True, kw_only=True):
    """One running copy of a model. `state` is that of its slowest shard; `in_flight` the gateway's requests to it.

    `revision` of the model's profile it was made from, `outdated` where another one is wanted; `generation` is the
    number of the attempt, `waiting` what it waits for now, in words.
    """

    id: str = ""
    model: str = ""
    state: str = "starting"
    nodes: tuple[str, ...] = ()
    address: str = ""
    port: int | None = None
    age: float | None = None
    ready_age: float | None = None
    restarts: int = 0
    cause: str = ""
    in_flight: int | None = None
    shards: tuple[ShardView, ...] = ()
    generation: int = 0
    revision: int = 0
    outdated: bool = False
    warning: str = ""
    waiting: str = ""


class ReplicasReply(Struct, frozen=True, kw_only=True):
    api: int = API
    replicas: tuple[ReplicaView, ...] = ()


class VariableView(Struct, frozen=True, kw_only=True):
    """A variable of an engine's environment. `by`: "plane" or "profile"; `instead` of what the plane would write."""

    name: str = ""
    value: str = ""
    by: str = "plane"
    instead: str = ""


class MemberView(Struct, frozen=True, kw_only=True):
    """One member of a replica, by rank; rank 0 leads. `ports` are those that the plane reserved, by purpose.

    `environment` is what the plane wrote from what it knows of the wires, and where the profile wins over it; `rdma`
    the ports ("mlx5_0:1") that the members are meant to use, none where sockets are meant. `waiting`: in words.
    """

    shard: ShardView = ShardView()
    stage: str = ""
    ports: dict[str, int] = {}
    environment: tuple[VariableView, ...] = ()
    rdma: tuple[str, ...] = ()
    waiting: str = ""


class EvidenceView(Struct, frozen=True, kw_only=True):
    """The newest bandwidth test between two members' nodes; `age` null and no `text`: there was none.

    `bad` and `good` are rails by both of their ends, `figures` what was measured of bad ones. One that is `stale` is
    too old to keep a replica away.
    """

    a: str = ""
    b: str = ""
    clock: float = 0.0
    age: float | None = None
    stale: bool = False
    good: tuple[str, ...] = ()
    bad: tuple[str, ...] = ()
    text: str = ""
    figures: dict[str, str] = {}


class AttemptView(Struct, frozen=True, kw_only=True):
    """A failed attempt of a replica: the member that failed, and in `log` the command that shows its log."""

    shard: str = ""
    node: str = ""
    failure: FailureView = FailureView()
    log: str = ""


class ReplicaReply(Struct, frozen=True, kw_only=True):
    """Everything the plane knows of one replica. `why` is why it is where it is; `waiting` what it waits for.

    `restarts` failures in a row so far, of which `first` is the first and `last` the newest.
    """

    api: int = API
    replica: ReplicaView = ReplicaView()
    engine: str = ""
    source: str = ""
    wanted_revision: int | None = None
    want: str = "run"
    why: str = ""
    waiting: tuple[str, ...] = ()
    restarts: int = 0
    members: tuple[MemberView, ...] = ()
    evidence: tuple[EvidenceView, ...] = ()
    first: AttemptView | None = None
    last: AttemptView | None = None

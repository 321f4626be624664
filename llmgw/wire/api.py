"""What the admin API answers: the values that the plane encodes as JSON and `llmgw ctl` and the page read.

Every key of these objects is always there; fields are only ever added, each with a default, so a client of
another version reads what it knows. Ages and durations are seconds and are counted on the plane; `*_clock`
is Unix seconds, only ever shown. Objects taken over from a node's own facts (interfaces, disks, imex,
managers, progress) leave out what is empty or unknown.
"""

from __future__ import annotations

from msgspec import Struct

from llmgw.wire.facts import Disk, EngineInstall, Imex, Interface, PortManagers, Weights

#: The version of the API, in its path and in every answer.
API = 1


# --- errors ------------------------------------------------------------------------------------------


class ApiError(Struct, frozen=True, kw_only=True):
    """What went wrong, in words, with a stable `code` for programs and what to do about it."""

    code: str = "error"
    message: str = ""
    remedy: str = ""


class ErrorReply(Struct, frozen=True, kw_only=True):
    error: ApiError = ApiError()


# --- problems ----------------------------------------------------------------------------------------


class ProblemView(Struct, frozen=True, kw_only=True):
    """Something wrong now. `age` since it was first seen; `acknowledged_for` what is left of an acknowledgement."""

    node: str = ""
    subject: str = ""
    code: str = ""
    grade: str = ""
    text: str = ""
    remedy: str = ""
    age: float = 0.0
    first_clock: float = 0.0
    acknowledged_for: float | None = None


class ProblemsReply(Struct, frozen=True, kw_only=True):
    api: int = API
    problems: tuple[ProblemView, ...] = ()


# --- shards and replicas -------------------------------------------------------------------------------


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


# --- models ------------------------------------------------------------------------------------------


class ModelView(Struct, frozen=True, kw_only=True):
    """A model: how many replicas are wanted now, placed and ready, and what keeps the rest away.

    `elsewhere` are the addresses of engines that serve it too and are not the plane's to run (`[[endpoints]]`).
    `updated` replicas have the wanted revision of its profile; `rollout` says in words how a change goes on, `paused`
    why it does not. `replicas` is how many were asked for: none of them are wanted while it is `unloaded`, for want of
    requests for `idle` seconds; `idle_in` is how long until then, if no request comes. `requests` are those that ended
    since the gateways started, `failed` with a status from 500 on; `held` wait now for it to be ready.
    """

    name: str = ""
    engine: str = ""
    source: str = ""
    revision: int = 0
    wanted: int = 0
    placed: int = 0
    ready: int = 0
    nodes_each: int = 1
    gpus_each: int = 0
    reason: str = ""
    smallest_change: str = ""
    elsewhere: tuple[str, ...] = ()
    updated: int = 0
    rollout: str = ""
    paused: str = ""
    surge: int = 1
    replicas: int = 0
    idle: float = 0.0
    idle_in: float | None = None
    unloaded: bool = False
    revisions: int = 1
    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    held: int = 0


class ModelsReply(Struct, frozen=True, kw_only=True):
    api: int = API
    models: tuple[ModelView, ...] = ()


class RevisionView(Struct, frozen=True, kw_only=True):
    """A profile that a model has or had. `changes` against the one before, in words; `replicas` that run it now.

    `clock` is until when it was wanted; 0 for the present one.
    """

    revision: int = 0
    current: bool = False
    clock: float = 0.0
    engine: str = ""
    source: str = ""
    changes: tuple[str, ...] = ()
    replicas: int = 0


class HistoryReply(Struct, frozen=True, kw_only=True):
    """A model's profiles in the order in which they were wanted: what a roll back can go to, and what differs."""

    api: int = API
    model: str = ""
    revision: int = 0
    revisions: tuple[RevisionView, ...] = ()


class ReasonView(Struct, frozen=True, kw_only=True):
    """Why one node does not take a shard: the check, the value there, the value needed, the fact's age."""

    node: str = ""
    check: str = ""
    value: str = ""
    needed: str = ""
    age: float | None = None
    text: str = ""


class StandingView(Struct, frozen=True, kw_only=True):
    """One shard of a model: what it does, and in `text` why it is there and what is in its way."""

    shard: str = ""
    node: str = ""
    generation: int = 0
    state: str = ""
    text: str = ""


class ChangeView(Struct, frozen=True, kw_only=True):
    """Something an operator can do, in words. `effort` compares: 1 is a command, 50 a machine more."""

    kind: str = ""
    effort: int = 0
    text: str = ""


class WhyReply(Struct, frozen=True, kw_only=True):
    """Why a model is not fully placed or not ready: a sentence, each shard, and per node what keeps it away.

    The node that is nearest to fitting comes first. `waiting` is what holds the whole plane back, if anything.
    `changes` is `smallest_change` one by one, where it was proved to be enough.
    """

    api: int = API
    model: str = ""
    wanted: int = 0
    placed: int = 0
    ready: int = 0
    waiting: str = ""
    reasons: tuple[ReasonView, ...] = ()
    smallest_change: str = ""
    replicas: tuple[ReplicaView, ...] = ()
    text: str = ""
    standings: tuple[StandingView, ...] = ()
    changes: tuple[ChangeView, ...] = ()


class ApplyReply(Struct, frozen=True, kw_only=True):
    """What an apply changes, or with `dry_run` would change: model names. `words` of those that change: how."""

    api: int = API
    dry_run: bool = False
    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    words: dict[str, str] = {}


# --- nodes -------------------------------------------------------------------------------------------


class NodeRow(Struct, frozen=True, kw_only=True):
    """A node in one line. `problems` counts open, unacknowledged ones by grade.

    `stage`: "expected", "ready", "unreachable" or "lost"; `heard_age` is the silence so far. `drained`: it is
    draining, and nothing runs there any more; `drain_within` is how long its shards may finish requests, where an
    operator said so.
    """

    id: str = ""
    stage: str = ""
    stage_age: float = 0.0
    connected: bool = False
    heard_age: float | None = None
    address: str = ""
    version: str = ""
    cordoned: bool = False
    draining: bool = False
    labels: dict[str, str] = {}
    cpu_threads: int | None = None
    cpu_percent: float | None = None
    load1: float | None = None
    memory_bytes: int | None = None
    memory_available_bytes: int | None = None
    gpus: int = 0
    gpu_names: tuple[str, ...] = ()
    gpu_memory_bytes: int | None = None
    gpu_memory_used_bytes: int | None = None
    ports: int = 0
    ports_active: int = 0
    engines: tuple[EngineInstall, ...] = ()
    shards: int = 0
    shards_ready: int = 0
    problems: dict[str, int] = {}
    drained: bool = False
    drain_within: float | None = None


class LeavingView(Struct, frozen=True, kw_only=True):
    """What is still on a node that is being drained, and in `text` what its leaving waits for."""

    shard: str = ""
    replica: str = ""
    model: str = ""
    state: str = ""
    want: str = ""
    in_flight: int | None = None
    stop_in: float | None = None
    text: str = ""


class NodesReply(Struct, frozen=True, kw_only=True):
    api: int = API
    nodes: tuple[NodeRow, ...] = ()


class GpuProcessView(Struct, frozen=True, kw_only=True):
    """A process on a GPU; `shard` is "" for a foreign one, "?" where none can tell. Memory is null where hidden."""

    pid: int = 0
    name: str = ""
    memory_bytes: int | None = None
    shard: str = ""


class MigView(Struct, frozen=True, kw_only=True):
    """A part of a GPU that is used like a GPU of its own."""

    uuid: str = ""
    profile: str = ""
    memory_bytes: int | None = None


class GpuView(Struct, frozen=True, kw_only=True):
    """A GPU: its facts, and three numbers side by side: memory reserved by placement, measured, foreign.

    `topology` is how it reaches each other GPU ("NV18", "PIX", ...), by uuid.
    """

    uuid: str = ""
    index: int | None = None
    name: str = ""
    pci: str = ""
    serial: str = ""
    memory_bytes: int | None = None
    reserved_bytes: int = 0
    used_bytes: int | None = None
    foreign_bytes: int = 0
    unified_memory: bool = False
    compute_capability: tuple[int, int] | None = None
    mig_enabled: bool | None = None
    utilization_percent: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    throttle: int | None = None
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    ecc_uncorrected: int | None = None
    ecc_corrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    nvlinks: int | None = None
    nvlinks_up: int | None = None
    nvlink_errors: int | None = None
    nvlink_state: str = ""
    nvlink_domain: str = ""
    nvlink_healthy: bool | None = None
    shards: tuple[str, ...] = ()
    processes: tuple[GpuProcessView, ...] = ()
    unreadable: str = ""
    ecc_uncorrected_total: int | None = None
    ecc_corrected_total: int | None = None
    remapped_rows: int | None = None
    retired_pages_pending: bool | None = None
    recovery_action: int | None = None
    nvlink_faults: tuple[str, ...] = ()
    numa_node: int | None = None
    topology: dict[str, str] = {}
    no_peer_access: dict[str, str] = {}
    mig_devices: tuple[MigView, ...] = ()


class GidView(Struct, frozen=True, kw_only=True):
    index: int = 0
    gid: str = ""
    type: str = ""
    netdev: str = ""


class PortView(Struct, frozen=True, kw_only=True):
    """A port of an RDMA adapter. `rates` are counters per second: null where no rate can be told."""

    device: str = ""
    number: int = 1
    kind: str = ""
    role: str = ""
    rail: int | None = None
    fabric: str = ""
    state: str = ""
    physical_state: str = ""
    rate_gbps: float | None = None
    rate_text: str = ""
    link_layer: str = ""
    netdev: str = ""
    mtu: int | None = None
    lid: int | None = None
    sm_lid: int | None = None
    port_guid: str = ""
    pci: str = ""
    numa_node: int | None = None
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    driver: str = ""
    firmware: str = ""
    board: str = ""
    received_bytes_per_second: float | None = None
    sent_bytes_per_second: float | None = None
    rates: dict[str, float | None] = {}
    counters: dict[str, int] = {}
    counters_age: float | None = None
    gids: tuple[GidView, ...] = ()
    nearest_gpus: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    bond: str = ""
    node_guid: str = ""
    prefix: str = ""
    libfabric: str = ""


class ExpectedView(Struct, frozen=True, kw_only=True):
    """What a node should have: as an operator confirmed it at `clock`. Ports are counted by role and kind."""

    text: str = ""
    clock: float = 0.0
    gpus: dict[str, int] = {}
    ports: dict[str, int] = {}
    ports_up: dict[str, int] = {}
    slowest_gbps: dict[str, float] = {}
    nvlinks: dict[str, int] = {}
    memory_bytes: int = 0


class EventView(Struct, frozen=True, kw_only=True):
    """Something that happened. `id` grows and is never used twice."""

    id: int = 0
    clock: float = 0.0
    kind: str = ""
    subject: str = ""
    text: str = ""
    data: dict[str, str] = {}


class NodeReply(Struct, frozen=True, kw_only=True):
    """Everything the plane knows of one node. `why_no_gpus` is the driver's reason when there are none to see.

    `clock_offset` is how far the node's clock is ahead of the plane's, in seconds and only shown. `expected` is null
    when nothing was confirmed, so that its peers count. `history` is what happened there lately, oldest first;
    `leaving` what a drain still waits for.
    """

    api: int = API
    node: NodeRow = NodeRow()
    hostname: str = ""
    os: str = ""
    kernel: str = ""
    arch: str = ""
    cpu_model: str = ""
    swap_bytes: int = 0
    boot_id: str = ""
    facts_age: float | None = None
    node_clock: float | None = None
    features: tuple[str, ...] = ()
    driver: str = ""
    cuda: str = ""
    why_no_gpus: str = ""
    gpus: tuple[GpuView, ...] = ()
    ports: tuple[PortView, ...] = ()
    imex: Imex | None = None
    managers: tuple[PortManagers, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    disks: tuple[Disk, ...] = ()
    limits: dict[str, bool | int | str | tuple[str, ...] | None] = {}
    engines: tuple[EngineInstall, ...] = ()
    weights: tuple[Weights, ...] = ()
    shards: tuple[ShardView, ...] = ()
    strays: tuple[ShardView, ...] = ()
    problems: tuple[ProblemView, ...] = ()
    clock_offset: float | None = None
    expected: ExpectedView | None = None
    history: tuple[EventView, ...] = ()
    leaving: tuple[LeavingView, ...] = ()


# --- the whole, and what happened -----------------------------------------------------------------------


class StatusReply(Struct, frozen=True, kw_only=True):
    """The fleet in a few numbers. `waiting` is what the plane puts off now and why, with the seconds left.

    `gateway` counts since the gateways started: "requests", of them "failed" (status from 500 on) and "left" (the
    client went away), "retries", "prompt_tokens", "completion_tokens"; and what is now: "held" and "in_flight".
    """

    api: int = API
    plane: str = ""
    version: str = ""
    uptime: float = 0.0
    clock: float = 0.0
    nodes: dict[str, int] = {}
    nodes_connected: int = 0
    nodes_cordoned: int = 0
    gpus: int = 0
    models: int = 0
    models_complete: int = 0
    replicas_wanted: int = 0
    replicas: dict[str, int] = {}
    strays: int = 0
    problems: dict[str, int] = {}
    waiting: str = ""
    waiting_for: float | None = None
    gateway: dict[str, float | int | str | None] = {}
    latest_event: int = 0


class EventsReply(Struct, frozen=True, kw_only=True):
    """Events, oldest first; `latest` goes into the next request's `after`."""

    api: int = API
    events: tuple[EventView, ...] = ()
    latest: int = 0


class DoneReply(Struct, frozen=True, kw_only=True):
    """It is done, and stored where it has to last. `text` says what, for a person."""

    api: int = API
    text: str = ""


class LogSourceView(Struct, frozen=True, kw_only=True):
    name: str = ""
    runs: tuple[str, ...] = ()
    bytes: int = 0


class LogsReplyView(Struct, frozen=True, kw_only=True):
    """Lines of one log, oldest first; `cursor` goes into the next request's `after`."""

    api: int = API
    node: str = ""
    source: str = ""
    run: str = ""
    lines: tuple[str, ...] = ()
    cursor: str = ""
    truncated: bool = False
    sources: tuple[LogSourceView, ...] = ()


class FindingView(Struct, frozen=True, kw_only=True):
    """One check of a node: "pass", "warn", "fail" or "skipped", its numbers and the command that fixes it."""

    check: str = ""
    outcome: str = ""
    text: str = ""
    subject: str = "node"
    numbers: dict[str, float | int | str] = {}
    remedy: str = ""
    seconds: float = 0.0


class DoctorView(Struct, frozen=True, kw_only=True):
    api: int = API
    node: str = ""
    findings: tuple[FindingView, ...] = ()
    seconds: float = 0.0


# --- identities ----------------------------------------------------------------------------------------


class TokenView(Struct, frozen=True, kw_only=True):
    """A join token, without its secret. `state`: "open", "used", "expired" or "revoked"; `node`: only that one."""

    id: str = ""
    state: str = ""
    node: str = ""
    note: str = ""
    replace: bool = False
    created_clock: float = 0.0
    expires_clock: float = 0.0
    expires_in: float = 0.0
    used_clock: float | None = None
    used_by: str = ""
    used_from: str = ""


class TokensReply(Struct, frozen=True, kw_only=True):
    api: int = API
    tokens: tuple[TokenView, ...] = ()


class TokenReply(Struct, frozen=True, kw_only=True):
    """A new join token. The secret is shown this once; the plane keeps only its hash. `plane` is where to join."""

    api: int = API
    id: str = ""
    token: str = ""
    expires_clock: float = 0.0
    expires_in: float = 0.0
    plane: str = ""


class CertView(Struct, frozen=True, kw_only=True):
    """A certificate that the plane gave out. `state`: "live", "renewal-due", "expired" or "revoked".

    `renews` is the serial it followed, `token` the id of the join token it was issued for.
    """

    name: str = ""
    role: str = ""
    serial: str = ""
    state: str = ""
    issued_clock: float = 0.0
    expires_clock: float = 0.0
    expires_in: float = 0.0
    renews: str = ""
    token: str = ""
    revoked_clock: float | None = None
    why: str = ""


class CertsReply(Struct, frozen=True, kw_only=True):
    api: int = API
    certs: tuple[CertView, ...] = ()


class OverviewReply(Struct, frozen=True, kw_only=True):
    """What the page shows, in one answer and so of one moment."""

    api: int = API
    status: StatusReply = StatusReply()
    nodes: tuple[NodeRow, ...] = ()
    models: tuple[ModelView, ...] = ()
    replicas: tuple[ReplicaView, ...] = ()
    problems: tuple[ProblemView, ...] = ()
    events: tuple[EventView, ...] = ()

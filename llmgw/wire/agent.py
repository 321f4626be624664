"""What an agent says to the plane."""

from __future__ import annotations

from msgspec import Raw, Struct

from llmgw.wire.facts import (
    Disk,
    EngineInstall,
    Gpu,
    GpuDriver,
    GpuFabric,
    GpuLoad,
    GpuProcess,
    Host,
    HostLoad,
    Imex,
    ModelName,
    NodeId,
    Port,
    PortLoad,
    PortManagers,
    Problem,
    Progress,
    ReplicaId,
    ShardId,
    ShardLoad,
    ShardState,
    Weights,
)


class ShardStatus(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="shard"):
    """One shard changed, or is told again after a Register (C5).

    `clock` is the node's wall clock at the change, shown and never compared. `port` is where its HTTP
    answers on the node's address, 0 while unknown. `lines` are the last lines of output of a failure.
    """

    shard: ShardId
    replica: ReplicaId
    model: ModelName
    generation: int
    state: ShardState
    port: int = 0
    pid: int | None = None
    adopted: bool = False
    exit_code: int | None = None
    signal: str = ""
    cause: str = ""  # the probable one, in a sentence
    cause_code: str = ""  # a stable word: "out-of-memory", "port-in-use", ...
    detail: str = ""
    lines: tuple[str, ...] = ()
    progress: Progress | None = None
    clock: float = 0.0
    command: tuple[str, ...] = ()
    network: str = ""  # what the engine's log says the members of its replica talk over
    warning: str = ""  # something that is wrong and no end: sockets where RDMA was meant


class Register(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="register"):
    """The first frame of a stream, and again whenever the hardware changed: the node's whole truth.

    `shards` is always given: an empty tuple says "I run nothing" (A7). `epoch` is the highest plane
    epoch this agent has obeyed, 0 for none.
    """

    node: NodeId
    version: str
    features: tuple[str, ...] = ()
    address: str = ""  # where engines on this node can be reached; "" means: where the stream came from
    host: Host = Host()
    gpu_driver: GpuDriver = GpuDriver()
    gpus: tuple[Gpu, ...] = ()
    ports: tuple[Port, ...] = ()
    imex: Imex | None = None
    managers: tuple[PortManagers, ...] = ()
    problems: tuple[Problem, ...] = ()
    installable: tuple[str, ...] | None = None  # None: says nothing of it, so llama.cpp only
    installs: tuple[EngineInstall, ...] = ()
    weights: tuple[Weights, ...] = ()
    shards: tuple[ShardStatus, ...] = ()
    labels: dict[str, str] = {}
    epoch: int = 0
    engine_ports: tuple[int, int] | None = None  # the first and the last port that engines may be given; None: not said
    share: str = ""  # where other nodes have this one's weights, HOST:PORT; ":PORT": at its address; "": nowhere


class Heartbeat(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="heartbeat"):
    """What changes. A list that is None was not said; a list that is given is the whole truth (B2)."""

    load: HostLoad | None = None
    shards: tuple[ShardLoad, ...] | None = None
    gpus: tuple[GpuLoad, ...] | None = None
    gpu_processes: tuple[GpuProcess, ...] | None = None
    gpu_fabrics: dict[str, GpuFabric] | None = None  # by GPU uuid
    ports: tuple[PortLoad, ...] | None = None
    port_facts: tuple[Port, ...] | None = None  # GID tables, LIDs, MTU: only when they changed
    managers: tuple[PortManagers, ...] | None = None
    imex: Imex | None = None
    problems: tuple[Problem, ...] | None = None
    disks: tuple[Disk, ...] | None = None
    memory_bytes: int | None = None
    installs: tuple[EngineInstall, ...] | None = None
    weights: tuple[Weights, ...] | None = None
    counters: tuple[str, ...] | None = None  # the names that `counts` follow, from now on
    counts: bytes | None = None  # every port's counters, in the order of the ports told last: see `wire.counters`
    share: str | None = None  # as in Register
    installable: tuple[str, ...] | None = None  # as in Register: where packages come from may change it


class Working(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="working"):
    """A request goes on: wait `seconds` more, counted from now. `note` says what is being done."""

    request_id: int
    seconds: float
    note: str = ""


class Listening(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="listening"):
    """A bandwidth server's socket is open (E3): the client may start."""

    request_id: int
    port: int


class Reply(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="reply"):
    """The answer to one request. `value` is the request's reply type, encoded; the asker knows which."""

    request_id: int
    value: Raw


class RequestFailed(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="request-failed"):
    """The node's error for one request (A10), in words for an operator."""

    request_id: int
    error: str
    code: str = "failed"


class Part(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="part"):
    """A piece of a frame too long to send in one go, so that heartbeats pass between pieces (A13).

    Pieces of one frame share `series` and come in order; the frame is all `data` joined.
    """

    series: int
    data: bytes
    last: bool = False


class Renew(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="renew"):
    """A request for a new certificate on the same stream. The key stays on the node; this is its CSR (PEM)."""

    csr: str


class Join(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="join"):
    """The only frame of a stream without a certificate: a token for an identity."""

    token: str
    node: NodeId
    csr: str
    version: str = ""


AgentMessage = Register | Heartbeat | ShardStatus | Working | Listening | Reply | RequestFailed | Part | Renew | Join

#: A feature that is no request (A11): this agent starts members of a replica of several nodes, by rank, on ports that
#: the plane reserves. An agent without it would start each as a whole replica.
GANGS = "replicas-of-several-nodes"
#: This agent brings a newer commit of a source when it is asked to; one without it would say that it has the source.
REFRESH = "weights-refresh"

"""What the plane says to an agent: commands, which are idempotent, and requests, which have a reply."""

from __future__ import annotations

from typing import ClassVar, Generic, TypeVar, get_args

from msgspec import Struct

from llmgw.wire.facts import (
    EngineInstall,
    EnginePackage,
    ModelName,
    PortManagers,
    ReplicaId,
    ShardId,
    ShardSpec,
    Weights,
)

R = TypeVar("R")


# --- the stream itself -------------------------------------------------------------------------------


class Registered(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="registered"):
    """The Register was taken. `epoch` fences older planes off; `heartbeat` is the period in seconds."""

    plane: str
    version: str
    epoch: int
    heartbeat: float = 5.0


class Goodbye(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="goodbye"):
    """The last frame before the plane closes: why, and when and where to try again.

    `code` is a stable word: "not-leader", "superseded", "identity", "revoked", "protocol", "silent",
    "stopping". `leader` is the leader's address where it is known (A2).
    """

    code: str
    reason: str
    leader: str = ""
    retry_after: float = 0.0


class Pace(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="pace"):
    """A new heartbeat period, in seconds (B1)."""

    heartbeat: float


class Withdraw(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="withdraw"):
    """Nobody waits for this request any more: stop working on it."""

    request_id: int


class Renewed(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="renewed"):
    """A new certificate chain (PEM), leaf first; empty with `error` when it was refused."""

    certificate: str = ""
    error: str = ""


class JoinHello(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="join-hello"):
    """The first frame on the join path: the fleet's CA (PEM), to be held against the token's fingerprint."""

    ca: str


class Joined(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="joined"):
    """The answer to Join: an identity, or why not."""

    node: str = ""
    certificate: str = ""
    ca: str = ""
    error: str = ""


# --- commands ----------------------------------------------------------------------------------------


class Provision(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="provision"):
    """The engines this node should have, sorted by name: ones it says it can install, or may once it has this (A7).

    `preferred` is, by engine, the version for shards that ask for none; `packages` where an engine is installed from.
    """

    engines: tuple[EngineInstall, ...] = ()
    preferred: dict[str, str] = {}
    packages: dict[str, EnginePackage] = {}


class StartShard(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="start"):
    """Run this shard at this generation. Repeated, it makes the node tell the shard's state (C4).

    The `weights_` fields say where in the fleet its source may be had: from whom as HOST:PORT (`weights_from` have all
    of it, `weights_soon` fetch it or are about to), and which commit the others hold. They are advice.
    """

    shard: ShardId
    replica: ReplicaId
    model: ModelName
    generation: int
    spec: ShardSpec
    weights_from: tuple[str, ...] = ()
    weights_soon: tuple[str, ...] = ()
    weights_revision: str = ""


class StopShard(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="stop"):
    """Stop this shard if its generation is at most `generation`; `grace` in seconds, None: the spec's own."""

    shard: ShardId
    generation: int
    grace: float | None = None
    why: str = ""


class DrainShard(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="drain"):
    """Take no new traffic; a StopShard follows when the gateways are done with it."""

    shard: ShardId
    generation: int
    why: str = ""


class FetchWeights(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="fetch"):
    """Bring a model's files into the cache before they are needed. The `weights_` fields are as in StartShard.

    `refresh`: where the source is a branch that has moved on, bring what it is now, beside what is there.
    """

    source: str
    bytes_per_second: int | None = None
    weights_from: tuple[str, ...] = ()
    weights_soon: tuple[str, ...] = ()
    weights_revision: str = ""
    refresh: bool = False


class Revoked(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="revoked"):
    """Serials of nodes' certificates that are honoured no more before they expire: all there are.

    Nodes look at each other's certificates only where they give each other weights.
    """

    serials: tuple[str, ...] = ()


# --- requests ----------------------------------------------------------------------------------------


class Request(Struct, Generic[R], frozen=True, kw_only=True, omit_defaults=True):
    """Something with a reply of type R. `feature` "" is answered by every agent (A11)."""

    feature: ClassVar[str] = ""
    request_id: int = 0


class LogSource(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something whose log a node can show: "agent", or a shard with its runs, newest last."""

    name: str
    runs: tuple[str, ...] = ()
    bytes: int = 0


class LogsReply(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Lines, oldest first, and every source there is (C7). `cursor` goes into the next request's `after`."""

    lines: tuple[str, ...] = ()
    sources: tuple[LogSource, ...] = ()
    source: str = ""
    run: str = ""
    cursor: str = ""
    truncated: bool = False


class LogsRequest(Request[LogsReply], frozen=True, kw_only=True, omit_defaults=True, tag="logs"):
    """The last lines of a source, or what came `after` a cursor, waiting up to `wait` seconds for some."""

    source: str = "agent"
    run: str = ""
    lines: int = 100
    after: str = ""
    wait: float = 0.0


class Finding(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One check of `doctor` (C11). `outcome` is "pass", "warn", "fail" or "skipped"."""

    check: str
    outcome: str
    text: str
    numbers: dict[str, float | int | str] = {}
    remedy: str = ""
    subject: str = "node"
    seconds: float = 0.0


class DoctorReply(Struct, frozen=True, kw_only=True, omit_defaults=True):
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0


class DoctorRequest(Request[DoctorReply], frozen=True, kw_only=True, omit_defaults=True, tag="doctor"):
    feature: ClassVar[str] = "doctor"
    only: tuple[str, ...] = ()


class ScanReply(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A fabric as one port sees it. `map` is the structured map, packed and compressed by rdma.fabric."""

    device: str
    number: int = 1
    complete: bool = False
    holes: tuple[str, ...] = ()
    seconds: float = 0.0
    tool: str = ""
    map: bytes = b""
    raw: bytes = b""


class ScanRequest(Request[ScanReply], frozen=True, kw_only=True, omit_defaults=True, tag="scan"):
    feature: ClassVar[str] = "fabric-scan"
    device: str = ""
    number: int = 1
    raw: bool = False


class ManagersReply(Struct, frozen=True, kw_only=True, omit_defaults=True):
    ports: tuple[PortManagers, ...] = ()


class ManagersRequest(Request[ManagersReply], frozen=True, kw_only=True, omit_defaults=True, tag="managers"):
    feature: ClassVar[str] = "subnet-managers"


class RoutesReply(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Forwarding tables of switches, packed and compressed by rdma.fabric."""

    tables: bytes = b""
    holes: tuple[str, ...] = ()


class RoutesRequest(Request[RoutesReply], frozen=True, kw_only=True, omit_defaults=True, tag="routes"):
    feature: ClassVar[str] = "fabric-routes"
    device: str = ""
    number: int = 1
    switches: tuple[int, ...] = ()  # LIDs; empty: all


class Bandwidth(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One perftest run's parameters, the same for both sides (E2). MTU in bytes, size in bytes."""

    test: str = "ib_write_bw"
    device: str = ""
    number: int = 1
    gid_index: int | None = None
    mtu: int | None = None
    tcp_port: int = 18515
    size: int = 1 << 20
    queue_pairs: int = 2
    seconds: int = 10
    bidirectional: bool = False
    gpu: str = ""  # uuid: GPUDirect; "": host memory
    extra: tuple[str, ...] = ()


class BandwidthReply(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one side saw. `average_gbps` is None when it could not be measured: never 0 (E7)."""

    average_gbps: float | None = None
    latency_us: float | None = None
    message_rate: float | None = None
    exit_code: int | None = None
    error: str = ""
    cause: str = ""
    lines: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    version: str = ""
    installed_now: bool = False
    state_before: str = ""
    state_after: str = ""
    counters: dict[str, int] = {}  # what the port's error counters grew by during the run
    busy: tuple[str, ...] = ()  # shards that were running meanwhile (E8)
    seconds: float = 0.0
    cause_code: str = ""  # a stable word for `cause`: "port-down", "peer-left", ...
    remedy: str = ""


class BandwidthServe(Request[BandwidthReply], frozen=True, kw_only=True, omit_defaults=True, tag="bandwidth-serve"):
    """Run the server side: say Listening when its socket is open, reply when it ended."""

    feature: ClassVar[str] = "fabric-test"
    run: Bandwidth = Bandwidth()


class BandwidthClient(Request[BandwidthReply], frozen=True, kw_only=True, omit_defaults=True, tag="bandwidth-client"):
    feature: ClassVar[str] = "fabric-test"
    run: Bandwidth = Bandwidth()
    server: str = ""


class PerftestReply(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What perftest a node has: "" when none can be had, and then why."""

    version: str = ""
    cuda: bool = False
    free_port: int = 0
    address: str = ""
    error: str = ""
    installed_now: bool = False


class PerftestRequest(Request[PerftestReply], frozen=True, kw_only=True, omit_defaults=True, tag="perftest"):
    """Is perftest there (install it where permitted), which version, which TCP port is free?"""

    feature: ClassVar[str] = "fabric-test"
    install: bool = True


class RemoveWeightsReply(Struct, frozen=True, kw_only=True, omit_defaults=True):
    removed: tuple[str, ...] = ()
    kept: dict[str, str] = {}  # path -> why it was not removed
    freed_bytes: int = 0


class RemoveWeightsRequest(
    Request[RemoveWeightsReply], frozen=True, kw_only=True, omit_defaults=True, tag="remove-weights"
):
    """A proposal to remove weights; the node checks each again (C8)."""

    feature: ClassVar[str] = "weights"
    sources: tuple[str, ...] = ()
    dry_run: bool = True


class WeightsReply(Struct, frozen=True, kw_only=True, omit_defaults=True):
    weights: tuple[Weights, ...] = ()


class WeightsRequest(Request[WeightsReply], frozen=True, kw_only=True, omit_defaults=True, tag="weights"):
    feature: ClassVar[str] = "weights"


Requests = (
    LogsRequest
    | DoctorRequest
    | ScanRequest
    | ManagersRequest
    | RoutesRequest
    | BandwidthServe
    | BandwidthClient
    | PerftestRequest
    | RemoveWeightsRequest
    | WeightsRequest
)

ControlMessage = (
    Registered
    | Goodbye
    | Pace
    | Withdraw
    | Renewed
    | Joined
    | Provision
    | StartShard
    | StopShard
    | DrainShard
    | FetchWeights
    | Revoked
    | JoinHello
    | Requests
)


def reply_type(request: Request[R]) -> type[R]:
    """The type that a request's reply has, from its class line."""
    # types.get_original_bases came with Python 3.12
    for base in getattr(type(request), "__orig_bases__", ()):
        for argument in get_args(base):
            if isinstance(argument, type):
                return argument
    raise TypeError(f"{type(request).__name__} names no reply type")


def tag_of(frame: Struct) -> str:
    """A frame's kind as it stands on the wire."""
    return str(frame.__struct_config__.tag)

"""The nouns of a machine: what it has, what it does now, what is wrong with it.

Frozen values that node, plane, store, API and page all use; nothing maps them into other shapes.
Absent is None ("nothing was said"), an empty tuple is "there are none". Structs whose name ends in
`Load` travel in every heartbeat and are arrays on the wire: fields are only ever appended, each with
a default, so that an older peer reads what it knows.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

from msgspec import Struct

NodeId = NewType("NodeId", str)
ModelName = NewType("ModelName", str)
ReplicaId = NewType("ReplicaId", str)
ShardId = NewType("ShardId", str)


class Word(StrEnum):
    """A closed list of words that a newer peer may have lengthened: an unknown word reads as UNKNOWN."""

    @classmethod
    def _missing_(cls, value: object) -> Word:
        return cls("unknown")


class Grade(Word):
    """How bad a problem is. Only `bad` keeps new shards away."""

    NOTE = "note"
    WARN = "warn"
    BAD = "bad"
    UNKNOWN = "unknown"


class Problem(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something wrong, and with what.

    `subject` is "gpu:<uuid>", "port:<device>/<number>" or "node"; with `code` it is the problem's
    identity. `text` is the sentence for a person with the raw numbers in it; `remedy` what to do.
    """

    subject: str
    code: str
    grade: Grade
    text: str
    remedy: str = ""


# --- the host -------------------------------------------------------------------------------------


class Interface(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A network interface. `addresses` are in CIDR form; `speed_mbps` is None where the driver says nothing."""

    name: str
    addresses: tuple[str, ...] = ()
    mac: str = ""
    mtu: int | None = None
    speed_mbps: int | None = None
    up: bool = False


class Disk(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The file system under a path that matters: sizes in bytes; `purpose` is "weights" or "state"."""

    purpose: str
    path: str
    mount: str = ""
    device: str = ""
    filesystem: str = ""
    total_bytes: int = 0
    free_bytes: int = 0


class Cpu(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`threads` counts what this process may run on, so a container's share and not the machine's."""

    model: str = ""
    sockets: int | None = None
    cores: int | None = None
    threads: int = 1
    numa_nodes: int | None = None


class HostLimits(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Settings of the host that decide whether RDMA and engines can work. None: could not be read."""

    memlock_bytes: int | None = None  # -1: unlimited
    hugepages_total: int | None = None
    hugepage_bytes: int | None = None
    iommu: str | None = None  # "off", "passthrough", "translated"
    acs_redirect: tuple[str, ...] | None = None  # PCI bridges that send peer traffic to the root complex
    peer_memory: tuple[str, ...] | None = None  # ways GPUDirect RDMA can work: "nvidia_peermem", "dma-buf"
    persistence_daemon: bool | None = None
    fabric_manager: str | None = None  # systemd's word: "active", "inactive", ...; None: not installed
    umad: bool | None = None  # /dev/infiniband/umad*: the InfiniBand tools can be used
    uverbs: bool | None = None
    nvswitches: int | None = None  # on this machine's PCI


class Host(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The machine. `boot_id` changes with every boot, so a process id means something only beside it."""

    hostname: str = ""
    machine_id: str = ""
    boot_id: str = ""
    os: str = ""
    kernel: str = ""
    arch: str = ""
    cpu: Cpu = Cpu()
    memory_bytes: int = 0
    swap_bytes: int = 0
    interfaces: tuple[Interface, ...] = ()
    disks: tuple[Disk, ...] = ()
    limits: HostLimits = HostLimits()
    reserved_bytes: int = 0  # of the memory: left to the machine, never given to engines


class HostLoad(Struct, frozen=True, array_like=True, omit_defaults=True):
    """What the host does now. `clock` is its wall clock (Unix seconds): shown, never used to decide."""

    cpu_percent: float = 0.0  # of all threads together: 0 to 100
    load1: float = 0.0
    memory_available_bytes: int = 0
    clock: float = 0.0


class ShardLoad(Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one engine with all its processes uses. `cpu_percent` is of one thread, so may pass 100."""

    shard: ShardId
    cpu_percent: float = 0.0
    rss_bytes: int = 0
    gpu_memory_bytes: int | None = None
    processes: int = 0


# --- GPUs ------------------------------------------------------------------------------------------


class MigDevice(Struct, frozen=True, kw_only=True, omit_defaults=True):
    uuid: str
    profile: str = ""
    memory_bytes: int | None = None


class GpuFabric(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU's place in an NVLink fabric that spans nodes.

    `cluster_uuid` is "" where it is all zero, which is no domain at all, whatever `state` says.
    `state`: "not-supported", "not-started", "in-progress", "completed". `faults` is the decoded
    health mask (NVML, nvmlGpuFabricInfo_v3).
    """

    state: str = "not-supported"
    status: int = 0
    cluster_uuid: str = ""
    clique: int = 0
    healthy: bool | None = None
    faults: tuple[str, ...] = ()

    @property
    def domain(self) -> str | None:
        """The NVLink domain's name, `uuid.clique`; None when the GPU reaches no other node by NVLink."""
        if self.state != "completed" or self.status != 0 or not self.cluster_uuid:
            return None
        return f"{self.cluster_uuid}.{self.clique}"


class Gpu(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU's lasting facts. A GPU that cannot be read keeps its identity and says why in `unreadable`."""

    uuid: str
    index: int | None = None
    name: str = ""
    pci: str = ""  # 0000:1b:00.0, lower case, four-digit domain as sysfs has it
    serial: str = ""
    memory_bytes: int | None = None
    unified_memory: bool = False
    compute_capability: tuple[int, int] | None = None
    mig_enabled: bool | None = None
    mig_devices: tuple[MigDevice, ...] = ()
    numa_node: int | None = None
    pcie_gen_max: int | None = None
    pcie_width_max: int | None = None
    nvlinks: int | None = None
    fabric: GpuFabric | None = None
    unreadable: str = ""
    topology: dict[str, str] = {}  # other GPU's uuid -> "NV18", "PIX", "PXB", "PHB", "NODE", "SYS"
    no_peer_access: dict[str, str] = {}  # other GPU's uuid -> why the driver lets neither read the other's memory


class GpuDriver(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The driver's versions, or the reason why there are no GPUs to see (C9)."""

    version: str = ""
    cuda: str = ""
    absent: str = ""


class GpuProcess(Struct, frozen=True, array_like=True, omit_defaults=True):
    """A process on a GPU. `shard` is "" for a foreign one (B4), "?" where it cannot be told, since the driver counts
    process ids in another PID namespace than the agent's. Memory is None where the driver hides it."""

    gpu: str
    pid: int
    name: str = ""
    memory_bytes: int | None = None
    shard: str = ""


class GpuLoad(Struct, frozen=True, array_like=True, omit_defaults=True):
    """What a GPU does now. None: not supported, or not readable."""

    uuid: str
    memory_used_bytes: int | None = None
    utilization_percent: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    throttle: int | None = None  # NVML clocks-event reason bits
    pcie_gen: int | None = None
    pcie_width: int | None = None
    ecc_uncorrected: int | None = None  # volatile: since the driver was loaded
    ecc_corrected: int | None = None
    ecc_uncorrected_total: int | None = None  # aggregate: over the GPU's life
    ecc_corrected_total: int | None = None
    remapped_rows: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    retired_pages_pending: bool | None = None
    recovery_action: int | None = None  # NVML field 230
    nvlinks_up: int | None = None
    nvlink_errors: int | None = None
    sram_uncorrected: int | None = None  # the larger of volatile and aggregate
    sram_corrected: int | None = None
    remapped_uncorrected: int | None = None  # rows among `remapped_rows` that an uncorrectable error cost
    nvlink_recoveries: int | None = None


class Imex(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The IMEX daemon's view of its domain. `state` "UP", "DEGRADED", "DOWN" or why it cannot be asked; that begins
    with "runs" where it is known to run all the same."""

    state: str
    nodes: tuple[tuple[str, str], ...] = ()  # (address or name, status)
    disconnected: tuple[str, ...] = ()  # peers this node's row does not reach
    mismatch: tuple[str, ...] = ()  # peers whose node list or version differs
    channels: int = 0


# --- RDMA ports ------------------------------------------------------------------------------------


class Gid(Struct, frozen=True, array_like=True, omit_defaults=True):
    """One row of a port's GID table; zero rows are left out. `type` is "IB/RoCE v1", "RoCE v2" or ""."""

    index: int
    gid: str
    type: str = ""
    netdev: str = ""


class Port(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A port of an RDMA adapter.

    `kind` is "ib", "roce", "efa", "opa" or "other". `rate_gbps` is what the link carries as data (the
    encoding taken off), None when unknown or when the port is down: sysfs shows stale figures then.
    LIDs are None when unset (0, 65535) or stale. GUIDs are integers in 16 hexadecimal digits without
    0x; an all-zero GUID is "". `role` is "fabric" (a rail), "storage", "management" or "vf".
    """

    device: str
    number: int = 1
    kind: str = "other"
    driver: str = ""
    state: str = ""
    physical_state: str = ""
    rate_gbps: float | None = None
    rate_text: str = ""
    link_layer: str = ""
    node_guid: str = ""
    port_guid: str = ""
    system_guid: str = ""
    prefix: str = ""
    lid: int | None = None
    sm_lid: int | None = None
    gids: tuple[Gid, ...] = ()
    netdev: str = ""
    netdev_speed_mbps: int | None = None
    mtu: int | None = None  # the RDMA MTU in bytes: 256 to 4096
    firmware: str = ""
    board: str = ""
    hca_type: str = ""
    pci: str = ""
    pcie_gen: int | None = None
    pcie_width: int | None = None
    pcie_gen_max: int | None = None
    pcie_width_max: int | None = None
    numa_node: int | None = None
    vf: bool = False
    bond: str = ""
    role: str = "fabric"
    rail: int | None = None
    fabric: str = ""  # the label from configuration, "" when there is none (C10)
    nearest_gpus: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()  # files that could not be read, with the reason
    libfabric: str = ""  # the domain's name in libfabric where it differs from the kernel's (EFA)
    shut: str = ""  # why no program here can open it; "" where it can be opened, or that is not known


class PortLoad(Struct, frozen=True, array_like=True, omit_defaults=True):
    """A port now. `counters` are raw readings by name as sysfs has them; the plane makes rates (B5).

    On the wire the readings go apart from the states, which seldom change: see `wire.counters`.
    """

    device: str
    number: int = 1
    state: str = ""
    physical_state: str = ""
    rate_gbps: float | None = None
    sm_lid: int | None = None
    counters: dict[str, int] = {}


class SubnetManager(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One subnet manager as it answered for itself; `state` "master", "standby", "discovering", "inactive"."""

    guid: str
    lid: int | None = None
    priority: int | None = None
    state: str = ""
    activity: int | None = None
    error: str = ""


class PortManagers(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who manages the subnet that one port is on, as asked through that port.

    `error` says why there is no master, and `code` in a stable word: "no-sm", "sm-silent", "no-umad", "no-permission",
    "not-installed", "no-device", "roce", "port-down", "timed-out", "crashed", "failed", or "" for a hand-over.
    """

    device: str
    number: int = 1
    master: SubnetManager | None = None
    others: tuple[SubnetManager, ...] = ()
    error: str = ""
    code: str = ""


# --- what is installed, what is stored ------------------------------------------------------------


class InstallState(Word):
    INSTALLING = "installing"
    INSTALLED = "installed"
    FAILED = "failed"
    UNSUPPORTED = "unsupported"
    UNKNOWN = "unknown"


class EngineInstall(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One engine at one version on a node; `detail` says where it is or why it is not."""

    engine: str
    version: str = ""
    state: InstallState = InstallState.INSTALLED
    detail: str = ""


def release(version: str) -> str:
    """A version without what says how it was built: "0.32.0+cpu" is 0.32.0."""
    return version.partition("+")[0]


def same_version(asked: str, has: str) -> bool:
    """Whether what is there is the version that was asked for: any build of it, where no build was asked for."""
    return asked == has or ("+" not in asked and asked == release(has))


class EnginePackage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where an engine is installed from; what is empty here is the node's to decide.

    `cpu` is the package for nodes without GPUs. `also` are requirements that are installed with it, and with `no_deps`
    nothing but those. `disk_bytes` is what all of it takes while it is being installed.
    """

    name: str = ""
    cpu: str = ""
    index: str = ""
    extra_index: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    no_deps: bool = False
    disk_bytes: int = 0


class Weights(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model's files in a node's cache. Complete only against its manifest of names and sizes."""

    source: str
    path: str = ""
    bytes: int = 0
    total_bytes: int | None = None
    complete: bool = False
    in_use: bool = False
    error: str = ""
    revision: str = ""  # the commit that the hub named, or the file's digest
    fetching: bool = False
    idle: float | None = None  # seconds for which no shard has used them; None: not said
    came_from: str = ""  # the node that gave the last of their bytes; "": from the source itself, or not said
    context: int | None = None  # the longest that the model takes, in tokens; this and what follows from its headers
    heads: int | None = None
    layers: int | None = None
    kv_bytes_per_token: int | None = None  # of the whole model's cache, with 16-bit values
    dtype: str = ""  # as its config.json has it: "bfloat16"


# --- shards ------------------------------------------------------------------------------------------


class ShardState(Word):
    """Where a shard is in its life (C5). `unknown` also stands for what could not be verified."""

    STARTING = "starting"
    FETCHING = "fetching"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"
    UNKNOWN = "unknown"

    @property
    def alive(self) -> bool:
        """Whether there may be a process."""
        return self not in (ShardState.STOPPED, ShardState.FAILED)


class Resources(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one shard needs. A CPU shard asks for threads and memory and no GPUs."""

    gpus: int = 0
    gpu_memory_bytes: int = 0  # per GPU
    compute_capability: tuple[int, int] | None = None
    cpu_threads: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0


class ShardSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to run one shard: everything the node needs and nothing it would have to look up.

    `source` is where the weights are: a path, or a URL such as hf://org/model@revision. `gpus` are the
    uuids the plane chose. Rank 0 leads a replica of several nodes; `peers` are all members' addresses
    by rank, `ports` the numbers reserved on this node by purpose ("http", "master", "rpc", ...), `peer_ports` the same
    of all members by rank. `network` is the environment that the plane wrote from what it knows of the wires; `rdma`
    names the ports ("mlx5_0:1") that the members are to reach each other by, none where sockets are meant.
    """

    engine: str
    model: ModelName
    source: str
    engine_version: str = ""
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    resources: Resources = Resources()
    gpus: tuple[str, ...] = ()
    context: int | None = None
    rank: int = 0
    peers: tuple[str, ...] = ()
    ports: dict[str, int] = {}
    ready_within: float = 900.0  # seconds from exec to health
    grace: float = 30.0  # seconds from SIGTERM to SIGKILL
    peer_ports: tuple[dict[str, int], ...] = ()
    network: dict[str, str] = {}
    rdma: tuple[str, ...] = ()


class Progress(Struct, frozen=True, array_like=True, omit_defaults=True):
    """Bytes (or steps) done of a total; the total is None while it is unknown."""

    what: str
    done: int = 0
    total: int | None = None

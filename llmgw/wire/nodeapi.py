"""Nodes with their GPUs and ports, as the admin API answers them: see `wire.api`."""

from __future__ import annotations

from msgspec import Struct

from llmgw.wire.apicommon import API, EventView, ProblemView
from llmgw.wire.facts import Disk, EngineInstall, Imex, Interface, PortManagers, Weights
from llmgw.wire.replicaapi import ShardView


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

"""Nodes, their hardware and their problems as the admin API shows them. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import msgspec
from immutables import Map

from llmgw.plane import drains
from llmgw.plane.admin.shardview import members_of, shard_view, stray_view
from llmgw.plane.event import Event
from llmgw.plane.expect import in_words
from llmgw.plane.rates import rates as rates_of
from llmgw.plane.world import DEFAULT, Inventory, Node, OpenProblem, Settings, Shard, Want, World, seen
from llmgw.units import format_duration
from llmgw.wire.agent import Register
from llmgw.wire.apicommon import EventView, ProblemView
from llmgw.wire.facts import Gpu, GpuLoad, Grade, ModelName, NodeId, Port, ShardState
from llmgw.wire.nodeapi import (
    ExpectedView,
    GidView,
    GpuProcessView,
    GpuView,
    LeavingView,
    MigView,
    NodeReply,
    NodeRow,
    PortView,
)
from llmgw.wire.replicaapi import ShardView

_WORST_FIRST = (Grade.BAD, Grade.WARN, Grade.NOTE, Grade.UNKNOWN)


def problem_views(nodes: Iterable[Node], now: float) -> tuple[ProblemView, ...]:
    """Open problems, the worst grade first and in a grade the oldest first."""
    found = [(node, problem) for node in nodes for problem in node.problems.values()]
    found.sort(key=lambda pair: (_WORST_FIRST.index(pair[1].problem.grade), pair[1].first_at, pair[0].id))
    return tuple(_problem(node, problem, now) for node, problem in found)


def _problem(node: Node, open_problem: OpenProblem, now: float) -> ProblemView:
    problem = open_problem.problem
    return ProblemView(
        node=node.id,
        subject=problem.subject,
        code=problem.code,
        grade=problem.grade.value,
        text=problem.text,
        remedy=problem.remedy,
        age=max(0.0, now - open_problem.first_at),
        first_clock=open_problem.first_clock,
        acknowledged_for=_acknowledged(open_problem, now),
    )


def _acknowledged(problem: OpenProblem, now: float) -> float | None:
    until = problem.acknowledged_until
    return until - now if until is not None and until > now else None


def grades(nodes: Iterable[Node], now: float) -> dict[str, int]:
    """Open problems that nobody has acknowledged, counted by grade."""
    counts = Counter(
        problem.problem.grade.value
        for node in nodes
        for problem in node.problems.values()
        if _acknowledged(problem, now) is None
    )
    return {grade.value: counts[grade.value] for grade in _WORST_FIRST if counts[grade.value]}


def shards_by_node(world: World) -> dict[NodeId, list[Shard]]:
    placed: dict[NodeId, list[Shard]] = defaultdict(list)
    for shard in world.shards.values():
        placed[shard.node].append(shard)
    return placed


def node_rows(world: World, now: float) -> tuple[NodeRow, ...]:
    """Every node in one line each, by name."""
    placed, strays = shards_by_node(world), Counter(stray.node for stray in world.strays.values())
    return tuple(node_row(node, placed[id], now, strays[id]) for id, node in sorted(world.nodes.items()))


def node_row(node: Node, shards: list[Shard], now: float, strays: int = 0) -> NodeRow:
    facts = node.facts or Register(node=node.id, version="")
    loads = node.gpu_loads.values()
    rails = [port for port in facts.ports if port.role == "fabric"]
    return NodeRow(
        id=node.id,
        stage=node.stage.value,
        stage_age=max(0.0, now - node.stage_at),
        connected=node.connected,
        heard_age=max(0.0, now - node.heard_at) if node.heard_at is not None else None,
        address=node.address,
        version=node.version,
        cordoned=node.cordoned,
        draining=node.draining,
        labels=dict(sorted(node.labels.items())),
        cpu_threads=facts.host.cpu.threads if node.facts else None,
        cpu_percent=node.load.cpu_percent if node.load else None,
        load1=node.load.load1 if node.load else None,
        memory_bytes=facts.host.memory_bytes or None,
        memory_available_bytes=node.load.memory_available_bytes if node.load else None,
        gpus=len(facts.gpus),
        gpu_names=tuple(dict.fromkeys(gpu.name for gpu in facts.gpus if gpu.name)),
        gpu_memory_bytes=_total(gpu.memory_bytes for gpu in facts.gpus),
        gpu_memory_used_bytes=_total(load.memory_used_bytes for load in loads),
        ports=len(rails),
        ports_active=sum(_state(node, port) == "ACTIVE" for port in rails),
        engines=facts.installs,
        shards=len(shards),
        shards_ready=sum(seen(shard, node) is ShardState.READY for shard in shards),
        problems=grades([node], now),
        drained=node.draining and not shards and not strays,
        drain_within=node.drain_within,
    )


def _total(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _state(node: Node, port: Port) -> str:
    reading = node.ports.get(port.device, port.number)
    words = (reading.load.state if reading else "") or port.state
    # sysfs says "4: ACTIVE"; the number is of no use to a person.
    return words.partition(":")[2].strip().upper() if ":" in words else words.upper()


def event_view(happened: Event) -> EventView:
    return EventView(
        id=happened.id,
        clock=happened.clock,
        kind=happened.kind,
        subject=happened.subject,
        text=happened.text,
        data=dict(happened.data),
    )


def _expected(confirmed: Inventory | None) -> ExpectedView | None:
    if confirmed is None:
        return None
    return ExpectedView(
        text=in_words(confirmed),
        clock=confirmed.clock,
        gpus=confirmed.gpus,
        ports=confirmed.ports,
        ports_up=confirmed.ports_up,
        slowest_gbps=confirmed.slowest,
        nvlinks=confirmed.nvlinks,
        memory_bytes=confirmed.memory_bytes,
    )


def node_reply(
    node: Node,
    world: World,
    now: float,
    history: Iterable[Event] = (),
    in_flight: Mapping[str, int] = Map(),
    settings: Settings = DEFAULT,
) -> NodeReply:
    """Everything the plane knows of one node; `history` is what happened there lately."""
    shards = sorted(shards_by_node(world)[node.id], key=lambda shard: shard.id)
    strays = tuple(stray_view(stray, node) for _, stray in sorted(world.strays.items()) if stray.node == node.id)
    row = node_row(node, shards, now, len(strays))
    members = members_of(world.shards.values()) if shards else {}
    views = tuple(
        shard_view(shard, node, now, drains.of_replica(world, members[shard.replica], settings)) for shard in shards
    )
    leaving = _leaving(views, strays, world, in_flight) if node.draining else ()
    problems = problem_views([node], now)
    facts, confirmed, happened = node.facts, _expected(node.expected), tuple(map(event_view, history))
    if facts is None:
        return NodeReply(
            node=row,
            shards=views,
            strays=strays,
            problems=problems,
            expected=confirmed,
            history=happened,
            leaving=leaving,
        )
    host = facts.host
    return NodeReply(
        node=row,
        hostname=host.hostname,
        os=host.os,
        kernel=host.kernel,
        arch=host.arch,
        cpu_model=host.cpu.model,
        swap_bytes=host.swap_bytes,
        boot_id=host.boot_id,
        facts_age=max(0.0, now - node.facts_at) if node.facts_at is not None else None,
        node_clock=node.load.clock if node.load and node.load.clock else None,
        features=facts.features,
        driver=facts.gpu_driver.version,
        cuda=facts.gpu_driver.cuda,
        why_no_gpus=facts.gpu_driver.absent,
        gpus=tuple(_gpu(gpu, node, shards) for gpu in facts.gpus),
        ports=tuple(_port(port, node, now) for port in facts.ports),
        imex=facts.imex,
        managers=facts.managers,
        interfaces=host.interfaces,
        disks=host.disks,
        limits=msgspec.structs.asdict(host.limits),
        engines=facts.installs,
        weights=facts.weights,
        shards=views,
        strays=strays,
        problems=problems,
        clock_offset=node.clock_offset,
        expected=confirmed,
        history=happened,
        leaving=leaving,
    )


def _leaving(
    shards: Iterable[ShardView], strays: Iterable[ShardView], world: World, in_flight: Mapping[str, int]
) -> tuple[LeavingView, ...]:
    """What is still on a node that is being drained, and what its leaving waits for."""
    found = []
    for view in (*shards, *strays):
        requests = in_flight.get(view.replica) if view.want != "stop" else None
        found.append(
            LeavingView(
                shard=view.id,
                replica=view.replica,
                model=view.model,
                state=view.state,
                want=view.want,
                in_flight=requests,
                stop_in=view.stop_in,
                text=_awaits(view, world, requests or 0),
            )
        )
    return tuple(found)


def _awaits(view: ShardView, world: World, requests: int) -> str:
    if view.want == "stop":
        return "being stopped"
    if view.want == "drain":
        left = f"{format_duration(view.stop_in)} more at most" if view.stop_in is not None else "a moment more"
        serves = f"finishes {requests} request{'s' if requests != 1 else ''}" if requests else "finishes what it serves"
        return f"gets no new requests; {serves}, for {left}"
    unplaced = world.unplaced.get(ModelName(view.model))
    if unplaced is not None:
        return f"stays until there is room for its replacement: `llmgw ctl why {view.model}`"
    return "serves until its replacement is ready"


def _gpu(gpu: Gpu, node: Node, shards: list[Shard]) -> GpuView:
    load = node.gpu_loads.get(gpu.uuid) or GpuLoad(gpu.uuid)
    here = [shard for shard in shards if gpu.uuid in shard.spec.gpus and shard.want is not Want.STOP]
    processes = [process for process in node.gpu_processes if process.gpu == gpu.uuid]
    fabric = gpu.fabric
    return GpuView(
        uuid=gpu.uuid,
        index=gpu.index,
        name=gpu.name,
        pci=gpu.pci,
        serial=gpu.serial,
        memory_bytes=gpu.memory_bytes,
        reserved_bytes=sum(shard.spec.resources.gpu_memory_bytes for shard in here),
        used_bytes=load.memory_used_bytes,
        foreign_bytes=sum(process.memory_bytes or 0 for process in processes if not process.shard),
        unified_memory=gpu.unified_memory,
        compute_capability=gpu.compute_capability,
        mig_enabled=gpu.mig_enabled,
        utilization_percent=load.utilization_percent,
        temperature_c=load.temperature_c,
        power_w=load.power_w,
        throttle=load.throttle,
        pcie_gen=load.pcie_gen,
        pcie_gen_max=gpu.pcie_gen_max,
        pcie_width=load.pcie_width,
        pcie_width_max=gpu.pcie_width_max,
        ecc_uncorrected=load.ecc_uncorrected,
        ecc_corrected=load.ecc_corrected,
        remap_pending=load.remap_pending,
        remap_failed=load.remap_failed,
        nvlinks=gpu.nvlinks,
        nvlinks_up=load.nvlinks_up,
        nvlink_errors=load.nvlink_errors,
        nvlink_state=fabric.state if fabric else "",
        nvlink_domain=(fabric.domain or "") if fabric else "",
        nvlink_healthy=fabric.healthy if fabric else None,
        shards=tuple(shard.id for shard in here),
        processes=tuple(
            GpuProcessView(pid=process.pid, name=process.name, memory_bytes=process.memory_bytes, shard=process.shard)
            for process in processes
        ),
        unreadable=gpu.unreadable,
        ecc_uncorrected_total=load.ecc_uncorrected_total,
        ecc_corrected_total=load.ecc_corrected_total,
        remapped_rows=load.remapped_rows,
        retired_pages_pending=load.retired_pages_pending,
        recovery_action=load.recovery_action,
        nvlink_faults=fabric.faults if fabric else (),
        numa_node=gpu.numa_node,
        topology=gpu.topology,
        no_peer_access=gpu.no_peer_access,
        mig_devices=tuple(
            MigView(uuid=mig.uuid, profile=mig.profile, memory_bytes=mig.memory_bytes) for mig in gpu.mig_devices
        ),
    )


def _port(port: Port, node: Node, now: float) -> PortView:
    reading = node.ports.get(port.device, port.number)
    load = reading.load if reading else None
    rates = dict(sorted(rates_of(reading).items())) if reading else {}
    return PortView(
        device=port.device,
        number=port.number,
        kind=port.kind,
        role=port.role,
        rail=port.rail,
        fabric=port.fabric,
        state=_state(node, port),
        physical_state=(load.physical_state if load else "") or port.physical_state,
        rate_gbps=load.rate_gbps if load and load.rate_gbps is not None else port.rate_gbps,
        rate_text=port.rate_text,
        link_layer=port.link_layer,
        netdev=port.netdev,
        mtu=port.mtu,
        lid=port.lid,
        sm_lid=load.sm_lid if load and load.sm_lid is not None else port.sm_lid,
        port_guid=port.port_guid,
        pci=port.pci,
        numa_node=port.numa_node,
        pcie_gen=port.pcie_gen,
        pcie_gen_max=port.pcie_gen_max,
        pcie_width=port.pcie_width,
        pcie_width_max=port.pcie_width_max,
        driver=port.driver,
        firmware=port.firmware,
        board=port.board,
        received_bytes_per_second=rates.get("port_rcv_data"),
        sent_bytes_per_second=rates.get("port_xmit_data"),
        rates=rates,
        counters=dict(sorted(reading.counters.items())) if reading else {},
        counters_age=max(0.0, now - reading.at) if reading else None,
        gids=tuple(GidView(index=gid.index, gid=gid.gid, type=gid.type, netdev=gid.netdev) for gid in port.gids),
        nearest_gpus=port.nearest_gpus,
        unreadable=port.unreadable,
        bond=port.bond,
        node_guid=port.node_guid,
        prefix=port.prefix,
        libfabric=port.libfabric,
    )

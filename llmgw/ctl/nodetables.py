"""One node on one screen, and its doctor's findings. Pure."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from llmgw.ctl.client import Answer
from llmgw.ctl.replicatables import shard_table
from llmgw.ctl.show import (
    Cell,
    Column,
    age,
    clean,
    columns,
    counted,
    fields,
    number,
    of,
    percent,
    rate,
    section,
    size,
    when,
    word,
    words,
)
from llmgw.ctl.tables import engines, problem_table, stage
from llmgw.wire.api import DoctorView
from llmgw.wire.nodeapi import GpuView, LeavingView, NodeReply, NodeRow, PortView


def node(answer: Answer, width: int) -> RenderableType:
    """Head, problems, shards, GPUs, ports, NVLink domain and IMEX, disks: what there is of each."""
    reply = answer.read(NodeReply)
    parts: list[RenderableType] = [_head(reply)]
    if reply.problems:
        parts.append(section("Problems", problem_table(reply.problems, width)))
    if reply.shards:
        parts.append(section("Shards", shard_table(reply.shards, width, here=reply.node.id)))
    if reply.strays:
        strays = shard_table(reply.strays, width, here=reply.node.id)
        parts.append(section("Processes that no placement claims", strays))
    if reply.leaving:
        left = columns(_LEAVING, map(_leaving, reply.leaving), nothing="", width=width)
        parts.append(section("Still to leave", left))
    if reply.gpus:
        parts.append(section("GPUs", columns(_GPUS, map(_gpu, reply.gpus), nothing="", width=width)))
        parts.extend(_foreign(reply.gpus, width))
    if reply.ports:
        indexes = {gpu.uuid: str(gpu.index) for gpu in reply.gpus if gpu.index is not None}
        ports = (_port(port, indexes) for port in reply.ports)
        parts.append(section("RDMA ports", columns(_PORTS, ports, nothing="", width=width)))
    if reply.managers or reply.imex is not None:
        parts.append(section("Fabric", _fabric(reply)))
    if limits := _limits(reply):
        parts.append(section("Host", fields(limits)))
    if reply.disks:
        rows = ((d.purpose, d.path, of(size(d.free_bytes), size(d.total_bytes)), d.filesystem) for d in reply.disks)
        heads = (Column("DISK FOR"), Column("PATH"), Column("FREE", right=True), Column("KIND", extra=1))
        parts.append(section("Disks", columns(heads, rows, nothing="", width=width)))
    up = [i for i in reply.interfaces if i.up and i.name != "lo"]
    if up:
        rows2 = (
            (i.name, ", ".join(i.addresses), number(i.mtu), f"{i.speed_mbps / 1000:g} Gb/s" if i.speed_mbps else "")
            for i in up
        )
        heads = (Column("INTERFACE"), Column("ADDRESSES"), Column("MTU", right=True, extra=2), Column("SPEED", extra=1))
        parts.append(section("Network", columns(heads, rows2, nothing="", width=width)))
    if reply.history:
        rows3 = ((when(event.clock), event.kind, clean(event.text)) for event in reply.history[-_HISTORY:])
        heads3 = (Column("WHEN"), Column("WHAT", extra=1), Column("HAPPENED", prose=True))
        parts.append(section("Lately", columns(heads3, rows3, nothing="", width=width)))
    return Group(*parts)


#: Events that are shown of a node; `llmgw ctl events --node NAME` shows all that are kept.
_HISTORY = 15


def _head(reply: NodeReply) -> RenderableType:
    row = reply.node
    memory = None
    if row.memory_bytes is not None and row.memory_available_bytes is not None:
        memory = row.memory_bytes - row.memory_available_bytes
    heard = f"heard {age(row.heard_age)} ago" if row.heard_age is not None else "never heard since the plane started"
    gpus = f"{row.gpus} {', '.join(row.gpu_names)}".strip() if row.gpus else f"none: {reply.why_no_gpus}"
    versions = ", ".join(filter(None, (reply.driver and f"driver {reply.driver}", reply.cuda and f"CUDA {reply.cuda}")))
    pairs: list[tuple[str, Cell]] = [
        ("node", Text(row.id, style="bold")),
        ("stage", words(stage(row), f"for {age(row.stage_age)},", heard)),
        ("drain", _drain(row)),
        ("address", words(row.address, f"({reply.hostname})" if reply.hostname not in ("", row.id) else "")),
        ("agent", words(row.version, f"(facts {age(reply.facts_age)} old)" if reply.facts_age is not None else "")),
        ("labels", ", ".join(f"{key}={value}" for key, value in row.labels.items())),
        ("system", ", ".join(filter(None, (reply.os, reply.kernel, reply.arch)))),
        ("clock there", words(when(reply.node_clock), _ahead(reply.clock_offset))),
        ("CPU", words(f"{row.cpu_threads} threads" if row.cpu_threads else "", reply.cpu_model)),
        ("load", words(percent(row.cpu_percent), f"load {row.load1:.2f}" if row.load1 is not None else "")),
        ("memory", of(size(memory), size(row.memory_bytes))),
        ("GPUs", words(gpus, f"({versions})" if versions else "") if row.gpus or reply.why_no_gpus else ""),
        ("engines", engines(reply.engines)),
        ("expected", words(reply.expected.text, f"(confirmed {when(reply.expected.clock)})") if reply.expected else ""),
        ("problems", counted(row.problems)),
    ]
    return fields(pairs)


def _drain(row: NodeRow) -> str:
    if row.drained:
        return "over: nothing runs here any more (`llmgw ctl undrain` takes it back)"
    if row.draining and row.drain_within is not None:
        return f"what leaves may finish requests for {age(row.drain_within)}"
    return ""


def _ahead(seconds: float | None) -> str:
    """How far a clock is off; a moment of the way here counts, so tenths of a second say nothing."""
    if seconds is None:
        return ""
    if abs(seconds) < 1:
        return "(as the plane's)"
    return f"({age(abs(seconds))} {'ahead of' if seconds > 0 else 'behind'} the plane's)"


def _limits(reply: NodeReply) -> list[tuple[str, Cell]]:
    """Settings of the host that decide whether RDMA and engines can work."""
    found = reply.limits

    def text(name: str) -> str:
        value = found.get(name)
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, tuple | list):
            return ", ".join(map(str, value)) or "none"
        return "" if value is None else str(value)

    locked, pages, page = found.get("memlock_bytes"), found.get("hugepages_total"), found.get("hugepage_bytes")
    bridges = found.get("acs_redirect")
    pairs: list[tuple[str, Cell]] = [
        ("memlock", "unlimited" if locked == -1 else size(locked) if isinstance(locked, int) else ""),
        ("huge pages", f"{pages} of {size(page if isinstance(page, int) else None)}" if pages is not None else ""),
        ("IOMMU", text("iommu")),
        ("ACS", "" if not isinstance(bridges, tuple | list) else f"redirects at {len(bridges)} bridges"),
        ("peer memory", text("peer_memory")),
        ("persistence", text("persistence_daemon")),
        ("fabric manager", text("fabric_manager")),
        ("umad, uverbs", ", ".join(filter(None, (text("umad"), text("uverbs"))))),
    ]
    return [pair for pair in pairs if pair[1]]


_LEAVING = (
    Column("SHARD"),
    Column("STATE"),
    Column("IN FLIGHT", right=True, extra=1),
    Column("WHY IT IS STILL HERE", prose=True),
)


def _leaving(one: LeavingView) -> tuple[Cell, ...]:
    return one.shard, word(one.state), number(one.in_flight), one.text


_GPUS = (
    Column("GPU", right=True),
    Column("NAME", extra=4),
    Column("USED", right=True),
    Column("RESERVED", right=True, extra=1),
    Column("FOREIGN", right=True, extra=1),
    Column("BUSY", right=True, extra=2),
    Column("TEMP", right=True, extra=3),
    Column("POWER", right=True, extra=5),
    Column("PCIE", extra=6),
    Column("NVLINK", extra=5),
    Column("ECC", extra=6),
    Column("SHARDS", extra=2),
    Column("PCI", extra=7),
    Column("UUID", extra=8),
)


def _gpu(gpu: GpuView) -> tuple[Cell, ...]:
    links = f"{gpu.nvlinks_up if gpu.nvlinks_up is not None else '?'}/{gpu.nvlinks}" if gpu.nvlinks else ""
    errors = f"{gpu.ecc_uncorrected} uncorrected" if gpu.ecc_uncorrected else ""
    faults = ", ".join(gpu.nvlink_faults) or "unhealthy"
    fabric = Text(faults, style="red") if gpu.nvlink_healthy is False else ""
    state = gpu.nvlink_state if gpu.nvlink_state not in ("", "not-supported", "completed") else ""
    remap = word("failed") if gpu.remap_failed else Text("remap pending", style="yellow") if gpu.remap_pending else ""
    return (
        number(gpu.index),
        Text(gpu.unreadable, style="red") if gpu.unreadable else gpu.name,
        of(size(gpu.used_bytes), size(gpu.memory_bytes)),
        size(gpu.reserved_bytes) if gpu.reserved_bytes else "",
        size(gpu.foreign_bytes) if gpu.foreign_bytes else "",
        percent(gpu.utilization_percent),
        f"{gpu.temperature_c} C" if gpu.temperature_c is not None else "",
        f"{gpu.power_w:.0f} W" if gpu.power_w is not None else "",
        _pcie(gpu.pcie_gen, gpu.pcie_width, gpu.pcie_gen_max, gpu.pcie_width_max),
        words(links, gpu.nvlink_domain, state, fabric),
        words(errors, remap),
        ", ".join(gpu.shards),
        gpu.pci,
        gpu.uuid,
    )


def _pcie(gen: int | None, width: int | None, gen_max: int | None, width_max: int | None) -> str:
    now = f"gen{gen or '?'} x{width or '?'}" if gen or width else ""
    most = f"gen{gen_max or '?'} x{width_max or '?'}" if gen_max or width_max else ""
    return now if now == most or not most else of(now, most)


def _foreign(gpus: tuple[GpuView, ...], width: int) -> list[RenderableType]:
    rows = [
        (
            number(gpu.index),
            str(process.pid),
            clean(process.name),
            size(process.memory_bytes) or "hidden",
            "cannot be told: PID namespace differs" if process.shard == "?" else "",
        )
        for gpu in gpus
        for process in gpu.processes
        if process.shard in ("", "?")
    ]
    if not rows:
        return []
    heads = (
        Column("GPU", right=True),
        Column("PID", right=True),
        Column("NAME"),
        Column("MEMORY", right=True),
        Column("WHOSE", extra=1),
    )
    unsure = any(row[-1] for row in rows)
    title = "Processes on GPUs that may be foreign" if unsure else "Foreign processes on GPUs"
    return [section(title, columns(heads, rows, nothing="", width=width))]


_PORTS = (
    Column("PORT"),
    Column("STATE"),
    Column("RATE", right=True),
    Column("KIND"),
    Column("RAIL", right=True, extra=2),
    Column("FABRIC", extra=3),
    Column("RECEIVED", right=True, extra=1),
    Column("SENT", right=True, extra=1),
    Column("NEAR GPUS", extra=6),
    Column("NETDEV", extra=4),
    Column("MTU", right=True, extra=5),
    Column("LID", right=True, extra=6),
    Column("PCIE", extra=6),
    Column("FIRMWARE", extra=8),
    Column("PORT GUID", extra=9),
)


def _port(port: PortView, indexes: dict[str, str]) -> tuple[Cell, ...]:
    up = port.state == "ACTIVE"
    return (
        f"{port.device}/{port.number}",
        words(Text(port.state.lower(), style="green" if up else "red"), "" if up else port.physical_state),
        f"{port.rate_gbps:g} Gb/s" if port.rate_gbps is not None else "",
        words(port.kind, "" if port.role == "fabric" else f"({port.role})"),
        number(port.rail),
        port.fabric,
        rate(port.received_bytes_per_second),
        rate(port.sent_bytes_per_second),
        ", ".join(indexes.get(uuid, uuid) for uuid in port.nearest_gpus),
        port.netdev,
        number(port.mtu),
        number(port.lid),
        _pcie(port.pcie_gen, port.pcie_width, port.pcie_gen_max, port.pcie_width_max),
        port.firmware,
        port.port_guid,
    )


def _fabric(reply: NodeReply) -> RenderableType:
    pairs: list[tuple[str, Cell]] = []
    for managers in reply.managers:
        master = managers.master
        said = managers.error or "no master answers"
        if master is not None:
            said = f"master {master.guid}, priority {master.priority}, {len(managers.others)} others"
        pairs.append((f"SM at {managers.device}/{managers.number}", said))
    if reply.imex is not None:
        apart = f"not reached: {', '.join(reply.imex.disconnected)}" if reply.imex.disconnected else ""
        differ = f"differs from: {', '.join(reply.imex.mismatch)}" if reply.imex.mismatch else ""
        channels = f"{reply.imex.channels} channels"
        nodes = f"{len(reply.imex.nodes)} node{'s' if len(reply.imex.nodes) != 1 else ''}"
        imex = (reply.imex.state, nodes, channels, apart, differ)
        pairs.append(("IMEX", ", ".join(filter(None, imex))))
    return fields(pairs)


_FINDINGS = (
    Column("OUTCOME"),
    Column("CHECK"),
    Column("SUBJECT", extra=1),
    Column("FOUND", prose=True),
    Column("TO DO", prose=True),
)


def findings(reply: DoctorView, width: int) -> RenderableType:
    """The failures first, then what was a warning, then the rest."""
    order = {"fail": 0, "warn": 1, "pass": 2}
    rows = (
        (word(f.outcome), f.check, f.subject if f.subject != "node" else "", clean(f.text), f.remedy)
        for f in sorted(reply.findings, key=lambda finding: order.get(finding.outcome, 3))
    )
    return columns(_FINDINGS, rows, nothing="no check was made", width=width)

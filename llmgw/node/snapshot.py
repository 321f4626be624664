"""Everything that the survey knows of a node at one moment."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from llmgw.wire.facts import (
    Gpu,
    GpuDriver,
    GpuFabric,
    GpuLoad,
    GpuProcess,
    Host,
    HostLoad,
    Imex,
    Port,
    PortLoad,
    Problem,
    ShardLoad,
)


@attrs.frozen
class Snapshot:
    host: Host = Host()
    load: HostLoad = HostLoad()
    shards: tuple[ShardLoad, ...] = ()
    driver: GpuDriver = GpuDriver()
    gpus: tuple[Gpu, ...] = ()
    gpu_loads: tuple[GpuLoad, ...] = ()
    gpu_processes: tuple[GpuProcess, ...] = ()
    gpu_fabrics: Mapping[str, GpuFabric] = attrs.field(factory=dict)
    ports: tuple[Port, ...] = ()
    port_loads: tuple[PortLoad, ...] = ()
    imex: Imex | None = None
    problems: tuple[Problem, ...] = ()

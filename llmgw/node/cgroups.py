"""What a container or a systemd unit lets this process have: CPU time and memory, by cgroup v2 or v1.

Limits of every ancestor hold, so the smallest counts. In a container without its own cgroup namespace the
path that /proc names may not exist below the mount; then the mount's root is the container's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs

from llmgw.node import files
from llmgw.node.view import View


@attrs.frozen
class Share:
    """None: no limit. `cpus` is in CPUs' worth of time and may be a fraction; memory in bytes."""

    cpus: float | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None


def share(view: View) -> Share:
    """This process's limits."""
    own = files.text(view.at("proc/self/cgroup")) or ""
    mount = view.at("sys/fs/cgroup")
    paths = dict(_controllers(own))
    cpus, memory, used = list[float](), list[tuple[int, Path]](), None
    if "" in paths:
        for unified in (mount, mount / "unified"):
            for folder in _ancestors(unified, paths[""]):
                quota = (files.text(folder / "cpu.max") or "").split()
                if len(quota) == 2 and (limit := _ratio(quota[0], quota[1])) is not None:
                    cpus.append(limit)
                if (most := files.number(folder / "memory.max")) is not None:
                    memory.append((most, folder))
    if "cpu" in paths:
        for folder in _ancestors(mount / "cpu", paths["cpu"]):
            limit = _ratio(files.text(folder / "cpu.cfs_quota_us"), files.text(folder / "cpu.cfs_period_us"))
            if limit is not None:
                cpus.append(limit)
    if "memory" in paths:
        for folder in _ancestors(mount / "memory", paths["memory"]):
            most = files.number(folder / "memory.limit_in_bytes")
            if most is not None and most < 1 << 60:  # v1 writes "unlimited" as a huge number
                memory.append((most, folder))
    if memory:
        used = _used(min(memory)[1])
    return Share(min(cpus, default=None), min(memory)[0] if memory else None, used)


def _controllers(own: str) -> Iterator[tuple[str, str]]:
    """(controller, path); the controller of v2 is ""."""
    for line in own.splitlines():
        _, _, rest = line.partition(":")
        controllers, mark, path = rest.partition(":")
        if mark:
            for controller in controllers.split(","):
                yield controller, path


def _ancestors(mount: Path, path: str) -> Iterator[Path]:
    folder = mount / path.lstrip("/")
    if ".." in Path(path).parts or not folder.is_dir():
        folder = mount
    while True:
        yield folder
        if folder == mount:
            return
        folder = folder.parent


def _ratio(quota: str | None, period: str | None) -> float | None:
    most, of = files.integer(quota), files.integer(period)
    return most / of if most is not None and most > 0 and of else None


def _used(folder: Path) -> int | None:
    """Memory in use that could not be reclaimed by dropping file pages nobody touches."""
    used = files.number(folder / "memory.current")
    if used is None:
        used = files.number(folder / "memory.usage_in_bytes")
    if used is None:
        return None
    stat = files.fields(files.text(folder / "memory.stat"), " ")
    idle = files.integer(stat.get("total_inactive_file") or stat.get("inactive_file")) or 0
    return max(0, used - idle)

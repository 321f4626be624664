"""Processes as the kernel shows them: who one is, who belongs to it, and how it ended.

A process id alone names nobody, because numbers come again. With its start time, within one boot, it does. All of /proc
is somebody else's: any file may vanish between two reads, and then the process is gone.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import attrs
import trio

PROC = Path("/proc")


@attrs.frozen
class Seen:
    """One process. `started` is its start time in clock ticks since boot; `state` the kernel's letter."""

    pid: int
    name: str
    state: str
    parent: int
    group: int
    session: int
    started: int

    @property
    def alive(self) -> bool:
        """A zombie has given everything back and only waits for its parent to ask."""
        return self.state not in "ZXx"


def parse_stat(line: str) -> Seen | None:
    """A line of /proc/PID/stat (proc(5)). The name stands in parentheses and may itself hold any character."""
    opening, closing = line.find("("), line.rfind(")")
    rest = line[closing + 1 :].split()
    try:
        return Seen(
            int(line[:opening]),
            line[opening + 1 : closing],
            rest[0],
            int(rest[1]),
            int(rest[2]),
            int(rest[3]),
            int(rest[19]),
        )
    except (ValueError, IndexError):
        return None


def look(pid: int) -> Seen | None:
    """The process with this id now; None when there is none."""
    try:
        return parse_stat((PROC / str(pid) / "stat").read_text(errors="replace"))
    except (OSError, ValueError):
        return None


def everyone() -> dict[int, Seen]:
    """All processes now, by id."""
    found = (look(int(name)) for name in os.listdir(PROC) if name.isdigit())
    return {seen.pid: seen for seen in found if seen is not None}


def boot_id() -> str:
    """What tells this boot of the machine from every other."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def age(seen: Seen) -> float:
    """Seconds since a process was started; 0.0 where /proc/uptime cannot be read."""
    try:
        uptime = float((PROC / "uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, uptime - seen.started / os.sysconf("SC_CLK_TCK"))


def environment(pid: int) -> dict[str, str] | None:
    """The environment a process was started with; None when it may not or can no longer be read."""
    try:
        data = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    pairs = (entry.partition(b"=") for entry in data.split(b"\0") if entry)
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}


def scope_of(pid: int) -> Path | None:
    """The cgroup of a process where that is a scope of its own made for an engine; None else."""
    try:
        lines = (PROC / str(pid) / "cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        path = line.split(":", 2)[-1]
        name = path.rsplit("/", 1)[-1]
        if line.startswith("0::") and name.startswith("llmgw-engine-") and name.endswith(".scope"):
            return Path("/sys/fs/cgroup") / path.lstrip("/")
    return None


def service_of_own() -> tuple[str, bool]:
    """The systemd service that this process belongs to ("llmgw-node.service"), by its cgroup, "" for none; and whether
    a user's systemd runs it, not the system's."""
    try:
        lines = (PROC / "self/cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return "", False
    parts = [part for line in lines for part in line.split(":", 2)[-1].split("/")]
    units = [part for part in parts if part.endswith((".service", ".scope"))]
    if not units or units[-1].endswith(".scope"):
        return "", False
    return units[-1], any(unit.startswith("user@") for unit in units[:-1])


def members(
    leader: int,
    started: int,
    everybody: Mapping[int, Seen],
    *,
    of_scope: Iterable[int] = (),
    marked: Iterable[int] = (),
) -> dict[int, Seen]:
    """All living processes that belong to an engine, its leader included. Pure.

    They are those in its session or process group, those in its cgroup (`of_scope`), those that carry its token
    (`marked`), and every descendant of one of them. When the leader's number belongs to another process by now, its
    session and group are no longer a proof of anything and only scope and token count.
    """
    holder = everybody.get(leader)
    ours = holder is None or holder.started == started
    # A member cannot be older than its leader: what is, lives in somebody else's group of the same number.
    found = {
        seen.pid
        for seen in everybody.values()
        if ours and leader in (seen.session, seen.group, seen.pid) and seen.started >= started
    }
    found |= {pid for pid in (*of_scope, *marked) if pid in everybody}
    children: dict[int, list[int]] = {}
    for seen in everybody.values():
        children.setdefault(seen.parent, []).append(seen.pid)
    open_ends = list(found)
    while open_ends:
        for child in children.get(open_ends.pop(), ()):
            if child not in found:
                found.add(child)
                open_ends.append(child)
    return {pid: everybody[pid] for pid in found if everybody[pid].alive}


def descends(seen: Seen, ancestor: int) -> bool:
    """Whether a process was started by another one, directly or not, as far as the kernel still knows."""
    known: Seen | None = seen
    while known is not None and known.pid != ancestor:
        known = look(known.parent) if known.parent else None
    return known is not None


def carrying(name: str, value: str, everybody: Iterable[int]) -> Iterator[int]:
    """The processes whose environment has this variable with this value."""
    mark = f"{name}={value}".encode()
    for pid in everybody:
        try:
            data = (PROC / str(pid) / "environ").read_bytes()
        except OSError:
            continue
        if mark in data.split(b"\0"):
            yield pid


def in_scope(scope: Path | None) -> tuple[int, ...]:
    """Every process of a cgroup and those below it; none when it is gone."""
    if scope is None:
        return ()
    found: list[int] = []
    for folder, _, files in os.walk(scope):
        if "cgroup.procs" in files:
            try:
                found += map(int, (Path(folder) / "cgroup.procs").read_text().split())
            except (OSError, ValueError):
                continue
    return tuple(found)


def oom_kills() -> int:
    """How many processes the kernel has killed for memory since boot (/proc/vmstat, since Linux 4.13)."""
    try:
        lines = (PROC / "vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def listeners(port: int, pid: int | str = "self") -> frozenset[int] | None:
    """The inodes of the sockets that listen on a TCP port, as seen from a process's network; None: cannot be read."""
    found: set[int] = set()
    readable = False
    for name in ("tcp", "tcp6"):
        try:
            lines = (PROC / str(pid) / "net" / name).read_text().splitlines()[1:]
        except OSError:
            continue
        readable = True
        for line in lines:
            fields = line.split()
            if len(fields) > 9 and fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(int(fields[9]))
    return frozenset(found) if readable else None


def connected(pid: int) -> frozenset[str] | None:
    """The IPv4 ends, as address:port, that a process is connected to by TCP; None where that may not be seen."""
    if (own := sockets(pid)) is None:
        return None
    try:
        lines = (PROC / str(pid) / "net" / "tcp").read_text().splitlines()[1:]
    except OSError:
        return None
    found: set[str] = set()
    for line in lines:
        fields = line.split()
        if len(fields) > 9 and fields[3] == "01" and int(fields[9]) in own:
            address, _, port = fields[2].partition(":")
            # The kernel prints the four bytes as one number of this machine's own byte order.
            host = ipaddress.IPv4Address(int(address, 16).to_bytes(4, sys.byteorder))
            found.add(f"{host}:{int(port, 16)}")
    return frozenset(found)


def sockets(pid: int) -> frozenset[int] | None:
    """The inodes of the sockets a process has open; None where that may not be seen."""
    found: set[int] = set()
    try:
        entries = os.listdir(PROC / str(pid) / "fd")
    except PermissionError:
        return None
    except OSError:
        return frozenset()
    for entry in entries:
        try:
            target = os.readlink(PROC / str(pid) / "fd" / entry)
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(int(target[8:-1]))
    return frozenset(found)


class Handle:
    """A hold on one process that cannot slip to another with the same number (a pidfd).

    Started and adopted processes are the same here. Only a child's status can be had; opening, waiting and
    signalling work for all.
    """

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError when there is no such process."""
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def ended(self) -> None:
        """Wait until the process has ended; it may then still be a zombie."""
        await trio.lowlevel.wait_readable(self._fd)

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; False when the process is gone already."""
        try:
            signal.pidfd_send_signal(self._fd, number)
        except ProcessLookupError:
            return False
        return True

    def reap(self) -> tuple[int | None, int | None]:
        """(exit code, signal) of an ended child, which this also lays to rest; both None for others' children."""
        try:
            result = os.waitid(os.P_PIDFD, self._fd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return None, None
        if result is None:
            return None, None
        if result.si_code == os.CLD_EXITED:
            return result.si_status, None
        return None, result.si_status

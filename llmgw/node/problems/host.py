"""What is wrong with the host: settings and shortages that break engines or RDMA."""

from __future__ import annotations

from collections.abc import Iterator

from llmgw.node.problems.gpus import node
from llmgw.node.problems.memory import Facts, Symptom
from llmgw.wire.facts import Grade

HOUR, MINUTE = 3600.0, 60.0
MEMLOCK = 1 << 30
#: A disk with less than both is nearly full.
DISK_SHARE, DISK_BYTES = 0.05, 20 << 30
MEMORY_SHARE = 0.02


def host(facts: Facts, now: float) -> Iterator[Symptom]:
    limits = facts.host.limits
    rdma = [port for port in facts.ports.ports if port.kind in ("ib", "roce")]
    gpus = [gpu for gpu in facts.gpus.gpus if not gpu.unreadable]
    if rdma and limits.memlock_bytes is not None and 0 <= limits.memlock_bytes < MEMLOCK:
        yield node(
            "memlock",
            Grade.WARN,
            f"this agent and its engines may lock {limits.memlock_bytes >> 20} MiB of memory: RDMA needs much more",
            "set LimitMEMLOCK=infinity in the agent's unit, and ulimit -l unlimited for others",
        )
    if rdma and limits.uverbs is False:
        yield node(
            "uverbs-missing",
            Grade.WARN,
            "there are RDMA adapters and no /dev/infiniband/uverbs*: no program here can use them",
            "modprobe ib_uverbs; in a container, pass /dev/infiniband in",
        )
    if gpus and rdma and limits.peer_memory == ():
        yield node(
            "peer-memory",
            Grade.WARN,
            "neither nvidia_peermem nor dma-buf is available: RDMA goes through host memory instead of GPU memory",
            "modprobe nvidia_peermem, or use the open kernel modules on Linux 5.12 or newer",
        )
    if gpus and rdma and limits.acs_redirect:
        count = len(limits.acs_redirect)
        yield node(
            "acs-redirect",
            Grade.WARN,
            f"{count} PCI bridges send traffic between devices through the root complex (ACS), the first is "
            f"{limits.acs_redirect[0]}: GPU and adapter cannot talk directly",
            "disable ACS in the BIOS, or: setpci -s BRIDGE ECAP_ACS+0x6.w=0000 for each",
        )
    for disk in facts.host.disks:
        if disk.total_bytes and disk.free_bytes < min(DISK_SHARE * disk.total_bytes, DISK_BYTES):
            yield node(
                f"disk-full-{disk.purpose}",
                Grade.BAD if disk.free_bytes < 1 << 30 else Grade.WARN,
                f"{disk.free_bytes / 2**30:.1f} GiB of {disk.total_bytes / 2**30:.0f} are free on "
                f"{disk.mount or disk.path}, which holds {'weights' if disk.purpose == 'weights' else 'our state'}",
                "remove what is not needed: llmgw ctl weights",
                clear=5 * MINUTE,
            )
    total, available = facts.host.memory_bytes, facts.load.memory_available_bytes
    if total and available < MEMORY_SHARE * total:
        yield node(
            "memory-low",
            Grade.WARN,
            f"{available / 2**30:.1f} GiB of {total / 2**30:.0f} GiB of memory are available",
            "stop what uses it; the kernel ends processes when it is gone",
            after=30.0,
        )
    if facts.host_stalled is not None and now - facts.host_stalled > 30:
        yield node(
            "host-stalled",
            Grade.WARN,
            f"reading this host's files and disks has not returned for {round(now - facts.host_stalled)} s",
            "look for a network file system that does not answer: mount | grep nfs",
        )
    yield from kernel(facts, now)


def kernel(facts: Facts, now: float) -> Iterator[Symptom]:
    kills = [event for event in facts.events if event.kind == "oom-kill" and now - event.at <= HOUR]
    if kills:
        yield node(
            "oom-kill",
            Grade.WARN,
            f"the kernel ended {len(kills)} processes for want of memory in the last hour [{kills[-1].text[:200]}]",
            "give engines less, or the node more memory",
            clear=MINUTE,
        )
    checks = [event for event in facts.events if event.kind == "machine-check" and now - event.at <= 24 * HOUR]
    if checks:
        yield node(
            "machine-check",
            Grade.WARN,
            f"{len(checks)} hardware errors of processor or memory in the last day, lastly [{checks[-1].text[:200]}]",
            "look at them with rasdaemon or mcelog; exchange the memory module named there",
            clear=MINUTE,
        )

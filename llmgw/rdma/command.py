"""The command line of one side of a perftest run.

Both sides get the same flags: newer perftest refuses a run whose sides differ in any of them. Only the device, its
port, its GID index and, on the client, the server's address belong to one side. Pure.
"""

from __future__ import annotations

import re

import attrs

from llmgw.errors import BadInput
from llmgw.wire.control import Bandwidth

#: The programs that may be run, and whether each measures bandwidth or latency.
TESTS = {
    "ib_write_bw": "bandwidth",
    "ib_read_bw": "bandwidth",
    "ib_send_bw": "bandwidth",
    "ib_write_lat": "latency",
    "ib_read_lat": "latency",
    "ib_send_lat": "latency",
}
#: Options that an operator may add; each takes a number, or nothing where that is None.
EXTRA: dict[str, str | None] = {
    "-t": "sends in flight",
    "-u": "queue pair time-out",
    "-S": "service level",
    "-Q": "completions",
    "-l": "post list",
    "-c": "connection type",
    "--tclass": "traffic class",
    "--ipv6-addr": None,
    "--disable_pcie_relaxed": None,
}
MTUS = (256, 512, 1024, 2048, 4096)
#: Seconds that a side may take beyond the test's own: set-up, calibration, and a machine that is slow.
SLACK = 30.0
#: Seconds that the server waits longer than the client: it is started first and must see the client end.
SERVER_SLACK = 15.0

_NAME = re.compile(r"[A-Za-z0-9][\w.:-]{0,63}")
_HOST = re.compile(r"[A-Za-z0-9\[:][\w.:%\]-]{0,254}")
_NUMBER = re.compile(r"[0-9]{1,9}|RC|UC|XRC|DC")


@attrs.frozen
class Tools:
    """What a node has: perftest's version and long options, and programs that pin and unbuffer."""

    version: str = ""
    options: frozenset[str] = frozenset()
    stdbuf: bool = False
    numactl: bool = False
    taskset: bool = False

    @property
    def cuda(self) -> bool:
        return "use_cuda" in self.options


@attrs.frozen
class Pin:
    """Where a side runs: the adapter's NUMA node and that node's CPUs ("0-31,64-95"); nothing known, no pinning."""

    numa_node: int | None = None
    cpus: str = ""


@attrs.frozen
class Command:
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()


def limits(run: Bandwidth) -> tuple[float, float]:
    """Seconds after which the client's and the server's process are killed, whatever they do."""
    client = run.seconds + SLACK
    return client, client + SERVER_SLACK


def check(run: Bandwidth) -> None:
    """Raises BadInput for parameters that cannot be meant; nothing else reaches a command line."""
    if run.test not in TESTS:
        raise BadInput(f"{run.test!r} is no test", remedy=f"one of {', '.join(TESTS)}")
    if not _NAME.fullmatch(run.device):
        raise BadInput(f"{run.device!r} is no device name")
    if run.mtu is not None and run.mtu not in MTUS:
        raise BadInput(f"an MTU of {run.mtu} is not possible", remedy=f"one of {', '.join(map(str, MTUS))}")
    bounds = (
        ("port number", run.number, 1, 255),
        ("GID index", run.gid_index or 0, 0, 65535),
        ("TCP port", run.tcp_port, 1, 65535),
        ("size in bytes", run.size, 1, 1 << 30),
        ("number of queue pairs", run.queue_pairs, 1, 1024),
        ("number of seconds", run.seconds, 1, 86_400),
    )
    for what, value, least, most in bounds:
        if not least <= value <= most:
            raise BadInput(f"a {what} of {value} is not possible", remedy=f"{least} to {most}")
    extra = list(run.extra)
    while extra:
        option = extra.pop(0)
        option, equals, value_text = option.partition("=")
        if option not in EXTRA:
            raise BadInput(f"{option!r} may not be added to a test", remedy=f"one of {', '.join(EXTRA)}")
        if EXTRA[option] is None:
            if equals:
                raise BadInput(f"{option} takes no value")
        elif not _NUMBER.fullmatch(value_text if equals else (extra.pop(0) if extra else "")):
            raise BadInput(f"{option} needs a number ({EXTRA[option]})")


def command(run: Bandwidth, tools: Tools, *, server: str | None = None, pin: Pin | None = None) -> Command:
    """The command of the client when `server` names where to connect, else of the server.

    Raises BadInput for parameters that cannot be meant, and when this perftest lacks what they need.
    """
    check(run)
    if server is not None and not _HOST.fullmatch(server):
        raise BadInput(f"{server!r} is no address")
    bandwidth = TESTS[run.test] == "bandwidth"
    # -F: a CPU governor that is not at its maximum is no reason to refuse; -D: only a duration bounds a run.
    argv = [run.test, "-d", run.device, "-i", str(run.number), "-p", str(run.tcp_port), "-F"]
    argv += ["-D", str(run.seconds), "-s", str(run.size)]
    if bandwidth:
        argv += ["-q", str(run.queue_pairs), "--report_gbits"]
    if run.mtu is not None:
        argv += ["-m", str(run.mtu)]
    if run.gid_index is not None:
        argv += ["-x", str(run.gid_index)]
    if run.bidirectional and bandwidth:
        argv.append("-b")
    env: list[tuple[str, str]] = []
    if run.gpu:
        if not tools.cuda:
            raise BadInput(
                f"perftest {tools.version or 'here'} cannot use GPU memory",
                remedy="build perftest with CUDA support, or test without --gpu",
            )
        # By uuid and not by index: CUDA counts devices by speed, the driver by PCI address.
        env.append(("CUDA_VISIBLE_DEVICES", run.gpu))
        argv.append("--use_cuda=0")
        if "use_cuda_dmabuf" in tools.options:
            argv.append("--use_cuda_dmabuf")
    if "--ipv6-addr" in run.extra and "ipv6-addr" not in tools.options:
        raise BadInput(
            f"perftest {tools.version or 'here'} cannot exchange parameters over IPv6",
            remedy="give the nodes IPv4 management addresses or install a newer perftest",
        )
    argv += run.extra
    if server is not None:
        argv.append(server)
    # Into a pipe perftest buffers whole blocks, so that a killed run would leave nothing to read.
    prefix = ["stdbuf", "-oL"] if tools.stdbuf else []
    return Command((*_pinned(tools, pin), *prefix, *argv), tuple(env))


def _pinned(tools: Tools, pin: Pin | None) -> tuple[str, ...]:
    if pin is None or pin.numa_node is None or pin.numa_node < 0:
        return ()
    if tools.numactl:
        return ("numactl", f"--cpunodebind={pin.numa_node}", f"--membind={pin.numa_node}")
    if tools.taskset and pin.cpus:
        return ("taskset", "-c", pin.cpus)
    return ()


def shared(argv: tuple[str, ...]) -> tuple[str, ...]:
    """The part of a command line that must be the same on both sides: without pinning, device, port, GID and server."""
    start = next((at for at, word in enumerate(argv) if word in TESTS), 0)
    words = list(argv[start:])
    kept: list[str] = []
    while words:
        word = words.pop(0)
        if word in ("-d", "-i", "-x"):
            words = words[1:]
        else:
            kept.append(word)
    return tuple(kept)

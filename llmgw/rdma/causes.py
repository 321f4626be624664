"""Why a perftest run failed, from what it printed: exit code first, row second (E7).

The table is ordered from what explains a run to what merely follows from the other side's failure. Texts are
perftest's own, as printed by versions 4.5 (6.06) to 26.01 (6.28).
"""

from __future__ import annotations

import re
import signal
from enum import IntEnum

import attrs

from llmgw.rdma import perftest
from llmgw.rdma.perftest import Row


class Weight(IntEnum):
    """How far a finding explains a failed pair of processes; the heavier side's words come first."""

    ECHO = 1  # the other side went away: look there
    SYMPTOM = 2  # this side saw the failure
    CAUSE = 3  # this says why


@attrs.frozen
class Cause:
    """A probable cause: a stable word, a sentence for an operator, and what to do about it."""

    code: str
    text: str
    remedy: str = ""
    weight: Weight = Weight.CAUSE


@attrs.frozen
class Measured:
    """The run ended well and this is its row."""

    row: Row


@attrs.frozen
class NotMeasured:
    """The run has no result, which is never 0 Gb/s. `row` is a low row that a failed run may still have printed."""

    error: str
    cause: Cause
    row: Row | None = None


#: How a work request's status is told, before its number; releases since 26.01 also say what the number means.
_STATUS = r"(?i)(?:failed status(?:-[^()\n]{0,80}\()? ?|bad wc status (?:-- )?|CQ error status=)"

_TABLE: tuple[tuple[str, str, Weight, str, str], ...] = (
    (
        r"error while loading shared libraries: ([^\s:]{1,80})|symbol lookup error: ([^\s:]{1,80})",
        "broken-install",
        Weight.CAUSE,
        "perftest cannot start: a library that it needs is missing or does not fit it ({0})",
        "install perftest and rdma-core (libibverbs, librdmacm) from one source",
    ),
    (
        r"(?:couldn't load driver '([^']{1,80})'|no userspace device-specific driver found for (\S{1,80}))"
        r"[\s\S]*(?:Did not detect devices|No IB devices found|Unable to find the Infiniband/RoCE device)",
        "no-provider",
        Weight.CAUSE,
        "the adapter's user-space driver cannot be loaded ({0})",
        "install ibverbs-providers (or rdma-core) in the version of libibverbs",
    ),
    (
        r"IB device (\S{1,80}) not found",
        "no-device",
        Weight.CAUSE,
        "no RDMA device {0} on this node",
        "compare with `rdma link` there; the adapter or its driver is gone",
    ),
    (
        r"Did not detect devices|No IB devices found|Unable to find the Infiniband/RoCE device",
        "no-device",
        Weight.CAUSE,
        "no such RDMA device on this node",
        "check the adapter and its driver there with `rdma link`; in a container, that /dev/infiniband is passed in",
    ),
    (
        r"Unable to query port (\d+) attributes",
        "no-port",
        Weight.CAUSE,
        "the adapter has no port {0}",
        "check the port number with `rdma link`",
    ),
    (
        r"Port number (\d+) state is (\w+)",
        "port-down",
        Weight.CAUSE,
        "port {0} is {1}",
        "look at the cable and the switch port; Init means that no subnet manager configured it",
    ),
    (
        r"Couldn't listen to port (\d+)|Address already in use",
        "port-in-use",
        Weight.CAUSE,
        "TCP port {0} is taken by another process",
        "run the test again: it chooses another port",
    ),
    (
        r"(?:Name or service not known|Temporary failure in name resolution|No address associated with hostname)"
        r" for (\S{1,200})",
        "bad-host",
        Weight.CAUSE,
        "the server's name {0} cannot be resolved on the client",
        "set the node's address in its configuration",
    ),
    (
        r"Address family for hostname not supported",
        "ipv6-exchange",
        Weight.CAUSE,
        "this perftest cannot exchange parameters over IPv6",
        "give the node an IPv4 management address or install a newer perftest",
    ),
    (
        r"not compatible with versions older than ([\d.]+)",
        "versions",
        Weight.CAUSE,
        "the two nodes' perftest versions do not talk to each other (older than {0})",
        "install the same perftest on both",
    ),
    (
        r"\b([\w-]{1,40}(?: [\w-]{1,40}){0,2}) mismatch: local ?= ?([^\s,]{1,60}),? remote ?= ?(\S{1,60})",
        "parameters-differ",
        Weight.CAUSE,
        "the two sides were started with different parameters: {0} is {1} here and {2} there",
        "install the same perftest on both",
    ),
    (
        r"Gid index should be between (\d+) and (\d+)",
        "gid-index",
        Weight.CAUSE,
        "the GID index is beyond what the program takes ({0} to {1})",
        "remove unused addresses from the interface so that the wanted GID has a lower index",
    ),
    (
        r"Found Incompatibility issue with GID types",
        "gid-types",
        Weight.CAUSE,
        "the two sides use GIDs of different families",
        "give both interfaces addresses of one family and subnet",
    ),
    (
        r"Failed to modify QP (?:\S{1,20} )?to RTR|Unable to Connect the HCA's through the link",
        "no-path",
        Weight.CAUSE,
        "the adapters cannot address each other: an empty or unroutable GID, or no path between the ports",
        "compare both ports' GID tables and subnets; ping between the interfaces",
    ),
    (
        r"Couldn't allocate MR with error=14|Bad address",
        "peer-memory",
        Weight.CAUSE,
        "the adapter cannot reach the GPU's memory: the kernel has no peer memory for it",
        "load nvidia_peermem, or use a kernel and driver with dma-buf; else test without a GPU",
    ),
    (
        r"(?i)couldn't create (?:CQ|QP|SRQ|PD)\b|(?:failed|unable) to create (?:CQ|QP|SRQ|PD)\b",
        "resources",
        Weight.CAUSE,
        "the adapter has no queue pairs or completion queues left, or not of the size that was asked for",
        "use fewer queue pairs and a smaller depth; see `rdma resource` there",
    ),
    (
        r"(?i)(?:could not|couldn't|failed to) (?:allocate|get) \w{0,20} ?huge ?pages?",
        "hugepages",
        Weight.CAUSE,
        "there are no huge pages left",
        "test without huge pages, or raise vm.nr_hugepages",
    ),
    (
        r"Couldn't allocate MR|failed to create mr|Cannot allocate memory",
        "memory-lock",
        Weight.CAUSE,
        "not enough memory may be locked (ulimit -l)",
        "set LimitMEMLOCK=infinity for the agent",
    ),
    (
        r"(?i)\bcu(?:da)?\w{0,30}(?:\([^)]{0,10}\))? (?:\w{1,20} ){0,4}(?:failed|error|returned)"
        r"|couldn't (?:init|create|allocate)\w{0,8} (?:\w{1,20} ){0,4}(?:cuda|gpu)",
        "cuda",
        Weight.CAUSE,
        "GPU memory could not be used for RDMA",
        "load nvidia_peermem, or use a kernel and driver with dma-buf; else test without a GPU",
    ),
    (
        r"unrecognized option|invalid option|Invalid Command|Duplicated argument",
        "option",
        Weight.CAUSE,
        "this perftest does not know an option of the test",
        "install the same, newer perftest on both nodes",
    ),
    (
        r"DURATION > 2\*MARGIN",
        "duration",
        Weight.CAUSE,
        "the test is shorter than twice its margin",
        "ask for more seconds",
    ),
    (
        r"BW result is below bw limit",
        "below-limit",
        Weight.CAUSE,
        "perftest was given a limit and the result is below it",
        "",
    ),
    (
        r"Can't produce a report|Correlation coefficient r\^2: \S{1,20} < ",
        "clock",
        Weight.CAUSE,
        "perftest could not calibrate its clock on this machine",
        "use a stable clock source (tsc) and test on an idle machine",
    ),
    (
        r"(?i)unexpected CM event|rdma_(?:client|server) function|resolving basic address and port"
        r"|rdma_(?:resolve|get_cm_event|cm_event|connect|accept|listen|bind_addr|create_id)|rdma(?:_cm)? resources"
        r"|(?-i:RDMA_CM|\b(?:ADDR|ROUTE|CONNECT)_ERROR\b)",
        "rdma-cm",
        Weight.CAUSE,
        "connecting through rdma_cm failed: InfiniBand needs IPoIB addresses for it",
        "test without rdma_cm",
    ),
    (
        _STATUS + r"12\b",
        "no-answer",
        Weight.CAUSE,
        "packets were sent and never acknowledged (transport retry exceeded): the path is broken or drops everything",
        "look at the cable, the switch port and, on RoCE, the GID and VLAN",
    ),
    (
        _STATUS + r"13\b",
        "receiver-not-ready",
        Weight.CAUSE,
        "the receiver was not ready (RNR retry exceeded)",
        "",
    ),
    (
        _STATUS + r"2\b",
        "local-error",
        Weight.CAUSE,
        "the local queue pair failed (status 2): its interface went down or its adapter was reset",
        "look at the port's state and the kernel log of that node",
    ),
    (
        _STATUS + r"9\b",
        "remote-invalid",
        Weight.CAUSE,
        "the remote side refused a request (status 9)",
        "use fewer queue pairs or a smaller size",
    ),
    (
        _STATUS + r"10\b",
        "remote-access",
        Weight.CAUSE,
        "the remote side refused access to its memory (status 10): the sides were started with different parameters",
        "install the same perftest on both",
    ),
    (
        _STATUS + r"(\d+)\b",
        "completion",
        Weight.CAUSE,
        "a work request failed with status {0}",
        "look at the kernel log of both nodes",
    ),
    (
        r"Invalid MTU|Requested mtu is higher than active mtu",
        "mtu",
        Weight.SYMPTOM,
        "the MTU asked for is not possible on this port",
        "",
    ),
    (
        r"(?i)permission denied|Operation not permitted",
        "permission",
        Weight.CAUSE,
        "the agent may not open the RDMA device",
        "run the agent as root or give it /dev/infiniband",
    ),
    (
        r"Couldn't get context for the device",
        "device-open",
        Weight.CAUSE,
        "the RDMA device cannot be opened",
        "check /dev/infiniband and the driver",
    ),
    (
        r"Couldn't connect to (\S{1,200}):(\d+)",
        "no-server",
        Weight.SYMPTOM,
        "the server at {0} port {1} does not answer over the management network",
        "check that a firewall between the nodes lets that port through",
    ),
    (
        r"Did not get Message for (\d+) Seconds",
        "no-traffic",
        Weight.SYMPTOM,
        "no message came from the other side for {0} s",
        "look at the link and at the other side's lines",
    ),
    (r"Completion with error", "completion", Weight.SYMPTOM, "a work request failed", ""),
    (
        r"Couldn't read reports|Couldn't read remote address|Unable to (?:read|write) (?:to|from) socket"
        r"|Failed to (?:exchange data|close connection) between",
        "peer-left",
        Weight.ECHO,
        "the other side ended first",
        "",
    ),
)
_CAUSES = tuple((re.compile(pattern), code, weight, text, remedy) for pattern, code, weight, text, remedy in _TABLE)

UNKNOWN = Cause("unknown", "the output shows no known cause", "", Weight.SYMPTOM)
CUT_SHORT = Cause(
    "time-limit",
    "it did not end by itself: data stopped flowing, or the other side accepted and said nothing",
    "look at the link and at the other side's lines",
    Weight.SYMPTOM,
)
NO_ROW = Cause("no-result", "no row of the table could be read", "compare the output with what this version reads")


_WEIGHTS = {code: weight for _, code, weight, _, _ in reversed(_TABLE)}
_WEIGHTS |= {UNKNOWN.code: UNKNOWN.weight, CUT_SHORT.code: CUT_SHORT.weight, "completion": Weight.CAUSE}


def weight_of(code: str) -> Weight:
    """How much a cause explains, by its word; causes that are not of the table explain all."""
    return _WEIGHTS.get(code, Weight.CAUSE)


def cause(text: str, device: str = "") -> Cause:
    """The first cause of the table that the text shows; a missing `device` is named where perftest names none."""
    for pattern, code, weight, words, remedy in _CAUSES:
        if found := pattern.search(text):
            if code == "no-device" and device:
                words = "no RDMA device {0} on this node"
            groups = [group for group in found.groups() if group] or [device]
            return Cause(code, words.format(*groups, "?", "?", "?"), remedy, weight)
    return UNKNOWN


def verdict(
    exit_code: int | None,
    stdout: str,
    stderr: str,
    *,
    size: int | None = None,
    cut_short: bool = False,
    device: str = "",
) -> Measured | NotMeasured:
    """What one side's process says. `exit_code` is negative for a signal; `cut_short`: our own limit ended it.

    The exit code comes first: a client whose server was killed still prints a row, a low one, and leaves with 1.
    """
    row = perftest.result(stdout, size)
    shown = cause(stderr + "\n" + stdout, device)
    if cut_short:
        return NotMeasured("ended by the time limit", shown if shown.weight is Weight.CAUSE else CUT_SHORT, row)
    if exit_code is None:
        return NotMeasured("it could not be started", shown, row)
    if exit_code < 0 or exit_code > 128:
        number = -exit_code if exit_code < 0 else exit_code - 128
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        return NotMeasured(f"killed by {name}", Cause("killed", f"somebody or something killed it ({name})"), row)
    if exit_code:
        return NotMeasured(f"exit code {exit_code}", shown, row)
    if row is None:
        return NotMeasured("exit code 0 without a result", NO_ROW if shown is UNKNOWN else shown)
    if size is not None and row.size != size:
        return NotMeasured(
            f"a row for {row.size} bytes instead of {size}",
            Cause("no-result", "the table has no row for the size that was asked for"),
            row,
        )
    if not row.measured:
        if not row.iterations:
            return NotMeasured("no iteration finished", CUT_SHORT, row)
        return NotMeasured(
            "exit code 0 and a result of 0.00",
            Cause(
                "could-not-measure",
                "perftest moved data and could not measure it: its clock calibration failed on this machine",
                "use a stable clock source (tsc) and test on an idle machine",
            ),
            row,
        )
    return Measured(row)

"""Error counters of a whole fabric (`ibqueryerrors`) or of one port (`perfquery`), and what they mean over time.

`ibqueryerrors` prints only what is not zero, and nothing for a node that did not answer: an absent counter of a node
that was asked is 0 at most for the ports it printed. A counter at its maximum has stopped counting, so that its growth
is unknown, not zero. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import attrs

from llmgw.rdma.fabric import PortCounters
from llmgw.rdma.fields import fields, number
from llmgw.rdma.ran import Ran, Trouble, trouble

_NODE = re.compile(r'(?:Errors|Data Counters) for (?:0x(?P<guid>[0-9a-fA-F]{1,16}) )?"(?P<name>.*)"\s*$')
_PORT = re.compile(r"\s+GUID 0x(?P<guid>[0-9a-fA-F]{1,16}) port (?P<port>\d+|ALL):(?P<counters>.*)$")
_COUNTER = re.compile(r"\[(?P<name>\w+) == (?P<value>\d+)(?: \([^()]*\))?\]")
_SUMMARY = re.compile(r"##\s+(?P<words>.*)$")
_PMA = re.compile(r"(\d+) PMA query failures")
_LINK = re.compile(r"\s+Link info:")

#: Where each classic counter stops (PortCounters, InfiniBand Architecture 16.1.3): from there its growth is unknown.
MAXIMA: dict[str, int] = {
    "SymbolErrorCounter": 0xFFFF, "LinkErrorRecoveryCounter": 0xFF, "LinkDownedCounter": 0xFF, "PortRcvErrors": 0xFFFF,
    "PortRcvRemotePhysicalErrors": 0xFFFF, "PortRcvSwitchRelayErrors": 0xFFFF, "PortXmitDiscards": 0xFFFF,
    "PortXmitConstraintErrors": 0xFF, "PortRcvConstraintErrors": 0xFF, "LocalLinkIntegrityErrors": 0xF,
    "ExcessiveBufferOverrunErrors": 0xF, "QP1Dropped": 0xFFFF, "VL15Dropped": 0xFFFF, "PortXmitWait": 0xFFFFFFFF,
}  # fmt: skip

#: Counters of broken bits: each count is at least one wrong symbol on the cable.
BIT_ERRORS = ("SymbolErrorCounter", "PortRcvErrors", "LocalLinkIntegrityErrors")
#: Counters of a link that went away for a moment: one is one too many.
FLAPS = ("LinkDownedCounter", "LinkErrorRecoveryCounter")
#: Not errors of a cable: traffic, congestion, and what a subnet manager's sweep always causes.
NOT_ERRORS = frozenset({
    "PortXmitData", "PortRcvData", "PortXmitPkts", "PortRcvPkts", "PortUnicastXmitPkts", "PortUnicastRcvPkts",
    "PortMulticastXmitPkts", "PortMulticastRcvPkts", "PortXmitWait", "PortRcvSwitchRelayErrors", "VL15Dropped",
    "QP1Dropped", "CounterSelect", "CounterSelect2", "PortSelect",
})  # fmt: skip

#: The bit error rate that the InfiniBand Architecture allows a link (volume 2, 6.3: 10^-12).
ALLOWED = 1e-12


@attrs.frozen
class Counted:
    """What one run of `ibqueryerrors` printed, and the lines of no known form."""

    ports: tuple[PortCounters, ...]
    unanswered: int = 0  # nodes or ports whose performance agent did not answer
    strange: tuple[str, ...] = ()


def parse(lines: Iterable[str]) -> Counted:
    """Counters by port; a node's sum over all its ports ("port ALL") is left out. Never raises."""
    found: dict[tuple[int, int], dict[str, int]] = {}
    strange: list[str] = []
    unanswered = 0
    for line in lines:
        if match := _PORT.match(line):
            if match["port"] == "ALL":
                continue
            key = (int(match["guid"], 16), int(match["port"]))
            counters = found.setdefault(key, {})
            counters.update({name: int(value) for name, value in _COUNTER.findall(match["counters"])})
        elif match := _SUMMARY.match(line):
            failed = _PMA.search(match["words"])
            unanswered += int(failed[1]) if failed else 0
        elif line.strip() and not _NODE.match(line) and not _LINK.match(line):
            strange.append(line[:200])
    ports = tuple(PortCounters(guid, port, dict(sorted(found[guid, port].items()))) for guid, port in sorted(found))
    return Counted(ports, unanswered, tuple(strange))


def counted(ran: Ran) -> Counted | Trouble:
    """A run's counters, or why there are none. Exit status 1 means counters over a threshold, which is an answer."""
    failure = trouble(ran)
    if failure is not None:
        return failure
    if not ran.out.strip():
        return Trouble("failed", "ibqueryerrors counted nothing: it needs a subnet manager and LIDs")
    return parse(ran.out.splitlines())


def one_port(ran: Ran, guid: int, port: int) -> PortCounters | Trouble:
    """The counters of one port by `perfquery`, with or without -x. A counter that reads "N/A" is left out."""
    failure = trouble(ran)
    if failure is not None:
        return failure
    values = {name: number(text) for name, text in fields(ran.out.splitlines()).items()}
    return PortCounters(guid, port, {name: value for name, value in values.items() if value is not None})


def growth(before: int | None, after: int | None, name: str = "") -> int | None:
    """How much a counter grew. None: not told before, set back, or stuck at its maximum."""
    if before is None or after is None or after < before:
        return None
    if name in MAXIMA and after >= MAXIMA[name]:
        return None
    return after - before


@attrs.frozen
class Window:
    """Bit errors of one link over a stretch of time.

    `rate` is errors a bit carried; without errors it is 0 and `bound` says what can be excluded with 95 %
    confidence (3 divided by the bits: the rule of three). `bits` are what the link can carry, idle or not,
    since symbols flow on an idle link too.
    """

    seconds: float
    bits: float
    errors: int
    rate: float
    bound: float

    @property
    def verdict(self) -> str:
        """ "bad": more than the architecture allows; "good": surely less; "short": too early to say."""
        if self.errors >= 3 and self.rate > ALLOWED:
            return "bad"
        return "good" if self.bound <= ALLOWED else "short"


def window(errors: int, gbps: float, seconds: float) -> Window:
    """The bit error rate that `errors` on a link of `gbps` in `seconds` come to."""
    bits = max(gbps, 0.0) * 1e9 * max(seconds, 0.0)
    if bits == 0.0:
        return Window(seconds, 0.0, errors, 0.0, float("inf"))
    return Window(seconds, bits, errors, errors / bits, max(3.0, errors + 2.0 * max(errors, 1) ** 0.5) / bits)


@attrs.frozen
class ErrorRate:
    """What one port's error counters did between two readings."""

    guid: int
    port: int
    seconds: float
    grown: Mapping[str, int]  # counters that grew, by how much
    stuck: tuple[str, ...]  # at their maximum: reset them to see whether they still grow
    bits: Window | None  # None: the link's rate is not known

    @property
    def per_hour(self) -> dict[str, float]:
        return {name: value * 3600.0 / self.seconds for name, value in self.grown.items()} if self.seconds > 0 else {}

    @property
    def grade(self) -> str:
        """ "bad": flaps, or too many bit errors; "warn": other errors grow, or a counter is stuck; "good"."""
        if any(self.grown.get(name) for name in FLAPS) or (self.bits is not None and self.bits.verdict == "bad"):
            return "bad"
        return "warn" if self.grown or self.stuck else "good"


#: What a switch counts at any of its ports while a way out of the fabric is being changed: packets that were under way.
OF_CHANGE = frozenset({"PortXmitDiscards"})


def compare(
    before: PortCounters | None,
    after: PortCounters,
    gbps: float | None,
    seconds: float,
    ignored: frozenset[str] = frozenset(),
) -> ErrorRate:
    """What happened on one port between two readings `seconds` apart.

    `before` None: the port had nothing to report then, so every counter was 0. `ignored` counters are not judged.
    """
    grown: dict[str, int] = {}
    stuck: list[str] = []
    for name, value in after.counters.items():
        if name in NOT_ERRORS or name in ignored:
            continue
        if name in MAXIMA and value >= MAXIMA[name]:
            stuck.append(name)
            continue
        more = growth(before.counters.get(name, 0) if before else 0, value, name)
        if more:
            grown[name] = more
    errors = sum(grown.get(name, 0) for name in BIT_ERRORS)
    bits = window(errors, gbps, seconds) if gbps is not None else None
    return ErrorRate(after.guid, after.port, seconds, grown, tuple(stuck), bits)

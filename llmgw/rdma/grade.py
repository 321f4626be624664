"""What a measured bandwidth is worth, against what this link can carry (E6).

The ceiling is the smaller of two: the link's data rate less the headers that its MTU costs, and what PCIe can feed.
A grade always comes with its rule and its numbers, and with what explains it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from msgspec import Struct

from llmgw.rdma.link import End, Link

#: Bytes a packet carries beside its payload: InfiniBand LRH 8 + BTH 12 + ICRC 4 + VCRC 2; RoCE v2 over IPv4 also
#: counts Ethernet 14 + FCS 4 + preamble 8 + gap 12, IP 20 and UDP 8.
IB_OVERHEAD = 26
ROCE_OVERHEAD = 82
VLAN_OVERHEAD = 4
IPV6_OVERHEAD = 20
#: Gb/s that one PCIe lane carries by generation, the line code taken off.
PCIE_LANE_GBPS = {1: 2.0, 2: 4.0, 3: 7.877, 4: 15.754, 5: 31.508, 6: 60.5}
#: Bytes of a message from which one queue pair fills any link (PT07).
FILLING = 1 << 20
#: Counters whose growth during a run explains a low figure, and what they count.
TELLING = {
    "link_downed": "the link went down",
    "link_error_recovery": "the link retrained",
    "symbol_error": "symbol errors: cable or connector",
    "local_link_integrity_errors": "link integrity errors: cable or connector",
    "port_rcv_errors": "received packets with errors",
    "excessive_buffer_overrun_errors": "buffer overruns",
    "port_xmit_discards": "packets discarded on sending",
    "out_of_sequence": "packets lost or reordered on the way",
    "packet_seq_err": "packets lost on the way",
    "local_ack_timeout_err": "acknowledgements missing",
    "completer_retry_err": "retransmissions: packets lost on the way",
    "retry_exceeded_err": "retries exceeded",
    "rnr_nak_retry_err": "receiver not ready",
    "roce_adp_retrans_to": "retransmission time-outs",
    "rx_icrc_encapsulated": "packets with a wrong checksum",
    "out_of_buffer": "the receiver ran out of buffers",
}


@attrs.frozen
class Thresholds:
    """Shares of the ceiling. The defaults are what operators of large fleets accept (95 % good, 90 % fair)."""

    good: float = 0.95
    fair: float = 0.90
    suspicious: float = 1.01
    pcie_usable: float = 0.88  # of PCIe's raw rate: what its own packets leave


class Verdict(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A grade with its reasons.

    `grade` is "good", "fair", "bad", "suspicious" (more than the link can carry), "measured" (nothing to compare
    with) or "failed". `share` is of the ceiling. `rule` holds the numbers that decided.
    """

    grade: str
    share: float | None = None
    ceiling_gbps: float | None = None
    limit: str = ""  # what sets the ceiling: "link" or "pcie"
    rule: str = ""
    why: tuple[str, ...] = ()


def efficiency(kind: str, mtu: int, *, vlan: bool = False, ipv6: bool = False) -> float:
    """The share of a link's data rate that is payload."""
    if kind == "ib":
        return mtu / (mtu + IB_OVERHEAD)
    return mtu / (mtu + ROCE_OVERHEAD + VLAN_OVERHEAD * vlan + IPV6_OVERHEAD * ipv6)


def pcie_raw(generation: int | None, width: int | None) -> float | None:
    """Gb/s of a slot in one direction; None when either figure is unknown."""
    lane = PCIE_LANE_GBPS.get(generation or 0)
    return lane * width if lane and width and width > 0 else None


@attrs.frozen
class Ceiling:
    """The most a link can show, both directions together where the test is bidirectional."""

    gbps: float | None
    limit: str
    text: str
    why: tuple[str, ...] = ()


def ceiling(link: Link, *, bidirectional: bool = False, thresholds: Thresholds | None = None) -> Ceiling:
    """The ceiling and its arithmetic. An unknown rate is no ceiling, even where PCIe is known: it would be a guess."""
    limits = thresholds or Thresholds()
    if not link.rate_gbps:
        return Ceiling(None, "", "the link's rate is unknown: measured, not graded")
    mtu = link.mtu or 4096
    share = efficiency(link.kind, mtu, vlan=link.vlan, ipv6=link.ipv6)
    wire = link.rate_gbps * share
    assumed = "" if link.mtu else " (assumed)"
    text = f"{link.rate_gbps:g} Gb/s x {share:.3f} (MTU {mtu}{assumed}, {_kind(link)})"
    why: list[str] = []
    best, limit = wire, "link"
    for end in (link.a, link.b):
        raw = pcie_raw(end.pcie_gen, end.pcie_width)
        if raw is not None and raw * limits.pcie_usable / end.sharing < best:
            best, limit = raw * limits.pcie_usable / end.sharing, "pcie"
            shared = f", shared by {end.sharing} ports" if end.sharing > 1 else ""
            text = (
                f"{limits.pcie_usable:g} x {raw:.0f} Gb/s "
                f"(PCIe Gen{end.pcie_gen} x{end.pcie_width} of {end.name}{shared})"
            )
            why = [_pcie_words(end, link.rate_gbps, raw, limits)]
    if limit == "link" and mtu < 4096 and share < 0.97:
        better = efficiency(link.kind, 4096, vlan=link.vlan, ipv6=link.ipv6) * link.rate_gbps
        why.append(f"MTU {mtu} limits this link to {wire:.1f} Gb/s; 4096 would allow {better:.1f}")
    both = 2.0 if bidirectional else 1.0
    if bidirectional:
        text = f"2 x {text}"
    return Ceiling(best * both, limit, text, tuple(why))


def _kind(link: Link) -> str:
    if link.kind == "ib":
        return "InfiniBand"
    return "RoCE" + (" IPv6" if link.ipv6 else "") + (" VLAN" if link.vlan else "")


def _pcie_words(end: End, rate: float, raw: float, limits: Thresholds) -> str:
    words = (
        f"PCIe-limited: {end.name} hangs on PCIe Gen{end.pcie_gen} x{end.pcie_width}, which feeds "
        f"{raw * limits.pcie_usable / end.sharing:.0f} of the link's {rate:g} Gb/s"
    )
    if end.sharing > 1:
        words += f", as {end.sharing} ports that share the slot were tested at once"
    able = pcie_raw(end.pcie_gen_max or end.pcie_gen, end.pcie_width_max or end.pcie_width)
    if able is not None and able > raw:
        words += (
            f"; the adapter can do Gen{end.pcie_gen_max or end.pcie_gen} x{end.pcie_width_max or end.pcie_width}: "
            "reseat it or use another slot"
        )
    return words


def grade(
    average_gbps: float,
    link: Link,
    *,
    bidirectional: bool = False,
    gpu_a: str = "",
    gpu_b: str = "",
    counters: Mapping[str, Mapping[str, int]] | None = None,
    ports: tuple[str, ...] = (),
    size: int | None = None,
    queue_pairs: int | None = None,
    thresholds: Thresholds | None = None,
) -> Verdict:
    """The verdict on one run.

    `counters` are what each end's error counters grew by, `ports` sentences about a port that changed during the
    run, `gpu_a` and `gpu_b` the GPUs whose memory was used, `size` a message's in bytes.
    """
    limits = thresholds or Thresholds()
    top = ceiling(link, bidirectional=bidirectional, thresholds=limits)
    why = list(ports) + list(top.why)
    for name, grown in (counters or {}).items():
        why += [
            f"{name}: {counter} grew by {by} ({TELLING[counter]})"
            for counter, by in grown.items()
            if _tells(counter, by)
        ]
    if top.gbps is None:
        return Verdict(grade="measured", rule=top.text, why=tuple(why))
    share = average_gbps / top.gbps
    numbers = f"{average_gbps:.4g} of {top.gbps:.4g} Gb/s = {share:.1%}; ceiling {top.text}"
    if share > limits.suspicious:
        word, rule = "suspicious", f"over {limits.suspicious:.0%}"
        why.append("more than the link can carry: traffic that never left the node (loopback), or a wrong rate")
    elif share >= limits.good:
        word, rule = "good", f"from {limits.good:.0%}"
    elif share >= limits.fair:
        word, rule = "fair", f"from {limits.fair:.0%}, below {limits.good:.0%}"
    else:
        word, rule = "bad", f"below {limits.fair:.0%}"
    if word in ("fair", "bad"):
        if size is not None and size < FILLING and queue_pairs == 1:
            why.append(
                f"messages of {size} bytes over one queue pair do not fill every link: "
                f"test with {FILLING} bytes or several queue pairs"
            )
        why += _guesses(average_gbps / (2 if bidirectional else 1), link, gpu_a, gpu_b)
        why += list(link.warnings)
    return Verdict(
        grade=word,
        share=share,
        ceiling_gbps=top.gbps,
        limit=top.limit,
        rule=f"{word}: {rule} ({numbers})",
        why=tuple(dict.fromkeys(why)),
    )


def _tells(counter: str, by: int) -> bool:
    return by > 0 and counter in TELLING


def _guesses(one_way: float, link: Link, gpu_a: str, gpu_b: str) -> list[str]:
    """What else would explain a low figure."""
    found = []
    for end, gpu in ((link.a, gpu_a), (link.b, gpu_b)):
        if gpu and gpu not in end.nearest_gpus:
            use = f"use {end.nearest_gpus[0]}" if end.nearest_gpus else "no GPU of the node is near this adapter"
            found.append(
                f"GPU {gpu} is far from {end.name} (SYS: its traffic crosses the CPU), the probable cause; {use}"
            )
        if end.pcie_gen is None or end.pcie_width is None:
            found.append(f"the PCIe link of {end.name} is unknown, so it may be the limit")
    rate = link.rate_gbps or 0.0
    for mtu in (1024, 2048):
        if (link.mtu or 0) > mtu and rate:
            expected = rate * efficiency(link.kind, mtu, vlan=link.vlan, ipv6=link.ipv6)
            if abs(one_way / expected - 1) < 0.01:
                found.append(f"the figure is what MTU {mtu} gives ({expected:.1f} Gb/s): check the switch's MTU")
    return found

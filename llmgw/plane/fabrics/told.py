"""Events of a fabric, from what a scan's verdict says and what was known before: each thing told once. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from llmgw.plane.events import Event
from llmgw.plane.fabrics.kept import Scan
from llmgw.plane.fabrics.verdict import Fault, Told, Verdict
from llmgw.rdma.managers import Told as ManagersTold
from llmgw.rdma.touches import Touched

#: Told by the fleet's own fold at the port that saw it first (B6).
TOLD_BY_FLEET = frozenset({"sm-changed"})

Ports = frozenset[tuple[int, int]]


def of_managers(told: Iterable[ManagersTold], clock: float) -> list[Event]:
    return [
        Event(kind=one.kind, subject=f"fabric:{one.fabric}", text=one.text, clock=clock,
              data={"fabric": one.fabric, **dict(one.data)})
        for one in told
        if one.kind not in TOLD_BY_FLEET
    ]  # fmt: skip


def of_scan(
    fabric: str, verdict: Verdict, before: Mapping[str, Fault], last: Scan | None, clock: float
) -> tuple[list[Event], dict[str, Fault]]:
    """What a scan tells, and the faults that are open after it (by kind and key, without misplaced cables).

    `last` is the scan before. A link that got slow and is confirmed as slow is one event, not two; what a partial
    map does not show is neither changed nor over.
    """
    events: list[Event] = []
    if not verdict.complete and (last is None or last.complete or last.error):
        holes = "; ".join(verdict.holes[:3])
        more = f" and {len(verdict.holes) - 3} more" if len(verdict.holes) > 3 else ""
        text = f"the map is partial: {holes}{more}; what it does not show may still be there"
        events.append(_event("fabric-partial", fabric, text, clock, holes=str(len(verdict.holes))))
    if verdict.complete and last is not None and not last.complete and not last.error:
        events.append(_event("fabric-partial-over", fabric, "the map is complete again", clock))
    now = {f"{fault.kind} {fault.key}": fault for fault in verdict.faults}
    after = {key: fault for key, fault in before.items() if key in now or not verdict.complete} | now
    ended = {key: fault for key, fault in before.items() if key not in after}
    slow = {frozenset(fault.ports) for fault in (*now.values(), *ended.values()) if fault.kind == "link-slow"}
    for one in verdict.changes:
        if one.change.kind in ("link-slower", "link-faster") and frozenset(one.change.ports) in slow:
            continue
        events.append(_change(fabric, one, clock))
    if verdict.more_changes:
        events.append(_event("fabric-changed", fabric, f"{verdict.more_changes} more changes", clock))
    events += faults(fabric, before, after, clock)
    return events, after


def faults(
    fabric: str, before: Mapping[str, Fault], after: Mapping[str, Fault], clock: float, quiet: Ports = frozenset()
) -> list[Event]:
    """Faults that began and ended; those at ports in `quiet` were told as a change already."""
    events = []
    for key, fault in after.items():
        if key not in before and not quiet & frozenset(fault.ports):
            events.append(_event(f"fabric-{fault.kind}", fabric, _with(fault.text, fault.touched), clock,
                                 **_data(fault.touched), grade=fault.grade))  # fmt: skip
    for key, fault in before.items():
        if key not in after and not quiet & frozenset(fault.ports):
            events.append(_event(f"fabric-{fault.kind}-over", fabric, f"over: {fault.text}", clock))
    return events


def failed(fabric: str, error: str, last: Scan | None, clock: float) -> list[Event]:
    """A scan failed: told when the one before had not."""
    if last is not None and last.error:
        return []
    return [_event("fabric-scan-failed", fabric, f"it cannot be scanned: {error}", clock)]


def moved_ports(told: Iterable[Told]) -> Ports:
    """The ports whose cables were moved or swapped, by these changes."""
    return frozenset(
        port for one in told if one.change.kind in ("cables-swapped", "cable-moved") for port in one.change.ports
    )


def _change(fabric: str, one: Told, clock: float) -> Event:
    data = _data(one.touched)
    if one.change.before or one.change.after:
        data |= {"before": one.change.before, "after": one.change.after}
    return _event(f"fabric-{one.change.kind}", fabric, _with(one.change.text, one.touched), clock, **data)


def _with(text: str, touched: Touched) -> str:
    """A sentence, with what it touches."""
    parts = []
    if touched.everyone:
        parts.append("all traffic between leaves may have used it")
    if touched.replicas:
        parts.append(f"replicas over it: {_few(touched.replicas)}")
    elif touched.nodes and not all(node in text for node in touched.nodes):
        parts.append(f"nodes: {_few(touched.nodes)}")
    return f"{text} ({'; '.join(parts)})" if parts else text


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _data(touched: Touched) -> dict[str, str]:
    named = {"nodes": touched.nodes, "rails": touched.rails, "replicas": touched.replicas}
    return {key: ",".join(names[:50]) for key, names in named.items() if names}


def _event(kind: str, fabric: str, text: str, clock: float, **data: str) -> Event:
    return Event(
        kind=kind, subject=f"fabric:{fabric}", text=f"fabric {fabric}: {text}", clock=clock,
        data={"fabric": fabric, **data},
    )  # fmt: skip

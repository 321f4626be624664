"""Problems and subnet managers as a node tells them: sets with a history, not streams of alarms (B3, B6). Pure."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from immutables import Map

from llmgw.plane.event import Event
from llmgw.plane.world import Node, OpenProblem
from llmgw.wire.facts import PortManagers, Problem

#: A change of master that another port told within this time is the same change (one event a fabric).
ONE_CHANGE = 120.0


def problems(
    node: Node, told: Iterable[Problem], now: float, clock: float
) -> tuple[Map[tuple[str, str], OpenProblem], list[Event]]:
    """The open problems after a list that is the whole truth, and what opened, cleared or changed its grade."""
    was, events = node.problems, list[Event]()
    # What the plane itself found is not the node's to clear.
    found = {key: open_ for key, open_ in was.items() if open_.by_plane}
    for problem in told:
        key = (problem.subject, problem.code)
        before, until = was.get(key), acknowledged(node, key, now)
        if before is None:
            found[key] = OpenProblem(problem, now, now, clock, until)
        else:
            found[key] = attrs.evolve(before, problem=problem, last_at=now, acknowledged_until=until)
    for key, open_ in found.items():
        before = was.get(key)
        if before is None:
            events.append(opened(node, open_.problem, clock))
        elif before.problem.grade is not open_.problem.grade:
            change = f"{before.problem.grade.value} -> {open_.problem.grade.value}: {open_.problem.text}"
            events.append(_event("problem-changed", node, open_.problem, change, clock))
    for key, gone in was.items():
        if key not in found:
            events.append(cleared(node, gone, now, clock))
    return Map(found), events


def masters(
    node: Node, told: Iterable[PortManagers], recent: Map[tuple[str, str], float], now: float, clock: float
) -> tuple[Map[tuple[str, int], str], Map[tuple[str, str], float], list[Event]]:
    """The last known master SM of each port; an event where one known GUID followed another.

    Only a manager that says it is master counts: a hand-back's moment of standby, an error or silence leave
    what was known. `recent` are the changes already told, so that a fabric's ports tell it once.
    """
    known, events = node.masters, list[Event]()
    for port in told:
        master = port.master
        if master is None or not master.guid or master.state.lower() not in ("master", ""):
            continue
        key, before = (port.device, port.number), known.get((port.device, port.number))
        known = known if before == master.guid else known.set(key, master.guid)
        if before is None or before == master.guid:
            continue
        change = (before, master.guid)
        if now - recent.get(change, float("-inf")) >= ONE_CHANGE:
            name = f"{port.device}/{port.number}"
            text = f"{node.id} {name}: the master subnet manager changed from {before} to {master.guid}"
            data = {"node": str(node.id), "port": name, "from": before, "to": master.guid}
            events.append(Event(kind="sm-changed", subject=f"node:{node.id}", text=text, clock=clock, data=data))
        fresh = {pair: at for pair, at in recent.items() if now - at < ONE_CHANGE}
        recent = Map({**fresh, change: recent.get(change, now) if change in fresh else now})
    return known, recent, events


def acknowledged(node: Node, key: tuple[str, str], now: float) -> float | None:
    """Until when an operator takes this problem as it is; None when nobody does."""
    ack = node.acks.get(key)
    return ack.until_at if ack is not None and ack.until_at > now else None


def opened(node: Node, problem: Problem, clock: float) -> Event:
    return _event("problem-opened", node, problem, problem.text, clock)


def cleared(node: Node, gone: OpenProblem, now: float, clock: float) -> Event:
    text = f"cleared after {now - gone.first_at:.0f} s: {gone.problem.text}"
    return _event("problem-cleared", node, gone.problem, text, clock)


def _event(kind: str, node: Node, problem: Problem, text: str, clock: float) -> Event:
    where = "" if problem.subject == "node" else f" {problem.subject}"
    return Event(
        kind=kind,
        subject=f"node:{node.id}",
        text=f"{node.id}{where}: {problem.code}: {text}",
        clock=clock,
        data={"node": str(node.id), "subject": problem.subject, "code": problem.code, "grade": problem.grade.value},
    )

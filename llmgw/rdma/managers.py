"""Which ports are on one fabric, who manages it, and what happened to its managers.

A fabric is a label where one is configured, else the set of ports that report the same subnet managers; its name is
then the smallest GUID of all managers known when it was first seen, and stays through every failover. Nothing else
tells fabrics apart: GID prefix and LIDs repeat on each (C10).

Reports come one port at a time and lag behind one another, so a change of master is told at the first port that sees it
and once for the fabric; anything that a failover also looks like for a while (nobody answers, two masters) counts only
when it held for `Patience.hold`. Pure: the time comes in as `now`.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from immutables import Map as Frozen

from llmgw.wire.facts import PortManagers, SubnetManager


@attrs.frozen(order=True)
class PortKey:
    """A port of the fleet."""

    node: str
    device: str
    number: int = 1

    def __str__(self) -> str:
        return f"{self.node} {self.device}/{self.number}"


#: Troubles of the node that asks: see `llmgw.rdma.ran.Trouble`.
BLIND = frozenset({"no-umad", "no-permission", "not-installed", "no-device", "roce", "port-down", "crashed", "failed"})


@attrs.frozen
class Patience:
    """How long something must hold before it is told, in seconds.

    `hold` is over a failover's length (opensm's default: polling 10 s, 4 retries, so about 50 s). `frozen` is how
    long a master's activity count may stand still; it grows with each sweep and each poll of a standby.
    """

    hold: float = 60.0
    frozen: float = 300.0
    forget: float = 86400.0


@attrs.frozen
class Seen:
    """A manager as last heard of: `at` when it last answered, `moved_at` when its activity count last changed."""

    manager: SubnetManager
    at: float
    moved_at: float
    silent_since: float | None = None


@attrs.frozen
class View:
    """What one port last reported. `master` is the last known one, `since` its first report; kept in silence."""

    master: str = ""
    since: float = 0.0
    answering: bool = False
    error: str = ""
    blind: bool = False  # it could not ask at all, so that its silence says nothing of the managers
    at: float = 0.0
    label: str = ""
    sees: frozenset[str] = frozenset()  # the managers that answered through this port


@attrs.frozen
class Told:
    """Something that happened to a fabric's managers, for the event log."""

    kind: str
    fabric: str
    text: str
    data: tuple[tuple[str, str], ...] = ()


@attrs.frozen
class Fabric:
    """One fabric's managers and ports. `open` are the troubles told and not yet over, by kind, since when.

    `heir_of` is the fabric that its ports were on before, when its managers were known to nobody and no port came from
    elsewhere: should no port be left there, it is that one.
    """

    name: str
    labelled: bool = False
    heir_of: str = ""
    managers: Frozen[str, Seen] = Frozen()
    ports: Frozen[PortKey, View] = Frozen()
    answering: Frozen[str, int] = Frozen()  # how many ports each master answers now
    master: str = ""
    changed: Frozen[tuple[str, str], float] = Frozen()  # changes told lately, by (from, to)
    pending: Frozen[str, float] = Frozen()  # what holds, not yet for long enough, since when
    open: Frozen[str, float] = Frozen()

    @property
    def masters(self) -> frozenset[str]:
        """Who is master by the ports that get an answer now: two while a fabric is split."""
        return frozenset(self.answering)

    def under(self, master: str) -> list[PortKey]:
        """The ports that this master answers now, sorted."""
        return sorted(key for key, view in self.ports.items() if view.answering and view.master == master)

    @property
    def standbys(self) -> tuple[SubnetManager, ...]:
        """The standbys that answer, by priority and then GUID as they would be elected."""
        found = [seen.manager for seen in self.managers.values() if _stands_by(seen)]
        return tuple(sorted(found, key=lambda one: (-(one.priority or 0), one.guid)))


@attrs.frozen
class Managers:
    """All fabrics by name, the fabric of each port, and who owns which manager's GUID."""

    fabrics: Frozen[str, Fabric] = Frozen()
    at: Frozen[PortKey, str] = Frozen()

    def of(self, node: str, device: str, number: int = 1) -> Fabric | None:
        name = self.at.get(PortKey(node, device, number))
        return self.fabrics.get(name) if name is not None else None


def known(names: Iterable[tuple[str, Iterable[str]]], now: float) -> Managers:
    """The fabrics that a former life of the plane named: (name, GUIDs of its managers)."""
    fabrics: Frozen[str, Fabric] = Frozen()
    for name, guids in names:
        seen = {guid: Seen(SubnetManager(guid=guid), now, now, now) for guid in guids}
        fabrics = fabrics.set(name, Fabric(name, managers=Frozen(seen)))
    return Managers(fabrics)


def fold(
    state: Managers, key: PortKey, label: str, report: PortManagers, now: float, patience: Patience | None = None
) -> tuple[Managers, tuple[Told, ...]]:
    """One port's report taken in: the new state, and what it tells at once. `judge` tells the rest."""
    patience = patience or Patience()
    answered = [one for one in (report.master, *report.others) if one is not None and one.guid and not one.error]
    master = report.master if report.master and report.master.state == "master" and not report.master.error else None
    state, told = _placed(state, key, label, frozenset(one.guid for one in answered), now)
    name = state.at.get(key)
    if name is None:
        return state, told
    fabric = state.fabrics[name]
    before = fabric.ports.get(key, View())
    view = View(
        master=master.guid if master else before.master,
        since=now if master and master.guid != before.master else before.since,
        answering=master is not None,
        error="" if master else report.error or "no master answers",
        blind=master is None and report.code in BLIND,
        at=now,
        label=label,
        sees=frozenset(one.guid for one in answered),
    )
    managers = fabric.managers
    for one in answered:
        managers = managers.set(one.guid, _seen(managers.get(one.guid), one, now))
    for one in report.others:
        if one.guid and one.error:
            managers = managers.set(one.guid, _silent(managers.get(one.guid), one, now))
    if master is not None and not report.error:
        # What this port saw before and the master does not remember any more.
        for guid in before.sees - view.sees:
            if guid in managers:
                managers = managers.set(guid, _silent(managers[guid], managers[guid].manager, now))
    fabric = attrs.evolve(_with(fabric, key, view), managers=managers)
    if master is not None and before.master and before.master != master.guid:
        fabric, change = _changed(fabric, key, before, master, now, patience)
        told += change
    if master is not None and not fabric.master:
        fabric = attrs.evolve(fabric, master=master.guid)
    return attrs.evolve(state, fabrics=state.fabrics.set(name, fabric)), told


def judge(state: Managers, now: float, patience: Patience | None = None) -> tuple[Managers, tuple[Told, ...]]:
    """What is wrong by now, or over, in any fabric: to be asked every few seconds, whether or not anybody reported."""
    patience = patience or Patience()
    told: tuple[Told, ...] = ()
    for name, fabric in state.fabrics.items():
        after, more = _judged(fabric, now, patience)
        if after is not fabric:
            state = attrs.evolve(state, fabrics=state.fabrics.set(name, after))
        told += more
    return state, told


def gone(state: Managers, keys: Iterable[PortKey]) -> Managers:
    """Without these ports: of a node that is lost, or that no longer has them."""
    for key in keys:
        if key in state.at:
            state = _without(state, key)
    return state


def _without(state: Managers, key: PortKey) -> Managers:
    name = state.at[key]
    fabric = state.fabrics[name]
    fabric = _with(fabric, key, None)
    fabrics = state.fabrics.set(name, fabric)
    if not fabric.ports and not fabric.managers and not fabric.open:
        fabrics = state.fabrics.delete(name)
    return Managers(fabrics, state.at.delete(key))


def _placed(
    state: Managers, key: PortKey, label: str, sees: frozenset[str], now: float
) -> tuple[Managers, tuple[Told, ...]]:
    """The port in its fabric: by label, else by the managers it sees, joining fabrics that turn out to be one."""
    current = state.at.get(key)
    if label:
        return _moved(state, key, label, labelled=True), ()
    plain = {name: fabric for name, fabric in state.fabrics.items() if not fabric.labelled}
    if not sees:
        # Nothing to tell it by: it stays where it was, and is nowhere when it never saw a manager.
        return (state, ()) if current is None or current in plain else (_without(state, key), ())
    owners = sorted({name for guid in sees for name, fabric in plain.items() if guid in fabric.managers})
    if not owners:
        state = _moved(state, key, min(sees), labelled=False)
        if current in plain:
            heir = attrs.evolve(state.fabrics[min(sees)], heir_of=current)
            state = attrs.evolve(state, fabrics=state.fabrics.set(heir.name, heir))
        return state, ()
    if len(owners) == 1:
        return _inherited(_moved(state, key, owners[0], labelled=False), owners[0], current)
    # A manager that another fabric only remembers has moved here; one that its ports still see joins the two.
    home = current if current in owners else max(owners, key=lambda name: (len(sees & set(plain[name].managers)), name))
    joined: list[str] = []
    for name in owners:
        if name == home:
            continue
        live = frozenset(
            guid for port, view in plain[name].ports.items() if port != key and view.answering for guid in view.sees
        )
        if sees & live:
            joined.append(name)
        else:
            rest = plain[name].managers
            for guid in sees:
                rest = rest.delete(guid) if guid in rest else rest
            state = attrs.evolve(state, fabrics=state.fabrics.set(name, attrs.evolve(plain[name], managers=rest)))
    told: tuple[Told, ...] = ()
    if joined:
        every = sorted((home, *joined))
        state, name = _joined(state, every), every[0]
        text = f"the fabrics {' and '.join(every)} are one: {key} sees the managers of all of them"
        told = (Told("fabrics-joined", name, text, (("fabrics", ",".join(every)),)),)
        home = name
    return _moved(state, key, home, labelled=False), told


def _inherited(state: Managers, name: str, before: str | None) -> tuple[Managers, tuple[Told, ...]]:
    """The fabric that a port came to from `before`, under its old name where all that happened is that a manager which
    nobody had seen took over: one port that goes elsewhere was cabled there, and two that leave nobody behind were not.
    """
    heir = state.fabrics[name]
    if not heir.heir_of:
        return state, ()
    left = state.fabrics.get(heir.heir_of)
    if left is None or before not in (None, name, left.name):
        return attrs.evolve(state, fabrics=state.fabrics.set(name, attrs.evolve(heir, heir_of=""))), ()
    if not all(view.blind for view in left.ports.values()) or len({key.node for key in heir.ports}) < 2:
        return state, ()
    state = _joined(state, [left.name, name])
    whole = attrs.evolve(state.fabrics[left.name], master=heir.master, changed=left.changed.update(heir.changed))
    text = f"{whole.name} goes on under a manager that was not known there: all of its ports see {heir.master} now"
    told = Told("fabrics-joined", whole.name, text, (("fabrics", f"{whole.name},{name}"),))
    return attrs.evolve(state, fabrics=state.fabrics.set(whole.name, whole)), (told,)


def _with(fabric: Fabric, key: PortKey, view: View | None) -> Fabric:
    """The fabric with a port's view, or without the port; the masters' counts with it."""
    before, counts = fabric.ports.get(key), fabric.answering
    if before is not None and before.answering:
        left = counts[before.master] - 1
        counts = counts.set(before.master, left) if left else counts.delete(before.master)
    if view is not None and view.answering:
        counts = counts.set(view.master, counts.get(view.master, 0) + 1)
    ports = fabric.ports.set(key, view) if view is not None else fabric.ports.delete(key)
    return attrs.evolve(fabric, ports=ports, answering=counts)


def _joined(state: Managers, names: list[str]) -> Managers:
    """One fabric of several, under the first name."""
    first, *rest = (state.fabrics[name] for name in names)
    whole = first
    for other in rest:
        whole = attrs.evolve(whole, managers=whole.managers.update(other.managers))
        for key, view in other.ports.items():
            whole = _with(whole, key, view)
    at, fabrics = state.at, state.fabrics
    for other in rest:
        fabrics = fabrics.delete(other.name)
        for key in other.ports:
            at = at.set(key, first.name)
    return Managers(fabrics.set(first.name, whole), at)


def _moved(state: Managers, key: PortKey, name: str, *, labelled: bool) -> Managers:
    current = state.at.get(key)
    if current == name:
        return state
    view = View()
    if current is not None:
        view = state.fabrics[current].ports.get(key, view)
        state = _without(state, key)
    fabric = state.fabrics.get(name) or Fabric(name, labelled)
    fabric = _with(fabric, key, view)
    return Managers(state.fabrics.set(name, fabric), state.at.set(key, name))


def _seen(before: Seen | None, one: SubnetManager, now: float) -> Seen:
    moved = before is None or before.manager.activity != one.activity or before.silent_since is not None
    return Seen(one, now, now if moved or before is None else before.moved_at)


def _silent(before: Seen | None, one: SubnetManager, now: float) -> Seen:
    """Named by the master and not answering. A port that cannot reach it does not outweigh one that just did."""
    if before is None:
        return Seen(one, now, now, now)
    return attrs.evolve(before, silent_since=before.silent_since if before.silent_since is not None else now)


def _stands_by(seen: Seen) -> bool:
    return seen.silent_since is None and seen.manager.state == "standby"


def _changed(
    fabric: Fabric, key: PortKey, view: View, master: SubnetManager, now: float, patience: Patience
) -> tuple[Fabric, tuple[Told, ...]]:
    """A port that knew one master knows another (B6). Others will follow; the fabric's change is told once.

    A port that lags behind has known the old master since before the change was told; one that saw it come
    back has not, and sees it go a second time.
    """
    before = view.master
    pair = (before, master.guid)
    recent = fabric.changed.get(pair)
    if recent is not None and now - recent < patience.hold and view.since <= recent:
        return fabric, ()
    kept = {pair: at for pair, at in fabric.changed.items() if now - at < patience.hold}
    old = fabric.managers.get(before)
    if old is not None and old.at >= now and old.manager.state == "standby":
        why = f"{before} stands by now"
    elif old is not None and old.manager.state == "standby" and old.silent_since is None:
        why = f"{before} was standing by when last heard"
    else:
        why = f"{before} does not answer"
        if old is not None:
            silent = attrs.evolve(old, silent_since=old.silent_since if old.silent_since is not None else now)
            fabric = attrs.evolve(fabric, managers=fabric.managers.set(before, silent))
    priority = f", priority {master.priority}" if master.priority is not None else ""
    standby = "" if any(_stands_by(seen) for seen in fabric.managers.values()) else "; no standby is known"
    text = (
        f"fabric {fabric.name}: the master subnet manager changed from {before} to {master.guid}"
        f" (LID {master.lid}{priority}), first seen by {key}; {why}{standby}"
    )
    data = (
        ("from", before), ("to", master.guid), ("node", key.node),
        ("port", f"{key.device}/{key.number}"), ("fabric", fabric.name),
    )  # fmt: skip
    fabric = attrs.evolve(fabric, changed=Frozen({**kept, pair: now}), master=master.guid)
    return fabric, (Told("sm-changed", fabric.name, text, data),)


def _judged(fabric: Fabric, now: float, patience: Patience) -> tuple[Fabric, tuple[Told, ...]]:
    """Troubles that began, that have held long enough to be told, and that are over."""
    if not fabric.ports:
        # Nobody is there to ask: nothing begins, and nothing is over.
        return fabric, ()
    wrong = dict(_troubles(fabric, now, patience))
    if not wrong and not fabric.pending and not fabric.open:
        return fabric, ()
    pending, open_, told = fabric.pending, fabric.open, []
    for kind, (text, hold) in wrong.items():
        if kind in open_:
            continue
        since = pending.get(kind, now)
        if now - since >= hold:
            pending = pending.delete(kind) if kind in pending else pending
            open_ = open_.set(kind, now)
            told.append(Told(kind.partition(" ")[0], fabric.name, f"fabric {fabric.name}: {text}"))
        elif kind not in pending:
            pending = pending.set(kind, now)
    for kind in [kind for kind in pending if kind not in wrong]:
        pending = pending.delete(kind)
    for kind in [kind for kind in open_ if kind not in wrong]:
        open_ = open_.delete(kind)
        told.append(Told(f"{kind.partition(' ')[0]}-over", fabric.name, f"fabric {fabric.name}: {_over(kind)}"))
    if pending is fabric.pending and open_ is fabric.open:
        return fabric, tuple(told)
    return attrs.evolve(fabric, pending=pending, open=open_), tuple(told)


def _over(kind: str) -> str:
    word, _, guid = kind.partition(" ")
    return {
        "sm-none": "a master subnet manager answers again",
        "sm-unseen": "its subnet manager can be asked again",
        "sm-split": "all its ports have one master again",
        "sm-hung": f"the activity of {guid} counts again",
        "sm-standby-missing": f"{guid} is there again",
        "sm-equal-priority": f"the priorities of {guid.replace('+', ' and ')} differ now",
    }.get(word, f"{word} is over")


def _troubles(fabric: Fabric, now: float, patience: Patience) -> Iterable[tuple[str, tuple[str, float]]]:
    """What is wrong just now: the kind (with its subject), the words, and how long it must hold to be told."""
    masters = fabric.masters
    if not masters:
        last = fabric.managers.get(fabric.master)
        seeing = [view for view in fabric.ports.values() if not view.blind]
        error = next((view.error for view in seeing or fabric.ports.values() if view.error), "")
        if not seeing:
            yield "sm-unseen", (f"no port of it can ask for its subnet manager: {error}", patience.hold)
            return
        if last is None:
            yield "sm-none", (f"no subnet manager: {error}", 0.0)
        else:
            text = f"the master {fabric.master} (LID {last.manager.lid}) does not answer and none took over: {error}"
            yield "sm-none", (text, patience.hold)
        return
    undecided: set[str] = set()
    if "sm-split" in fabric.open:
        # A split is over when all have one master, not while one half has none for the moment of the merge.
        undecided = {view.master for view in fabric.ports.values() if not view.answering and not view.blind}
    if len(masters | undecided - {""}) > 1:
        halves = "; ".join(f"{guid} for {_named(fabric.under(guid))}" for guid in sorted(masters))
        yield "sm-split", (f"two masters at once, so it is split: {halves}", patience.hold)
    for guid in sorted(masters):
        seen = fabric.managers.get(guid)
        if seen is None:
            continue
        for other in fabric.standbys:
            if other.priority is not None and other.priority == seen.manager.priority and other.guid not in masters:
                text = (
                    f"{guid} and its standby {other.guid} have the same priority {other.priority}: "
                    "the smaller GUID decides who is master; give them different ones"
                )
                yield f"sm-equal-priority {'+'.join(sorted((guid, other.guid)))}", (text, 0.0)
        still = now - seen.moved_at
        if seen.manager.activity is not None and still >= patience.frozen:
            text = f"the activity count of the master {guid} stands at {seen.manager.activity} for {still:.0f} s now"
            yield f"sm-hung {guid}", (text, 0.0)
    for guid, seen in sorted(fabric.managers.items()):
        # Who was master is told by the change itself; a standby that goes is told here.
        silent = None if seen.silent_since is None else now - seen.silent_since
        if silent is not None and seen.manager.state == "standby" and silent < patience.forget:
            yield f"sm-standby-missing {guid}", (f"the standby {guid} does not answer any more", patience.hold)


def _named(keys: list[PortKey]) -> str:
    first = ", ".join(str(key) for key in keys[:3])
    return first if len(keys) <= 3 else f"{first} and {len(keys) - 3} more ports"

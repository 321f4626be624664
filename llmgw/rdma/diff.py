"""What changed between two maps of one fabric, told as an operator would: cut, moved, swapped, replaced, slower.

A partial map proves the absence of nothing: from it nothing is gone, and against it nothing is new. What hangs
together is told together: a dead leaf is one change, not one for each of its cables. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from llmgw.rdma.fabric import Link, Map, Node, components, place
from llmgw.rdma.guids import shown


class Change(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that changed.

    `kind`: "switch-gone", "switch-new", "host-gone", "host-new", "part-gone", "part-new" (several switches
    that hang together), "device-gone", "device-new" (a router, UFM, aggregation node), "link-gone", "link-new",
    "cable-moved", "cables-swapped", "adapter-replaced", "link-slower", "link-faster", "renamed". `nodes` are the
    GUIDs it is about and `ports` the ends of its links: (GUID, port).
    """

    kind: str
    text: str
    nodes: tuple[int, ...] = ()
    ports: tuple[tuple[int, int], ...] = ()
    before: str = ""
    after: str = ""


class Diff(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All changes, and why some could not be told (a partial map on one side)."""

    changes: tuple[Change, ...] = ()
    blind: tuple[str, ...] = ()

    def of(self, *kinds: str) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.kind in kinds)


def compare(old: Map, new: Map) -> Diff:
    """What changed from `old` to `new`."""
    return _Compared(old, new).diff()


class _Compared:
    """Two maps side by side."""

    def __init__(self, old: Map, new: Map) -> None:
        self.old, self.new = old, new
        self.was, self.now = old.by_guid(), new.by_guid()
        self.old_ends, self.new_ends = old.by_end(), new.by_end()
        was, now = {link.ends: link for link in old.links}, {link.ends: link for link in new.links}
        self.stayed = [(was[key], now[key]) for key in was if key in now]
        # Absence is believed only of a complete map.
        self.gone_links = [link for key, link in was.items() if key not in now] if new.complete else []
        self.new_links = [link for key, link in now.items() if key not in was] if old.complete else []
        self.gone_nodes = set(self.was) - set(self.now) if new.complete else set()
        self.new_nodes = set(self.now) - set(self.was) if old.complete else set()
        self.told: set[tuple[tuple[int, int], tuple[int, int]]] = set()
        self.changes: list[Change] = []

    def diff(self) -> Diff:
        self.replaced()
        self.crossed()
        self.moved()
        self.parts(self.gone_nodes, self.old, self.was, "gone")
        self.parts(self.new_nodes, self.new, self.now, "new")
        for link in self.gone_links:
            if link.ends not in self.told:
                self.changes.append(self.link("link-gone", link, self.was, "is gone"))
        for link in self.new_links:
            if link.ends not in self.told:
                self.changes.append(self.link("link-new", link, self.now, "is new"))
        self.paces()
        self.names()
        blind = []
        if not self.new.complete:
            blind.append("the newer map is partial: what it does not show may still be there")
        if not self.old.complete:
            blind.append("the older map is partial: what it did not show may have been there")
        return Diff(changes=tuple(self.changes), blind=tuple(blind))

    def link(self, kind: str, link: Link, nodes: Mapping[int, Node], words: str) -> Change:
        ends = " - ".join(_place(nodes, *end) for end in link.ends)
        self.told.add(link.ends)
        return Change(kind=kind, text=f"the link {ends} {words}", nodes=(link.a, link.b), ports=link.ends)

    def replaced(self) -> None:
        """An adapter gone and another one new at the same switch port."""
        for link in self.gone_links:
            for one, end in ((link.a, (link.b, link.b_port)), (link.b, (link.a, link.a_port))):
                there = self.new_ends.get(end)
                if one not in self.gone_nodes or self.was[one].switch or there is None or end[0] not in self.was:
                    continue
                other = there.other(*end)[0]
                if other not in self.new_nodes or self.now[other].switch or link.ends in self.told:
                    continue
                before, after = self.was[one], self.now[other]
                same = before.name == after.name and before.name.strip() != ""
                what = f"the adapter of {before.label}" if same else f"{before.label}"
                by = shown(other) if same else f"{after.label} ({shown(other)})"
                text = f"{what} ({shown(one)}) at {_place(self.now, *end)} was replaced by {by}"
                self.changes.append(
                    Change(
                        kind="adapter-replaced",
                        text=text,
                        nodes=(one, other),
                        ports=(end,),
                        before=shown(one),
                        after=shown(other),
                    )
                )
                self.tell_all_of(one, self.gone_links)
                self.tell_all_of(other, self.new_links)
                self.gone_nodes.discard(one)
                self.new_nodes.discard(other)

    def tell_all_of(self, guid: int, links: Iterable[Link]) -> None:
        self.told.update(link.ends for link in links if guid in (link.a, link.b))

    def crossed(self) -> None:
        """Two cables whose ends changed places: a-b and c-d became a-d and c-b."""
        new_at = {end: link for link in self.new_links for end in link.ends}
        gone_at = {end: link for link in self.gone_links for end in link.ends}
        for link in self.gone_links:
            if link.ends in self.told:
                continue
            a, b = link.ends
            for one, other in ((a, b), (b, a)):
                mine, theirs = new_at.get(one), new_at.get(other)
                if mine is None or theirs is None or mine is theirs or mine.ends in self.told:
                    continue
                d, c = mine.other(*one), theirs.other(*other)
                partner = gone_at.get(c)
                if partner is None or partner is not gone_at.get(d) or partner.ends in self.told or partner is link:
                    continue
                self.told.update((link.ends, partner.ends, mine.ends, theirs.ends))
                first, second = self._swapped_words(link, partner, mine, theirs)
                self.changes.append(
                    Change(
                        kind="cables-swapped",
                        text=f"two cables are swapped: {first}, and {second}",
                        nodes=tuple(dict.fromkeys(guid for end in (a, b, c, d) for guid in end[:1])),
                        ports=(a, b, c, d),
                    )
                )
                break

    def _swapped_words(self, one: Link, other: Link, mine: Link, theirs: Link) -> tuple[str, str]:
        words = []
        for old in (one, other):
            end = next((end for end in old.ends if not self.was[end[0]].switch), old.ends[0])
            new = self.new_ends[end]
            words.append(
                f"{_place(self.now, *end)} moved from {_place(self.was, *old.other(*end))} "
                f"to {_place(self.now, *new.other(*end))}"
            )
        return words[0], words[1]

    def moved(self) -> None:
        """A cable of which one end stayed and the other is somewhere else now."""
        new_at = {end: link for link in self.new_links for end in link.ends if link.ends not in self.told}
        for link in self.gone_links:
            if link.ends in self.told:
                continue
            # A host's end is what stays; between switches either may.
            for end in sorted(link.ends, key=lambda end: self.was[end[0]].switch if end[0] in self.was else True):
                there = new_at.get(end)
                if there is None or there.ends in self.told:
                    continue
                before, after = link.other(*end), there.other(*end)
                self.told.update((link.ends, there.ends))
                self.changes.append(
                    Change(
                        kind="cable-moved",
                        text=f"the cable of {_place(self.now, *end)} moved from {_place(self.was, *before)} "
                        f"to {_place(self.now, *after)}",
                        nodes=(end[0], before[0], after[0]),
                        ports=(end, before, after),
                    )
                )
                break

    def parts(self, nodes: set[int], fabric: Map, names: Mapping[int, Node], word: str) -> None:
        """Nodes gone or new, those that hang together as one change, with all their links."""
        for part in components(nodes, fabric.links):
            inside = set(part)
            links = [link for link in fabric.links if link.a in inside or link.b in inside]
            self.told.update(link.ends for link in links)
            here = [names[guid] for guid in part]
            switches = [node for node in here if node.switch]
            hosts = [node for node in here if node.kind == "host"]
            verb = "is gone" if word == "gone" else "is new"
            if not switches and len(here) == 1:
                node, end = here[0], next((link.other(*end) for link in links for end in link.ends
                                           if end[0] == here[0].guid), None)  # fmt: skip
                where = f" (it was at {_place(names, *end)})" if end and word == "gone" else ""
                where = f" (at {_place(names, *end)})" if end and word == "new" else where
                kind = "host" if node.kind == "host" else "device"
                hint = ": its cable is cut or it is off" if word == "gone" and kind == "host" else ""
                text = f"{node.label} {verb}{where}{hint}"
            elif len(switches) == 1:
                kind = "switch"
                with_hosts = f" and with it {_counted(hosts)}" if hosts else ""
                text = f"{switches[0].label} {verb} with its {len(links)} links{with_hosts}"
            else:
                kind = "part"
                verb = "are not to be seen any more" if word == "gone" else "are new"
                text = f"{len(switches)} switches and {len(hosts)} hosts' adapters that hang together {verb}"
                text += f": {_counted(switches or hosts)}"
            self.changes.append(
                Change(
                    kind=f"{kind}-{word}",
                    text=text,
                    nodes=part,
                    ports=tuple(end for link in links for end in link.ends),
                )
            )

    def paces(self) -> None:
        for before, after in self.stayed:
            if before.rate is None or after.rate is None or before.pace == after.pace:
                continue
            kind = "link-slower" if after.rate < before.rate else "link-faster"
            ends = " - ".join(_place(self.now, *end) for end in after.ends)
            self.changes.append(
                Change(
                    kind=kind,
                    text=f"the link {ends} runs at {after.pace}, it ran at {before.pace}",
                    nodes=(after.a, after.b),
                    ports=after.ends,
                    before=before.pace,
                    after=after.pace,
                )
            )

    def names(self) -> None:
        for guid in sorted(set(self.was) & set(self.now)):
            before, after = self.was[guid].name, self.now[guid].name
            # An empty name is a description that got lost, not a new name.
            if before != after and before.strip() and after.strip():
                text = f"{shown(guid)} was {before.strip()} and is now {after.strip()}"
                self.changes.append(Change(kind="renamed", text=text, nodes=(guid,), before=before, after=after))


def _place(nodes: Mapping[int, Node], guid: int, port: int) -> str:
    node = nodes.get(guid)
    return place(node, port) if node is not None else f"port {port} of {shown(guid)}"


def _counted(nodes: list[Node]) -> str:
    """ "leaf-1, leaf-2 and 3 more"."""
    shown_names = ", ".join(node.label for node in nodes[:4])
    return f"{shown_names} and {len(nodes) - 4} more" if len(nodes) > 4 else shown_names

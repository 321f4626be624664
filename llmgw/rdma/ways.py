"""The parts that traffic between two ports passes, many pairs over: what a search for bad parts needs of a map.

The same walk as `routes.way`, prepared once for a map and its tables. A host's own connection is one part: its
adapter, its cable and its leaf port lie on the same ways, so that no bandwidth tells them apart. Pure.
"""

from __future__ import annotations

from llmgw.rdma.fabric import Link, Map
from llmgw.rdma.routes import Tables

#: A longer way is a loop.
MOST_HOPS = 64


class Ways:
    """Ways over one fabric. A pair whose way is not known whole is known by its ends."""

    def __init__(self, fabric: Map, tables: Tables) -> None:
        self._nodes = fabric.by_guid()
        self._ends = fabric.by_end()
        self._tables = tables
        self._lids = {end.guid: end.lid for node in fabric.nodes for end in node.ends if end.guid}
        self._places = {end.guid: (node.guid, end.number) for node in fabric.nodes for end in node.ends if end.guid}
        self._fabric = fabric
        self._names: dict[tuple[tuple[int, int], tuple[int, int]], str] = {}

    def knows(self, port: int) -> bool:
        """Whether a port's GUID is on the map."""
        return port in self._places

    def between(self, start: int, end: int) -> tuple[str, ...] | None:
        """The cables from one port to another by name, in order; None when the way is not known to its end."""
        here = self._places.get(start)
        target = self._places.get(end)
        lid = self._lids.get(end)
        if here is None or target is None or not lid:
            return None
        parts: list[str] = []
        for _ in range(MOST_HOPS):
            link = self._ends.get(here)
            if link is None:
                return None
            parts.append(self._name(link))
            arrived = link.other(*here)
            if arrived == target:
                return tuple(parts)
            leave = self._tables.switches.get(arrived[0], {}).get(lid)
            if not leave:
                return None
            here = (arrived[0], leave)
        return None

    def _name(self, link: Link) -> str:
        """A cable for a person, by both its ends; a host's stands for its adapter and leaf port too."""
        first, second = link.ends
        key = (first, second)
        if key not in self._names:
            a, b = (self._fabric.where(*end, self._nodes) for end in (first, second))
            kinds = {self._nodes[guid].kind for guid, _ in (first, second) if guid in self._nodes}
            self._names[key] = f"{a} - {b}" + ("" if kinds <= {"switch"} else " (adapter, cable or leaf port)")
        return self._names[key]

"""What nodes report of their subnet managers, taken in as it comes and judged as time passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from llmgw.plane.events import Event
from llmgw.plane.fabrics import told
from llmgw.plane.fabrics.turns import Turns
from llmgw.plane.world import Node, Stage, World
from llmgw.rdma.managers import Managers, Patience, PortKey, Told, fold, gone, judge, known
from llmgw.wire.facts import NodeId, PortManagers


@attrs.frozen
class Looked:
    """What one look brought: events, and fabrics that are now known by another name (old, new)."""

    events: tuple[Event, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    moved: bool = False


class Reports:
    """`managers` is what is known now. Only nodes whose report is another object than before are looked at."""

    def __init__(self, patience: Patience, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._patience, self._clock, self._wall = patience, clock, wall
        self._reported: dict[NodeId, tuple[PortManagers, ...]] = {}
        self._keys: dict[NodeId, frozenset[PortKey]] = {}
        self.managers = Managers()

    def remember(self, names: Mapping[str, tuple[str, ...]]) -> None:
        """The fabrics that a former life of the plane named, with their managers' GUIDs."""
        self.managers = known(names.items(), self._clock())

    async def look(self, world: World) -> Looked:
        """Take in what is new in this world, and judge what holds by now."""
        before = self.managers
        happened: list[Told] = []
        turns = Turns()
        for id_, node in world.nodes.items():
            reported = _report(node)
            if reported is not self._reported.get(id_):
                happened += self._take(id_, node, reported)
            if turns.over():
                await turns.next()
        if len(self._reported) > len(world.nodes):
            for id_ in [id_ for id_ in self._reported if id_ not in world.nodes]:
                del self._reported[id_]
                self.managers = gone(self.managers, self._keys.pop(id_, ()))
        self.managers, more = judge(self.managers, self._clock(), self._patience)
        happened += more
        renamed = [
            (old, one.fabric)
            for one in happened
            if one.kind == "fabrics-joined"
            for old in dict(one.data)["fabrics"].split(",")
            if old != one.fabric
        ]
        events = told.of_managers(happened, self._wall())
        return Looked(tuple(events), tuple(renamed), bool(events) or self.managers is not before)

    def _take(self, id_: NodeId, node: Node, reported: tuple[PortManagers, ...]) -> list[Told]:
        self._reported[id_] = reported
        labels = {(port.device, port.number): port.fabric for port in node.facts.ports} if node.facts else {}
        now, found = self._clock(), list[Told]()
        for one in reported:
            key = PortKey(id_, one.device, one.number)
            label = labels.get((one.device, one.number), "")
            self.managers, more = fold(self.managers, key, label, one, now, self._patience)
            found += more
        keys = frozenset(PortKey(id_, one.device, one.number) for one in reported)
        self.managers = gone(self.managers, self._keys.get(id_, frozenset()) - keys)
        self._keys[id_] = keys
        return found


_NOTHING: tuple[PortManagers, ...] = ()


def _report(node: Node) -> tuple[PortManagers, ...]:
    """What a node last said of its managers; nothing of one that is lost or was not heard yet."""
    if node.facts is None or node.stage in (Stage.LOST, Stage.EXPECTED):
        return _NOTHING
    return node.facts.managers

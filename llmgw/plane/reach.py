"""Which nodes reach one another, as long as one plan is made: the ways of each node, and pairs found bad or good (D6).

Pure. `Reach` knows the fleet's wires; it knows nothing of room, of models or of what is preferred.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import attrs

from llmgw.plane.checks import Need, domains, installed_versions
from llmgw.plane.groups import Rails, Way, common
from llmgw.plane.network import site
from llmgw.plane.rooms import Room
from llmgw.plane.wires import Fault, Rail, Wiring, fabric_of, fabrics, wirings
from llmgw.plane.world import DEFAULT, Evidence, Node, Settings, World
from llmgw.wire.facts import NodeId

_Pairs = Mapping[NodeId, frozenset[NodeId]]


@attrs.define
class Reach:
    """The wires of a world. `now` is the plane's monotonic clock, by which tests grow old."""

    world: World
    now: float
    settings: Settings = DEFAULT
    _canonical: dict[str, str] | None = None
    _signatures: dict[NodeId, tuple[tuple[Wiring, Rails], ...]] = attrs.field(factory=dict)
    _common: dict[tuple[str, int], tuple[Rails, ...]] = attrs.field(factory=dict)
    _ways: dict[tuple[str, str, Rails, str, str], Way] = attrs.field(factory=dict)
    _fresh: dict[tuple[NodeId, NodeId], Evidence] | None = None
    _bad_pairs: list[tuple[tuple[NodeId, NodeId], Evidence]] | None = None
    _foes: dict[tuple[str, Rails], _Pairs] = attrs.field(factory=dict)
    _friends: _Pairs | None = None

    def ways(self, room: Room, need: Need) -> tuple[Way, ...]:
        """Every way by which a node that has room could be reached in a replica; none when it reaches nobody."""
        node = room.node
        at, versions = site(node), installed_versions(node, need)
        found: list[Way] = []
        for network in need.network:
            for over, rails in self._wires(network, room, need):
                for version in versions:
                    key = (network, over, rails, at, version)
                    way = self._ways.get(key)
                    if way is None:
                        way = self._ways[key] = Way(*key)
                    found.append(way)
        return tuple(found)

    def _wires(self, network: str, room: Room, need: Need) -> Iterator[tuple[str, Rails]]:
        if network == "tcp":
            yield "", frozenset()
        elif network == "nvlink":
            for domain in domains(room, need) if not imex(room.node) else ():
                yield domain, frozenset()
        else:
            for wiring, rails in self.signatures(room.node):
                if need.rails:
                    for some in self.common(wiring.family, need.rails):
                        if some <= rails:
                            yield wiring.family, some
                elif rails and not wiring.faults:
                    yield wiring.family, rails

    def signatures(self, node: Node) -> tuple[tuple[Wiring, Rails], ...]:
        """A node's good rails, with the fabric of each."""
        found = self._signatures.get(node.id)
        if found is None:
            if self._canonical is None:
                self._canonical = fabrics(self.world.nodes.values())
            canonical = self._canonical
            found = self._signatures[node.id] = tuple(
                (wiring, frozenset((rail.key, fabric_of(rail, canonical)) for rail in wiring.rails))
                for wiring in wirings(node)
            )
        return found

    def common(self, family: str, fewest: int) -> tuple[Rails, ...]:
        """Every set of so many rails that some nodes of the fleet have in common."""
        key = (family, fewest)
        if key not in self._common:
            every = chain.from_iterable(self.signatures(node) for node in self.world.nodes.values())
            rails = [rails for wiring, rails in every if wiring.family == family]
            self._common[key] = common((*rails, *self._without_bad(family)), fewest)
        return self._common[key]

    def _without_bad(self, family: str) -> Iterator[Rails]:
        """For each pair that was tested bad: the rails that both have, without those that are bad between them."""
        for pair, test in self._tested_bad():
            known = [self.world.nodes[name] for name in pair if name in self.world.nodes]
            if len(known) < 2:
                continue
            both: list[Rails] = []
            for node in known:
                for wiring, rails in self.signatures(node):
                    if wiring.family == family:
                        ends = {f"{node.id} {rail.port.device}/{rail.port.number}": rail.key for rail in wiring.rails}
                        bad = {ends[end] for end in self._bad(test) if end in ends}
                        both.append(frozenset(rail for rail in rails if rail[0] not in bad))
            if len(both) == 2:
                yield both[0] & both[1]

    def rails(self, node: Node, way: Way) -> tuple[Rail, ...]:
        """A node's rails of a way, in the order that is the same on all its nodes."""
        for wiring, _ in self.signatures(node) if way.network == "rdma" else ():
            if wiring.family == way.over:
                names = {key for key, _ in way.rails}
                return tuple(rail for rail in wiring.rails if rail.key in names)
        return ()

    def faults(self, node: Node) -> tuple[Fault, ...]:
        """What is wrong with the rails of the way in which least is wrong."""
        every = [wiring.faults for wiring in wirings(node)]
        return min(every, key=len, default=())

    # Tests ------------------------------------------------------------------------------------------------

    def evidence(self) -> Mapping[tuple[NodeId, NodeId], Evidence]:
        """The tests that are not too old to count."""
        if self._fresh is None:
            self._fresh = {
                pair: test
                for pair, test in self.world.evidence.items()
                if (age := self.age(test)) is None or age <= self.settings.evidence
            }
        return self._fresh

    def age(self, test: Evidence, end: str = "") -> float | None:
        """How long ago a pair was tested, or one end of its rails; None where that is not known."""
        if test.at is None:
            return None
        return max(0.0, self.now - test.at + test.clock - test.since.get(end, test.clock))

    def foes(self, way: Way) -> _Pairs:
        """By node: the nodes that it does not reach well over the rails of this way, by a test."""
        if way.network != "rdma":
            return {}
        key = (way.over, way.rails)
        if key not in self._foes:
            self._foes[key] = _both(pair for pair, test in self._tested_bad() if self.bad(pair, test, way))
        return self._foes[key]

    def _tested_bad(self) -> Sequence[tuple[tuple[NodeId, NodeId], Evidence]]:
        if self._bad_pairs is None:
            self._bad_pairs = [(pair, test) for pair, test in self.evidence().items() if test.bad]
        return self._bad_pairs

    def bad(self, pair: tuple[NodeId, NodeId], test: Evidence, way: Way) -> tuple[str, ...]:
        """The ends of rails of this way that a test of two nodes found bad."""
        if not test.bad:
            return ()
        ours = {
            f"{name} {rail.port.device}/{rail.port.number}"
            for name in pair
            if (node := self.world.nodes.get(name)) is not None
            for rail in self.rails(node, way)
        }
        return tuple(end for end in self._bad(test) if end in ours)

    def _bad(self, test: Evidence) -> tuple[str, ...]:
        """The ends that were bad when they were tested last, unless that is too long ago."""
        most = self.settings.evidence
        return tuple(end for end in test.bad if (self.age(test, end) or 0.0) <= most)

    def friends(self, way: Way) -> _Pairs:
        """By node: the nodes that it reaches well by a test in which nothing was bad."""
        return self.friendly() if way.network == "rdma" else {}

    def friendly(self) -> _Pairs:
        if self._friends is None:
            self._friends = _both(pair for pair, test in self.evidence().items() if test.good and not test.bad)
        return self._friends


def _both(pairs: Iterator[tuple[NodeId, NodeId]]) -> _Pairs:
    found: dict[NodeId, set[NodeId]] = {}
    for a, b in pairs:
        found.setdefault(a, set()).add(b)
        found.setdefault(b, set()).add(a)
    return {node: frozenset(others) for node, others in found.items()}


def imex(node: Node) -> str:
    """Why the IMEX daemon lets no GPU of this node reach another node's; "" when it does, or says nothing (FA09)."""
    daemon = node.facts.imex if node.facts is not None else None
    if daemon is None or daemon.state == "UP" or daemon.state.startswith("runs"):
        return ""
    if daemon.state == "DEGRADED" and not daemon.disconnected and not daemon.mismatch:
        return ""
    return f"IMEX is {daemon.state}"


def of_one(nodes: Sequence[tuple[Way, ...]]) -> tuple[Way, ...]:
    """The ways that all of these have, the best first."""
    first, *rest = nodes
    return tuple(sorted((way for way in first if all(way in others for others in rest)), key=_order))


def _order(way: Way) -> tuple[object, ...]:
    return way.order

"""The members of a replica: their nodes, and for several of them what each needs to find the others (D6). Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs

from llmgw.plane.checks import Need, pick, took
from llmgw.plane.groups import Way
from llmgw.plane.network import End, ends, environment
from llmgw.plane.reach import Reach
from llmgw.plane.reserve import purposes, reserve
from llmgw.plane.rooms import Room
from llmgw.plane.world import Node, Shard
from llmgw.wire.facts import NodeId, ShardId
from llmgw.wire.spans import spanned


@attrs.frozen
class Member:
    """The place of one shard: its node, the GPUs it takes, and what it needs to find the others of its replica.

    `address` is where the others reach it, `ports` are the numbers reserved there, `network` the environment that the
    wires between them ask for, `rdma` the ports they use. All empty for a replica of one node.
    """

    node: NodeId
    gpus: tuple[str, ...]
    address: str = ""
    ports: Mapping[str, int] = attrs.field(factory=dict)
    network: Mapping[str, str] = attrs.field(factory=dict)
    rdma: tuple[str, ...] = ()


@attrs.frozen
class Choice:
    """The nodes that take a replica, by rank, and why these. `version`: the engine's, where all must have the same."""

    members: tuple[Member, ...]
    why: str
    version: str = ""

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return tuple(member.node for member in self.members)


@attrs.define
class Ports:
    """The port numbers that members hold on each machine. `held` are the shards placed on each node, at any moment."""

    nodes: Mapping[NodeId, Node]
    held: Mapping[NodeId, Mapping[ShardId, Shard]]
    _at: dict[str, list[NodeId]] | None = None

    def taken(self, node: Node, without: Collection[ShardId] = ()) -> set[int]:
        """The numbers that are held on this node's machine, which may have several agents."""
        if self._at is None:
            self._at = {}
            for other in self.nodes.values():
                self._at.setdefault(other.address, []).append(other.id)
        return {
            number
            for name in self._at.get(node.address, (node.id,))
            for shard in self.held.get(name, {}).values()
            if shard.spec.ports and shard.id not in without
            for number in spanned(shard.spec.ports)
        }


def members(
    reach: Reach,
    ports: Ports,
    way: Way,
    rooms: Sequence[Room],
    need: Need,
    before: Sequence[Shard] = (),
    *,
    others: int = 0,
) -> Choice | NodeId:
    """The members of a replica on these nodes, by rank; or the node that has no port number left for it.

    `before` are its shards where it starts again on the same nodes; `others` counts the model's other replicas there.
    """
    met = ends([room.node for room in rooms], ipv4=need.engine == "llamacpp")
    made: list[Member] = []
    given: dict[str, set[int]] = {}
    for rank, (room, end) in enumerate(zip(rooms, met, strict=True)):
        node, numbers = room.node, dict[str, int]()
        if names := purposes(need.engine, rank):
            mine = given.setdefault(node.address, set())
            taken = mine | ports.taken(node, [shard.id for shard in before])
            allowed = node.facts.engine_ports if node.facts is not None else None
            found = reserve(names, allowed, taken, before[rank].spec.ports if before else {})
            if found is None:
                return node.id
            numbers = found
            mine.update(spanned(numbers))
        rails = reach.rails(node, way)
        made.append(
            Member(
                node.id,
                pick(room, need, way.over if way.network == "nvlink" else ""),
                end.address,
                numbers,
                environment(need.engine, need.resources.gpus, way, end, rails),
                tuple(rail.name for rail in rails),
            )
        )
    why = "it ran here before" if before else _why(reach, way, rooms, need, others, met)
    return Choice(tuple(made), why, way.version)


def _why(reach: Reach, way: Way, rooms: Sequence[Room], need: Need, others: int, met: Sequence[End]) -> str:
    count = len(rooms)
    words: list[str] = []
    if way.network == "nvlink":
        words.append(f"all {count} are in NVLink domain {way.over}")
    elif way.network == "rdma":
        kind, many = "InfiniBand" if way.over == "ib" else "RoCE", "" if len(way.rails) == 1 else "s"
        words.append(f"all {count} reach one another over {len(way.rails)} {kind} rail{many}")
        if left := _left_out(reach, way, rooms):
            words.append(f"narrowed to the rails that all have, without {', '.join(left)}")
    else:
        words.append(f"all {count} reach one another over TCP" + (" on one machine" if way.site else ""))
    there = sum(need.source in room.weights for room in rooms)
    if need.leader_reads:
        words += ["the weights are there on the leader"] if need.source in rooms[0].weights else []
    elif there:
        words.append(f"the weights are there on {'all' if there == count else there}")
    friends, names = reach.friends(way), [room.node.id for room in rooms]
    good = sum(b in friends.get(a, ()) for at, a in enumerate(names) for b in names[at + 1 :])
    if good:
        words.append(f"{good} of {count * (count - 1) // 2} pairs tested good")
    if others:
        words.append(f"{others} other replica{'s' if others > 1 else ''} of the model there")
    if need.took:
        words.append(took(need))
    if way.network != "nvlink" and not met[0].interface and not way.site:
        words.append("no subnet that all are in is known, so their addresses must be routed")
    return ", ".join(words)


def _left_out(reach: Reach, way: Way, rooms: Sequence[Room]) -> list[str]:
    """The rails of these nodes that the way leaves out (RA06)."""
    names = {key for key, _ in way.rails}
    found: list[str] = []
    for room in rooms:
        for wiring, _ in reach.signatures(room.node):
            if wiring.family == way.over:
                found += [f"{room.node.id} {rail.port.device}" for rail in wiring.rails if rail.key not in names]
                found += [f"{room.node.id} {fault}" for fault in wiring.faults]
    return found

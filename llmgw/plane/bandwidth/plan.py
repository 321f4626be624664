"""What a test of two nodes will do, decided from what the plane knows before anything is started (E1, E2, E8). Pure."""

from __future__ import annotations

import attrs
from msgspec.structs import replace

from llmgw.errors import AgentGone, BadInput, Conflict, NotFound
from llmgw.plane.world import Node, World
from llmgw.rdma import rails
from llmgw.rdma.command import TESTS, check
from llmgw.rdma.grade import Thresholds
from llmgw.rdma.link import Link, Refusal, Side, agree
from llmgw.rdma.meeting import Meeting, meeting
from llmgw.rdma.results import Parameters
from llmgw.wire.agent import Register
from llmgw.wire.control import Bandwidth
from llmgw.wire.facts import NodeId, Port

#: What latency tests send, in bytes; they take a size of their own because megabytes measure bandwidth.
LATENCY_SIZE = 2


@attrs.frozen
class RailPlan:
    """One rail: the link that was agreed and where its sides meet, or why it cannot be tested."""

    rail: rails.Rail
    link: Link | Refusal
    meeting: Meeting | None = None
    gpus: tuple[str, str] = ("", "")


@attrs.frozen
class Plan:
    """A whole test: A's agent is the client, B's the server."""

    a: NodeId
    b: NodeId
    rails: tuple[RailPlan, ...]
    parameters: Parameters
    notes: tuple[str, ...] = ()
    busy: tuple[str, ...] = ()


def plan(world: World, a: str, b: str, parameters: Parameters, *, force: bool = False, fabric: str = "") -> Plan:
    """The test of two nodes; with `fabric` only over ports of that label.

    Raises NotFound, BadInput, AgentGone, or Conflict for nodes that cannot be tested now.
    """
    if a == b:
        raise BadInput(f"{a} cannot be tested against itself", remedy="name two nodes")
    sane(parameters)
    node_a, node_b = known(world, a), known(world, b)
    facts_a, facts_b = registered(node_a), registered(node_b)
    running = tuple(name for node in (node_a, node_b) for name in serving(world, node.id))
    if running and not force:
        raise Conflict(
            f"a test would disturb what runs there ({', '.join(running)})",
            remedy="wait for an idle window with --when-idle, drain the nodes, or use --force",
        )
    side_a, side_b = (
        rails.Side(facts.node, [port for port in facts.ports if fabric in ("", port.fabric)], facts.gpus)
        for facts in (facts_a, facts_b)
    )
    pairing = rails.narrow(rails.pair(side_a, side_b), parameters.rails)
    if pairing.refusal:
        raise Conflict(pairing.refusal, remedy="; ".join(pairing.notes) or "compare both nodes' ports")
    planned = tuple(_rail(rail, node_b, facts_a, facts_b, parameters) for rail in pairing.rails)
    return Plan(node_a.id, node_b.id, planned, parameters, pairing.notes, running)


def _rail(rail: rails.Rail, server: Node, facts_a: Register, facts_b: Register, parameters: Parameters) -> RailPlan:
    link = agree(
        Side(facts_a.node, rail.a, facts_a.host.interfaces),
        Side(facts_b.node, rail.b, facts_b.host.interfaces),
        routed=parameters.routed,
    )
    if isinstance(link, Refusal):
        return RailPlan(rail, link)
    meet = meeting(facts_a, facts_b, server.peer_address, rail_netdev=rail.b.netdev)
    if meet is None:
        return RailPlan(
            rail,
            Refusal(
                "no-meeting",
                f"no network is known over which {facts_a.node} reaches {facts_b.node} to agree on a test",
                f"set `address` in {facts_b.node}'s node.toml to an address that the other nodes reach",
            ),
        )
    gpus = (_nearest(facts_a, rail.a), _nearest(facts_b, rail.b)) if parameters.gpu else ("", "")
    if parameters.gpu and not all(gpus):
        bare = facts_a.node if not gpus[0] else facts_b.node
        return RailPlan(rail, Refusal("no-gpu", f"{bare} has no GPU to test with", "test without --gpu"))
    return RailPlan(rail, link, meet, gpus)


def _nearest(facts: Register, port: Port) -> str:
    """The GPU next to a port, else the first one there is, of those that can be read."""
    lost = {gpu.uuid for gpu in facts.gpus if gpu.unreadable}
    return next((uuid for uuid in (*port.nearest_gpus, *(gpu.uuid for gpu in facts.gpus)) if uuid not in lost), "")


def sane(parameters: Parameters) -> None:
    """Raises BadInput for parameters that cannot be meant, before any node is asked."""
    if parameters.test not in TESTS:
        raise BadInput(f"{parameters.test!r} is no test", remedy=f"one of {', '.join(TESTS)}")
    if not 0 < parameters.fair <= parameters.good <= 1.5:
        raise BadInput(
            f"thresholds of good {parameters.good:g} and fair {parameters.fair:g} cannot be meant",
            remedy="shares of the ceiling, fair not above good: 0.95 and 0.90",
        )
    check(bandwidth(parameters, "device", 1, None, None, 18515))


def bandwidth(
    parameters: Parameters, device: str, number: int, gid_index: int | None, mtu: int | None, port: int, gpu: str = ""
) -> Bandwidth:
    """One side's run. Latency is measured with its own size and without queue pairs."""
    return Bandwidth(
        test=parameters.test,
        device=device,
        number=number,
        gid_index=gid_index,
        mtu=mtu,
        tcp_port=port,
        size=LATENCY_SIZE if parameters.latency else parameters.size,
        queue_pairs=parameters.queue_pairs,
        seconds=parameters.seconds,
        bidirectional=parameters.bidirectional,
        gpu=gpu,
        extra=parameters.extra,
    )


def sides(made: RailPlan, link: Link, parameters: Parameters, port: int) -> tuple[Bandwidth, Bandwidth]:
    """The client's and the server's run: the same in all but device, port, GID and GPU."""
    meet = made.meeting
    if meet is not None and ":" in meet.address and "--ipv6-addr" not in parameters.extra:
        parameters = replace(parameters, extra=(*parameters.extra, "--ipv6-addr"))
    client, server = (
        bandwidth(parameters, end.device, end.number, end.gid_index, link.mtu, port, gpu)
        for end, gpu in zip((link.a, link.b), made.gpus, strict=True)
    )
    return client, server


def thresholds(parameters: Parameters) -> Thresholds:
    return Thresholds(good=parameters.good, fair=parameters.fair)


def known(world: World, name: str) -> Node:
    """Raises NotFound."""
    node = world.nodes.get(NodeId(name))
    if node is None:
        names = ", ".join(sorted(world.nodes)[:10]) or "none yet"
        raise NotFound(f"no node is called {name!r}", remedy=f"the nodes are {names}")
    return node


def registered(node: Node) -> Register:
    """Raises AgentGone for a node that is not there."""
    if node.facts is None or not node.connected:
        raise AgentGone(
            f"no agent is connected for {node.id}",
            remedy="see that llmgw-node runs there and what it logs (`journalctl -u llmgw-node`)",
        )
    return node.facts


def serving(world: World, node: NodeId) -> tuple[str, ...]:
    """The shards that run on a node now, or are being started there (E8)."""
    placed = (shard for shard in world.shards.values() if shard.node == node and shard.state.alive)
    strays = (stray.status.shard for (at, _), stray in world.strays.items() if at == node)
    return tuple(sorted({*(shard.id for shard in placed), *strays}))

from __future__ import annotations

import attrs
import pytest
from msgspec.structs import replace

from llmgw.errors import AgentGone, BadInput, Conflict, NotFound
from llmgw.plane.bandwidth.plan import plan, serving, sides
from llmgw.plane.world import World
from llmgw.rdma.link import Link, Refusal
from llmgw.rdma.results import Parameters
from llmgw.wire.agent import Register
from llmgw.wire.facts import NodeId, ShardState
from tests.plane.bandwidth.lab import node, world
from tests.plane.worlds import status

PLAIN = Parameters()
WORLD = world(node("a", 1), node("b", 2))


def busy() -> World:
    made = world(replace(node("a", 1), shards=(status("tiny-0-0"),)), node("b", 2))
    assert serving(made, NodeId("a")) == ("tiny-0-0",)
    return made


def test_a_node_that_serves_is_tested_only_by_force_and_what_runs_is_named() -> None:
    with pytest.raises(Conflict, match=r"tiny-0-0.*--force"):
        plan(busy(), "a", "b", PLAIN)
    assert plan(busy(), "a", "b", PLAIN, force=True).busy == ("tiny-0-0",)


def test_a_shard_that_ended_disturbs_nobody() -> None:
    made = world(replace(node("a", 1), shards=(status("tiny-0-0", state=ShardState.STOPPED),)), node("b", 2))
    assert serving(made, NodeId("a")) == ()


def test_names_that_nothing_has_and_nodes_that_are_not_there_are_told_apart() -> None:
    with pytest.raises(NotFound, match=r"no node is called 'c'.*a, b"):
        plan(WORLD, "a", "c", PLAIN)
    gone = attrs.evolve(
        WORLD, nodes=WORLD.nodes.set(NodeId("b"), attrs.evolve(WORLD.nodes[NodeId("b")], connected=False))
    )
    with pytest.raises(AgentGone, match="no agent is connected for b"):
        plan(gone, "a", "b", PLAIN)
    with pytest.raises(BadInput, match="against itself"):
        plan(WORLD, "a", "a", PLAIN)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seconds": 0}, "seconds"),
        ({"test": "ping"}, "no test"),
        ({"extra": ("--mmap=/dev/mem",)}, "may not be added"),
        ({"good": 0.5, "fair": 0.9}, "thresholds"),
    ],
)
def test_parameters_that_cannot_be_meant_are_refused_before_any_node_is_asked(
    change: dict[str, object], words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        plan(WORLD, "a", "b", replace(PLAIN, **change))


def test_nodes_whose_rails_cannot_be_paired_are_refused_with_the_counts() -> None:
    narrow = world(node("a", 1), node("b", 2, ports=(replace(node("b", 2).ports[0], gids=()),)))
    with pytest.raises(Conflict, match="a has 2 RoCE ports and b has 1"):
        plan(narrow, "a", "b", PLAIN)


def test_a_rail_that_does_not_exist_is_named_beside_those_that_do() -> None:
    with pytest.raises(Conflict, match="no rail 7; the rails are 0, 1"):
        plan(WORLD, "a", "b", replace(PLAIN, rails=("7",)))


def test_nodes_that_share_no_network_cannot_agree_on_a_test() -> None:
    apart = world(replace(node("a", 1), address=""), replace(node("b", 2), host=node("b", 2).host.__class__()))
    made = attrs.evolve(
        apart,
        nodes=apart.nodes.set(NodeId("b"), attrs.evolve(apart.nodes[NodeId("b")], peer_address="127.0.0.1")),
    )
    refused = [each.link for each in plan(made, "a", "b", PLAIN).rails]
    assert all(isinstance(link, Refusal) and link.code == "no-meeting" for link in refused)


def test_an_ipv6_meeting_tells_both_sides() -> None:
    first = plan(WORLD, "a", "b", PLAIN).rails[0]
    assert isinstance(first.link, Link)
    assert first.meeting is not None
    six = attrs.evolve(first, meeting=attrs.evolve(first.meeting, address="fd00::2"))
    client, server = sides(six, first.link, PLAIN, 20000)
    assert client.extra == server.extra == ("--ipv6-addr",)


def test_a_test_of_one_fabric_leaves_the_others_rails_alone() -> None:
    def labelled(name: str, number: int) -> Register:
        plain = node(name, number)
        north, south = (
            replace(port, fabric=label) for port, label in zip(plain.ports, ("north", "south"), strict=True)
        )
        return replace(plain, ports=(north, south))

    made = world(labelled("a", 1), labelled("b", 2))
    assert [each.rail.a.device for each in plan(made, "a", "b", PLAIN, fabric="south").rails] == ["mlx5_1"]
    assert len(plan(made, "a", "b", PLAIN).rails) == 2
    with pytest.raises(Conflict, match="no RDMA port that could be a rail on a and b"):
        plan(made, "a", "b", PLAIN, fabric="west")

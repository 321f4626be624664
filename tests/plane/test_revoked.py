"""Which nodes are told of revoked certificates, and when."""

from __future__ import annotations

import attrs
import trio
import trio.testing
from msgspec.structs import replace

from llmgw.errors import AgentGone
from llmgw.plane.revoked import EVERY, due, tell_revoked
from llmgw.plane.world import World
from llmgw.wire.agent import REFRESH
from llmgw.wire.control import ControlMessage, Revoked
from llmgw.wire.facts import NodeId
from tests.plane.worlds import register, world


def fleet(*names: str) -> World:
    return world(*(replace(register(name), features=(REFRESH,)) for name in names))


def changed(of: World, name: str, **fields: object) -> World:
    node = attrs.evolve(of.nodes[NodeId(name)], **fields)  # type: ignore[arg-type]
    return attrs.evolve(of, nodes=of.nodes.set(node.id, node))


def test_a_node_is_told_over_each_stream_and_with_each_change() -> None:
    now = fleet("n1", "n2")
    streams = {node.id: node.stream for node in now.nodes.values()}
    assert due(now, (), {}) == ()
    assert sorted(due(now, ("a",), {})) == ["n1", "n2"]
    told = {id: (stream, ("a",)) for id, stream in streams.items()}
    assert due(now, ("a",), told) == ()
    assert due(changed(now, "n1", stream=9), ("a",), told) == ("n1",)
    assert sorted(due(now, ("a", "b"), told)) == ["n1", "n2"]
    assert sorted(due(now, (), told)) == ["n1", "n2"]


def test_who_is_not_connected_or_would_not_understand_is_told_nothing() -> None:
    now = changed(fleet("n1"), "n1", connected=False)
    assert due(now, ("a",), {}) == ()
    assert due(world(register("n1")), ("a",), {}) == ()


async def test_what_could_not_be_told_is_told_again(autojump_clock: trio.testing.MockClock) -> None:
    said: list[tuple[str, ControlMessage]] = []

    class Hub:
        gone = True

        def tell(self, node: NodeId, command: ControlMessage) -> None:
            if self.gone:
                raise AgentGone("no stream")
            said.append((node, command))

    hub, now = Hub(), fleet("n1")
    serials: tuple[str, ...] = ("a",)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell_revoked, lambda: serials, lambda: now, hub)
        await trio.sleep(EVERY / 2)
        hub.gone = False
        await trio.sleep(3 * EVERY)
        assert said == [("n1", Revoked(serials=("a",)))]
        serials = ("a", "b")
        await trio.sleep(EVERY)
        assert said[1:] == [("n1", Revoked(serials=("a", "b")))]
        nursery.cancel_scope.cancel()

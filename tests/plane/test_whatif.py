"""What would happen, and that it is what then happens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from llmgw.errors import NotFound
from llmgw.plane.models import models_of
from llmgw.plane.whatif import (
    ApplyModels,
    DrainNode,
    LoseFabric,
    LoseNode,
    PortName,
    Supposition,
    WhatIf,
    what_if,
)
from llmgw.plane.world import DEFAULT, Settings
from llmgw.wire.agent import Heartbeat, Register
from llmgw.wire.facts import NodeId, Port
from tests.plane.ideal import Ideal, ideal, placements
from tests.plane.worlds import GIB, gpus, hear, model, ready, register, settle, world

QUICK = Settings(quiet=5.0, settle=1.0, believe=60.0)
#: Long enough for silence, drains and all that follows from them, in seconds of a clock that jumps.
AFTERWARDS = 240.0


def gang(name: str, replicas: int = 1, *, nodes: int = 2, gpus: int = 1, rails: int = 0, context: int = 512) -> str:
    return (
        f'[[models]]\nname = "{name}"\nengine = "vllm"\nsource = "hf://org/{name}"\nreplicas = {replicas}\n'
        f'nodes = {nodes}\nnetwork = "rdma"\nrails = {rails}\ncontext = {context}\n'
        f"resources = {{ gpus = {gpus}, cpu_threads = 1 }}\n"
    )


def rail(number: int, fabric: str) -> Port:
    """A good port of a rail."""
    return Port(
        device=f"mlx5_{number}",
        kind="ib",
        state="ACTIVE",
        physical_state="LinkUp",
        rate_gbps=400.0,
        link_layer="InfiniBand",
        lid=1,
        sm_lid=1,
        rail=number,
        fabric=fabric,
    )


def wired(node: str, *fabrics: str, gpu: int = 2, threads: int = 8) -> Register:
    """A node with a rail on each of these fabrics."""
    return replace(
        register(node, threads=threads, gpu=gpus(gpu, node=node)),
        ports=tuple(rail(number, fabric) for number, fabric in enumerate(fabrics)),
    )


def text(*models: str) -> str:
    return "\n".join(models)


def toml(
    name: str,
    replicas: int = 1,
    *,
    threads: int = 0,
    gpus: int = 0,
    source: str = "/models/tiny.gguf",
    disk: int = 0,
    context: int = 512,
) -> str:
    return (
        f'[[models]]\nname = "{name}"\nengine = "llamacpp"\nsource = "{source}"\nreplicas = {replicas}\n'
        f"context = {context}\n"
        f'resources = {{ cpu_threads = {threads}, gpus = {gpus}, disk = "{disk}GiB" }}\n'
    )


async def foretold_and_seen(
    registers: list[Register],
    models: str,
    change: Callable[[Ideal], tuple[Supposition, Callable[[], Awaitable[None]]]],
    *,
    cordoned: str = "",
    moving: tuple[str, float] | None = None,
    trouble: tuple[str, float] = ("", 0.0),
) -> tuple[WhatIf, Ideal]:
    """What a change was said to do, and the fleet long after it was made.

    `moving`: other models were applied so many seconds before, so that the fleet is not at rest. `trouble`: the last
    node was "lost", or an engine of it was "hurt", so many seconds before.
    """
    last = str(registers[-1].node)
    async with ideal(*registers, settings=QUICK) as fleet:
        await fleet.fleet.apply(models)
        await trio.sleep(20)
        if cordoned:
            await fleet.fleet.cordon(NodeId(cordoned), True)
        if moving is not None:
            await fleet.fleet.apply(moving[0])
            await trio.sleep(moving[1])
        if trouble[0]:
            fleet.lose(last) if trouble[0] == "lost" else fleet.hurt(last)
            await trio.sleep(trouble[1])
        supposed, make = change(fleet)
        foretold = what_if(fleet.world, supposed, trio.current_time(), QUICK)
        await make()
        await trio.sleep(AFTERWARDS)
        return foretold, fleet


def draining(node: str) -> Callable[[Ideal], tuple[Supposition, Callable[[], Awaitable[None]]]]:
    def change(fleet: Ideal) -> tuple[Supposition, Callable[[], Awaitable[None]]]:
        async def make() -> None:
            await fleet.fleet.drain(NodeId(node), True)

        return DrainNode(NodeId(node)), make

    return change


def losing(node: str) -> Callable[[Ideal], tuple[Supposition, Callable[[], Awaitable[None]]]]:
    def change(fleet: Ideal) -> tuple[Supposition, Callable[[], Awaitable[None]]]:
        async def make() -> None:
            fleet.lose(node)

        return LoseNode(NodeId(node)), make

    return change


def labelled(fleet: Ideal, fabric: str) -> frozenset[PortName]:
    """The ports with a label."""
    nodes = fleet.world.nodes.values()
    return frozenset(
        (node.id, port.device, port.number)
        for node in nodes
        for port in (node.facts.ports if node.facts is not None else ())
        if port.fabric == fabric
    )


def losing_fabric(fabric: str) -> Callable[[Ideal], tuple[Supposition, Callable[[], Awaitable[None]]]]:
    def change(fleet: Ideal) -> tuple[Supposition, Callable[[], Awaitable[None]]]:
        async def make() -> None:
            fleet.lose_fabric(fabric)

        return LoseFabric(fabric, labelled(fleet, fabric)), make

    return change


def applying(models: str) -> Callable[[Ideal], tuple[Supposition, Callable[[], Awaitable[None]]]]:
    def change(fleet: Ideal) -> tuple[Supposition, Callable[[], Awaitable[None]]]:
        async def make() -> None:
            await fleet.fleet.apply(models)

        return ApplyModels(models_of(models)), make

    return change


def on_a_jumping_clock(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@st.composite
def some_models(draw: st.DrawFn) -> str:
    return text(
        *(
            toml(
                name,
                draw(st.integers(0, 3)),
                threads=draw(st.integers(1, 3)),
                gpus=draw(st.integers(0, 2)),
                source=draw(st.sampled_from(["/models/x.gguf", "hf://org/x", f"hf://org/{name}"])),
                disk=draw(st.sampled_from([0, 30])),
                context=draw(st.sampled_from([512, 1024])),
            )
            for name in sorted(draw(st.sets(st.sampled_from("abcd"), max_size=3)))
        )
    )


@st.composite
def some_nodes(draw: st.DrawFn) -> list[Register]:
    return [
        register(
            f"n{n}",
            threads=draw(st.integers(1, 6)),
            gpu=gpus(draw(st.integers(0, 4)), node=f"n{n}"),
            disk=draw(st.sampled_from([40 * GIB, 100 * GIB])),
        )
        for n in range(draw(st.integers(1, 4)))
    ]


#: Before, while and after what was applied is started, drained and stopped.
PAUSES = st.sampled_from([0.02, 5.0, 30.0, 30.005, 31.0])
TROUBLES = st.just(("", 0.0)) | st.tuples(st.sampled_from(["lost", "hurt"]), st.sampled_from([0.05, 0.5, 20.0, 100.0]))


@settings(max_examples=50)
@given(
    some_nodes(),
    some_models(),
    some_models(),
    st.integers(0, 4),
    st.booleans(),
    st.tuples(some_models(), PAUSES) | st.none(),
    TROUBLES,
)
def test_what_is_foretold_is_what_happens(
    registers: list[Register],
    models: str,
    others: str,
    kind: int,
    cordoned: bool,
    moving: tuple[str, float] | None,
    trouble: tuple[str, float],
) -> None:
    last = f"n{len(registers) - 1}"
    assume(kind not in (1, 4) or trouble[0] != "lost")  # two within a second: which is missed first is chance
    change = (draining("n0"), losing("n0"), applying(others), draining(last), losing(last))[kind]

    async def main() -> None:
        foretold, fleet = await foretold_and_seen(
            registers, models, change, cordoned=last if cordoned else "", moving=moving, trouble=trouble
        )
        assert foretold.complete
        assert placements(foretold.after) == placements(fleet.world)
        assert {short.model for short in foretold.short} <= set(fleet.world.unplaced)

    on_a_jumping_clock(main)


@st.composite
def wired_nodes(draw: st.DrawFn) -> list[Register]:
    return [
        wired(
            f"n{n}",
            *draw(st.sampled_from([("red", "red"), ("red", "blue"), ("blue",), ("red",)])),
            gpu=draw(st.integers(1, 4)),
            threads=draw(st.integers(2, 6)),
        )
        for n in range(draw(st.integers(2, 6)))
    ]


@st.composite
def gangs(draw: st.DrawFn) -> str:
    """Up to two models of several nodes, and one of one node."""
    parts = [
        gang(
            name,
            draw(st.integers(0, 2)),
            nodes=draw(st.integers(2, 3)),
            gpus=draw(st.integers(1, 2)),
            rails=draw(st.integers(0, 1)),
            context=draw(st.sampled_from([512, 1024])),
        )
        for name in sorted(draw(st.sets(st.sampled_from("pq"))))
    ]
    parts.append(toml("single", draw(st.integers(0, 3)), gpus=1, threads=1))
    return text(*parts)


@settings(max_examples=50)
@given(wired_nodes(), gangs(), gangs(), st.integers(0, 4), st.tuples(gangs(), PAUSES) | st.none(), TROUBLES)
def test_what_is_foretold_of_replicas_of_several_nodes_is_what_happens(
    registers: list[Register],
    models: str,
    others: str,
    kind: int,
    moving: tuple[str, float] | None,
    trouble: tuple[str, float],
) -> None:
    assume(kind != 1 or trouble[0] != "lost")
    change = (draining("n0"), losing("n1"), applying(others), losing_fabric("red"), losing_fabric("blue"))[kind]

    async def main() -> None:
        foretold, fleet = await foretold_and_seen(registers, models, change, moving=moving, trouble=trouble)
        assert foretold.complete
        assert placements(foretold.after) == placements(fleet.world)
        assert {short.model for short in foretold.short} <= set(fleet.world.unplaced)

    on_a_jumping_clock(main)


def test_a_lost_fabric_ends_the_replicas_that_talk_over_it_and_they_move_to_another() -> None:
    nodes = [wired("n1", "red"), wired("n2", "red"), wired("n3", "blue"), wired("n4", "blue")]
    ports = frozenset({(NodeId("n3"), "mlx5_0", 1), (NodeId("n4"), "mlx5_0", 1)})
    found = told(nodes, gang("p", 1), LoseFabric("blue", ports))
    assert [(f.replica, f.what, f.before, f.after) for f in found.fates] == [
        ("p-0", "moves", ("n3", "n4"), ("n1", "n2"))
    ]
    assert [(gap.model, gap.begin) for gap in found.gaps] == [("p", 0.0)]


def test_a_replica_that_no_other_fabric_takes_is_short_and_says_which_wires_are_missing() -> None:
    nodes = [wired("n1", "red"), wired("n2", "red"), wired("n3")]
    ports = frozenset({(NodeId("n1"), "mlx5_0", 1), (NodeId("n2"), "mlx5_0", 1)})
    found = told(nodes, gang("p", 1), LoseFabric("red", ports))
    assert [f.what for f in found.fates] == ["unplaced"]
    (short,) = found.short
    assert {(reason.node, reason.check) for reason in short.reasons} == {
        ("n1", "rails"),
        ("n2", "rails"),
        ("n3", "fabric"),
    }
    assert found.gaps[0].end is None


def test_nothing_is_changed_by_asking() -> None:
    async def main() -> None:
        async with ideal(register("n1"), register("n2"), settings=QUICK) as fleet:
            await fleet.fleet.apply(toml("a", 2, threads=1))
            await trio.sleep(20)
            before = fleet.world
            what_if(before, DrainNode(NodeId("n1")), trio.current_time(), QUICK)
            assert fleet.world is before

    on_a_jumping_clock(main)


def told(registers: list[Register], models: str, supposed: Supposition) -> WhatIf:
    """What is said of a fleet at rest."""
    found: list[WhatIf] = []

    async def main() -> None:
        async with ideal(*registers, settings=DEFAULT) as fleet:
            await fleet.fleet.apply(models)
            await trio.sleep(200)
            found.append(what_if(fleet.world, supposed, trio.current_time(), DEFAULT))

    on_a_jumping_clock(main)
    return found[0]


def test_a_drained_nodes_replicas_are_replaced_before_they_go_and_nobody_is_without() -> None:
    found = told([register("n1", threads=1), register("n2", threads=1), register("n3", threads=1)],
                 toml("a", 2, threads=1), DrainNode(NodeId("n1")))  # fmt: skip
    assert [(f.replica, f.what, f.before, f.by, f.after) for f in found.fates] == [
        ("a-0", "replaced", ("n1",), "a-2", ("n3",)),
        ("a-1", "stays", ("n2",), "", ("n2",)),
    ]
    assert (found.gaps, found.short, found.restless, found.complete) == ((), (), False, True)


def test_a_replica_that_finds_no_other_place_stays_on_a_drained_node_and_says_so() -> None:
    found = told([register("n1", threads=1), register("n2", threads=1)], toml("a", 2, threads=1),
                 DrainNode(NodeId("n1")))  # fmt: skip
    assert [(f.replica, f.what, f.after) for f in found.fates] == [("a-0", "stays", ("n1",)), ("a-1", "stays", ("n2",))]
    stuck, free = found.fates
    assert stuck.why.startswith("n1 is not emptied: there is no room for its replacement: n2: has 0 of 1")
    assert free.why == ""


def test_a_lost_node_is_without_its_replica_until_silence_is_believed() -> None:
    found = told(
        [register("n1", threads=1), register("n2", threads=1)], toml("a", 1, threads=1), LoseNode(NodeId("n1"))
    )
    (fate,) = found.fates
    assert (fate.what, fate.before, fate.after) == ("moves", ("n1",), ("n2",))
    (gap,) = found.gaps
    assert (gap.model, gap.begin) == ("a", 0.0)
    assert gap.end == pytest.approx(90.0, abs=5)
    assert [moment.kind for moment in found.moments] == ["node-gone", "node-unreachable", "node-lost", "shard-placed"]


def test_a_drain_with_a_time_of_its_own_takes_that_time() -> None:
    nodes = [register("n1", threads=1), register("n2", threads=1), register("n3", threads=1)]
    for within, seconds in ((None, 30.0), (300.0, 300.0)):
        found = told(nodes, toml("a", 2, threads=1), DrainNode(NodeId("n1"), within))
        assert found.seconds == pytest.approx(seconds, abs=1)


def test_a_model_that_ends_up_short_says_why_and_what_would_help() -> None:
    found = told(
        [register("n1", threads=1), register("n2", threads=1)], toml("a", 2, threads=1), LoseNode(NodeId("n1"))
    )
    (short,) = found.short
    assert (short.model, short.wanted, short.before, short.after) == ("a", 2, 2, 1)
    assert {reason.check for reason in short.reasons} >= {"cpu-threads"}
    assert short.smallest_change == "bring n1 back: its agent is not heard"
    assert [f.what for f in found.fates] == ["unplaced", "stays"]


def test_an_applied_file_says_what_starts_and_what_stops() -> None:
    found = told(
        [register("n1", threads=4)], text(toml("a", 1, threads=1)), ApplyModels(models_of(toml("b", 1, threads=1)))
    )
    assert [(f.replica, f.what) for f in found.fates] == [("a-0", "stops"), ("b-0", "starts")]


@pytest.mark.parametrize("supposed", [DrainNode(NodeId("n9")), LoseNode(NodeId("n9"))])
def test_a_node_that_nobody_knows_is_not_found(supposed: Supposition) -> None:
    with pytest.raises(NotFound, match="there is no node 'n9': did you mean 'n99'"):
        what_if(world(register("n99")), supposed, 0.0)


def test_a_silence_is_over_in_time_however_its_seconds_are_rounded() -> None:
    heard = 100.01
    assert heard + DEFAULT.lost_after - heard < DEFAULT.lost_after  # in floating point
    here = world(register("n1", threads=1), register("n2", threads=1), models=[model()])
    here = hear(ready(settle(here)[0]), "n1", Heartbeat(), heard)
    (fate,) = what_if(here, LoseNode(NodeId("n1")), heard).fates
    assert (fate.what, fate.after) == ("moves", ("n2",))

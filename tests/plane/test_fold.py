"""What a node says becomes the world (A5, A7, B1-B9)."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmgw.plane.events import Event
from llmgw.plane.fold import fold
from llmgw.plane.rates import rates
from llmgw.plane.world import Node, Stage, World
from llmgw.wire.agent import Heartbeat, Register
from llmgw.wire.facts import (
    Disk,
    EngineInstall,
    Gpu,
    GpuFabric,
    GpuLoad,
    GpuProcess,
    HostLoad,
    Imex,
    InstallState,
    NodeId,
    Port,
    PortLoad,
    PortManagers,
    ShardId,
    ShardLoad,
    SubnetManager,
    Weights,
)
from tests.plane.worlds import CLOCK, GIB, gpus, register, world
from tests.strategies import heartbeats, registers

N = NodeId("n1")


def say(before: World, message: Register | Heartbeat, now: float = 5.0) -> tuple[Node, tuple[Event, ...], World]:
    after, events = fold(before, N, message, now, CLOCK + now)
    return after.nodes[N], events, after


def kinds(events: tuple[Event, ...]) -> list[str]:
    return [event.kind for event in events]


def test_a_first_register_makes_a_node_known_and_ready() -> None:
    after, events = fold(World(), N, register("n1", gpu=2), 7.0, CLOCK, stream=3, address="192.0.2.7")
    node = after.nodes[N]
    assert (node.stage, node.connected, node.stream, node.peer_address) == (Stage.READY, True, 3, "192.0.2.7")
    assert (node.heard_at, node.facts_at, node.first_clock) == (7.0, 7.0, CLOCK)
    assert kinds(events) == ["node-joined"]
    assert "2 GPUs, 8 CPU threads, 64 GiB" in events[0].text


def test_the_engines_address_is_the_nodes_own_word_or_where_its_stream_comes_from() -> None:
    named, _ = fold(World(), N, register("n1"), 0.0, CLOCK, stream=1, address="192.0.2.7")
    assert named.nodes[N].address == "n1.example"
    silent, _ = fold(World(), N, replace(register("n1"), address=""), 0.0, CLOCK, stream=1, address="192.0.2.7")
    assert silent.nodes[N].address == "192.0.2.7"


def test_a_second_register_replaces_the_whole_inventory() -> None:
    ports = (Port(device="mlx5_0", state="ACTIVE"),)
    before = world(replace(register("n1", gpu=2), ports=ports, weights=(Weights(source="a"),)))
    load = Heartbeat(
        gpus=(GpuLoad("GPU-n1-0", 5), GpuLoad("GPU-n1-1", 6)),
        ports=(PortLoad("mlx5_0", 1, "ACTIVE", counters={"port_rcv_errors": 1}),),
    )
    _, _, before = say(before, load)
    node, events, _ = say(before, register("n1", gpu=1), 9.0)
    assert node.facts == register("n1", gpu=1)
    assert set(node.gpu_loads) == {"GPU-n1-0"}
    assert (node.ports.last.ports, node.facts_at) == ((), 9.0)
    assert kinds(events) == ["node-changed"]
    assert "gpus: 2 of 2 readable -> 1 of 1 readable" in events[0].text


def test_an_identical_register_is_no_event() -> None:
    assert say(world(register("n1")), register("n1"))[1] == ()


def test_a_heartbeat_of_a_stranger_changes_nothing() -> None:
    before = world(register("n1"))
    assert fold(before, NodeId("n2"), Heartbeat(), 5.0, CLOCK) == (before, ())


def test_an_idle_heartbeat_says_only_that_the_node_is_there() -> None:
    before = world(register("n1", gpu=2))
    node, events, after = say(before, Heartbeat())
    assert (node.heard_at, events, after.version) == (5.0, (), before.version)
    assert node.facts is before.nodes[N].facts


def test_load_never_grows_the_worlds_version() -> None:
    before = world(register("n1", gpu=2))
    beat = Heartbeat(
        load=HostLoad(50.0, 1.0, 9 * GIB, CLOCK),
        shards=(ShardLoad(ShardId("a-0-0"), 99.0, GIB),),
        gpus=(GpuLoad("GPU-n1-0", 5),),
        gpu_processes=(GpuProcess("GPU-n1-0", 77, "python", GIB),),
        disks=(Disk(purpose="weights", path="/w", free_bytes=1),),
    )
    node, events, after = say(before, beat)
    assert (after.version, events) == (before.version, ())
    assert node.load == beat.load
    assert node.shard_loads[ShardId("a-0-0")].rss_bytes == GIB
    assert node.gpu_loads["GPU-n1-0"].memory_used_bytes == 5
    assert node.gpu_processes == beat.gpu_processes
    assert node.facts is not None
    assert node.facts.host.disks == beat.disks


#: B2, list by list: how to say it, how to see it, two different truths.
LISTS: dict[str, tuple[Callable[[Node], object], tuple[object, ...]]] = {
    "shards": (lambda n: tuple(n.shard_loads.values()), (ShardLoad(ShardId("a"), 1.0),)),
    "gpus": (lambda n: tuple(n.gpu_loads.values()), (GpuLoad("GPU-n1-0", 1),)),
    "gpu_processes": (lambda n: n.gpu_processes, (GpuProcess("GPU-n1-0", 1),)),
    "ports": (lambda n: n.ports.last.ports, (PortLoad("mlx5_0", 1, "ACTIVE"),)),
    "port_facts": (lambda n: n.facts.ports if n.facts else None, (Port(device="mlx5_9"),)),
    "managers": (lambda n: n.facts.managers if n.facts else None, (PortManagers(device="mlx5_0"),)),
    "problems": (lambda n: tuple(o.problem for o in n.problems.values()), ()),
    "disks": (lambda n: n.facts.host.disks if n.facts else None, (Disk(purpose="state", path="/"),)),
    "installs": (lambda n: n.facts.installs if n.facts else None, (EngineInstall(engine="vllm", version="9"),)),
    "weights": (lambda n: n.facts.weights if n.facts else None, (Weights(source="x"),)),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_is_the_whole_truth_even_when_empty_and_none_says_nothing(name: str) -> None:
    see, value = LISTS[name]
    before = world(register("n1", gpu=1))
    told, _, after = say(before, Heartbeat(**{name: value}))  # type: ignore[arg-type]
    assert see(told) == value
    silent, _, after = say(after, Heartbeat(), 6.0)
    assert see(silent) == value
    emptied, _, _ = say(after, Heartbeat(**{name: ()}), 7.0)  # type: ignore[arg-type]
    assert see(emptied) == ()


def test_fabrics_imex_and_memory_are_refreshed_by_heartbeats() -> None:
    before = world(register("n1", gpu=2))
    fabric = GpuFabric(state="completed", cluster_uuid="c", clique=7)
    node, events, _ = say(before, Heartbeat(gpu_fabrics={"GPU-n1-0": fabric}, memory_bytes=GIB))
    assert node.facts is not None
    assert [gpu.fabric for gpu in node.facts.gpus] == [fabric, None]
    assert node.facts.host.memory_bytes == GIB
    assert kinds(events) == ["node-changed"]
    assert "nvlink: none -> c.7 (1 GPU); memory: 64.0 GiB -> 1.0 GiB" in events[0].text


def test_one_gpu_that_leaves_the_nvlink_domain_is_an_event() -> None:
    fabric = GpuFabric(state="completed", cluster_uuid="c", clique=7)
    both = {"GPU-n1-0": fabric, "GPU-n1-1": fabric}
    _, _, before = say(world(register("n1", gpu=2)), Heartbeat(gpu_fabrics=both))
    left = {**both, "GPU-n1-1": replace(fabric, state="in-progress")}
    _, events, _ = say(before, Heartbeat(gpu_fabrics=left))
    assert [event.text for event in events] == ["n1 changed: nvlink: c.7 (2 GPUs) -> c.7 (1 GPU)"]
    assert events[0].data["node"] == "n1"


def test_every_change_of_imex_is_an_event() -> None:
    up = Imex(state="UP", nodes=(("10.0.0.1", "READY"), ("10.0.0.2", "READY")), channels=2048)
    _, events, before = say(world(register("n1")), Heartbeat(imex=up))
    assert [event.text for event in events] == ["n1 changed: imex: none -> UP, 2 nodes, 2048 channels"]
    assert say(before, Heartbeat(imex=up))[1] == ()
    degraded = replace(up, state="DEGRADED", disconnected=("10.0.0.2",), mismatch=("10.0.0.3",))
    _, events, before = say(before, Heartbeat(imex=degraded))
    assert [event.text for event in events] == [
        "n1 changed: imex: UP, 2 nodes, 2048 channels -> DEGRADED, 2 nodes, 2048 channels, "
        "not connected to 10.0.0.2, differs from 10.0.0.3"
    ]
    _, events, _ = say(before, register("n1"))
    assert "-> none" in events[0].text


def test_how_far_a_nodes_clock_is_off_is_shown_and_decides_nothing() -> None:
    before = world(register("n1"))
    ahead, events, after = say(before, Heartbeat(load=HostLoad(clock=CLOCK + 5.0 + 3600.0)))
    assert (ahead.clock_offset, events, after.version) == (3600.0, (), before.version)
    silent, _, _ = say(after, Heartbeat(load=HostLoad()), 6.0)
    assert silent.clock_offset == 3600.0


def test_engines_and_provision_states_are_one_line_with_before_and_after() -> None:
    before = world(register("n1", engines=["llamacpp"]))
    installs = (
        EngineInstall(engine="llamacpp", version="2"),
        EngineInstall(engine="vllm", version="1", state=InstallState.INSTALLING, detail="10 %"),
    )
    _, events, after = say(before, Heartbeat(installs=installs))
    assert [e.text for e in events] == [
        "n1 changed: engines: llamacpp 1 -> llamacpp 2; provision: none -> vllm 1 installing"
    ]
    progress = (installs[0], replace(installs[1], detail="20 %"))
    assert say(after, Heartbeat(installs=progress), 6.0)[1] == ()


def test_what_a_node_can_install_changes_when_it_hears_where_packages_come_from() -> None:
    before = world(replace(register("n1"), installable=("llamacpp",)))
    _, events, after = say(before, Heartbeat(installable=("llamacpp", "vllm")))
    facts = after.nodes[NodeId("n1")].facts
    assert facts is not None
    assert facts.installable == ("llamacpp", "vllm")
    assert events == ()
    _, _, silent = say(after, Heartbeat(), 6.0)
    assert silent.nodes[NodeId("n1")].facts == facts


def test_a_port_that_went_down_is_one_event_and_the_facts_follow() -> None:
    port = Port(device="mlx5_0", state="ACTIVE", physical_state="LinkUp", rate_gbps=400.0, sm_lid=1)
    before = world(replace(register("n1"), ports=(port,)))
    up = PortLoad("mlx5_0", 1, "ACTIVE", "LinkUp", 400.0, 1)
    assert say(before, Heartbeat(ports=(up,)))[1] == ()
    node, events, after = say(before, Heartbeat(ports=(PortLoad("mlx5_0", 1, "DOWN", "Polling", None, None),)))
    assert [(e.kind, e.text) for e in events] == [("port-changed", "n1 mlx5_0/1: ACTIVE -> DOWN")]
    assert node.facts is not None
    assert (node.facts.ports[0].state, node.facts.ports[0].rate_gbps) == ("DOWN", None)
    assert after.version == before.version + 1


def test_ports_that_vanished_do_not_linger() -> None:
    before = world(replace(register("n1"), ports=(Port(device="mlx5_0", state="ACTIVE"),)))
    _, _, before = say(before, Heartbeat(ports=(PortLoad("mlx5_0", 1, "ACTIVE"),)))
    node, events, _ = say(before, Heartbeat(ports=()), 6.0)
    assert node.facts is not None
    assert (node.facts.ports, node.ports.last.ports) == ((), ())
    assert [e.text for e in events] == ["n1 mlx5_0/1: ACTIVE -> gone"]


def test_rates_come_from_two_heartbeats() -> None:
    before = world(replace(register("n1"), ports=(Port(device="mlx5_0", state="ACTIVE"),)))
    _, _, before = say(before, Heartbeat(ports=(PortLoad("mlx5_0", 1, "ACTIVE", counters={"port_xmit_data": 0}),)))
    load = PortLoad("mlx5_0", 1, "ACTIVE", counters={"port_xmit_data": 500})
    node, _, _ = say(before, Heartbeat(ports=(load,)), 15.0)
    found = node.ports.get("mlx5_0", 1)
    assert found is not None
    assert rates(found)["port_xmit_data"] == 200.0


def master(guid: str, port: str = "mlx5_0", state: str = "master") -> PortManagers:
    return PortManagers(device=port, master=SubnetManager(guid=guid, state=state))


def test_a_changed_master_is_an_event_with_both_guids_once_a_fabric() -> None:
    both = (master("a"), master("a", "mlx5_1"))
    before = world(replace(register("n1"), managers=both), replace(register("n2"), managers=both))
    _, events, after = say(before, Heartbeat(managers=(master("b"), master("b", "mlx5_1"))))
    assert [e.kind for e in events] == ["sm-changed"]
    assert events[0].data == {"node": "n1", "port": "mlx5_0/1", "from": "a", "to": "b"}
    elsewhere = fold(after, NodeId("n2"), Heartbeat(managers=(master("b"), master("b", "mlx5_1"))), 8.0, CLOCK)
    assert elsewhere[1] == ()
    _, events, _ = say(elsewhere[0], Heartbeat(managers=(master("a"),)), 9.0)
    assert [e.data["to"] for e in events] == ["a"]


@pytest.mark.parametrize(
    "between",
    [
        pytest.param(PortManagers(device="mlx5_0", error="no answer"), id="an error"),
        pytest.param(PortManagers(device="mlx5_0"), id="nobody"),
        pytest.param(master("b", state="standby"), id="a hand-back's moment of standby"),
        pytest.param(master(""), id="no GUID"),
    ],
)
def test_only_known_masters_are_compared(between: PortManagers) -> None:
    before = world(replace(register("n1"), managers=(master("a"),)))
    _, events, after = say(before, Heartbeat(managers=(between,)))
    assert events == ()
    assert say(after, Heartbeat(managers=(master("a"),)), 6.0)[1] == ()
    assert kinds(say(after, Heartbeat(managers=(master("c"),)), 7.0)[1]) == ["sm-changed"]


def test_the_first_master_seen_is_no_change() -> None:
    assert say(world(register("n1")), Heartbeat(managers=(master("a"),)))[1] == ()


def test_a_silent_node_is_ready_again_with_any_frame() -> None:
    before = world(register("n1"))
    for stage in (Stage.UNREACHABLE, Stage.LOST):
        quiet = attrs.evolve(
            before, nodes=before.nodes.set(N, attrs.evolve(before.nodes[N], stage=stage, stage_at=20.0))
        )
        node, events, after = say(quiet, Heartbeat(), 30.0)
        assert (node.stage, node.stage_at, after.version) == (Stage.READY, 30.0, quiet.version + 1)
        assert [e.text for e in events] == [f"n1 is back after 30 s ({stage.value} -> ready)"]


@given(registers(), st.lists(heartbeats(), max_size=6))
def test_fold_loses_nothing_that_was_said(first: Register, beats: list[Heartbeat]) -> None:
    """B2: after any heartbeats the world shows, list by list, the last truth that was said."""
    now, (after, _) = 1.0, fold(World(), first.node, first, 1.0, CLOCK, stream=1)
    said: dict[str, object] = {}
    for beat in beats:
        now += 5.0
        before = after
        after, _ = fold(before, first.node, beat, now, CLOCK + now)
        assert after.version in (before.version, before.version + 1)
        said |= {name: value for name in beat.__struct_fields__ if (value := getattr(beat, name)) is not None}
    node = after.nodes[first.node]
    assert node.heard_at == now
    assert node.facts is not None
    if "load" in said:
        assert node.load == said["load"]
    if "gpu_processes" in said:
        assert node.gpu_processes == said["gpu_processes"]
    for name, seen in {
        "shards": {load.shard: load for load in node.shard_loads.values()},
        "gpus": {load.uuid: load for load in node.gpu_loads.values()},
    }.items():
        if name in said:
            key = "shard" if name == "shards" else "uuid"
            assert seen == {getattr(load, key): load for load in said[name]}  # type: ignore[attr-defined]
    for name, value in {
        "installs": node.facts.installs,
        "weights": node.facts.weights,
        "managers": node.facts.managers,
        "imex": node.facts.imex,
        "disks": node.facts.host.disks,
        "memory_bytes": node.facts.host.memory_bytes,
    }.items():
        if name in said:
            assert value == said[name]
    if "problems" in said:
        assert set(node.problems) == {(p.subject, p.code) for p in said["problems"]}  # type: ignore[attr-defined]
    if "ports" in said:
        assert node.ports.last.ports == said["ports"]


@given(registers(), st.lists(heartbeats(), max_size=3), registers())
def test_a_register_is_the_whole_truth_whatever_came_before(
    first: Register, beats: list[Heartbeat], again: Register
) -> None:
    again = replace(again, node=first.node)
    after, _ = fold(World(), first.node, first, 1.0, CLOCK, stream=1)
    for beat in beats:
        after, _ = fold(after, first.node, beat, 2.0, CLOCK)
    after, _ = fold(after, first.node, again, 3.0, CLOCK)
    node = after.nodes[first.node]
    assert node.facts == again
    assert set(node.problems) == {(p.subject, p.code) for p in again.problems}
    assert set(node.gpu_loads) <= {gpu.uuid for gpu in again.gpus}
    assert node.ports.last.ports == ()


def test_a_gpu_that_fell_off_the_bus_is_a_line() -> None:
    two = gpus(2, node="n1")
    before = world(register("n1", gpu=two))
    lost = (two[0], Gpu(uuid=two[1].uuid, index=1, unreadable="fell off the bus"))
    _, events, _ = say(before, register("n1", gpu=lost))
    assert "gpus: 2 of 2 readable -> 1 of 2 readable" in events[0].text

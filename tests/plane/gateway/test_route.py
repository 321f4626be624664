from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from immutables import Map
from msgspec.structs import replace

from llmgw.plane.gateway.route import (
    UNLOADED,
    Endpoint,
    ModelRoute,
    ModelState,
    Routes,
    StaticEndpoint,
    choose,
    routes_of,
    settled,
)
from llmgw.plane.world import Failure, Model, Node, Profile, Reason, Shard, Stage, Unplaced, Want, World
from llmgw.wire.agent import Register, ShardStatus
from llmgw.wire.facts import ModelName, NodeId, Progress, ReplicaId, ShardId, ShardSpec, ShardState

TINY = ModelName("tiny")


def node(name: str, stage: Stage = Stage.READY, address: str = "10.0.0.1") -> Node:
    return Node(NodeId(name), stage, 0.0, facts=Register(node=NodeId(name), version="1", address=address))


def shard(number: int = 0, state: ShardState | None = ShardState.READY, **fields: object) -> Shard:
    replica = ReplicaId(f"tiny-{number}")
    status = (
        ShardStatus(
            shard=ShardId(f"{replica}-0"), replica=replica, model=TINY, generation=1, state=state, port=8000 + number
        )
        if state
        else None
    )
    made = Shard(
        id=ShardId(f"{replica}-0"),
        replica=replica,
        model=TINY,
        rank=0,
        node=NodeId("n1"),
        generation=1,
        spec=ShardSpec(engine="llamacpp", model=TINY, source="x"),
        revision=1,
        status=status,
    )
    return attrs.evolve(made, **fields)  # type: ignore[arg-type]


def world(*shards: Shard, nodes: tuple[Node, ...] = (), **fields: object) -> World:
    model = Model(name=TINY, profile=Profile(engine="llamacpp", source="x"))
    made = World(
        nodes=Map({node.id: node for node in nodes or (node("n1"),)}),
        models=Map({TINY: model}),
        shards=Map({shard.id: shard for shard in shards}),
    )
    return attrs.evolve(made, **fields)  # type: ignore[arg-type]


def tiny(world: World) -> ModelRoute:
    return routes_of(world).models["tiny"]


def ready(*replicas: str) -> ModelRoute:
    endpoints = tuple(Endpoint(replica=replica, host="h", port=1) for replica in replicas)
    return ModelRoute(state=ModelState.READY, endpoints=endpoints)


# --- from the world


def test_ready_replicas_are_routed_to_at_their_nodes_address() -> None:
    assert tiny(world(shard(0), shard(1))) == ModelRoute(
        state=ModelState.READY,
        endpoints=(
            Endpoint(replica="tiny-0", host="10.0.0.1", port=8000),
            Endpoint(replica="tiny-1", host="10.0.0.1", port=8001),
        ),
    )


@pytest.mark.parametrize(
    ("stage", "count"), [(Stage.READY, 1), (Stage.UNREACHABLE, 1), (Stage.LOST, 0), (Stage.EXPECTED, 0)]
)
def test_a_silent_node_keeps_its_traffic_until_it_is_lost(stage: Stage, count: int) -> None:
    assert len(tiny(world(shard(), nodes=(node("n1", stage),))).endpoints) == count


@pytest.mark.parametrize(
    "not_serving",
    [
        shard(want=Want.DRAIN),
        shard(want=Want.STOP),
        shard(rank=1),
        shard(generation=2),
        shard(node=NodeId("unknown")),
        shard(state=ShardState.STARTING),
        shard(state=ShardState.DRAINING),
        shard(state=ShardState.FAILED),
        shard(state=None),
    ],
)
def test_what_is_not_ready_and_wanted_gets_no_request(not_serving: Shard) -> None:
    assert tiny(world(not_serving)).endpoints == ()


def test_a_model_on_its_way_says_how_far_it_is() -> None:
    fetching = shard(state=ShardState.FETCHING)
    assert fetching.status is not None
    status = fetching.status
    route = tiny(world(attrs.evolve(fetching, status=replace(status, progress=Progress("weights", 50, 200)))))
    assert route == ModelRoute(state=ModelState.STARTING, reason="replica tiny-0 on n1 is fetching (25 % of weights)")


def test_a_model_in_a_crash_loop_says_why_it_failed() -> None:
    failure = Failure(generation=1, clock=0.0, exit_code=1, signal="", cause="out of GPU memory")
    route = tiny(world(shard(state=ShardState.FAILED, last_failure=failure)))
    assert route.state is ModelState.STARTING
    assert route.reason.endswith("it failed before: out of GPU memory")


def test_a_model_that_fits_nowhere_is_unplaced_and_names_the_checks() -> None:
    reasons = (Reason(NodeId("n1"), "gpus", "0", "8"), Reason(NodeId("n2"), "gpus", "4", "8"))
    route = tiny(world(unplaced=Map({TINY: Unplaced(TINY, 1, 0, reasons)})))
    assert route == ModelRoute(state=ModelState.UNPLACED, reason="no node fits (gpus)")


@pytest.mark.parametrize(
    ("stage", "state"),
    [
        (Stage.EXPECTED, ModelState.STARTING),
        (Stage.UNREACHABLE, ModelState.STARTING),
        (Stage.LOST, ModelState.UNPLACED),
        (Stage.READY, ModelState.UNPLACED),
    ],
)
def test_waiting_helps_while_a_silent_node_that_would_take_it_may_return(stage: Stage, state: ModelState) -> None:
    check = "inventory" if stage is Stage.EXPECTED else "stage"
    reasons = (Reason(NodeId("n1"), check, "", ""), Reason(NodeId("n2"), "gpus", "4", "8"))
    here = world(nodes=(node("n1", stage), node("n2")), unplaced=Map({TINY: Unplaced(TINY, 1, 0, reasons)}))
    assert tiny(here).state is state
    also = (*reasons, Reason(NodeId("n1"), "labels", "", ""))
    assert tiny(attrs.evolve(here, unplaced=Map({TINY: Unplaced(TINY, 1, 0, also)}))).state is ModelState.UNPLACED


@pytest.mark.parametrize("stage", [Stage.EXPECTED, Stage.UNREACHABLE, Stage.LOST])
def test_a_replica_whose_node_is_silent_is_on_its_way_until_the_node_is_lost(stage: Stage) -> None:
    reasons = (Reason(NodeId("n1"), "stage", stage.value, "ready"),)
    silent = world(shard(state=None), nodes=(node("n1", stage),), unplaced=Map({TINY: Unplaced(TINY, 1, 0, reasons)}))
    assert tiny(silent).state is (ModelState.UNPLACED if stage is Stage.LOST else ModelState.STARTING)
    moved_in_a_moment = attrs.evolve(silent, unplaced=Map())
    assert tiny(moved_in_a_moment).state is ModelState.STARTING


def test_a_model_scaled_to_zero_is_unplaced() -> None:
    model = Model(name=TINY, profile=Profile(engine="llamacpp", source="x"), replicas=0)
    assert tiny(world(models=Map({TINY: model}))).state is ModelState.UNPLACED


def test_a_model_that_is_unloaded_while_idle_is_one_that_waiting_helps() -> None:
    sleeper = Model(name=ModelName("tiny"), profile=Profile(engine="llamacpp", source="/m"), replicas=2, idle=60.0)
    models = Map({sleeper.name: sleeper})
    route = tiny(world(models=models))
    assert (route.state, route.reason, route.idle) == (ModelState.STARTING, UNLOADED, 60.0)
    draining = shard(want=Want.DRAIN)
    assert tiny(world(draining, models=models)) == route
    awake = tiny(world(shard(), models=models))
    assert (awake.state, awake.idle, len(awake.endpoints)) == (ModelState.READY, 60.0, 1)
    assert tiny(world(shard())).idle == 0.0
    nowhere = Unplaced(sleeper.name, 2, 0, (Reason(NodeId("n"), "gpus", "0", "1"),))
    refused = tiny(world(models=models, unplaced=Map({sleeper.name: nowhere})))
    assert (refused.state, refused.idle) == (ModelState.UNPLACED, 60.0)
    before = Routes(models={"tiny": awake})
    kept = settled(before, Routes(models={"tiny": route}, settling=True)).models["tiny"]
    assert kept == awake


def test_while_the_plane_settles_a_model_without_replicas_is_on_its_way() -> None:
    routes = routes_of(world(settling_until=30.0))
    assert routes.settling
    assert routes.models["tiny"].state is ModelState.STARTING


def test_static_endpoints_stand_beside_placed_replicas_or_alone() -> None:
    static = [
        StaticEndpoint("tiny", "http://other:9000/v1/"),
        StaticEndpoint("gpt", "https://api.example.com/openai/v1"),
    ]
    routes = routes_of(world(shard()), static)
    assert [endpoint.authority for endpoint in routes.models["tiny"].endpoints] == ["10.0.0.1:8000", "other:9000"]
    (gpt,) = routes.models["gpt"].endpoints
    assert (gpt.authority, gpt.port, gpt.tls, gpt.prefix) == ("api.example.com", 443, True, "/openai")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host:80",
        "ftp://h",
        "http://",
        "http://h:0",
        "http://h:99999",
        "http://u:p@h",
        "http://h/?q",
        "http://h/a b",
        "http://[::1",
    ],
)
def test_an_endpoint_that_cannot_be_meant_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="address"):
        StaticEndpoint("m", url)


def test_an_endpoints_key_is_neither_shown_nor_able_to_forge_a_header() -> None:
    assert "sk-1" not in repr(StaticEndpoint("m", "http://h", api_key="sk-1").endpoint())
    with pytest.raises(ValueError, match="control"):
        StaticEndpoint("m", "http://h", api_key="sk-1\r\nX-Evil: 1")


# --- while the plane settles (D3)


def test_what_served_before_goes_on_serving_while_the_plane_settles() -> None:
    old = Routes(models={"a": ready("a-0", "a-1"), "b": ready("b-0")})
    new = Routes(models={"a": ready("a-1", "a-2"), "b": ModelRoute(state=ModelState.STARTING)}, settling=True)
    kept = settled(old, new)
    assert [endpoint.replica for endpoint in kept.models["a"].endpoints] == ["a-1", "a-2", "a-0"]
    assert kept.models["b"] == old.models["b"]
    assert settled(kept, without_settling(new)) == without_settling(new)


def without_settling(routes: Routes) -> Routes:
    return Routes(models=routes.models)


def test_a_gateway_without_routes_takes_what_it_gets() -> None:
    new = Routes(models={"a": ready("a-0")}, settling=True)
    assert settled(None, new) == new


# --- choosing

ENDPOINTS = ready("r0", "r1", "r2", "r3").endpoints


@given(
    st.dictionaries(st.sampled_from(["r0", "r1", "r2", "r3"]), st.integers(0, 5)),
    st.sets(st.sampled_from(["r0", "r1", "r2", "r3"])),
    st.integers(0, 1000),
)
def test_the_least_busy_of_those_that_are_not_out_is_chosen(loads: dict[str, int], out: set[str], turn: int) -> None:
    chosen = choose(ENDPOINTS, loads, dict.fromkeys(out), turn)
    left = [endpoint.replica for endpoint in ENDPOINTS if endpoint.replica not in out]
    if chosen is None:
        assert not left
    else:
        assert chosen.replica in left
        assert loads.get(chosen.replica, 0) == min(loads.get(replica, 0) for replica in left)


def test_those_that_tie_take_turns() -> None:
    chosen = [choose(ENDPOINTS, {}, {}, turn) for turn in range(8)]
    assert [endpoint.replica for endpoint in chosen if endpoint] == ["r0", "r1", "r2", "r3"] * 2

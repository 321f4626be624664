"""Why a model is not placed or not ready, and the smallest change (D7)."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from immutables import Map
from msgspec import structs

from llmgw.errors import NotFound
from llmgw.plane import operate
from llmgw.plane.checks import Need
from llmgw.plane.place import Choice, Rooms, place
from llmgw.plane.why import nearest, smallest, why
from llmgw.plane.world import Stage, Unplaced, World
from llmgw.wire.facts import ModelName, NodeId, Progress, ShardState
from tests.plane.worlds import CLOCK, GIB, hear, model, profile, ready, register, settle, status, world

TINY = ModelName("tiny")


def cordoned(here: World, *nodes: str) -> World:
    for node in nodes:
        here = operate.cordon(here, NodeId(node), True, CLOCK)[0]
    return here


def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises(NotFound, match="there is no model 'tiny'"):
        why(world(register("n1")), TINY, 0.0)


def test_a_model_that_is_placed_and_ready_needs_nothing() -> None:
    found = why(ready(settle(world(register("n1"), models=[model()]))[0]), TINY, 0.0)
    assert (found.text, found.wanted, found.placed, found.ready, found.reasons) == (
        "every replica is ready",
        1,
        1,
        1,
        (),
    )


def test_a_model_without_any_node_is_told_to_join_one() -> None:
    found = why(world(models=[model()]), TINY, 0.0)
    assert found.text == "its replica is not placed: no node has joined"
    assert "llmgw-node join" in found.smallest_change


def test_a_model_that_waits_for_the_plane_to_settle_says_for_how_long() -> None:
    here = attrs.evolve(world(register("n1"), models=[model()]), settling_until=30.0)
    assert why(here, TINY, 10.0).text.endswith("20 s more at most")


def test_the_node_that_is_nearest_to_fitting_is_named_first_with_its_change() -> None:
    here = world(
        register("n1", threads=1),
        register("n2"),
        register("n3", labels={"zone": "b"}),
        models=[model(of=profile(threads=2, labels={"zone": "a"}))],
    )
    here = cordoned(here, "n2")
    here = operate.label(here, NodeId("n2"), {"zone": "a"}, CLOCK)[0]
    found = why(here, TINY, 4.0)
    assert [(r.node, r.check) for r in found.reasons] == [
        ("n2", "cordon"),
        ("n3", "labels"),
        ("n1", "labels"),
        ("n1", "cpu-threads"),
    ]
    assert found.smallest_change == "`llmgw ctl uncordon n2`"
    assert found.reasons[-1].age == 4.0


def test_several_changes_of_one_node_are_all_named() -> None:
    here = cordoned(world(register("n1"), models=[model(of=profile(labels={"zone": "a"}))]), "n1")
    assert why(here, TINY, 0.0).smallest_change == "`llmgw ctl uncordon n1`; `llmgw ctl label n1 zone=a`"


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        ({"gpus": 2}, "add a node with 2 GPUs, or ask for less: n1 is nearest and has 1 GPUs, 2 needed"),
        (
            {"gpus": 1, "gpu_memory": 100 * GIB},
            "add a node with 1 GPU of 100.0 GiB, or ask for less: "
            "n1 is nearest and has GPUs of 80.0 GiB memory, not 100.0 GiB: 0 left, 1 needed",
        ),
        (
            {"gpus": 1, "capability": (10, 0)},
            "add a node with 1 GPU and compute capability 10.0, or ask for less: "
            "n1 is nearest and has GPUs of compute capability 9.0, not 10.0: 0 left, 1 needed",
        ),
        (
            {"gpus": 2, "engine": "sglang"},
            "add a node with 2 GPUs, or ask for less: n1 is nearest and has 1 GPUs, 2 needed",
        ),
        (
            {"threads": 9},
            "add a node with 9 CPU threads, or ask for less: n1 is nearest and has 8 of 8 free CPU threads, 9 needed",
        ),
        (
            {"memory": 65 * GIB},
            "add a node with 65.0 GiB of memory, or ask for less: "
            "n1 is nearest and has 64.0 GiB of 64.0 GiB memory to give, 65.0 GiB needed",
        ),
        (
            {"disk": 2000 * GIB},
            "add a node with 2000.0 GiB of disk for weights, or ask for less: "
            "n1 is nearest and has 1000.0 GiB of disk for weights, 2000.0 GiB needed",
        ),
        ({"engine": "sglang"}, "install sglang on n1 (not installed, and the node cannot install it)"),
    ],
)
def test_each_change_names_the_node_and_both_numbers(fields: dict[str, object], change: str) -> None:
    here = world(register("n1", gpu=1), models=[model(of=profile(**fields))])  # type: ignore[arg-type]
    assert why(here, TINY, 0.0).smallest_change == change


def test_a_placed_shard_that_fits_on_its_node_no_more_still_names_the_nodes_in_the_way() -> None:
    here, _ = settle(world(register("n1"), models=[model(of=profile(threads=2))]))
    here = hear(here, "n1", status("tiny-0-0", 1, ShardState.FAILED, cause="out of memory"), 10.0)
    here = attrs.evolve(
        here,
        unplaced=here.unplaced.set(
            TINY, Unplaced(TINY, 1, 0, Rooms(cordoned(here, "n1"), 0.0).refused(Need.of(model())), "uncordon it")
        ),
    )
    found = why(here, TINY, 10.0)
    assert found.text == "every replica has its place, 0 of 1 are ready; for 1 of them no node passes every check"
    assert [reason.check for reason in found.reasons] == ["cordon"]
    assert found.smallest_change == "uncordon it"


@pytest.mark.parametrize("stage", [Stage.LOST, Stage.EXPECTED])
def test_nothing_is_ready_on_a_node_that_nobody_hears(stage: Stage) -> None:
    here = ready(settle(world(register("n1"), models=[model()]))[0])
    node = attrs.evolve(here.nodes[NodeId("n1")], stage=stage)
    here = attrs.evolve(here, nodes=here.nodes.set(node.id, node))
    if stage is Stage.EXPECTED:  # as after a restart: what was placed is known, and not how it stands
        here = attrs.evolve(here, shards=Map({s.id: attrs.evolve(s, status=None) for s in here.shards.values()}))
    found = why(here, TINY, 10.0)
    assert found.ready == 0
    assert (found.standings[0].state, f"n1 is {stage.value}" in found.standings[0].text) == ("unknown", True)


def test_a_model_scaled_to_zero_says_that_none_is_wanted() -> None:
    assert why(world(register("n1"), models=[model(replicas=0)]), TINY, 0.0).text == "no replica is wanted"


def test_a_failing_shard_is_shown_with_its_cause_and_the_next_attempt() -> None:
    here, _ = settle(world(register("n1"), models=[model()]))
    here = hear(here, "n1", status("tiny-0-0", 1, ShardState.FAILED, cause="out of memory"), 10.0)
    (standing,) = why(here, TINY, 10.4).standings
    assert standing.state == "failed"
    assert "failed once: out of memory; tried again in 1 s" in standing.text


def test_a_fetching_shard_shows_its_progress_and_a_silent_node_its_stage() -> None:
    here, _ = settle(world(register("n1"), models=[model()]))
    fetching = status("tiny-0-0", 1, ShardState.FETCHING, progress=Progress("weights", 5, 10))
    here = hear(here, "n1", fetching, 1.0)
    node = here.nodes[NodeId("n1")]
    here = attrs.evolve(here, nodes=here.nodes.set(node.id, attrs.evolve(node, stage=Stage.UNREACHABLE)))
    (standing,) = why(here, TINY, 2.0).standings
    assert "n1 is unreachable; weights: 50% done" in standing.text


def test_a_removed_models_last_shards_are_still_explained() -> None:
    here, _ = settle(world(register("n1"), models=[model()]))
    found = why(attrs.evolve(here, models=here.models.delete(TINY)), TINY, 0.0)
    assert (found.wanted, found.placed) == (0, 1)


def test_a_paused_rollout_says_what_pauses_it() -> None:
    here = ready(settle(world(register("n1"), models=[model()]))[0])
    changed = model(revision=2, of=profile(threads=1, args=("--new",)))
    here = attrs.evolve(here, models=here.models.set(TINY, changed))
    here, _ = settle(here)
    for generation, now in ((1, 10.0), (2, 100.0)):
        new = next(shard for shard in here.shards.values() if shard.revision == 2)
        here = hear(here, "n1", status(new.id, generation, ShardState.FAILED, cause="bad argument"), now)
        here, _ = settle(here, now + 80.0)
    found = why(here, TINY, 200.0)
    assert "a rollout is paused: replica tiny-1 of revision 2 failed 2 times in a row: bad argument" in found.text
    assert "0 of 1 replicas have revision 2" in found.text


def test_a_model_that_is_unloaded_says_since_when_nobody_asked_for_it_and_what_loads_it() -> None:
    resting = structs.replace(model(), idle=600.0)
    here = attrs.evolve(world(register("n1"), models=[resting]), asked=Map({TINY: 100.0}))
    found = why(here, TINY, 1000.0)
    assert (found.text, found.wanted, found.smallest_change) == (
        "unloaded: nobody has asked for it for 900 s; a request loads it (1 replica)",
        1,
        "",
    )
    assert why(attrs.evolve(here, asked=Map()), TINY, 5.0).text.startswith(
        "unloaded: nobody has asked for it since the plane started"
    )


def test_a_leader_says_which_followers_it_waits_for_and_how_they_stand() -> None:
    gang = structs.replace(model(), profile=structs.replace(profile(threads=1), nodes=3, network="tcp"))
    here, _ = settle(world(register("n1"), register("n2"), register("n3"), models=[gang]))
    here = hear(here, "n2", status("tiny-0-1", 1, ShardState.READY))
    here = hear(here, "n3", status("tiny-0-2", 1, ShardState.FETCHING, progress=Progress("weights", 5, 10)))
    found = why(here, TINY, 1.0)
    assert (found.placed, found.ready) == (1, 0)
    assert found.standings[0].text.endswith("waits for tiny-0-2 on n3 (fetching)")
    assert "waits for" not in found.standings[1].text


def test_a_replica_on_a_lost_node_is_not_placed_and_bringing_that_node_back_is_enough() -> None:
    here = ready(settle(world(register("n1", threads=1), models=[model()]))[0])
    node = attrs.evolve(here.nodes[NodeId("n1")], stage=Stage.LOST)
    found = why(attrs.evolve(here, nodes=here.nodes.set(node.id, node)), TINY, 10.0)
    assert (found.placed, found.text) == (0, "its replica is not placed: no node passes every check")
    assert found.smallest_change == "bring n1 back: its agent is not heard"


flags = st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans(), st.integers(1, 3)), min_size=1, max_size=4)


@given(flags)
def test_what_operators_can_change_is_enough_where_it_is_all_that_is_named(
    nodes: list[tuple[bool, bool, bool, int]],
) -> None:
    """The named change is made, by brute force, and the model fits; no node would fit with less."""
    wanted = model(of=profile(threads=2, labels={"zone": "a"}))
    here = world(*(register(f"n{n}", threads=threads) for n, (_, _, _, threads) in enumerate(nodes)), models=[wanted])
    for number, (cordon, drain, label, _) in enumerate(nodes):
        id = NodeId(f"n{number}")
        here = operate.cordon(here, id, True, CLOCK)[0] if cordon else here
        here = operate.drain(here, id, True, CLOCK)[0] if drain else here
        here = operate.label(here, id, {"zone": "a"}, CLOCK)[0] if label else here
    if isinstance(place(here, wanted, 1.0), Choice):
        return
    reasons = Rooms(here, 1.0).refused(Need.of(wanted))
    change = smallest(reasons, Need.of(wanted))
    best = nearest(reasons)[0].node
    assert best in change
    if "CPU threads" in change:
        assert all(
            r.check == "cpu-threads" for r in reasons if r.node == best and r.check not in ("cordon", "drain", "labels")
        )
        return
    changed = here
    if "uncordon" in change:
        changed = operate.cordon(changed, best, False, CLOCK)[0]
    if "label" in change:
        changed = operate.label(changed, best, {"zone": "a"}, CLOCK)[0]
    choice = place(changed, wanted, 1.0)
    assert isinstance(choice, Choice)
    assert choice.nodes == (best,)

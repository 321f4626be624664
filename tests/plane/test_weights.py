"""What is proposed for removal, and what keeps the rest."""

from __future__ import annotations

import attrs
from hypothesis import given
from hypothesis import strategies as st
from immutables import Map

from llmgw.plane.weights import differing, needed, proposal, warnings
from llmgw.plane.world import Model, Profile, World
from llmgw.wire.facts import ModelName, Weights
from tests.plane.admin.sample import world
from tests.plane.test_whence import SOURCE, holder
from tests.plane.worlds import world as nodes

OLD = Weights(source="hf://org/old", complete=True, idle=7200.0)


def wanting(*sources: str) -> World:
    models = {
        ModelName(f"m{n}"): Model(name=ModelName(f"m{n}"), profile=Profile(engine="vllm", source=source), replicas=0)
        for n, source in enumerate(sources)
    }
    return World(models=Map(models))


def test_what_a_wanted_model_names_is_needed_even_at_no_replicas() -> None:
    assert needed(wanting("hf://org/a")) == {"hf://org/a": "model m0"}


def test_what_a_shard_still_runs_is_needed_after_its_model_is_gone() -> None:
    left = attrs.evolve(world(), models=Map())
    assert left.shards
    assert set(needed(left)) == {shard.spec.source for shard in left.shards.values()}


def test_what_nothing_needs_goes_after_the_grace() -> None:
    assert proposal([OLD], {}, 3600.0).remove == ("hf://org/old",)
    held = proposal([OLD], {}, 86400.0)
    assert (held.remove, dict(held.kept)) == (
        (),
        {"hf://org/old": "it was used 2h ago, and the grace is 1d"},
    )


def test_a_node_that_does_not_say_when_it_was_used_keeps_it() -> None:
    unsaid = Weights(source="hf://org/old", complete=True)
    assert "does not say" in proposal([unsaid], {}, 0.0).kept["hf://org/old"]


def test_what_could_not_be_fetched_is_forgotten_after_the_grace() -> None:
    failed = Weights(source="hf://org/none", error="no such repository", idle=60.0)
    said = "it could not be fetched 1m ago, and the grace is 1h"
    assert proposal([failed], {}, 3600.0).kept == {"hf://org/none": said}
    assert proposal([failed], {}, 30.0).remove == ("hf://org/none",)
    older = Weights(source="hf://org/none", error="no such repository")  # an agent of 0.1 does not say since when
    assert proposal([older], {}, 0.0).kept == {"hf://org/none": "the node does not say when it failed"}


@given(
    st.lists(
        st.builds(
            Weights,
            source=st.sampled_from(["hf://a/a", "hf://b/b", "hf://c/c", "/models/x"]),
            in_use=st.booleans(),
            fetching=st.booleans(),
            idle=st.none() | st.floats(0, 1e6),
        ),
        unique_by=lambda weights: weights.source,
    ),
    st.sets(st.sampled_from(["hf://a/a", "hf://b/b"])),
    st.floats(0, 1e6),
)
def test_nothing_that_is_needed_used_or_on_its_way_is_ever_proposed(
    held: list[Weights], wanted: set[str], grace: float
) -> None:
    made = proposal(held, dict.fromkeys(wanted, "model m"), grace)
    assert sorted([*made.remove, *made.kept]) == sorted(weights.source for weights in held)
    for weights in held:
        if weights.source in made.remove:
            assert weights.source not in wanted
            assert not weights.in_use
            assert not weights.fetching
            assert weights.idle is not None
            assert weights.idle >= grace


def test_nodes_with_different_commits_of_a_wanted_source_are_a_warning() -> None:
    fleet = nodes(
        holder("n1", complete=True, revision="b" * 40),
        *(holder(f"n{n}", complete=True, revision="a" * 40) for n in range(2, 7)),
    )
    assert differing(fleet) == {}  # nobody wants it
    fleet = attrs.evolve(fleet, models=wanting(SOURCE).models)
    assert {revision[0]: len(by) for revision, by in differing(fleet)[SOURCE].items()} == {"a": 5, "b": 1}
    (text,) = warnings(fleet)
    assert "aaaaaaaaaaaa on n2, n3, n4 and 2 more; bbbbbbbbbbbb on n1" in text
    assert "ctl fetch --refresh hf://org/model" in text

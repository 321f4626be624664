"""The API's answers as JSON, pinned: a change of a file in golden/ is a change for every program that reads it.

`LLMGW_GOLDEN=write pytest tests/plane/admin/test_views.py` writes them anew; review the difference.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.errors import NotFound
from llmgw.plane.admin import views
from llmgw.plane.admin.seams import Traffic
from llmgw.plane.admin.shardview import least_advanced
from llmgw.plane.events import Event
from llmgw.plane.world import Frozen, World
from llmgw.wire import api
from llmgw.wire.facts import ModelName, ShardState
from tests.plane.admin.sample import NOW, WALL, world

GOLDEN = Path(__file__).parent / "golden"
TRAFFIC = Traffic({"tiny-0": 3}, {"requests": 12})
FLAPPED = Event(kind="port-changed", subject="node:gpu-01", text="gpu-01 mlx5_0/1: ACTIVE -> DOWN", clock=WALL, id=6)
HAPPENED = Event(kind="node-lost", subject="node:node-b", text="node-b is lost", clock=WALL, id=7)


def status(w: World) -> api.StatusReply:
    """Without the version of this release, which is not promised."""
    said = views.status(w, NOW, WALL, plane="p", since=NOW - 60, traffic=TRAFFIC, latest=7)
    return msgspec.structs.replace(said, version="1.2.3")


ANSWERS: dict[str, Callable[[World], msgspec.Struct]] = {
    "status": lambda w: status(w),
    "nodes": lambda w: views.nodes(w, NOW),
    "node-gpu": lambda w: views.node(w, NOW, "gpu-01", [FLAPPED]),
    "node-cpu": lambda w: views.node(w, NOW, "node-a"),
    "node-lost": lambda w: views.node(w, NOW, "node-b"),
    "models": lambda w: views.models(w, NOW, WALL),
    "replicas": lambda w: views.replicas(w, NOW, WALL, TRAFFIC),
    "problems": lambda w: views.problems(w, NOW),
    "why": lambda w: views.why(w, NOW, WALL, "big"),
    "overview": lambda w: msgspec.structs.replace(
        views.overview(w, NOW, WALL, plane="p", since=NOW - 60, traffic=TRAFFIC, latest=7, events=[HAPPENED]),
        status=status(w),
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_answer_is_as_it_was_promised(name: str) -> None:
    found = msgspec.json.format(msgspec.json.encode(ANSWERS[name](world())), indent=2) + b"\n"
    path = GOLDEN / f"{name}.json"
    if os.environ.get("LLMGW_GOLDEN") == "write":
        path.write_bytes(found)
    assert found.decode() == path.read_text()


@pytest.mark.parametrize("name", ANSWERS)
def test_what_the_plane_says_the_client_reads(name: str) -> None:
    said = ANSWERS[name](world())
    assert msgspec.json.decode(msgspec.json.encode(said), type=type(said)) == said


@pytest.mark.parametrize(
    "kind", [kind for kind in vars(api).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
)
def test_a_client_reads_an_answer_of_an_older_and_of_a_newer_plane(kind: type[msgspec.Struct]) -> None:
    # Everything has a default, so keys may be missing; unknown keys are ignored.
    if kind.__name__ in ("Struct", "Disk", "EngineInstall", "Imex", "Interface", "PortManagers", "Weights"):
        return
    assert msgspec.json.decode(b"{}", type=kind) == msgspec.json.decode(b'{"from_the_future": [1]}', type=kind)


def test_an_empty_world_has_every_answer() -> None:
    for name, answer in ANSWERS.items():
        if name.startswith("node-") or name == "why":
            with pytest.raises(NotFound):
                answer(World())
        else:
            assert msgspec.json.encode(answer(World()))


def test_an_unknown_name_is_answered_with_the_near_one() -> None:
    with pytest.raises(NotFound, match="did you mean 'node-a'"):
        views.node(world(), NOW, "node_a")
    with pytest.raises(NotFound, match="did you mean 'tiny'"):
        views.why(world(), NOW, WALL, "tinny")


def test_a_frozen_plane_says_why_and_for_how_long() -> None:
    frozen = attrs.evolve(world(), frozen=Frozen("a third of the fleet fell silent together", NOW - 5, NOW + 85))
    status = views.status(frozen, NOW, WALL, plane="p", since=NOW, traffic=TRAFFIC, latest=0)
    assert (status.waiting, status.waiting_for) == (
        "no node is taken for lost: a third of the fleet fell silent together",
        85.0,
    )


def test_a_settling_plane_says_so() -> None:
    settling = attrs.evolve(world(), settling_until=NOW + 20)
    status = views.status(settling, NOW, WALL, plane="p", since=NOW, traffic=TRAFFIC, latest=0)
    assert status.waiting_for == 20.0
    assert "come back" in status.waiting


def test_models_that_are_served_elsewhere_are_shown_and_explained() -> None:
    traffic = Traffic(elsewhere={"far": ("https://far.example/v1",), "tiny": ("http://10.0.0.9:8000",)})
    shown = {model.name: model for model in views.models(world(), NOW, WALL, traffic).models}
    assert (shown["far"].elsewhere, shown["far"].wanted, shown["far"].reason) == (("https://far.example/v1",), 0, "")
    assert (shown["tiny"].elsewhere, shown["tiny"].wanted) == (("http://10.0.0.9:8000",), 1)
    assert "https://far.example/v1" in views.why(world(), NOW, WALL, "far", traffic).text


def test_a_model_that_is_no_longer_wanted_is_shown_until_its_replicas_are_gone() -> None:
    ended = attrs.evolve(world(), models=world().models.delete(ModelName("tiny")))
    shown = {model.name: model for model in views.models(ended, NOW, WALL).models}
    assert (shown["tiny"].wanted, shown["tiny"].placed) == (0, 1)
    assert "no longer wanted" in shown["tiny"].reason
    assert views.why(ended, NOW, WALL, "tiny").replicas


def test_ages_are_counted_from_now_and_never_negative() -> None:
    for row in views.nodes(world(), NOW - 10_000).nodes:
        assert row.stage_age >= 0
        assert row.heard_age is None or row.heard_age >= 0


@given(st.lists(st.sampled_from(list(ShardState)), min_size=1))
def test_a_replica_is_ready_only_when_every_shard_is(states: list[ShardState]) -> None:
    state = least_advanced(states)
    assert state in states
    assert (state is ShardState.READY) == all(one is ShardState.READY for one in states)


def test_a_view_of_nothing_is_unknown() -> None:
    assert least_advanced([]) is ShardState.UNKNOWN

"""What differs between two profiles, as an operator reads it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmgw.plane.profiles import differences, secret
from llmgw.plane.world import Profile
from llmgw.wire.facts import ModelName, Resources

BASE = Profile(engine="vllm", source="hf://org/a", args=("--max-num-seqs", "64", "--jinja"), env={"A": "1"})


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (replace(BASE, engine_version="0.9.1"), ["engine_version none -> 0.9.1"]),
        (replace(BASE, source="hf://org/b"), ["source hf://org/a -> hf://org/b"]),
        (replace(BASE, context=4096, nodes=2), ["context none -> 4096", "nodes 1 -> 2"]),
        (replace(BASE, network="rdma", rails=8), ["network none -> rdma", "rails none -> 8"]),
        (replace(BASE, ready_within=60.0), ["ready_within 15m -> 1m"]),
        (
            replace(BASE, args=("--max-num-seqs", "128", "--jinja")),
            ["args without --max-num-seqs 64", "args with --max-num-seqs 128"],
        ),
        (replace(BASE, args=("--jinja", "--max-num-seqs", "64")), ["args arranged differently"]),
        (replace(BASE, args=()), ["args without --max-num-seqs 64 --jinja"]),
        (replace(BASE, apart=(ModelName("x"),)), ["apart with x"]),
        (replace(BASE, env={"A": "2", "B": "3"}), ["env A 1 -> 2", "env B none -> 3"]),
        (replace(BASE, labels={"zone": "b"}), ["labels zone none -> b"]),
        (
            replace(BASE, resources=Resources(gpus=8, gpu_memory_bytes=80 << 30, compute_capability=(9, 0))),
            [
                "resources compute_capability none -> 9.0",
                "resources gpu_memory none -> 80GiB",
                "resources gpus none -> 8",
            ],
        ),
    ],
)
def test_a_difference_is_told_with_both_values(after: Profile, words: list[str]) -> None:
    assert list(differences(BASE, after)) == words


def test_nothing_differs_from_itself() -> None:
    assert differences(BASE, BASE) == ()


@pytest.mark.parametrize("name", ["HF_TOKEN", "api_key", "OPENAI_APIKEY", "DB_PASSWORD", "AWS_SECRET", "KEY"])
def test_the_value_of_a_secret_is_never_told(name: str) -> None:
    assert secret(name)
    before, after = replace(BASE, env={name: "hunter1"}), replace(BASE, env={name: "hunter2"})
    for one, other, word in ((before, after, "changed"), (BASE, after, "set"), (after, BASE, "removed")):
        told = " ".join(differences(one, other))
        assert f"env {name} {word}" in told
        assert "hunter" not in told


@pytest.mark.parametrize("name", ["NCCL_IB_HCA", "KEYBOARD", "MONKEY", "OMP_NUM_THREADS"])
def test_what_is_no_secret_is_told(name: str) -> None:
    assert not secret(name)


names = st.text("abcKEY_-= ", max_size=6)
profiles = st.builds(
    Profile,
    engine=st.sampled_from(["vllm", "sglang"]),
    source=names,
    engine_version=names,
    args=st.lists(st.sampled_from(["--a", "--b", "1", "x y", ""]), max_size=4).map(tuple),
    env=st.dictionaries(names, names, max_size=3),
    labels=st.dictionaries(names, names, max_size=2),
    resources=st.builds(
        Resources,
        gpus=st.integers(0, 8),
        memory_bytes=st.integers(0, 1 << 41),
        gpu_memory_bytes=st.integers(0, 1 << 41),
    ),
    context=st.none() | st.integers(1, 9),
    ready_within=st.floats(0.1, 1e6),
    rails=st.integers(0, 3),
    network=st.sampled_from(["", "rdma"]),
    apart=st.lists(names, max_size=2, unique=True).map(sorted).map(tuple),
)


@given(profiles, profiles)
def test_two_profiles_that_differ_are_never_told_to_be_alike(one: Profile, other: Profile) -> None:
    assert bool(differences(one, other)) == (one != other)

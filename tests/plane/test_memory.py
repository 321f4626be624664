"""GPU memory by estimate from a model's headers, and as real runs took it."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from immutables import Map
from msgspec.structs import replace

from llmgw.plane import memory
from llmgw.plane.checks import Need
from llmgw.plane.memory import Estimate, Runs, estimate, key
from llmgw.plane.place import Rooms
from llmgw.plane.world import Learned, Model, World
from llmgw.wire.agent import Heartbeat
from llmgw.wire.facts import ModelName, Resources, ShardId, ShardLoad, ShardState, Weights
from tests.plane.fabrics_of import chosen, told
from tests.plane.worlds import CLOCK, GIB, gpus, hear, model, profile, ready, register, settle, status, world

HF = "hf://org/big"
#: As Llama 3.1 70B: 80 layers, 8 KV heads of 128, 16 bits.
WEIGHTS = Weights(
    source=HF,
    bytes=140 * GIB,
    complete=True,
    context=131072,
    heads=64,
    layers=80,
    kv_bytes_per_token=2 * 80 * 8 * 128 * 2,
    dtype="bfloat16",
)


def runs(*args: str, engine: str = "vllm", context: int | None = None, gpus: int = 4, nodes: int = 1) -> Runs:
    return Runs(engine, HF, args, context, gpus, nodes)


def needs(*args: str, of: Weights = WEIGHTS, **fields: object) -> float | None:
    found = estimate(runs(*args, **fields), of, None)  # type: ignore[arg-type]
    return None if found is None else found.bytes / GIB


def test_vllm_needs_its_weights_and_the_cache_of_one_longest_request() -> None:
    assert needs() == 140 / 4 + 40 / 4  # 131072 tokens x 320 KiB = 40 GiB
    assert needs(context=16384) == 140 / 4 + 5 / 4
    assert needs("--max-model-len", "16384") == 140 / 4 + 5 / 4
    assert needs("--max-model-len=auto") == 140 / 4
    found = estimate(runs(context=16384), WEIGHTS, None)
    assert found is not None
    assert found.text == (
        "(weights 140.0 GiB + KV cache 16384 tokens x 320 KiB) / 4 GPUs = 36.2 GiB of each GPU at least; "
        "vllm uses at most 0.92 of a GPU"
    )


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--tensor-parallel-size", "8"), 140 / 8),
        (("-tp", "2", "-pp", "2"), 140 / 4),
        (("--tensor_parallel_size=2", "--data-parallel-size=2"), 140 / 2),
        (("-tp", "2", "-dp", "2", "--enable-expert-parallel"), 140 / 4),
        (("--quantization", "fp8"), 140 / 4 / 4),
        (("--cpu-offload-gb", "20"), None),
        (("--dtype", "half"), 140 / 4),
    ],
)
def test_arguments_say_how_the_weights_are_divided(args: tuple[str, ...], expected: float | None) -> None:
    assert needs(*args, of=replace(WEIGHTS, kv_bytes_per_token=None)) == expected


def test_weights_that_may_be_kept_narrower_count_half() -> None:
    wide = replace(WEIGHTS, dtype="float32", kv_bytes_per_token=None)
    assert needs(of=wide) == needs(of=replace(wide, dtype="")) == 140 / 8
    assert needs("--dtype", "float32", of=wide) == 140 / 4


def test_a_narrow_cache_counts_less_and_one_of_a_given_size_not_at_all() -> None:
    assert needs("--kv-cache-dtype", "fp8") == 140 / 4 + 20 / 4
    found = estimate(runs("--kv-cache-memory-bytes", "1000000"), WEIGHTS, None)
    assert found is not None
    assert (found.bytes, found.share) == (35 * GIB, 1.0)


def test_sglang_starts_with_less_cache_than_a_context_takes() -> None:
    assert needs(engine="sglang") == 35
    found = estimate(runs("--mem-fraction-static", "0.5", engine="sglang"), WEIGHTS, None)
    assert found is not None
    assert not found.fits(69 * GIB)
    assert found.fits(70 * GIB)


def test_nothing_is_certain_of_llama_cpp_of_no_gpus_or_of_unknown_weights() -> None:
    assert needs(engine="llamacpp") is None
    assert needs(gpus=0) is None
    assert estimate(runs(), None, None) is None


def test_a_gpu_that_does_not_tell_its_memory_may_hold_it() -> None:
    assert Estimate(1 << 60, 0.9, "").fits(None)


# --- in placement ----------------------------------------------------------------------------------------


def big(*args: str, gpus: int = 4, memory: int = 0, engine: str = "vllm") -> Model:
    return model("big", of=profile(engine=engine, source=HF, gpus=gpus, gpu_memory=memory, args=args))


def fleet(*sizes: int) -> World:
    """Nodes n0, n1, ... whose GPUs have so many GiB; n0 has the weights."""
    made = [
        register(f"n{n}", gpu=gpus(4, node=f"n{n}", memory=size * GIB), memory=512 * GIB)
        for n, size in enumerate(sizes)
    ]
    return world(replace(made[0], weights=(WEIGHTS,)), *made[1:])


def test_gpus_that_cannot_hold_the_model_are_refused_with_the_formula() -> None:
    here = fleet(40, 40)
    assert chosen(here, big("--max-model-len", "16384")).nodes == ("n0",)
    assert told(here, big()) == [(name, "estimate", "40.0 GiB x 0.92", "45.0 GiB") for name in ("n0", "n1")]
    first = Rooms(here, 10.0).refused(Need.of(big()))[0]
    assert "too little for (weights 140.0 GiB + KV cache 131072 tokens x 320 KiB) / 4 GPUs" in first.text
    assert chosen(fleet(40, 80), big()).nodes == ("n1",)


def test_a_profile_that_says_its_memory_is_believed() -> None:
    assert chosen(fleet(40), big(memory=39 * GIB)).nodes == ("n0",)


# --- learned ---------------------------------------------------------------------------------------------


def test_what_an_engine_took_is_known_instead_of_the_estimate() -> None:
    took = Learned(gpu_bytes=30 * GIB, runs=2)
    exact = estimate(runs(engine="llamacpp"), WEIGHTS, took)
    assert exact is not None
    assert (exact.bytes, exact.text) == (30 * GIB, "took up to 30.0 GiB of each GPU in 2 runs")
    lower = estimate(runs(), WEIGHTS, took)
    assert lower is not None
    assert lower.bytes == 30 * GIB


def test_an_engine_that_fills_its_share_of_any_gpu_may_do_with_less() -> None:
    filled = estimate(runs(), WEIGHTS, Learned(gpu_bytes=73 * GIB, runs=1))
    assert filled is not None
    assert filled.bytes == 45 * GIB
    assert estimate(runs(), None, Learned(gpu_bytes=73 * GIB, runs=1)) is None
    fixed = estimate(runs("--kv-cache-memory-bytes=1000"), None, Learned(gpu_bytes=73 * GIB, runs=1))
    assert fixed is not None
    assert fixed.bytes == 73 * GIB


def measured(here: World, load: ShardLoad, now: float) -> World:
    node = here.shards[load.shard].node
    return hear(here, node, Heartbeat(shards=(load,)), now)


def running(of: Model) -> World:
    here, _ = settle(world(register("n1", gpu=2, memory=512 * GIB), models=[of]))
    return ready(here, 1.0)


def test_real_runs_are_measured_once_they_are_warm_and_count_once() -> None:
    of = big(gpus=2)
    here = measured(running(of), ShardLoad(ShardId("big-0-0"), 0.0, 9 * GIB, 40 * GIB), 5.0)
    assert memory.learn(here, 5.0, CLOCK, 0.0) is here
    here = memory.learn(here, 12.0, CLOCK, 7.0)
    name = key(Runs("vllm", HF, (), None, 2, 1))
    assert here.learned == Map({name: Learned(gpu_bytes=20 * GIB, memory_bytes=9 * GIB, runs=1, clock=CLOCK)})
    assert memory.learn(here, 17.0, CLOCK, 12.0) is here
    more = measured(here, ShardLoad(ShardId("big-0-0"), 0.0, 8 * GIB, 50 * GIB), 20.0)
    more = memory.learn(more, 22.0, CLOCK + 10, 17.0)
    assert more.learned[name] == Learned(gpu_bytes=25 * GIB, memory_bytes=9 * GIB, runs=1, clock=CLOCK + 10)
    assert more.version > here.version


def test_a_peak_that_hardly_grew_is_not_written_again() -> None:
    here = measured(running(big(gpus=2)), ShardLoad(ShardId("big-0-0"), 0.0, 9 * GIB, 40 * GIB), 5.0)
    here = memory.learn(here, 12.0, CLOCK, 7.0)
    same = measured(here, ShardLoad(ShardId("big-0-0"), 0.0, 9 * GIB + 1, 40 * GIB + 1), 20.0)
    assert memory.learn(same, 22.0, CLOCK, 17.0) is same


def test_an_engine_that_is_not_ready_tells_nothing() -> None:
    here = measured(running(big(gpus=2)), ShardLoad(ShardId("big-0-0"), 0.0, 9 * GIB, 40 * GIB), 5.0)
    here = hear(here, "n1", status("big-0-0", 1, ShardState.DRAINING), 10.0)
    assert memory.learn(here, 30.0, CLOCK, 7.0) is here


def test_a_run_that_took_more_of_the_host_than_is_asked_for_is_said() -> None:
    of = model(
        "big", of=replace(profile(engine="vllm", source=HF, gpus=1), resources=Resources(gpus=1, memory_bytes=4 * GIB))
    )
    here = attrs.evolve(
        world(register("n1", gpu=1)),
        learned=Map({key(Runs("vllm", HF, (), None, 1, 1)): Learned(memory_bytes=9 * GIB)}),
    )
    assert "a run took 9.0 GiB of the host's memory, 4.0 GiB is asked for" in chosen(here, of).why
    small = attrs.evolve(here, nodes=world(register("n1", gpu=1, memory=2 * GIB)).nodes)
    (reason,) = Rooms(small, 1.0).refused(Need.of(of))
    assert reason.text == "n1: has 2.0 GiB of 2.0 GiB memory to give, 4.0 GiB needed (a run took 9.0 GiB)"


def test_ways_to_run_a_model_that_take_different_memory_have_different_names() -> None:
    names = {
        key(runs()),
        key(runs(gpus=8)),
        key(runs(nodes=2)),
        key(runs(context=4096)),
        key(runs("-tp", "2", "-pp", "2")),
        key(runs("--kv-cache-dtype", "fp8")),
        key(runs(engine="sglang")),
    }
    assert len(names) == 7
    assert key(runs("--enable-log-requests")) == key(runs())
    assert key(runs("--tensor-parallel-size=4")) == key(runs())


ARGS = st.lists(
    st.sampled_from(["-tp", "--max-model-len", "2", "-1", "x", "--dtype=half", "--quantization", "", "-", "--tp="]),
    max_size=6,
).map(tuple)


@given(args=ARGS, engine=st.sampled_from(["vllm", "sglang", "llamacpp", "other"]), gpus=st.integers(0, 8))
def test_any_arguments_can_be_read(args: tuple[str, ...], engine: str, gpus: int) -> None:
    asked = Runs(engine, HF, args, None, gpus, 1)
    found = estimate(asked, WEIGHTS, None)
    assert found is None or 0 < found.bytes <= 400 * GIB
    assert key(asked).startswith(f"{engine} {HF}")
    assert ModelName(key(asked)) == key(asked)

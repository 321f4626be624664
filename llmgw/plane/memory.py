"""How much memory a model takes: by estimate from its files, or as real runs took it. Pure.

The estimate is a lower bound, so that only a GPU which certainly cannot hold the model is refused. Of vLLM and SGLang,
per GPU of a world of tp x pp processes:

- weights: the files' bytes / (tp x pp). Half of that where they may be kept narrower than they lie on the disk
  (float32, which is loaded with 16 bits by default), a quarter where `--quantization` makes them so.
- KV cache: bytes a token x context / (tp x pp), of one request of the longest context: vLLM does not start with less.
  Bytes a token with 16 bits are 2 x layers x KV heads x head size x 2, or layers x (rank + rope) x 2 of latent
  attention; half with an fp8 cache. SGLang starts with less cache than a context takes, so it counts none.
- what the engine may use: `--gpu-memory-utilization` (0.92 by default) or `--mem-fraction-static` of a GPU.

llama.cpp leaves on the CPU what does not fit, so nothing is certain of it. vLLM and SGLang fill their share of any GPU,
so that a real run's figure only shows what was enough; others take what they need, and a real run tells that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import ceil, isfinite

import attrs
from immutables import Map

from llmgw.plane.world import Learned, Shard, World
from llmgw.wire.facts import ShardState, Weights

GIB = 1 << 30

#: The parallel sizes of an engine: tensor, pipeline, data.
SIZES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "vllm": (
        ("--tensor-parallel-size", "-tp"),
        ("--pipeline-parallel-size", "-pp"),
        ("--data-parallel-size", "-dp"),
    ),
    "sglang": (
        ("--tensor-parallel-size", "--tp-size", "--tp"),
        ("--pipeline-parallel-size", "--pp-size"),
        ("--data-parallel-size", "--dp-size"),
    ),
}
#: What an engine takes of a GPU at most, when it is not told.
SHARE = {"vllm": 0.92, "sglang": 1.0}
SHARES = {"vllm": ("--gpu-memory-utilization",), "sglang": ("--mem-fraction-static",)}
#: Arguments that change how much memory a model takes, beside the sizes.
TELLING = (
    "--gpu-memory-utilization",
    "--kv-cache-dtype",
    "--kv-cache-memory-bytes",
    "--max-model-len",
    "--context-length",
    "--max-num-seqs",
    "--max-running-requests",
    "--mem-fraction-static",
    "--quantization",
    "--dtype",
    "--cpu-offload-gb",
    "-c",
    "--ctx-size",
    "-np",
    "--parallel",
    "-ngl",
    "--gpu-layers",
    "--n-gpu-layers",
)
#: Experts are divided over all GPUs, so that tp x pp says nothing of what one of them holds.
EXPERTS = ("--enable-expert-parallel", "--ep-size", "--ep", "--expert-parallel-size")


@attrs.frozen
class Estimate:
    """What a shard takes of each of its GPUs, at least, and the share of a GPU that the engine may use."""

    bytes: int
    share: float
    text: str

    def fits(self, memory_bytes: int | None) -> bool:
        """Whether a GPU of so much memory may hold it. One that does not tell its memory may."""
        return memory_bytes is None or memory_bytes * self.share >= self.bytes


@attrs.frozen
class Runs:
    """How a model is run, as far as its memory is concerned."""

    engine: str
    source: str
    args: tuple[str, ...]
    context: int | None
    gpus: int  # of one shard
    nodes: int


@lru_cache(maxsize=1 << 14)
def key(runs: Runs) -> str:
    """Under which name real runs are remembered: two profiles with one name take as much."""
    tensor, pipeline, data = _sizes(runs)
    words = [runs.engine, runs.source, f"gpus={runs.gpus}", f"nodes={runs.nodes}"]
    words += [f"{name}={size}" for name, size in (("tp", tensor), ("pp", pipeline), ("dp", data)) if size > 1]
    if runs.context is not None:
        words.append(f"context={runs.context}")
    words += [f"{name}={value}" for name, value in sorted(_flags(runs.args).items()) if name in TELLING]
    words += [name for name in sorted(_flags(runs.args)) if name in EXPERTS]
    return " ".join(words)


def estimate(runs: Runs, weights: Weights | None, learned: Learned | None) -> Estimate | None:
    """What each GPU must hold at least; None where nothing is known, or nothing is certain."""
    if not runs.gpus:
        return None
    known = _formula(runs, weights) if weights is not None else None
    if learned is None or not learned.gpu_bytes:
        return known
    fills = runs.engine in SHARE and "--kv-cache-memory-bytes" not in _flags(runs.args)
    if fills and (known is None or known.bytes <= learned.gpu_bytes):
        return known  # it filled its share of the GPUs that it had: as much was enough, less may be
    count = f"{learned.runs} run{'' if learned.runs == 1 else 's'}"
    return Estimate(learned.gpu_bytes, 1.0, f"took up to {_gib(learned.gpu_bytes)} of each GPU in {count}")


def _formula(runs: Runs, weights: Weights) -> Estimate | None:
    given = _flags(runs.args)
    if runs.engine not in SHARE or not weights.bytes or "--cpu-offload-gb" in given:
        return None
    tensor, pipeline, data = _sizes(runs)
    split = tensor * pipeline * (data if any(name in given for name in EXPERTS) else 1)
    size = weights.bytes
    words = f"weights {_gib(weights.bytes)}"
    if "--quantization" in given or "-q" in given:
        size, words = size // 4, f"{words} / 4 (quantised when loaded)"
    elif given.get("--dtype", "auto") != "float32" and weights.dtype in ("", "float32"):
        size, words = size // 2, f"{words} / 2 (may be loaded with 16 bits)"
    each = ceil(size / split)
    if cache := _cache(runs, weights, given):
        tokens, bytes_each = cache
        each += ceil(tokens * bytes_each / split)
        words = f"{words} + KV cache {tokens} tokens x {bytes_each / 1024:g} KiB"
    share = SHARE[runs.engine]
    if "--kv-cache-memory-bytes" in given:
        share = 1.0
    else:
        for name in SHARES[runs.engine]:
            share = _number(given.get(name)) or share
    over = f" / {split} GPUs" if split > 1 else ""
    most = f"; {runs.engine} uses at most {share:g} of a GPU" if share < 1 else ""
    return Estimate(each, share, f"({words}){over} = {_gib(each)} of each GPU at least{most}")


def _cache(runs: Runs, weights: Weights, given: Mapping[str, str]) -> tuple[int, float] | None:
    """Tokens of one longest request and bytes of each, where the engine does not start with less."""
    if runs.engine != "vllm" or weights.kv_bytes_per_token is None or "--kv-cache-memory-bytes" in given:
        return None
    said = given.get("--max-model-len")  # "auto", -1 and "32k" say nothing certain
    tokens = _whole(said) if said is not None else runs.context or weights.context
    if not tokens:
        return None
    kind = given.get("--kv-cache-dtype", "auto")
    narrow = 1 if kind in ("auto", "float16", "bfloat16") else 2 if kind.startswith("fp8") else 4
    return tokens, weights.kv_bytes_per_token / narrow


def _sizes(runs: Runs) -> tuple[int, int, int]:
    """Tensor, pipeline and data parallel size; one tensor-parallel group of all GPUs where none is given."""
    given = _flags(runs.args)
    found = [
        next((_whole(given[name]) for name in names if name in given), None) for names in SIZES.get(runs.engine, ())
    ]
    if not any(found):
        return max(1, runs.gpus) * runs.nodes, 1, 1
    tensor, pipeline, data = (size or 1 for size in found)
    return tensor, pipeline, data


def _flags(args: Sequence[str]) -> dict[str, str]:
    """The options of a command line with their values: `--tp=2`, `--tp 2`; the last of several counts."""
    found: dict[str, str] = {}
    for at, word in enumerate(args):
        if not word.startswith("-") or _number(word) is not None:
            continue
        name, mark, value = word.partition("=")
        after = args[at + 1] if at + 1 < len(args) else ""
        found[name.replace("_", "-")] = value if mark else "" if after.startswith("-") else after
    return found


def _whole(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 12 else None


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


# --- real runs -----------------------------------------------------------------------------------------------

#: Seconds that an engine must have been ready before its memory tells anything.
WARM = 10.0
#: A peak that grew by less than this share is the same peak: what is learned is stored, and must not be written often.
GROWN = 0.02
#: Ways of running models that are remembered; the ones that were not measured for longest go.
MOST = 1000


def runs_of(shard: Shard) -> Runs:
    spec = shard.spec
    return Runs(spec.engine, spec.source, spec.args, spec.context, len(spec.gpus), max(1, len(spec.peers)))


def learn(world: World, now: float, clock: float, since: float) -> World:
    """The world with what ready shards take at most, as their nodes measured it. `since` is when this was asked last,
    so that each run counts once; the same world when there is nothing new."""
    learned = world.learned
    for shard in world.shards.values():
        if shard.ready_at is None or shard.state is not ShardState.READY or now - shard.ready_at < WARM:
            continue
        node = world.nodes.get(shard.node)
        load = node.shard_loads.get(shard.id) if node is not None else None
        if load is None:
            continue
        name, gpus = key(runs_of(shard)), len(shard.spec.gpus)
        known = learned.get(name)
        each = ceil((load.gpu_memory_bytes or 0) / gpus) if gpus else 0
        new = known is None or (isfinite(since) and shard.ready_at + WARM > since)
        before = known or Learned()
        grown = _more(each, before.gpu_bytes) or _more(load.rss_bytes, before.memory_bytes)
        if new or grown:
            learned = learned.set(
                name,
                Learned(
                    gpu_bytes=max(before.gpu_bytes, each),
                    memory_bytes=max(before.memory_bytes, load.rss_bytes),
                    runs=before.runs + new,
                    clock=clock,
                ),
            )
    if learned is world.learned:
        return world
    if len(learned) > MOST:
        newest = sorted(learned.items(), key=lambda item: (-item[1].clock, item[0]))[:MOST]
        learned = Map(newest)
    return attrs.evolve(world, learned=learned, version=world.version + 1)


def _more(now: int, before: int) -> bool:
    return now > before * (1 + GROWN)

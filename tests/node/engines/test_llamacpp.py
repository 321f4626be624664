from pathlib import Path

import pytest

from llmgw.node.engines.causes import Ended
from llmgw.node.engines.contents import Contents
from llmgw.node.engines.llamacpp import LlamaCpp
from tests.node.engines.specs import FACTS, seat, spec

LLAMA = LlamaCpp()
GGUF = Contents(Path("/models/m.gguf"), "gguf", bytes=1 << 30, context=4096, heads=32, kv_bytes_per_token=131072)


def codes(*args: str, contents: Contents | None = GGUF, **more: object) -> list[str]:
    return [objection.code for objection in LLAMA.validate(spec("llamacpp", *args, **more), FACTS, contents)]  # type: ignore[arg-type]


def argv(*args: str, **more: object) -> str:
    command = LLAMA.command(spec("llamacpp", *args, **more), seat("llamacpp", "llama-server", model="/models/m.gguf"))  # type: ignore[arg-type]
    return " ".join(command.argv)


def test_a_cpu_shard_uses_no_card_and_as_many_threads_as_it_was_given() -> None:
    assert argv(context=2048) == (
        "llama-server -m /models/m.gguf -a m --host 0.0.0.0 --port 8000 -t 4 -c 2048 -dev none -ngl 0"
        " --metrics --no-ui --offline --log-colors off"
    )


def test_a_gpu_shard_may_use_its_cards_and_users_extend_the_command() -> None:
    assert "-dev" not in argv(gpus=1)
    assert argv("-np", "4").endswith("--log-colors off -np 4")
    assert "-t 4" not in argv("-t", "2")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (codes(), []),
        (codes("-np", "4", "--cache-type-k", "q8_0", "--temp", "-1"), []),
        (codes("--port", "1"), ["bad-argument"]),
        (codes("-hf", "org/m"), ["bad-argument"]),
        (codes("--models-dir", "/m"), ["bad-argument"]),
        (codes("--alias", "x", "--host", "y"), ["bad-argument", "bad-argument"]),
        (codes("-t", "2", threads=2), ["bad-argument"]),
        (codes("-t", "2"), []),
        (codes("-c", "2", context=2), ["bad-argument"]),
        (codes("-ngl", "99"), ["bad-argument"]),
        (codes("-ngl", "99", gpus=1), []),
        (codes(threads=65), ["not-enough-cpu"]),
        (codes(memory=600 << 30), ["not-enough-memory"]),
        (codes(memory=1 << 29), ["not-enough-memory"]),
        (codes(memory=(1 << 30) + (400 << 20)), ["not-enough-memory"]),  # the cache of 4096 tokens is 512 MiB
        (codes(memory=(1 << 30) + (400 << 20), context=2048), []),
        (codes(context=5000), ["context-too-long"]),
        (codes(contents=None), ["missing-weights"]),
        (codes(contents=Contents(Path("/x"), "hub")), ["model-unsupported"]),
        (codes(peers=("a", "b")), ["bad-shape"]),
    ],
)
def test_what_the_engine_would_refuse_after_minutes_is_refused_at_once(found: list[str], expected: list[str]) -> None:
    assert found == expected


@pytest.mark.parametrize(
    ("lines", "ended", "code"),
    [
        ([], Ended(signal=4), "cpu-unsupported"),
        (["AMX is not ready to be used!"], Ended(signal=4), "cpu-unsupported"),
        (["0.00.100.000 E srv failed to load model '/x'"], Ended(exit_code=1), "missing-weights"),
        (["error: invalid argument: --x"], Ended(exit_code=1), "bad-argument"),
        (['error while handling argument "-c": stoi'], Ended(exit_code=1), "bad-argument"),
        (["couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 1"], Ended(exit_code=1), "port-in-use"),
        (["ggml_aligned_malloc: insufficient memory (attempted to allocate 1 MB)"], Ended(signal=11), "out-of-memory"),
        (["Remote RPC server crashed or returned malformed response"], Ended(signal=6), "peer-lost"),
        ([], Ended(signal=11), "crashed"),
        ([], Ended(signal=9), "killed"),
        ([], Ended(signal=9, oom_kills=1), "out-of-memory"),
        ([], Ended(exit_code=127), "engine-missing"),
        (
            ["llama-server: error while loading shared libraries: libgomp.so.1: cannot open shared object file"],
            Ended(exit_code=127),
            "missing-library",
        ),
        ([], Ended(exit_code=0), "ended"),
    ],
)
def test_the_way_it_ended_and_its_words_name_a_cause(lines: list[str], ended: Ended, code: str) -> None:
    cause = LLAMA.cause(lines, ended)
    assert cause is not None
    assert cause.code == code


def test_an_end_that_says_nothing_has_no_cause() -> None:
    assert LLAMA.cause(["some", "words"], Ended(exit_code=3)) is None
    assert LLAMA.cause([], Ended()) is None

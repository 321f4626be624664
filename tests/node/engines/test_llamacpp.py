from pathlib import Path

import pytest

from llmgw.node.engines import Asking, Command, Listens, Objection
from llmgw.node.engines.causes import Ended
from llmgw.node.engines.contents import Contents
from llmgw.node.engines.llamacpp import LlamaCpp
from llmgw.node.health import counted
from tests.node.engines.specs import FACTS, seat, spec

LLAMA = LlamaCpp()
GGUF = Contents(Path("/models/m.gguf"), "gguf", bytes=1 << 30, context=4096, heads=32, kv_bytes_per_token=131072)


def codes(*args: str, contents: Contents | None = GGUF, **more: object) -> list[str]:
    return [objection.code for objection in LLAMA.validate(spec("llamacpp", *args, **more), FACTS, contents)]  # type: ignore[arg-type]


RPC = {"rpc-server": "/opt/llama/rpc-server"}
PEERS = ("10.0.0.1", "10.0.0.2", "10.0.0.3")


def commanded(*args: str, layers: int | None = None, **more: object) -> Command:
    where = seat("llamacpp", "llama-server", model="/models/m.gguf", layers=layers, programs=RPC)
    command = LLAMA.command(spec("llamacpp", *args, **more), where)  # type: ignore[arg-type]
    assert isinstance(command, Command)
    return command


def argv(*args: str, **more: object) -> str:
    return " ".join(commanded(*args, **more).argv)  # type: ignore[arg-type]


def test_a_cpu_shard_uses_no_card_and_as_many_threads_as_it_was_given() -> None:
    assert argv(context=2048) == (
        "llama-server -m /models/m.gguf -a m --host 0.0.0.0 --port 8000 -t 4 -c 2048 -dev none -ngl 0"
        " --metrics --no-ui --offline --log-colors off --threads-http 128"
    )


def test_a_gpu_shard_may_use_its_cards_and_users_extend_the_command() -> None:
    assert "-dev" not in argv(gpus=1)
    assert argv("-np", "4").endswith("--threads-http 128 -np 4")
    assert argv(env={"LLAMA_ARG_N_PARALLEL": "100"}).endswith("--threads-http 200")
    assert "--threads-http" not in argv(env={"LLAMA_ARG_THREADS_HTTP": "9"})
    assert argv("-np", "256").endswith("--threads-http 512 -np 256")
    assert argv("--threads-http", "9").endswith("--log-colors off --threads-http 9")
    assert "-t 4" not in argv("-t", "2")


@pytest.mark.parametrize(
    ("command", "has"),
    [
        # Three members share 32 layers: the leader keeps 10, the others get 11 and the output layer.
        (
            argv(peers=PEERS, layers=32, context=512),
            "-t 4 -c 512 --rpc 10.0.0.2:8002,10.0.0.3:8002 -ngl 23 -ts 1,1 --metrics",
        ),
        (argv(peers=PEERS, layers=None), "-ngl 99 --metrics"),
        (argv(peers=PEERS, gpus=2, layers=32), "-ngl 99 --metrics"),
        (argv("-ts", "3,1", peers=PEERS, layers=32), "-ngl 23 --metrics"),
        (argv("-ngl", "5", peers=PEERS, layers=32), "-ts 1,1 --metrics"),
        (argv(peers=PEERS, gpus=1), "8002 -ngl 99 --metrics"),
        (argv(peers=PEERS, rank=1), "/opt/llama/rpc-server -H 10.0.0.2 -p 8002 -t 4 -d CPU"),
        (argv("-t", "7", peers=PEERS, rank=2, gpus=1), "/opt/llama/rpc-server -H 10.0.0.3 -p 8002 -t 7"),
    ],
)
def test_members_share_the_layers_and_meet_at_the_addresses_and_ports_that_the_plane_gave(
    command: str, has: str
) -> None:
    assert command.endswith(has) if "rpc-server" in has else has in command


def test_a_leader_must_not_be_kept_from_its_peers_devices_and_a_follower_listens_on_one_address_only() -> None:
    assert "-dev none" not in argv(peers=PEERS, layers=32)
    assert "0.0.0.0" not in argv(peers=PEERS, rank=1)
    assert "-d CPU" not in argv(peers=PEERS, rank=1, gpus=1)


def test_a_follower_needs_the_rpc_server_no_weights_and_no_http() -> None:
    follower = spec("llamacpp", rank=1, peers=PEERS)
    lacking = LLAMA.command(follower, seat("llamacpp", "/opt/llama-server"))
    assert isinstance(lacking, Objection)
    assert (lacking.code, "rpc-server beside /opt/llama-server" in lacking.text) == ("engine-missing", True)
    assert (LLAMA.weights(follower), LLAMA.ports(follower), LLAMA.asking(follower)) == (False, ("rpc",), Listens("rpc"))
    leader = spec("llamacpp", peers=PEERS)
    assert (LLAMA.weights(leader), LLAMA.ports(leader)) == (True, ("http",))


LISTED = """Available devices:
  RPC0: 10.0.0.2:8002 (24105 MiB, 24105 MiB free)
  RPC1: 10.0.0.3:8002 (24105 MiB, 24105 MiB free)"""


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (LISTED, None),
        (LISTED.replace("  RPC1: 10.0.0.3", "  RPC1[1]: 10.0.0.3"), None),
        (LISTED.rpartition("\n")[0], "no device of 10.0.0.3:8002 can be had; 1 of 2 peers answered"),
        (
            "0.00.005 E Failed to connect to 10.0.0.2:8002\n" + LISTED.replace("  RPC0: 10.0.0.2:8002", "  CPU"),
            "no device of 10.0.0.2:8002 can be had (0.00.005 E Failed to connect to 10.0.0.2:8002); 1 of 2",
        ),
        ("Failed to connect to 10.0.0.2:8002", "no device of 10.0.0.2:8002, 10.0.0.3:8002 can be had"),
        ("", "0 of 2 peers answered"),
    ],
)
def test_an_absent_peer_is_found_before_the_server_would_leave_it_out_without_a_word(
    output: str, says: str | None
) -> None:
    rehearsal = commanded(peers=PEERS).rehearsal
    assert rehearsal is not None
    assert rehearsal.argv == ("llama-server", "--rpc", "10.0.0.2:8002,10.0.0.3:8002", "--list-devices")
    objection = rehearsal.objection(output.splitlines())
    if says is None:
        assert objection is None
    else:
        assert objection is not None
        assert objection.code == "peer-missing"
        assert says in objection.text
    assert commanded().rehearsal is None


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (codes(), []),
        (codes("-np", "4", "--cache-type-k", "q8_0", "--temp", "-1"), []),
        (codes("--port", "1"), ["bad-argument"]),
        (codes("-hf", "org/m"), ["bad-argument"]),
        (codes("--models-dir", "/m"), ["bad-argument"]),
        (codes(env={"LLAMA_API_KEY": "s", "LLAMA_ARG_RPC": "x", "LLAMA_ARG_N_PARALLEL": "2"}), ["bad-argument"] * 2),
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
        (codes(peers=PEERS), []),
        (codes("-ngl", "99", peers=PEERS), []),
        (codes(peers=PEERS, peer_ports=()), ["bad-shape", "bad-shape"]),
        (codes(peers=("10.0.0.1", "gpu-02")), ["no-interface"]),
        (codes(peers=("10.0.0.1", "fd00::2")), ["no-interface"]),
        (codes(peers=("fd00::1", "10.0.0.2")), []),
        (codes("--rpc", "10.0.0.9:50052"), ["bad-argument"]),
        (codes(peers=PEERS[:2], rank=1, contents=None), []),
        (codes(peers=PEERS[:2], rank=1, contents=None, threads=65), ["not-enough-cpu"]),
        (codes(peers=PEERS, contents=Contents(Path("/m.gguf"), "gguf", layers=1)), []),
        (codes(peers=(*PEERS, "10.0.0.4"), contents=Contents(Path("/m.gguf"), "gguf", layers=1)), ["bad-shape"]),
        (codes(memory=400 << 20, context=1, peers=PEERS), []),  # a third of the weights each
        (codes(memory=300 << 20, context=1, peers=PEERS), ["not-enough-memory"]),
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
        (
            ['error while handling environment variable "LLAMA_ARG_CTX_SIZE": stoi'],
            Ended(exit_code=1),
            "bad-argument",
        ),
        (["couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 1"], Ended(exit_code=1), "port-in-use"),
        (["ggml_aligned_malloc: insufficient memory (attempted to allocate 1 MB)"], Ended(signal=11), "out-of-memory"),
        (["Remote RPC server crashed or returned malformed response"], Ended(signal=6), "peer-lost"),
        (["send failed (bytes_sent=0, size_to_send=8)"], Ended(signal=6), "peer-lost"),
        (["Failed to connect to 10.0.0.2:50052"], Ended(signal=6), "peer-missing"),
        (["Invalid host address: gpu-02", "Failed to create server socket"], Ended(exit_code=0), "no-interface"),
        (["Failed to create server socket"], Ended(exit_code=0), "port-in-use"),
        (["Accepted client connection"], Ended(signal=13), "peer-lost"),
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


#: What b10068 shows while it makes a long answer, and a second and a half later.
WORKING = """
llamacpp:prompt_tokens_total 7
llamacpp:tokens_predicted_total 0
llamacpp:n_decode_total 2709
llamacpp:requests_processing 1
llamacpp:requests_deferred 0
"""


def test_one_long_answer_shows_that_it_is_being_made() -> None:
    """Its tokens are counted when it ends, which on a CPU may be after an hour (EN10)."""
    asking = LLAMA.asking(spec("llamacpp"))
    assert isinstance(asking, Asking)
    first, second = counted(WORKING, asking), counted(WORKING.replace("2709", "3904"), asking)
    assert first is not None
    assert second is not None
    assert (first.requests, second.tokens - first.tokens) == (1, 3904 - 2709)

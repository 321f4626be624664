from pathlib import Path

import pytest
from msgspec import structs

from llmgw.node.engines.causes import Cause, Ended, telling
from llmgw.node.engines.contents import Contents
from llmgw.node.engines.vllm import Vllm
from llmgw.node.engines.wires import Wires, read
from llmgw.node.lines import clean, last
from llmgw.wire.facts import GpuFabric, Grade, Problem, ShardSpec
from tests.node.engines.specs import FACTS, GPUS, seat, spec

VLLM = Vllm()
PEERS = ("10.0.0.1", "10.0.0.2")
HUB = Contents(Path("/models/m"), "hub", bytes=10 << 30, context=8192, heads=32)


def codes(*args: str, gpus: int = 1, contents: Contents | None = HUB, **more: object) -> list[str]:
    return [objection.code for objection in VLLM.validate(spec("vllm", *args, gpus=gpus, **more), FACTS, contents)]  # type: ignore[arg-type]


def argv(*args: str, gpus: int = 1, gpu_size: int | None = None, **more: object) -> str:
    command = VLLM.command(spec("vllm", *args, gpus=gpus, **more), seat("vllm", "vllm", gpu_memory=gpu_size))  # type: ignore[arg-type]
    return " ".join(command.argv)


def test_one_gpu_needs_no_parallel_size() -> None:
    assert argv() == "vllm serve /models/m --served-model-name m --host 0.0.0.0 --port 8000"


@pytest.mark.parametrize(
    ("command", "has"),
    [
        (argv(gpus=4), "--tensor-parallel-size 4"),
        (argv(context=4096), "--max-model-len 4096"),
        (argv(gpu_memory=60 << 30, gpu_size=80 << 30), "--gpu-memory-utilization 0.75"),
        (argv("--max-num-seqs", "8"), "--port 8000 --max-num-seqs 8"),
        (argv(gpus=4, peers=("10.0.0.1", "10.0.0.2")), "--tensor-parallel-size 8"),
        (
            argv(gpus=4, peers=("10.0.0.1", "10.0.0.2")),
            "--nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 8001",
        ),
        (argv(gpus=4, peers=("10.0.0.1", "10.0.0.2"), rank=1), "--node-rank 1"),
        (argv(gpus=4, peers=("10.0.0.1", "10.0.0.2"), rank=1), "--headless"),
        (argv(gpus=4, peers=("10.0.0.1", "10.0.0.2")), "--distributed-timeout-seconds 900"),
    ],
)
def test_what_is_asked_for_becomes_arguments(command: str, has: str) -> None:
    assert has in command


@pytest.mark.parametrize(
    ("command", "lacks"),
    [
        (argv("--tensor-parallel-size=2", "-pp", "2", gpus=4), "--tensor-parallel-size 4"),
        (argv("--gpu-memory-utilization", "0.5", gpu_memory=60 << 30, gpu_size=80 << 30), "0.75"),
        (argv("--kv_cache_memory_bytes", "1", gpu_memory=60 << 30, gpu_size=80 << 30), "0.75"),
        (argv(gpus=4, peers=("10.0.0.1", "10.0.0.2"), rank=1), "--port"),
    ],
)
def test_what_the_user_gave_or_a_follower_has_not_is_left_out(command: str, lacks: str) -> None:
    assert lacks not in command


def test_members_meet_at_the_leaders_port_each_by_its_own_address() -> None:
    follower = spec("vllm", gpus=4, peers=PEERS, rank=1, peer_ports=({"master": 29600}, {}))
    command = VLLM.command(follower, seat("vllm", "vllm"))
    assert "--master-addr 10.0.0.1 --master-port 29600" in " ".join(command.argv)
    assert (command.env["VLLM_HOST_IP"], command.env["NCCL_DEBUG"]) == ("10.0.0.2", "INFO")
    assert VLLM.ports(follower) == ("internal+",)
    assert VLLM.ports(spec("vllm", gpus=4, peers=PEERS)) == ("http", "master", "internal+")


def test_gloo_is_kept_on_the_loopback_only_where_there_is_no_other_node() -> None:
    assert VLLM.command(spec("vllm"), seat("vllm", "vllm")).env["GLOO_SOCKET_IFNAME"] == "lo"
    two = VLLM.command(spec("vllm", peers=PEERS), seat("vllm", "vllm"))
    assert "GLOO_SOCKET_IFNAME" not in two.env
    assert "--tensor-parallel-size 2 --nnodes 2" in " ".join(two.argv), "on CPUs each node has one worker"


def test_internal_ports_lie_in_the_shards_own_block_and_nothing_is_fetched_for_a_path() -> None:
    env = VLLM.command(spec("vllm", gpus=1), seat("vllm", "vllm")).env
    assert (env["VLLM_PORT"], env["HF_HUB_OFFLINE"], env["VLLM_HOST_IP"]) == ("8010", "1", "127.0.0.1")
    assert "HF_HUB_OFFLINE" not in VLLM.command(spec("vllm", gpus=1), seat("vllm", "vllm", model="org/m")).env


def test_data_parallel_ranks_take_their_ports_from_the_shards_block() -> None:
    """With VLLM_DP_MASTER_PORT within ten below VLLM_PORT a vLLM looks for a port for ever."""
    shard = spec("vllm", "--data-parallel-size", "2", gpus=2)
    assert VLLM.ports(shard) == ("http", "internal+")
    env = VLLM.command(shard, seat("vllm", "vllm")).env
    assert "VLLM_DP_MASTER_PORT" not in env
    assert env["VLLM_PORT"] == "8010"


def test_a_cpu_shard_gets_threads_and_a_cache_out_of_its_memory() -> None:
    env = VLLM.command(spec("vllm", memory=10 << 30), seat("vllm", "vllm")).env
    assert (env["OMP_NUM_THREADS"], env["VLLM_CPU_KVCACHE_SPACE"]) == ("4", "4")


@pytest.mark.parametrize(
    ("shard", "gib"),
    [
        (spec("vllm"), "4"),  # else it takes nearly all of the machine
        (spec("vllm", memory=1 << 30), "1"),
        (spec("vllm", "-tp", "2", memory=10 << 30), "2"),
        (spec("vllm", memory=10 << 30, peers=PEERS), "4"),  # one worker on each of the two
        (spec("vllm", "--kv-cache-memory-bytes", "1G", memory=10 << 30), None),  # it would win over the argument
        (spec("vllm", "--gpu-memory-utilization", "0.3"), None),
        (spec("vllm", gpus=1, memory=10 << 30), None),
    ],
)
def test_a_cpu_shards_workers_share_its_cache_unless_the_profile_says_how_large_it_is(
    shard: ShardSpec, gib: str | None
) -> None:
    assert VLLM.command(shard, seat("vllm", "vllm")).env.get("VLLM_CPU_KVCACHE_SPACE") == gib


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (codes(), []),
        (codes("--port", "1"), ["bad-argument"]),
        (codes("--served_model_name=x"), ["bad-argument"]),
        (codes("--served-model", "x"), ["bad-argument"]),  # argparse takes it for --served-model-name
        (codes("--tensor_par=2", gpus=2), ["bad-argument"]),
        (codes("--kv-cache-memory=4000000000"), []),  # as vLLM's own log has it
        (codes("--data-parallel-size", "2", gpus=2), []),  # and not short for --data-parallel-size-local
        (codes("--config", "x.yaml"), ["bad-argument"]),
        (codes("--api-key", "s"), ["bad-argument"]),
        (codes(env={"VLLM_API_KEY": "s", "VLLM_USE_V1": "1"}), ["bad-argument"]),
        (codes(env={"VLLM_PORT": "29500"}), ["bad-argument"]),
        (codes("--max-model-len", "10", context=100), ["bad-argument"]),
        (codes("--max-model-len", "10"), []),
        (codes("-tp", "2"), ["bad-shape"]),
        (codes("-tp", "2", gpus=2), []),
        (codes("-tp", "2", "-pp", "2", gpus=4), []),
        (codes("-tp", "x", gpus=2), ["bad-argument"]),
        (codes(gpus=3), ["bad-shape"]),  # 32 heads
        (codes("-tp", "1", "-pp", "3", gpus=3), []),
        (codes(context=9000), ["context-too-long"]),
        (codes(gpu_memory=90 << 30), ["not-enough-memory"]),
        (codes(gpu_memory=5 << 30), ["not-enough-memory"]),  # the weights alone are 10 GiB
        (codes(gpu_memory=5 << 30, gpus=2), []),
        (codes(contents=Contents(Path("/x"), "unknown")), ["model-unsupported"]),
        (codes(contents=None, source="hf://org/m"), []),
        (codes(contents=None, source="somewhere"), ["missing-weights"]),
        (codes(chosen=("GPU-x",)), ["gpu-missing"]),
        (codes(gpus=4, peers=PEERS), []),
        (codes(gpus=3, peers=PEERS), ["bad-shape"]),  # 32 heads over 6 GPUs
        (codes("-tp", "4", "-pp", "2", gpus=4, peers=PEERS), []),
        (codes("-tp", "4", gpus=4, peers=PEERS), ["bad-shape"]),  # 4 of 8 GPUs
        (codes("-tp", "3", gpus=0, peers=PEERS), ["bad-shape", "bad-shape"]),
        (codes(gpus=0, peers=PEERS), []),
        (codes(gpus=4, peers=PEERS, peer_ports=()), ["bad-shape"]),
        (codes(gpus=4, peers=PEERS, peer_ports=({"http": 1}, {"master": 2})), ["bad-shape"]),
        (codes("-dp", "2", "-tp", "4", gpus=4, peers=PEERS), ["bad-shape"]),
        (codes("--distributed-executor-backend", "ray", gpus=4, peers=PEERS), ["bad-argument"]),
        (codes("--node-rank", "1", gpus=4, peers=PEERS), ["bad-argument"]),
    ],
)
def test_what_the_engine_would_refuse_after_minutes_is_refused_at_once(found: list[str], expected: list[str]) -> None:
    assert found == expected


@pytest.mark.parametrize(
    ("state", "gpus", "expected"),
    [
        ("not-started", 1, ["fabric-manager"]),
        ("in-progress", 1, []),
        ("in-progress", 2, ["fabric-manager", "fabric-manager"]),
        ("completed", 2, []),
        ("not-supported", 2, []),
    ],
)
def test_no_engine_is_started_on_gpus_whose_fabric_is_not_there(state: str, gpus: int, expected: list[str]) -> None:
    there = tuple(structs.replace(gpu, fabric=GpuFabric(state=state)) for gpu in FACTS.gpus)
    facts = structs.replace(FACTS, gpus=there)
    assert [found.code for found in VLLM.validate(spec("vllm", gpus=gpus), facts, HUB)] == expected


def test_a_problem_of_a_gpu_is_for_the_plane_to_judge() -> None:
    """It may be over since the node registered, and an operator may have acknowledged it."""
    bad = Problem(subject=f"gpu:{GPUS[0]}", code="remap-pending", grade=Grade.BAD, text="a row waits to be remapped")
    assert VLLM.validate(spec("vllm", gpus=1), structs.replace(FACTS, problems=(bad,)), HUB) == ()


LINES = {
    "OSError: [Errno 98] Address already in use": "port-in-use",
    "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized": "fabric-manager",
    "LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder": "missing-weights",
    "RuntimeError: Cannot find any model weights with `models/noweights`": "missing-weights",
    "ValidationError: 1 validation error for ModelConfig ... exceeds derived_max_model_len (2048)": "context-too-long",
    "Total number of attention heads (4) must be divisible by tensor parallel size (3).": "bad-shape",
    "vllm: error: unrecognized arguments: --no-such-flag": "bad-argument",
    "To serve at least one request with the model's max seq len (4096), (2 GiB KV": "context-too-long",
    "DistStoreError: Timed out after 21 seconds waiting for clients. 1/2 clients joined.": "peer-missing",
    "ValueError: `--nnodes 2` must evenly divide the total world size (1).": "bad-shape",
    "ValueError: World size (4) is larger than the number of available GPUs (2) in this node": "bad-shape",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB": "out-of-memory",
    "ValueError: No available memory for the cache blocks.": "out-of-memory",
    "ValueError: Available memory on node 0 (11.03/12.84 GiB) on startup is less than desired CPU memory utilization": (
        "not-enough-memory"
    ),
    "Free memory on device (1/80 GiB) on startup is less than desired GPU memory utilization": "gpu-memory-taken",
    "Bfloat16 is only supported on GPUs with compute capability of at least 8.0": "gpu-unsupported",
    "RuntimeError: CUDA error: no kernel image is available for execution on the device": "gpu-unsupported",
    "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect": (
        "peer-missing"
    ),
    "RuntimeError: Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144]": "peer-missing",
    "NET/IB : Got completion from peer 10.0.0.2<39926> with status=12 opcode=129 len=0 vendor err 129 (Recv)": (
        "rdma-retries"
    ),
    "NCCL WARN NET/IB : Got completion from peer 10.0.0.2<1> with error 12, opcode 0, len 0, vendor err 129": (
        "rdma-retries"
    ),
    "NET/IB: Got completion from peer 10.0.0.2<39926> with status=5 opcode=0 len=0 vendor err 244": "rdma-failed",
    "NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory": "memlock",
    "NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1": "rdma-unreachable",
    "NCCL WARN socketStartConnect: Connect to 10.0.0.2<40000> failed : Connection refused": "peer-unreachable",
    "NCCL WARN socketProgress: Connection closed by remote peer gpu-02<50000>": "peer-lost",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting.": "peer-lost",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:544] Gloo Connection closed by peer [10.0.0.2]": (
        "peer-lost"
    ),
    "NCCL WARN Mismatched NCCL version detected : rank 0 has 2.27.3, rank 8 has 2.26.2": "nccl-version",
    "NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 18000": "gpu-twice",
    "[rank1]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1": "collective-timeout",
    "torch.distributed.DistBackendError: NCCL error in: ncclSystemError: System call": "nccl",
    "RuntimeError: [enforce fail] Unable to find address for: eth9": "no-interface",
    "RuntimeError: Worker proc VllmWorker-1 died unexpectedly (exit code: -9).": "worker-died",
    "TimeoutError: Timed out waiting for engine core processes to start.": "too-slow",
}


@pytest.mark.parametrize(
    "line",
    [
        "INFO Port 20003 is already in use, trying port 20004",
        "INFO port 20003 is in use. Waiting for port 3s for scheduler_input_port to be available",
    ],
)
def test_a_port_that_was_passed_over_is_not_why_it_ended(line: str) -> None:
    cause = VLLM.cause([line, "torch.OutOfMemoryError: CUDA out of memory."], Ended(exit_code=1))
    assert cause is not None
    assert cause.code == "out-of-memory"


@pytest.mark.parametrize(("line", "code"), LINES.items())
def test_known_last_words_are_understood_whatever_comes_after_them(line: str, code: str) -> None:
    after = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    lines = ["INFO starting", line, after]
    cause = VLLM.cause(lines, Ended(exit_code=1))
    assert cause is not None
    assert (cause.code, cause.line) == (code, line)


def test_503_means_that_the_engine_is_dead_and_a_follower_is_not_asked() -> None:
    asking = VLLM.asking(spec("vllm"))
    assert asking is not None
    assert asking.dead_after == 2
    assert VLLM.asking(spec("vllm", rank=1, peers=("a", "b"))) is None


@pytest.mark.parametrize(
    ("args", "token"),
    [
        ((), True),
        (("--runner", "generate", "--convert=none"), True),
        (("--task", "auto"), True),
        (("--runner=pooling",), False),
        (("--task", "embed"), False),
        (("--task", "transcription"), False),
        (("--convert", "classify"), False),
    ],
)
def test_only_a_model_that_makes_tokens_has_to_make_one(args: tuple[str, ...], token: bool) -> None:
    asking = VLLM.asking(spec("vllm", *args))
    assert asking is not None
    assert asking.token is token


RECORDED = Path(__file__).parents[2] / "recorded" / "vllm"


def test_of_a_leader_whose_follower_was_killed_the_cause_is_shown_and_not_its_farewell() -> None:
    # vLLM 0.32.0 on two nodes without GPUs: 30 lines follow the one that counts, and it leaves with code 0.
    data = (RECORDED / "leader-lost-its-follower.log").read_bytes()
    evidence, lines = clean(data), last(data, 20)
    cause = VLLM.cause(evidence, Ended(ours=True))
    assert cause is not None
    assert cause.code == "peer-lost"
    assert not any("gloo" in line for line in lines)
    shown = telling(lines, evidence, cause)
    assert len(shown) == 20
    assert "Connection closed by peer" in shown[9]
    assert shown[10] == "..."
    assert shown[-1] == lines[-1]
    member = spec("vllm", gpus=0, peers=PEERS, network={"GLOO_SOCKET_IFNAME": "lo"})
    assert read(member, evidence) == Wires("gloo over lo")


def test_the_last_lines_are_shown_as_they_are_where_they_say_the_cause_or_nobody_knows_one() -> None:
    evidence = [f"line {n}" for n in range(40)]
    lines = tuple(evidence[-20:])
    for line in ("", "line 25", "said by nobody"):
        assert telling(lines, evidence, Cause("code", "text", "", line)) == lines
    assert telling(lines, evidence, None) == lines
    assert telling(("line 39",), evidence, Cause("code", "text", "", "line 3")) == ("line 3", "...")
    assert telling(lines, evidence, Cause("code", "text", "", "line 1"))[:3] == ("line 0", "line 1", "...")

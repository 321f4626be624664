from pathlib import Path

import pytest

from llmgw.node.engines.causes import Ended
from llmgw.node.engines.contents import Contents
from llmgw.node.engines.sglang import Sglang
from tests.node.engines.specs import FACTS, seat, spec

SGLANG = Sglang()
HUB = Contents(Path("/models/m"), "hub", bytes=10 << 30, context=8192, heads=32)
PEERS = ("10.0.0.1", "10.0.0.2")


def codes(*args: str, gpus: int = 1, **more: object) -> list[str]:
    return [objection.code for objection in SGLANG.validate(spec("sglang", *args, gpus=gpus, **more), FACTS, HUB)]  # type: ignore[arg-type]


def argv(*args: str, gpus: int = 1, gpu_size: int | None = None, **more: object) -> str:
    command = SGLANG.command(spec("sglang", *args, gpus=gpus, **more), seat("sglang", "sglang", gpu_memory=gpu_size))  # type: ignore[arg-type]
    return " ".join(command.argv)


def test_one_gpu() -> None:
    assert argv() == (
        "sglang serve --model-path /models/m --served-model-name m --host 0.0.0.0 --port 8000"
        " --nccl-port 8020 --enable-metrics"
    )


def test_the_ports_of_dp_attention_are_the_shards_own() -> None:
    """It would take the numbers from 233 above its HTTP port on, which may be another shard's."""
    attention = ("--tp", "2", "--dp", "2", "--enable-dp-attention")
    assert SGLANG.ports(spec("sglang", *attention, gpus=2)) == ("http", "nccl", "dist+")
    assert "--nccl-port 8020 --dist-init-addr 127.0.0.1:8030" in argv(*attention, gpus=2)
    assert SGLANG.ports(spec("sglang", gpus=2)) == ("http", "nccl")


@pytest.mark.parametrize(
    ("command", "has"),
    [
        (argv(gpus=4), "--tp-size 4"),
        (argv(context=4096), "--context-length 4096"),
        (argv(gpu_memory=60 << 30, gpu_size=80 << 30), "--mem-fraction-static 0.75"),
        (argv(gpus=4, peers=PEERS, rank=1), "--nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.1:8030"),
        (argv(gpus=4, peers=("fd00::1", "fd00::2")), "--dist-init-addr [fd00::1]:8030"),
        (argv(gpus=4, peers=PEERS), "--tp-size 8"),
    ],
)
def test_what_is_asked_for_becomes_arguments(command: str, has: str) -> None:
    assert has in command


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (codes(), []),
        (codes("--host", "::"), ["bad-argument"]),
        (codes("--dist-init-addr", "x:1"), ["bad-argument"]),
        (codes("--nccl-p", "1"), ["bad-argument"]),
        (codes("--mem", "0.5"), ["bad-argument"]),
        (codes("--tp", "2"), ["bad-shape"]),
        (codes("--tp", "2", "--dp", "2", gpus=4), []),
        (codes("--tp", "2", "--dp", "2", "--enable-dp-attention", gpus=2), []),
        (codes("--tp", "4", "--dp", "2", gpus=4, peers=PEERS), ["bad-shape"]),
        (codes("--tp", "8", "--dp", "2", "--enable-dp-attention", gpus=4, peers=PEERS), []),
        (codes(gpus=4, peers=PEERS), []),
        (codes(gpus=3, peers=PEERS), ["bad-shape"]),
        (codes("--tp", "4", "--pp", "2", gpus=4, peers=PEERS), []),
        (codes(gpus=4, peers=PEERS, peer_ports=({}, {})), ["bad-shape"]),
        (codes(gpus=0), ["gpu-missing"]),
        (codes("--device", "cpu", gpus=0), []),
        (codes(context=9000), ["context-too-long"]),
    ],
)
def test_what_the_engine_would_refuse_after_minutes_is_refused_at_once(found: list[str], expected: list[str]) -> None:
    assert found == expected


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "out-of-memory"),
        (
            "RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes.",
            "gpu-memory-taken",
        ),
        ("Port is already in use. dist_init_port=8030", "port-in-use"),
        ("ValueError: scheduler_input_port at 20237 is not available in 30 seconds. process 7 (python)", "port-in-use"),
        ("torch.distributed.DistBackendError: NCCL error in: ncclSystemError: System call", "nccl"),
        ("RuntimeError: Gloo connectFullMesh failed with [..]", "peer-missing"),
        ("Unable to find address for: eth9", "no-interface"),
        ("Scheduler hit an exception: Traceback (most recent call last):", "engine-failed"),
    ],
)
def test_its_kill_of_its_own_tree_is_not_taken_for_the_kernels(line: str, code: str) -> None:
    cause = SGLANG.cause(["start", line], Ended(signal=9))
    assert cause is not None
    assert cause.code == code


def test_health_is_given_longer_than_the_token_that_it_makes_may_take() -> None:
    asking = SGLANG.asking(spec("sglang"))
    assert asking is not None
    assert asking.timeout > 20
    assert SGLANG.asking(spec("sglang", rank=1, peers=PEERS)) is None


def test_members_meet_at_the_block_of_ports_that_the_leader_has() -> None:
    follower = spec("sglang", gpus=4, peers=PEERS, rank=1, peer_ports=({"dist+": 29600}, {}))
    command = SGLANG.command(follower, seat("sglang", "sglang"))
    assert "--dist-init-addr 10.0.0.1:29600" in " ".join(command.argv)
    assert (command.env["SGLANG_HOST_IP"], command.env["NCCL_DEBUG_SUBSYS"]) == ("10.0.0.2", "INIT,NET")
    assert SGLANG.ports(follower) == ("http",)
    assert SGLANG.ports(spec("sglang", gpus=4, peers=PEERS)) == ("http", "dist+")
    assert SGLANG.ports(spec("sglang", gpus=4)) == ("http", "nccl")

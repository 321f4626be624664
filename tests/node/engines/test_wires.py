"""What members talk over, from lines as engines really wrote them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.node.engines.wires import Wires, read, rpc, rpc_peers, telling
from llmgw.wire.facts import ShardSpec
from tests.node.engines.specs import spec

PEERS = ("10.0.0.1", "10.0.0.2")
BOTH = ("mlx5_0:1", "mlx5_1:1")
RUN = "gpu-01:4744:4763 [0] NCCL INFO "
RO = RUN + "NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>"
NONE = RUN + "NET/IB : No device found."
SOCKET = RUN + "NET/Socket : Using [0]eth0:10.0.0.1<0>"


def gang(
    engine: str = "vllm", *, rdma: tuple[str, ...] = (), rank: int = 0, gpus: int = 1, env: dict[str, str] | None = None
) -> ShardSpec:
    return spec(engine, gpus=gpus, peers=PEERS, rdma=rdma, rank=rank, env=env, network={"GLOO_SOCKET_IFNAME": "eth0"})


@pytest.mark.parametrize(
    ("lines", "network"),
    [
        # The spellings of NCCL: with and without the marks behind the list, InfiniBand, one device of two ports.
        ([RO, RUN + "Using network IB"], "IB: mlx5_0:1, mlx5_1:1"),
        (["nid13:1:1 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE ; OOB nmn0:10.252.1.67<0>"], "IB: mlx5_0:1"),
        ([RUN + "NET/IB : Using [0]mlx4_0:1/IB [1]mlx4_0:2/IB ; OOB ib0:10.149.0.1<0>"], "IB: mlx4_0:1, mlx4_0:2"),
        (
            [RUN + "NET/IB : Using [0]mlx5_0:1/IB/SHARP [1]mlx5_2:1/IB/SHARP ; OOB ib0:10.1.1.1<0>"],
            "IB: mlx5_0:1, mlx5_2:1",
        ),
        (
            [RUN + "NET/IB : Using [0]rocep1s0f1:1/RoCE [1]roceP2p1s0f1:1/RoCE ; OOB e:1.2.3.4<0>"],
            "IB: rocep1s0f1:1, roceP2p1s0f1:1",
        ),
        # A card of two ports as one device, and a plugin's name.
        (
            [RUN + "NET/IB : Using [0]={[0] mlx5_0:1/RoCE, [1] mlx5_1:1/RoCE} [RO]; ", RUN + "Using network IBext_v8"],
            "IBext_v8: mlx5_0:1, mlx5_1:1",
        ),
        ([RUN + "Initialized NET plugin IB", RUN + "Assigned NET plugin IB to comm", RO], "IB: mlx5_0:1, mlx5_1:1"),
        ([RUN + "Channel 00/0 : 0[0] -> 1[1] [send] via NET/IB/0/GDRDMA"], "IB"),
        # Every worker says the same; vLLM puts its name before.
        (
            [f"(Worker_TP{n} pid={n}) {line}" for n in range(2) for line in (RO, RUN + "Using network IB")],
            "IB: mlx5_0:1, mlx5_1:1",
        ),
        # Sockets.
        ([NONE, SOCKET, RUN + "Using network Socket"], "Socket: eth0"),
        ([SOCKET], "Socket: eth0"),
        ([RUN + "NET/Socket : Using eth0:10.0.0.24<0>"], "Socket: eth0"),
        (
            [RUN + "NET/Socket : Using [0]ibp24s0:10.100.9.37<0> [1]flannel.1:10.1.1.1<0> [2]veth1:fe80::d4%veth1<0>"],
            "Socket: ibp24s0, flannel.1, veth1",
        ),
        ([RUN + "Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0"], "Socket"),
        # "Using" without a device is none: NCCL 2.26 says so when it found nothing.
        (
            [
                NONE,
                RUN + "NET/IB : Using [RO]; OOB podnet1:10.0.123.96<0>",
                RUN + "NET/Socket : Using [0]podnet1:10.0.123.96<0>",
                RUN + "Using network Socket",
            ],
            "Socket: podnet1",
        ),
        # Another network altogether, and none that is told.
        ([RUN + "Using network AWS Libfabric"], "AWS Libfabric"),
        ([RUN + "NCCL_IB_HCA set to mlx5_0:1", RUN + "NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'"], ""),
        ([RUN + "Channel 00/0 : 0[0] -> 4[0] via P2P/MNNVL"], "NVLink"),
        (
            [RO, RUN + "Using network IB", RUN + "Channel 00/0 : 0[0] -> 4[0] via P2P/MNNVL"],
            "IB: mlx5_0:1, mlx5_1:1 and NVLink",
        ),
        (
            ["INFO world_size=2 rank=1 local_rank=0 distributed_init_method=tcp://10.0.0.1:29600 backend=gloo"],
            "gloo over eth0",
        ),
        ([], ""),
    ],
)
def test_the_network_is_read_from_every_spelling(lines: list[str], network: str) -> None:
    assert read(gang(), lines).network == network
    assert read(gang(), [line for line in lines if telling(line)]).network == network
    assert read(gang(), lines).warning == "", "sockets were meant"


@pytest.mark.parametrize(
    ("lines", "env", "warning"),
    [
        ([RO, RUN + "Using network IB"], {}, ""),
        ([], {}, ""),
        ([RUN + "Using network AWS Libfabric"], {}, ""),
        ([RUN + "Using network IB"], {}, ""),
        (
            [NONE, SOCKET, RUN + "Using network Socket"],
            {},
            "NCCL uses sockets on eth0 and not mlx5_0:1, mlx5_1:1, so it is slow: it found no RDMA device that it may"
            " use; look whether these ports are ACTIVE (`llmgw-node doctor`) and whether the engine may open"
            " /dev/infiniband (a container needs the devices and an unlimited memlock)",
        ),
        ([SOCKET], {"NCCL_IB_DISABLE": "1"}, "the profile's env sets NCCL_IB_DISABLE=1; take it out"),
        ([SOCKET], {"NCCL_IB_DISABLE": "0"}, "NCCL_DEBUG_SUBSYS=ALL"),
        ([SOCKET], {"NCCL_NET": "Socket"}, "the profile's env sets NCCL_NET=Socket; take it out"),
        ([NONE, SOCKET], {"NCCL_IB_HCA": "=mlx5_9"}, "by NCCL_IB_HCA==mlx5_9 of the profile's env"),
        ([RUN + "Failed to open libibverbs.so[.1]", SOCKET], {}, "libibverbs is not installed"),
        # One group over RDMA and another over sockets: the slow one counts.
        ([RO, RUN + "Using network IB", SOCKET, RUN + "Using network Socket"], {}, "NCCL uses sockets on eth0"),
        (
            [RUN + "NET/IB : Using [0]mlx5_0:1/IB ; OOB eth0:10.0.0.1<0>"],
            {},
            "NCCL uses 1 of 2 ports, and mlx5_1:1 not: look whether they are ACTIVE",
        ),
        (
            [RUN + "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [2]mlx5_7:1/RoCE ; OOB eth0:10.0.0.1<0>"],
            {},
            "NCCL uses mlx5_7:1, which the replica is not meant to use",
        ),
        (
            [RUN + "NET/IB : Using [0]mlx5_0:1/IB ; OOB e:1.1.1.1<0>"],
            {"NCCL_IB_HCA": "mlx5_0"},
            "NCCL_IB_HCA=mlx5_0; take",
        ),
    ],
)
def test_a_silent_fallback_is_a_warning_with_its_cause(lines: list[str], env: dict[str, str], warning: str) -> None:
    found = read(gang(rdma=BOTH, env=env), lines).warning
    assert warning in found if warning else found == ""


def three(*args: str, rank: int = 0) -> ShardSpec:
    return spec("llamacpp", *args, peers=(*PEERS, "10.0.0.3"), rank=rank)


@pytest.mark.parametrize(
    ("connected", "expected"),
    [
        ({"10.0.0.2:8002", "10.0.0.3:8002", "10.0.0.9:443"}, Wires("RPC: 10.0.0.2:8002, 10.0.0.3:8002")),
        ({"10.0.0.2:8002", "10.0.0.3:8003"}, Wires("RPC: 10.0.0.2:8002", missing=("10.0.0.3:8002",))),
        (set(), Wires(missing=("10.0.0.2:8002", "10.0.0.3:8002"))),
    ],
)
def test_a_leader_of_llamacpp_uses_every_peer_or_it_is_known_which_it_does_not(
    connected: set[str], expected: Wires
) -> None:
    assert rpc(three(), connected) == expected


def test_a_peer_that_the_profile_itself_gives_nothing_is_a_warning_only() -> None:
    found = rpc(three("-ts", "1,0"), {"10.0.0.2:8002"})
    assert (found.network, found.missing) == ("RPC: 10.0.0.2:8002", ())
    assert found.warning.startswith("10.0.0.3:8002 has no part of the model")


def test_only_a_leader_of_llamacpp_has_peers_to_be_connected_to() -> None:
    assert rpc_peers(three()) == ("10.0.0.2:8002", "10.0.0.3:8002")
    assert rpc_peers(three(rank=1)) == rpc_peers(gang("vllm")) == rpc_peers(spec("llamacpp")) == ()


@given(st.lists(st.text() | st.sampled_from([RO, NONE, SOCKET]), max_size=6))
def test_any_log_is_read_and_what_does_not_tell_changes_nothing(lines: list[str]) -> None:
    for engine in ("vllm", "sglang", "llamacpp"):
        shard = gang(engine, rdma=BOTH)
        assert read(shard, lines) == read(shard, [line for line in lines if telling(line)])
    assert read(spec("vllm"), lines) == Wires(), "a replica of one node has no wires"

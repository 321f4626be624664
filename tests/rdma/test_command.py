from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmgw.errors import BadInput
from llmgw.rdma.command import Command, Pin, Tools, command, limits, shared
from llmgw.wire.control import Bandwidth

TOOLS = Tools(version="6.06", stdbuf=True, numactl=True, taskset=True)
RUN = Bandwidth(device="mlx5_0", gid_index=3, mtu=4096, tcp_port=20001, size=1 << 20, seconds=10)


def test_everything_is_said_and_nothing_left_to_the_programs_own_choice() -> None:
    assert command(RUN, TOOLS, server="10.1.0.2").argv == (
        "stdbuf", "-oL", "ib_write_bw", "-d", "mlx5_0", "-i", "1", "-p", "20001", "-F", "-D", "10", "-s", "1048576",
        "-q", "2", "--report_gbits", "-m", "4096", "-x", "3", "10.1.0.2",
    )  # fmt: skip


def test_both_sides_get_the_same_flags() -> None:
    """Newer perftest refuses sides that differ (release 26.01)."""
    client = command(RUN, TOOLS, server="10.1.0.2", pin=Pin(1)).argv
    server = command(replace(RUN, device="mlx5_7", gid_index=5, number=2), Tools(stdbuf=True)).argv
    assert shared(client)[:-1] == shared(server)


def test_infiniband_gets_no_gid_index() -> None:
    assert "-x" not in command(replace(RUN, gid_index=None), TOOLS).argv


def test_both_directions_and_extra_options_are_passed_on() -> None:
    argv = command(replace(RUN, bidirectional=True, extra=("-t", "8", "--tclass=96")), TOOLS).argv
    assert "-b" in argv
    assert argv[-3:] == ("-t", "8", "--tclass=96")


def test_latency_has_no_queue_pairs_and_no_unit() -> None:
    argv = command(replace(RUN, test="ib_write_lat", size=2), TOOLS).argv
    assert "ib_write_lat" in argv
    assert not {"-q", "--report_gbits", "-b"} & set(argv)


def test_a_side_runs_next_to_its_adapter() -> None:
    assert command(RUN, TOOLS, pin=Pin(1, "32-63")).argv[:3] == ("numactl", "--cpunodebind=1", "--membind=1")
    assert command(RUN, Tools(taskset=True), pin=Pin(1, "32-63")).argv[:3] == ("taskset", "-c", "32-63")
    assert command(RUN, Tools(), pin=Pin(1, "32-63")).argv[0] == "ib_write_bw"
    assert command(RUN, TOOLS, pin=Pin(-1)).argv[0] == "stdbuf"


def test_gpu_memory_is_used_where_the_program_can() -> None:
    able = Tools(version="6.28", options=frozenset({"use_cuda", "use_cuda_dmabuf"}))
    made = command(replace(RUN, gpu="GPU-1"), able)
    assert isinstance(made, Command)
    assert {"--use_cuda=0", "--use_cuda_dmabuf"} <= set(made.argv)
    assert made.env == (("CUDA_VISIBLE_DEVICES", "GPU-1"),)
    with pytest.raises(BadInput, match=r"6\.06 cannot use GPU memory"):
        command(replace(RUN, gpu="GPU-1"), TOOLS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"test": "rm"}, "no test"),
        ({"device": "-x"}, "no device name"),
        ({"device": "a b"}, "no device name"),
        ({"mtu": 9000}, "MTU of 9000"),
        ({"tcp_port": 0}, "TCP port"),
        ({"seconds": 0}, "seconds"),
        ({"size": 0}, "size"),
        ({"queue_pairs": 0}, "queue pairs"),
        ({"gid_index": -2}, "GID index"),
        ({"extra": ("--mmap=/dev/mem",)}, "may not be added"),
        ({"extra": ("-t", "--mmap")}, "needs a number"),
        ({"extra": ("-t",)}, "needs a number"),
        ({"extra": ("--ipv6-addr",)}, "over IPv6"),
        ({"extra": ("--ipv6-addr=3",)}, "no value"),
    ],
)
def test_what_cannot_be_meant_never_reaches_a_command_line(change: dict[str, object], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        command(replace(RUN, **change), TOOLS)


def test_a_server_that_looks_like_an_option_is_refused() -> None:
    with pytest.raises(BadInput, match="no address"):
        command(RUN, TOOLS, server="--help")


def test_the_server_outlives_the_client_and_both_end() -> None:
    client, server = limits(RUN)
    assert 10 < client < server < 10 + 120


@given(st.text(max_size=20), st.lists(st.text(max_size=8), max_size=4), st.text(max_size=20), st.integers())
def test_any_words_become_a_command_of_known_parts_or_an_error(
    device: str, extra: list[str], server: str, port: int
) -> None:
    try:
        made = command(replace(RUN, device=device, extra=tuple(extra), tcp_port=port), TOOLS, server=server)
    except BadInput:
        return
    assert not made.argv[-1].startswith("-")
    assert made.argv[2] == "ib_write_bw"

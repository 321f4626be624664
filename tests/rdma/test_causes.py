from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.rdma.causes import Measured, NotMeasured, Weight, cause, verdict
from tests.rdma.recorded import ROCE, Side, sides


def judged(side: Side) -> Measured | NotMeasured:
    return verdict(side.exit_code, side.stdout, side.stderr, size=side.size, cut_short=side.cut_short)


@pytest.mark.parametrize(
    ("recording", "role", "code"),
    [
        ("err-no-such-device", "client", "no-device"),
        ("err-no-such-device-server", "client", "no-device"),
        ("err-no-such-port", "client", "no-port"),
        ("err-server-not-up", "client", "no-server"),
        ("err-no-route-peer", "client", "no-server"),
        ("err-bad-host", "client", "bad-host"),
        ("err-bad-option", "client", "option"),
        ("err-memlock", "client", "memory-lock"),
        ("err-memlock", "server", "peer-left"),
        ("err-mismatch-size", "client", "remote-access"),
        ("err-mismatch-tool", "client", "remote-access"),
        ("err-mismatch-qps", "server", "peer-left"),
        ("err-mismatch-rdmacm", "client", "rdma-cm"),
        ("err-mismatch-rail-stdbuf-90s", "client", "time-limit"),
        ("err-server-silent", "server", "time-limit"),
        ("bw-ipv6-oob", "client", "ipv6-exchange"),
        ("bw-x-mismatch-c0-s1", "client", "gid-types"),
        ("bw-x3-missing", "client", "no-path"),
        ("bw-x99-bad", "client", "gid-index"),
        ("bw-D4-margin2-error", "client", "duration"),
        ("bw-limit_bw", "client", "below-limit"),
        ("bw-q4", "client", "remote-invalid"),
        ("bw-d3", "client", "could-not-measure"),
        ("bw-plain", "client", "time-limit"),
        ("bw-output-bandwidth", "client", "no-result"),
        ("fault-client-netdev-down-midway", "client", "local-error"),
        ("fault-kill9-client-midway", "client", "killed"),
        ("fault-kill9-server-midway", "client", "peer-left"),
        ("fault-term-server-midway", "server", "killed"),
        ("fault-oob-same-rail-cable-pulled", "client", "time-limit"),
    ],
)
def test_a_recorded_failure_has_its_cause(recording: str, role: str, code: str) -> None:
    said = judged(sides(recording)[role])
    assert isinstance(said, NotMeasured)
    assert said.cause.code == code


def test_every_recorded_failure_is_one_and_every_success_is_one() -> None:
    for file in sorted(ROCE.glob("*.txt")):
        for side in sides(file.stem).values():
            said = judged(side)
            if side.exit_code:
                assert isinstance(said, NotMeasured), file.name
            elif isinstance(said, Measured):
                assert said.row.average_gbps or said.row.latency_us, file.name


def test_a_row_after_a_failure_is_kept_and_is_no_result() -> None:
    """The client of a killed server prints a low row and leaves with 1."""
    said = judged(sides("fault-kill9-server-midway")["client"])
    assert isinstance(said, NotMeasured)
    assert said.row is not None
    assert said.row.average_gbps == 0.001572


def test_the_port_in_the_way_is_named() -> None:
    assert cause("Couldn't listen to port 18999\n").text == "TCP port 18999 is taken by another process"
    assert cause(" Port number 1 state is Down\n Couldn't set the link layer\n").text == "port 1 is Down"
    assert cause("Couldn't connect to 10.0.0.9:18515").text.startswith("the server at 10.0.0.9 port 18515")


def test_the_side_that_only_lost_its_peer_weighs_least() -> None:
    echo = cause("ethernet_read_keys: Couldn't read remote address\n Unable to read to socket/rdma_cm\n")
    assert echo.weight is Weight.ECHO
    assert cause(" Completion with error at client\n").weight is Weight.SYMPTOM


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (
            " Did not detect devices \n Unable to find the Infiniband/RoCE device",
            "no-device",
        ),
        (" Current implementation is not compatible with versions older than 5.70", "versions"),
        ("num_of_qps mismatch: local=2, remote=1", "parameters-differ"),
        (" Completion with error at client\n Failed status 12: wr_id 0 syndrom 0x81", "no-answer"),
        (" Failed status-transport retry counter exceeded (12): wr_id 0 syndrom 0x81\n scnt=128, ccnt=0", "no-answer"),
        (" Failed status-RNR retry counter exceeded (13): wr_id 0 syndrom 0x0", "receiver-not-ready"),
        (" Failed status-Work Request Flushed Error (5): wr_id 1 syndrom 0xf9", "completion"),
        (" Failed status-local QP operation error (2): wr_id 1 syndrom 0x0", "local-error"),
        ("Poll send CQ error status=12 qp 0", "no-answer"),
        ("Bad wc status -- 12 -- 0 ", "no-answer"),
        (" Did not get Message for 120 Seconds, exiting..", "no-traffic"),
        ("No IB devices found", "no-device"),
        ("ib_write_bw: error while loading shared libraries: libefa.so.1: cannot open shared object", "broken-install"),
        (
            "libibverbs: Warning: couldn't load driver 'libmlx5.so'\n Unable to find the Infiniband/RoCE device",
            "no-provider",
        ),
        # A provider that another adapter would need explains nothing here.
        ("libibverbs: Warning: couldn't load driver 'libefa.so'\n Failed status 12: wr_id 0", "no-answer"),
        ("Failed to modify QP 131 to RTR\n Unable to Connect the HCA's through the link", "no-path"),
        ("Can't produce a report", "clock"),
        ("Couldn't allocate MR with error=14", "peer-memory"),
        ("Couldn't allocate MR\nfailed to create mr", "memory-lock"),
        ("Couldn't create CQ", "resources"),
        ("cuInit(0) failed with error", "cuda"),
        ("Received 10 times ADDR_ERROR\n Unable to perform rdma_client function", "rdma-cm"),
        ("unexpected CM event 1", "rdma-cm"),
        ("Function rdma_connect failed", "rdma-cm"),
        ("Problem in resolving basic address and port", "rdma-cm"),
        (" Unable to read from socket/rdma_cm", "peer-left"),
    ],
)
def test_known_words_have_their_cause(line: str, code: str) -> None:
    assert cause(line).code == code


def test_a_missing_device_is_named_though_perftest_does_not_name_it() -> None:
    """PT15: without any adapter it says only that it found none."""
    said = verdict(1, "", " Did not detect devices \n Unable to find the Infiniband/RoCE device\n", device="mlx5_3")
    assert isinstance(said, NotMeasured)
    assert said.cause.text == "no RDMA device mlx5_3 on this node"


def test_a_run_that_ends_well_without_a_row_is_explained_by_what_it_printed() -> None:
    said = verdict(0, "", " Completion with error at client\n Failed status 12: wr_id 0 syndrom 0x81\n", size=65536)
    assert isinstance(said, NotMeasured)
    assert (said.error, said.cause.code) == ("exit code 0 without a result", "no-answer")


@given(
    st.text(),
    st.text(),
    st.one_of(st.none(), st.integers(-70, 300)),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 1 << 23)),
)
def test_any_output_is_a_result_or_a_clear_error(
    out: str, err: str, code: int | None, late: bool, size: int | None
) -> None:
    said = verdict(code, out, err, size=size, cut_short=late)
    if isinstance(said, Measured):
        assert code == 0
        assert said.row.measured
    else:
        assert said.error
        assert said.cause.text


@given(st.binary(), st.binary(), st.integers(-70, 300))
def test_any_bytes_are_a_result_or_a_clear_error(out: bytes, err: bytes, code: int) -> None:
    """As a process's output reaches us: whatever it was, it is text by then."""
    said = verdict(code, out.decode(errors="replace"), err.decode(errors="replace"))
    assert isinstance(said, Measured) or (said.error and said.cause.text)


def test_a_megabyte_of_one_word_is_judged_in_time() -> None:
    for text in ("a" * 1_000_000, "cuda " * 200_000, "#bytes #iterations " + "BW " * 300_000, "x mismatch " * 100_000):
        assert isinstance(verdict(1, text, text), NotMeasured)

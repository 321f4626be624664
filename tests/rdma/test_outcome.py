from __future__ import annotations

import pytest

from llmgw.node.perftest import PortNow, report
from llmgw.node.run import Ran
from llmgw.rdma.outcome import Figure, Lost, outcome
from llmgw.rdma.results import Failure
from llmgw.wire.control import Bandwidth, BandwidthReply
from tests.rdma.recorded import sides


def replies(recording: str) -> tuple[BandwidthReply, BandwidthReply]:
    """What the two nodes would have replied in a recorded run."""
    found = []
    for role in ("client", "server"):
        side = sides(recording)[role]
        ran = Ran((), side.exit_code, side.stdout, side.stderr, side.cut_short, 1.0)
        test = Bandwidth(size=side.size or 65536)
        found.append(report(test, ran, PortNow("ACTIVE LinkUp"), PortNow("ACTIVE LinkUp"), serving=role == "server"))
    return found[0], found[1]


@pytest.mark.parametrize(
    ("recording", "side", "code"),
    [
        ("fault-kill9-server-midway", "b", "killed"),
        ("fault-term-server-midway", "b", "killed"),
        ("fault-kill9-client-midway", "a", "killed"),
        ("fault-int-client-midway", "a", "killed"),
        ("fault-client-netdev-down-midway", "a", "local-error"),
        ("fault-oob-same-rail-cable-pulled", "a", "time-limit"),
        ("fault-iterations-cable-pulled-midway", "a", "time-limit"),
        ("err-memlock", "a", "memory-lock"),
        ("err-mismatch-size", "a", "remote-access"),
        ("err-mismatch-rail-stdbuf-90s", "a", "time-limit"),
        ("err-mismatch-rdmacm", "a", "rdma-cm"),
        ("err-server-silent", "b", "time-limit"),
        ("bw-x-mismatch-c0-s1", "a", "gid-types"),
        ("bw-ipv6-oob", "a", "ipv6-exchange"),
        ("bw-d3", "a", "could-not-measure"),
        ("bw-limit_bw", "a", "below-limit"),
    ],
)
def test_a_recorded_failure_names_the_side_that_explains_it(recording: str, side: str, code: str) -> None:
    client, server = replies(recording)
    said = outcome("a", client, "b", server)
    assert isinstance(said, Failure)
    assert (said.side, said.code) == (side, code)
    assert said.error in said.text


@pytest.mark.parametrize("recording", ["bw-D10", "bw-bidir", "bw-cpu_util", "fault-baseline", "send_bw-D4"])
def test_a_recorded_run_that_went_well_is_the_clients_figure(recording: str) -> None:
    client, server = replies(recording)
    said = outcome("a", client, "b", server)
    assert isinstance(said, Figure)
    assert said.gbps == client.average_gbps


def test_latency_counts_where_the_server_prints_no_table() -> None:
    client, server = replies("read_lat")
    side = sides("read_lat")["client"]
    client = report(
        Bandwidth(size=2), Ran((), 0, side.stdout, side.stderr, False, 1.0), PortNow(), PortNow(), serving=False
    )
    assert outcome("a", client, "b", server) == Figure(None, 6978.03)


def test_a_port_that_went_down_makes_a_clean_exit_a_failure() -> None:
    """Cable pulled in the middle of a timed run: both sides exit 0 with a low figure."""
    fine = BandwidthReply(average_gbps=0.0029, exit_code=0, state_before="ACTIVE LinkUp", state_after="ACTIVE LinkUp")
    dead = BandwidthReply(exit_code=0, state_before="ACTIVE LinkUp", state_after="DOWN Polling")
    said = outcome("a", fine, "b", dead)
    assert isinstance(said, Failure)
    assert (said.side, said.code) == ("b", "link-died")
    assert "DOWN Polling" in said.cause


def test_a_lost_agent_explains_more_than_what_the_other_side_saw() -> None:
    client, _ = replies("fault-kill9-server-midway")
    said = outcome("a", client, "b", Lost("stream closed: b lost its stream", "agent-gone"))
    assert isinstance(said, Failure)
    assert (said.side, said.code) == ("b", "agent-gone")


def test_a_side_that_we_stopped_explains_nothing() -> None:
    client, _ = replies("err-memlock")
    said = outcome("a", client, "b", Lost("stopped", stopped=True))
    assert isinstance(said, Failure)
    assert said.side == "a"


def test_nothing_measured_is_a_failure_and_not_zero() -> None:
    said = outcome("a", BandwidthReply(exit_code=0), "b", BandwidthReply(exit_code=0))
    assert isinstance(said, Failure)
    assert said.code == "no-result"

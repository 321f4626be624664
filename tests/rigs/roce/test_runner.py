"""The node's side of a bandwidth test over real verbs: perftest on Soft-RoCE in two guests, run as an agent runs it."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
import trio
from msgspec.structs import replace

from llmgw.rdma.outcome import Figure, outcome
from llmgw.wire.control import Bandwidth, BandwidthReply
from tests.rigs.roce.guests import Guest
from tests.rigs.roce.side import Asked

pytestmark = [pytest.mark.real, pytest.mark.slow]

PROJECT = str(Path(__file__).parents[3])
#: What an emulated CPU carries in reasonable time.
RUN = Bandwidth(
    device="rxe0", gid_index=1, mtu=4096, tcp_port=18600, size=4096, queue_pairs=1, seconds=4, extra=("-t", "8")
)
#: Python with our modules takes half a minute to start in a guest.
START = 120.0


async def side(guest: Guest, run: Bandwidth, server: str | None = None) -> BandwidthReply:
    """A side's reply; what it said before is left out."""
    asked = msgspec.json.encode(Asked(run=run, server=server)).decode()
    done = await guest.run(sys.executable, "-m", "tests.rigs.roce.side", asked, env={"PYTHONPATH": PROJECT})
    return msgspec.json.decode(done.ok().splitlines()[-1], type=BandwidthReply)


async def listening(guest: Guest, port: int) -> None:
    """Wait until something in the guest listens: with the guest's own tools."""
    await guest.sh(f"until ss -Hltn 'sport = :{port}' | grep -q .; do sleep 0.1; done")


async def test_two_sides_measure_each_other_over_real_verbs(pair: tuple[Guest, Guest]) -> None:
    a, b = pair
    replies: dict[str, BandwidthReply] = {}

    async def serve() -> None:
        replies["server"] = await side(b, RUN)

    with trio.fail_after(2 * START + 60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            await listening(b, RUN.tcp_port)
            replies["client"] = await side(a, RUN, b.address(1))
    for reply in replies.values():
        assert (reply.exit_code, reply.error) == (0, ""), reply
        assert (reply.state_before, reply.state_after) == ("ACTIVE LinkUp", "ACTIVE LinkUp")
        assert reply.command[:2] == ("stdbuf", "-oL")
        assert reply.version
    figure = outcome("a", replies["client"], "b", replies["server"])
    assert isinstance(figure, Figure)
    assert figure.gbps is not None
    assert figure.gbps > 0
    assert await a.perftest() == await b.perftest() == []


async def test_a_busy_port_is_the_servers_words(pair: tuple[Guest, Guest]) -> None:
    _, b = pair
    port = 18601
    with trio.fail_after(START + 60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(b.run, "ib_write_bw", "-d", "rxe0", "-p", str(port))
            await listening(b, port)
            reply = await side(b, replace(RUN, tcp_port=port))
            nursery.cancel_scope.cancel()
    assert (reply.exit_code, reply.cause_code) == (1, "port-in-use")
    assert reply.cause == f"TCP port {port} is taken by another process"
    await b.sh("while pgrep -x ib_write_bw; do sleep 0.1; done")


async def test_a_silent_peer_is_ended_by_the_limit(pair: tuple[Guest, Guest]) -> None:
    a, b = pair
    port = 18602
    silent = (
        "import socket, time; s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); "
        f"s.bind(('', {port})); s.listen(); c, _ = s.accept(); time.sleep(600)"
    )
    with trio.fail_after(START + 90):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(b.run, sys.executable, "-S", "-c", silent)
            await listening(b, port)
            reply = await side(a, replace(RUN, tcp_port=port, seconds=1), b.address(1))
            nursery.cancel_scope.cancel()
    assert (reply.error, reply.cause_code) == ("ended by the time limit", "time-limit")
    assert reply.average_gbps is None
    assert reply.seconds < 45
    assert await a.perftest() == []


async def test_a_server_that_is_not_there_is_told_at_once(pair: tuple[Guest, Guest]) -> None:
    a, b = pair
    with trio.fail_after(START + 30):
        reply = await side(a, replace(RUN, tcp_port=18603), b.address(1))
    assert (reply.exit_code, reply.cause_code) == (1, "no-server")
    assert "18603" in reply.cause

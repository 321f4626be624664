"""The node's side of a bandwidth test over real verbs: perftest on Soft-RoCE in two guests, run as an agent runs it."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

import msgspec
import trio
from msgspec.structs import replace

from llmgw.rdma.outcome import Figure, outcome
from llmgw.wire.control import Bandwidth, BandwidthReply
from tests.engines import until
from tests.rigs.roce.fleet import BOUND, FEW, NO_CLOCK
from tests.rigs.roce.guests import IN_GUESTS, START, Guest
from tests.rigs.roce.side import Asked

pytestmark = IN_GUESTS

PROJECT = str(Path(__file__).parents[3])
#: What an emulated CPU carries in reasonable time.
RUN = Bandwidth(device="rxe0", gid_index=1, mtu=4096, tcp_port=18600, size=4096, queue_pairs=1, seconds=4, extra=FEW)


async def side(guest: Guest, run: Bandwidth, server: str | None = None, turn: str = "") -> BandwidthReply:
    """A side's reply; what it said before is left out."""
    asked = msgspec.json.encode(Asked(run=run, server=server, turn=turn)).decode()
    done = await guest.run(sys.executable, "-m", "tests.rigs.roce.side", asked, env={"PYTHONPATH": PROJECT})
    return msgspec.json.decode(done.ok().splitlines()[-1], type=BandwidthReply)


async def listening(guest: Guest, port: int) -> None:
    """Wait until something in the guest listens: with the guest's own tools."""
    await guest.sh(f"until ss -Hltn 'sport = :{port}' | grep -q .; do sleep 0.1; done")


async def exchange(a: Guest, b: Guest, run: Bandwidth) -> tuple[BandwidthReply, BandwidthReply]:
    """What the client on a and the server on b say. Both are ready before either begins."""
    replies: dict[str, BandwidthReply] = {}

    async def serve() -> None:
        replies["server"] = await side(b, run, turn="/share/turn")

    async def send() -> None:
        replies["client"] = await side(a, run, b.address(1), turn="/share/turn")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        nursery.start_soon(send)
        for guest in (a, b):
            await until((guest.share / "turn").exists, within=START)
        (b.share / "turn").unlink()
        await listening(b, run.tcp_port)
        (a.share / "turn").unlink()
    return replies["client"], replies["server"]


async def test_two_sides_measure_each_other_over_real_verbs(pair: tuple[Guest, Guest]) -> None:
    a, b = pair
    with trio.fail_after(BOUND):
        for port in count(18610):
            client, server = await exchange(a, b, replace(RUN, tcp_port=port))
            if client.cause_code not in NO_CLOCK:
                break
    for reply in (client, server):
        assert (reply.exit_code, reply.error) == (0, ""), reply
        assert (reply.state_before, reply.state_after) == ("ACTIVE LinkUp", "ACTIVE LinkUp")
        assert reply.command[:2] == ("stdbuf", "-oL")
        assert reply.version
    figure = outcome("a", client, "b", server)
    assert isinstance(figure, Figure)
    assert figure.gbps is not None
    assert figure.gbps > 0
    await a.no_perftest()
    await b.no_perftest()


async def test_a_busy_port_is_the_servers_words(pair: tuple[Guest, Guest]) -> None:
    _, b = pair
    port = 18601
    with trio.fail_after(START):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(b.run, "ib_write_bw", "-d", "rxe0", "-p", str(port))
            await listening(b, port)
            reply = await side(b, replace(RUN, tcp_port=port))
            nursery.cancel_scope.cancel()
    assert (reply.exit_code, reply.cause_code) == (1, "port-in-use")
    assert reply.cause == f"TCP port {port} is taken by another process"
    await b.no_perftest()


async def test_a_silent_peer_is_ended_by_the_limit(pair: tuple[Guest, Guest]) -> None:
    a, b = pair
    port = 18602
    silent = (
        "import socket, time; s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); "
        f"s.bind(('', {port})); s.listen(); c, _ = s.accept(); time.sleep(600)"
    )
    with trio.fail_after(START):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(b.run, sys.executable, "-S", "-c", silent)
            await listening(b, port)
            reply = await side(a, replace(RUN, tcp_port=port, seconds=1), b.address(1))
            nursery.cancel_scope.cancel()
    assert (reply.error, reply.cause_code) == ("ended by the time limit", "time-limit")
    assert reply.average_gbps is None
    await a.no_perftest()


async def test_a_server_that_is_not_there_is_told_at_once(pair: tuple[Guest, Guest]) -> None:
    a, b = pair
    with trio.fail_after(START):
        reply = await side(a, replace(RUN, tcp_port=18603), b.address(1))
    assert (reply.exit_code, reply.cause_code) == (1, "no-server")
    assert "18603" in reply.cause

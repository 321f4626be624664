"""How long does a map of 10,240 hosts take from the tool to the plane's store, and does it hold the loop up?

Real: the node's scanner with its processes (the tools are stand-ins that print a map of that size at once), a WebSocket
on loopback with parts, the verdict's process, SQLite. One process is both, so the longest block is both's.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import attrs
import msgspec
import structlog
import trio
import trio_websocket as ws

from llmgw.aside import aside
from llmgw.node.fabric import Scanner
from llmgw.plane.fabric import Fabrics
from llmgw.plane.fabrics import verdict
from llmgw.plane.fleet import Fleet
from llmgw.plane.store.sqlite import SqliteStore
from llmgw.process import prepare
from llmgw.rdma import fabric
from llmgw.wire.agent import Listening, Register, Working
from llmgw.wire.codec import decode_value, encode
from llmgw.wire.control import Request
from llmgw.wire.facts import NodeId, Port, PortManagers, SubnetManager
from llmgw.wire.stream import Joiner, WebSocketFrames, parts
from tests.rigs.ib.net import Net, fat_tree, host_guid

HOSTS, RADIX = 10_240, 64
R = TypeVar("R")
MASTER = "946dae0300000001"


def paper(net: Net) -> str:
    first = net.hosts[0]
    return f"#\n# Initiated from node {first.guid:x} port {first.guid + 1:x}\n\n{net.text()}"


def tools(directory: Path, text: str, errors: str) -> dict[str, str]:
    """Tools that print a file and leave: what they would take on a real fabric is their own."""
    directory.mkdir()
    (directory / "map").write_text(text)
    (directory / "errors").write_text(errors)
    for name, file in (("ibnetdiscover", "map"), ("ibqueryerrors", "errors")):
        script = directory / name
        script.write_text(
            '#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" = --cache ] && : > "$2"; shift; done\n'
            f"exec cat {directory / file}\n"
        )
        script.chmod(0o755)
    return {"PATH": f"{directory}:/usr/bin:/bin"}


@attrs.define
class Loop:
    """The longest turn of this loop in seconds: its own work, and by the wall, with what others took meanwhile."""

    longest: float = 0.0
    wall: float = 0.0

    async def watch(self) -> None:
        while True:
            wall, work = time.perf_counter(), time.thread_time()
            await trio.sleep(0.001)
            self.longest = max(self.longest, time.thread_time() - work)
            self.wall = max(self.wall, time.perf_counter() - wall - 0.001)

    def __str__(self) -> str:
        return f"{self.longest * 1e3:.1f} ms of work (10 ms are allowed), {self.wall * 1e3:.1f} ms by the wall"


@attrs.define
class WireHub:
    """A hub over a real WebSocket: the reply crosses it in parts."""

    scanner: Scanner
    there: WebSocketFrames
    here: WebSocketFrames
    transfer: float = 0.0
    looked: float = 0.0
    length: int = 0

    async def ask(self, node: NodeId, request: Request[R], *, within: float) -> R:
        began = time.perf_counter()
        answers: Any = self.scanner.answers
        reply = await answers[type(request)](request, _nobody)
        self.looked = time.perf_counter() - began
        data = encode(reply)
        began, self.length = time.perf_counter(), len(data)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send, data)
            whole = await self._receive()
        self.transfer = time.perf_counter() - began
        found: R = decode_value(whole, type(reply))
        return found

    async def _send(self, data: bytes) -> None:
        for piece, last in parts(data):
            await self.there.send((b"1" if last else b"0") + piece)

    async def _receive(self) -> bytes:
        joiner = Joiner()
        while True:
            piece = await self.here.receive()
            if (whole := joiner.add(1, piece[1:], piece[:1] == b"1")) is not None:
                return whole


def _nobody(_: Working | Listening) -> None:
    """Nobody waits for longer here."""


@asynccontextmanager
async def wire() -> AsyncIterator[tuple[WebSocketFrames, WebSocketFrames]]:
    """Both ends of a WebSocket on loopback."""
    accepted = trio.Event()
    done = trio.Event()
    ends: list[WebSocketFrames] = []

    async def answer(request: ws.WebSocketRequest) -> None:
        connection = await request.accept()
        ends.append(WebSocketFrames(connection))
        accepted.set()
        await done.wait()

    async with trio.open_nursery() as nursery:
        server = await nursery.start(ws.serve_websocket, answer, "127.0.0.1", 0, None)
        async with ws.open_websocket(
            "127.0.0.1", server.port, "/", use_ssl=False, max_message_size=1 << 20
        ) as connection:
            await accepted.wait()
            yield WebSocketFrames(connection), ends[0]
            done.set()
        nursery.cancel_scope.cancel()


def registers() -> list[Register]:
    """One node for each host, with one adapter on this fabric."""
    seen = SubnetManager(guid=MASTER, lid=1, priority=14, state="master", activity=1)
    return [
        Register(
            node=NodeId(f"gpu-{host:05d}"),
            version="1",
            features=("fabric-scan",),
            ports=(
                Port(
                    device="mlx5_0", kind="ib", state="ACTIVE", node_guid=f"{host_guid(host, 0):016x}",
                    port_guid=f"{host_guid(host, 0) + 1:016x}", rail=0,
                ),
            ),
            managers=(PortManagers(device="mlx5_0", master=seen),),
        )
        for host in range(HOSTS)
    ]  # fmt: skip


async def measure() -> None:
    net = fat_tree(HOSTS, 1, radix=RADIX, plane=0)
    whole = paper(net)
    # The second map: a leaf's uplink cut, two cables swapped, one link at 1x.
    leaf, other = net.leaves[3], net.leaves[200]
    spine, port, _ = leaf.cables.pop(RADIX // 2 + 1)
    del spine.cables[port]
    (a, ap, _), (b, bp, _) = leaf.cables.pop(1), other.cables.pop(1)
    del a.cables[ap], b.cables[bp]
    net.cable(leaf, 1, b, bp, "4xHDR")
    net.cable(other, 1, a, ap, "4xHDR")
    changed = paper(net)
    text = "".join(
        f'Errors for 0x{box.guid:016x} "{box.name}"\n   GUID 0x{box.guid:016x} port 1: [PortXmitDiscards == 3]\n'
        for box in net.switches
    )
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        (directory / "changed").write_text(changed)
        environment = tools(directory / "bin", whole, text)
        first = registers()[0].ports
        scanner = Scanner(lambda: first, environment=environment)
        async with await SqliteStore.open(directory / "plane.db") as store, wire() as (there, here):
            fleet = Fleet(store)
            hub = WireHub(scanner, there, here)
            fabrics = Fabrics(fleet, hub, store, think=aside)
            for stream, one in enumerate(registers(), 1):
                fleet.attach(one.node, stream, "10.0.0.1:1")
                fleet.heard(one.node, stream, one)
            prepare()
            loop = Loop()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(loop.watch)
                began = time.perf_counter()
                await fabrics.look_at_managers()
                report("managers of 10,240 nodes taken in", time.perf_counter() - began, loop)
                await scan("first map", fabrics, hub, loop)
                (directory / "changed").rename(directory / "bin" / "map")
                await scan("second map, compared with the first", fabrics, hub, loop)
                nursery.cancel_scope.cancel()
            standing = fabrics.standing(MASTER)
            assert standing.seen is not None
            print(f"  {standing.seen.changes} changes, {len(standing.open)} faults, {len(whole) / 1e6:.1f} MB of text, "
                  f"{len(standing.newest) / 1e3:.0f} kB packed")  # fmt: skip
    inside(whole, changed)


async def scan(what: str, fabrics: Fabrics, hub: WireHub, loop: Loop) -> None:
    loop.longest = loop.wall = 0.0
    began = time.perf_counter()
    scan = await fabrics.scan(MASTER)
    took = time.perf_counter() - began
    assert not scan.error, scan.error
    print(f"{what}: {took:.2f} s beyond the tool's time (5 s are allowed)")
    plane = took - hub.looked - hub.transfer
    print(f"  on the node (read, judge, pack): {hub.looked:.2f} s; on the plane (verdict, store): {plane:.2f} s")
    print(f"  transfer: {hub.transfer * 1e3:.1f} ms, {hub.length / 1e3:.0f} kB")
    print(f"  longest block of the loop: {loop}")


def report(what: str, seconds: float, loop: Loop) -> None:
    print(f"{what}: {seconds * 1e3:.0f} ms, longest block of the loop: {loop}")


def inside(whole: str, changed: str) -> None:
    """The parts, in this process, without starting any."""
    from llmgw.rdma import netdiscover
    from llmgw.rdma.ran import Ran

    maps, times = [], []
    for text in (whole, changed):
        began = time.perf_counter()
        found = netdiscover.scan(Ran("ibnetdiscover", 0, text))
        assert isinstance(found, fabric.Map)
        times.append(time.perf_counter() - began)
        maps.append(found)
    began = time.perf_counter()
    packed = [fabric.pack(one) for one in maps]
    pack = (time.perf_counter() - began) / 2
    began = time.perf_counter()
    fabric.unpack(packed[0])
    unpack = time.perf_counter() - began
    began = time.perf_counter()
    verdict.judged(msgspec.msgpack.encode(verdict.Question(new=packed[1], base=packed[0], counted=packed[0])))
    judge = time.perf_counter() - began
    print(f"parts, in one process: parse {times[0]:.2f} s, pack {pack * 1e3:.0f} ms, unpack {unpack * 1e3:.0f} ms, "
          f"verdict (two maps unpacked and compared) {judge:.2f} s")  # fmt: skip


def main() -> None:
    structlog.configure(processors=[structlog.dev.ConsoleRenderer()], logger_factory=structlog.ReturnLoggerFactory())
    trio.run(measure)


if __name__ == "__main__":
    main()

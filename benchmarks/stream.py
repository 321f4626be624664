"""What one heartbeat costs the plane: our stream against grpc.aio and `websockets`, side by side in one run.

    python -m benchmarks.stream [--seconds 8] [--rate 1200] [--agents 40]

Every contender is a server process of its own under mutual TLS 1.3 with the same certificates, fed by one client
process with the same heartbeat (8 GPUs, 8 ports of 20 counters: 388 fields) at the same rate over the same number of
bidirectional streams. What is printed is the server's CPU time (user and system) per heartbeat, and ratios to ours.

`ours` is the real listener, stream, codec and fold into the World. `ours, not folded` stops after decoding, as the
others do: they hand a decoded message to a function that only counts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import trio

from llmgw import pki, tls
from llmgw.wire.agent import Heartbeat, Register
from llmgw.wire.codec import agent_codec, encode
from llmgw.wire.counters import Packer
from llmgw.wire.facts import GpuLoad, HostLoad, NodeId, Port, PortLoad

COUNTERS = (  # a port's legacy counters, and three of its hardware counters
    "port_xmit_data port_rcv_data port_xmit_packets port_rcv_packets symbol_error link_error_recovery link_downed "
    "port_rcv_errors port_rcv_remote_physical_errors port_rcv_switch_relay_errors port_xmit_discards "
    "port_xmit_constraint_errors port_rcv_constraint_errors local_link_integrity_errors "
    "excessive_buffer_overrun_errors VL15_dropped port_xmit_wait out_of_sequence packet_seq_err local_ack_timeout_err"
).split()


def gpu(n: int) -> GpuLoad:
    """One with every field filled that this benchmark's protobuf has, too."""
    return GpuLoad(f"GPU-{n:08d}-0000-0000-0000-000000000000", 70 << 30, 97, 61, 640.5, 0, 5, 16, 0, 0, 0, 0, 0)


def port_load(n: int) -> PortLoad:
    counters = {name: (n + 1) * 1_234_567_890 + at for at, name in enumerate(COUNTERS)}
    return PortLoad(f"mlx5_{n}", 1, "ACTIVE", "LinkUp", 400.0, 1, counters)


def heartbeat(full: bool = True) -> Heartbeat:
    """A busy node's heartbeat; with `full` false an idle node's."""
    load = HostLoad(12.5, 3.25, 1 << 40, 1.7e9)
    if not full:
        return Heartbeat(load=load)
    return Heartbeat(load=load, gpus=tuple(map(gpu, range(8))), ports=tuple(map(port_load, range(8))))


def register(n: int) -> Register:
    ports = tuple(Port(device=f"mlx5_{at}", kind="ib", state="ACTIVE", physical_state="LinkUp") for at in range(8))
    return Register(node=NodeId(f"node-{n}"), version="0.1.0", ports=ports)


# --- certificates ------------------------------------------------------------------------------------


def certificates(where: Path, agents: int) -> None:
    """A CA, the server's identity and one per agent."""
    now = time.time()
    ca = pki.make_ca("bench", now)
    (where / "ca.pem").write_text(ca.pem)
    for name, role, hosts in [
        ("server", pki.Role.PLANE, ["127.0.0.1", "localhost"]),
        *((f"node-{n}", pki.Role.NODE, []) for n in range(agents)),
    ]:
        key = pki.make_key()
        leaf = ca.issue(key.public_key(), name, role, now=now, life=86400, hosts=hosts)
        (where / f"{name}.pem").write_text(pki.key_to_pem(key) + pki.to_pem(leaf))


def server_side(where: Path) -> ssl.SSLContext:
    return tls.server_context(where / "ca.pem", where / "server.pem", clients=ssl.CERT_REQUIRED)


def client_side(where: Path, n: int) -> ssl.SSLContext:
    return tls.client_context(where / "ca.pem", where / f"node-{n}.pem")


# --- contenders: servers -----------------------------------------------------------------------------


async def serve_ours(where: Path, port: int, *, folded: bool) -> None:
    import logging

    import structlog

    from llmgw.cell import Cell
    from llmgw.plane.agents import Hub
    from llmgw.plane.fleet import Fleet
    from llmgw.plane.listen import Leading, Listener, Standby
    from llmgw.plane.store.memory import MemoryStore
    from llmgw.plane.world import Settings
    from llmgw.process import prepare
    from llmgw.wire.control import Renewed

    async def nobody_joins(frames: object, address: str) -> None:
        await trio.lowlevel.checkpoint()

    class Open:
        def refused(self, peer: tls.Peer) -> str:
            return ""

        async def renew(self, node: str, csr: str, presented: tls.Peer) -> Renewed:
            return Renewed(error="not here")

    class Counts(Fleet):
        def heard(self, node: NodeId, stream: int, message: Any) -> None:
            if isinstance(message, Register) or folded:
                super().heard(node, stream, message)

    # Silent: a heartbeat logs nothing, but this benchmark's agents come and go.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    fleet = Counts(MemoryStore(), settings=Settings())
    await fleet.load()
    hub = Hub(fleet)
    listener = Listener(
        hub=hub,
        fleet=fleet,
        certificates=Open(),
        join=nobody_joins,
        standing=Cell[Leading | Standby](Leading(1)),
        context=tls.ServerTls(where / "ca.pem", where / "server.pem").context,
    )
    prepare()
    await listener.serve(await trio.open_tcp_listeners(port, host="127.0.0.1"))


async def serve_websockets(where: Path, port: int) -> None:
    from websockets.asyncio.server import serve

    seen = 0

    async def stream(socket: Any) -> None:
        nonlocal seen
        async for data in socket:
            agent_codec.decode(data)
            seen += 1

    async with serve(stream, "127.0.0.1", port, ssl=server_side(where), compression=None, max_queue=16):
        await asyncio.Future()


def protobuf() -> Any:
    """The heartbeat's message class, described at run time so that no compiler is needed."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="beat.proto", package="b", syntax="proto3")
    kind = descriptor_pb2.FieldDescriptorProto

    def message(name: str, fields: list[tuple[str, int, str]]) -> None:
        made = file.message_type.add(name=name)
        for number, (field, type_, of) in enumerate(fields, 1):
            one = made.field.add(name=field, number=number, type=type_)
            one.label = kind.LABEL_REPEATED if of else kind.LABEL_OPTIONAL
            if of:
                one.type_name = f".b.{of}"

    numbers = [(f"n{at}", kind.TYPE_DOUBLE if at == 3 else kind.TYPE_INT64, "") for at in range(13)]
    message("Gpu", [("uuid", kind.TYPE_STRING, ""), *numbers])
    message("Counter", [("name", kind.TYPE_STRING, ""), ("value", kind.TYPE_INT64, "")])
    message(
        "Port",
        [
            ("device", kind.TYPE_STRING, ""),
            ("number", kind.TYPE_INT64, ""),
            ("state", kind.TYPE_STRING, ""),
            ("physical", kind.TYPE_STRING, ""),
            ("rate", kind.TYPE_DOUBLE, ""),
            ("sm_lid", kind.TYPE_INT64, ""),
            ("counters", kind.TYPE_MESSAGE, "Counter"),
        ],
    )
    message(
        "Beat",
        [("load", kind.TYPE_BYTES, ""), ("gpus", kind.TYPE_MESSAGE, "Gpu"), ("ports", kind.TYPE_MESSAGE, "Port")],
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("b.Beat"))


def protobuf_heartbeat() -> bytes:
    beat, source = protobuf()(), heartbeat()
    for load in source.gpus or ():
        values = (70 << 30, 97, 61, 640.5, 0, 5, 16, 0, 0, 0, 0, 0, 0)
        beat.gpus.add(uuid=load.uuid, **{f"n{at}": value for at, value in enumerate(values)})
    for port in source.ports or ():
        one = beat.ports.add(device=port.device, number=1, state="ACTIVE", physical="LinkUp", rate=400.0, sm_lid=1)
        for name, value in port.counters.items():
            one.counters.add(name=name, value=value)
    return bytes(beat.SerializeToString())


def _grpc_credentials(where: Path, name: str) -> tuple[bytes, bytes, bytes]:
    whole = (where / f"{name}.pem").read_text()
    cut = whole.index("-----BEGIN CERTIFICATE")
    return (where / "ca.pem").read_bytes(), whole[:cut].encode(), whole[cut:].encode()


async def serve_grpc(where: Path, port: int) -> None:
    import grpc.aio

    kind = protobuf()
    seen = 0

    async def stream(requests: Any, context: Any) -> Any:
        nonlocal seen
        async for _ in requests:
            seen += 1
            if seen < 0:
                yield b""

    handler = grpc.method_handlers_generic_handler(
        "b.Plane", {"Stream": grpc.stream_stream_rpc_method_handler(stream, kind.FromString, lambda value: value)}
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    ca, key, leaf = _grpc_credentials(where, "server")
    server.add_secure_port(f"127.0.0.1:{port}", grpc.ssl_server_credentials([(key, leaf)], ca, True))
    await server.start()
    await server.wait_for_termination()


SERVERS: dict[str, Callable[[Path, int], Any]] = {
    "ours": lambda where, port: trio.run(partial(serve_ours, where, port, folded=True)),
    "ours, not folded": lambda where, port: trio.run(partial(serve_ours, where, port, folded=False)),
    "websockets (asyncio)": lambda where, port: asyncio.run(serve_websockets(where, port)),
    "grpc.aio": lambda where, port: asyncio.run(serve_grpc(where, port)),
}


# --- the load: one client process ----------------------------------------------------------------------


async def paced(send: Callable[[], Awaitable[object]], every: float, until: float, offset: float) -> int:
    """Send on a fixed grid of times, so that a slow moment is caught up with; how many were sent."""
    sent, at = 0, time.perf_counter() + offset
    while at < until:
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        await send()
        sent, at = sent + 1, at + every
    return sent


async def load_websocket(where: Path, port: int, agents: int, rate: float, seconds: float, ours: bool) -> int:
    from websockets.asyncio.client import connect

    packer = Packer()
    first, data = encode(packer.pack(heartbeat())), encode(packer.pack(heartbeat()))
    sockets = []
    for n in range(agents):
        url = f"wss://127.0.0.1:{port}/agent"
        sockets.append(await connect(url, ssl=client_side(where, n), compression=None, ping_interval=None))
        if ours:
            await sockets[-1].send(encode(register(n)))
            await sockets[-1].send(first)

    async def drain(socket: Any) -> None:
        async for _ in socket:
            pass

    readers = [asyncio.create_task(drain(socket)) for socket in sockets] if ours else []
    return await _spread([lambda s=s: s.send(data) for s in sockets], rate, seconds, readers)  # type: ignore[misc]


async def load_grpc(where: Path, port: int, agents: int, rate: float, seconds: float) -> int:
    import grpc.aio

    data = protobuf_heartbeat()
    calls = []
    for n in range(agents):
        ca, key, leaf = _grpc_credentials(where, f"node-{n}")
        options = [("grpc.use_local_subchannel_pool", 1)]  # a connection each, as agents have
        credentials = grpc.ssl_channel_credentials(ca, key, leaf)
        channel = grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options)
        await channel.channel_ready()
        calls.append(channel.stream_stream("/b.Plane/Stream", lambda value: value, lambda value: value)())
    return await _spread([lambda c=c: c.write(data) for c in calls], rate, seconds, [])  # type: ignore[misc]


async def _spread(senders: list[Callable[[], Awaitable[object]]], rate: float, seconds: float, keep: list[Any]) -> int:
    print("go", flush=True)
    until, every = time.perf_counter() + seconds, len(senders) / rate
    tasks = [paced(send, every, until, every * n / len(senders)) for n, send in enumerate(senders)]
    sent = sum(await asyncio.gather(*tasks))
    del keep
    return sent


def load(name: str, where: Path, port: int, agents: int, rate: float, seconds: float) -> None:
    if name == "grpc.aio":
        sent = asyncio.run(load_grpc(where, port, agents, rate, seconds))
    else:
        sent = asyncio.run(load_websocket(where, port, agents, rate, seconds, name.startswith("ours")))
    print(f"sent {sent}", flush=True)
    os._exit(0)  # no polite closing: its cost is nobody's question


# --- the comparison ------------------------------------------------------------------------------------


def cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(name: str, where: Path, agents: int, rate: float, seconds: float) -> float:
    """Microseconds of the server's CPU per heartbeat."""
    port = _free_port()
    me = [sys.executable, "-m", "benchmarks.stream"]
    server = subprocess.Popen([*me, "serve", name, str(where), str(port)])
    try:
        _wait_for(port)
        client = subprocess.Popen(
            [*me, "load", name, str(where), str(port), str(agents), str(rate), str(seconds)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert client.stdout is not None
        if client.stdout.readline().strip() != "go":
            raise SystemExit(f"{name}: the load did not start")
        process = psutil.Process(server.pid)
        before = cpu(process)
        line = client.stdout.readline()
        spent = cpu(process) - before
        client.wait()
        sent = int(line.split()[1])
        return spent / sent * 1e6
    finally:
        server.kill()
        server.wait()


def _free_port() -> int:
    import socket

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def _wait_for(port: int) -> None:
    import socket

    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise SystemExit("the server did not start")


def main() -> None:
    if len(sys.argv) > 2 and sys.argv[1] == "serve":
        SERVERS[sys.argv[2]](Path(sys.argv[3]), int(sys.argv[4]))
        return
    if len(sys.argv) > 2 and sys.argv[1] == "load":
        name, directory, *numbers = sys.argv[2:8]
        load(name, Path(directory), int(numbers[0]), int(numbers[1]), float(numbers[2]), float(numbers[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rate", type=float, default=1000.0, help="heartbeats per second, all agents together")
    parser.add_argument("--agents", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    told = Packer()
    told.pack(heartbeat())
    print(
        f"heartbeat: {len(encode(told.pack(heartbeat())))} bytes here, {len(protobuf_heartbeat())} as protobuf; "
        f"an idle node's: {len(encode(heartbeat(full=False)))}"
    )
    with tempfile.TemporaryDirectory() as place:
        where = Path(place)
        certificates(where, options.agents)
        best: dict[str, float] = {}
        for _ in range(options.rounds):  # interleaved, so that a noisy moment does not hit one contender alone
            for name in SERVERS:
                took = measure(name, where, options.agents, options.rate, options.seconds)
                best[name] = min(took, best.get(name, took))
    print(f"{'server CPU per heartbeat':28} {'us':>7} {'ratio':>6}")
    for name, took in best.items():
        print(f"{name:28} {took:7.0f} {took / best['ours']:6.2f}")


if __name__ == "__main__":
    main()

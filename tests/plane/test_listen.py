"""Who may open a stream, over real TLS on loopback: each refusal with the words that the agent logs (A1-A6, C1)."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import attrs
import pytest
import structlog
import trio
from msgspec import structs

from llmgw import pki, tls
from llmgw.cell import Cell
from llmgw.node.link import Address, CannotDial, dial
from llmgw.plane.agents import Hub
from llmgw.plane.listen import HANDSHAKE_WITHIN, HANDSHAKES, MESSAGE_BYTES, Leading, Listener, Standby
from llmgw.plane.stream import Timing
from llmgw.wire.agent import Heartbeat, Register, ShardStatus
from llmgw.wire.codec import Unknown, control_codec, encode
from llmgw.wire.control import ControlMessage, Goodbye, Provision, Registered, Renewed, StopShard
from llmgw.wire.facts import NodeId, ShardId
from llmgw.wire.stream import Closed, Frames

pytestmark = pytest.mark.real


class Fleet:
    """Greets and remembers; what it decides is other tests' business."""

    def __init__(self) -> None:
        self.registered: list[NodeId] = []
        self.detached: list[NodeId] = []

    def attach(self, node: NodeId, stream: int, address: str) -> None:
        pass

    def detach(self, node: NodeId, stream: int) -> None:
        self.detached.append(node)

    def heard(self, node: NodeId, stream: int, message: Register | Heartbeat | ShardStatus) -> None:
        if isinstance(message, Register):
            self.registered.append(node)

    def greeting(self, node: NodeId) -> tuple[ControlMessage, ...]:
        return Provision(), StopShard(shard=ShardId("stray"), generation=3, why="nothing claims it")


class Certificates:
    def __init__(self) -> None:
        self.revoked: set[str] = set()

    def refused(self, peer: tls.Peer) -> str:
        return f"the certificate of {peer.name} was revoked" if peer.name in self.revoked else ""

    async def renew(self, node: str, csr: str, presented: tls.Peer) -> Renewed:
        await trio.lowlevel.checkpoint()
        return Renewed(certificate=f"{node}:{presented.name}")


@attrs.define
class Plane:
    """A listener on loopback with a CA of its own."""

    directory: Path
    ca: pki.Authority
    fleet: Fleet = attrs.field(factory=Fleet)
    certificates: Certificates = attrs.field(factory=Certificates)
    standing: Cell[Leading | Standby] = attrs.field(factory=lambda: Cell[Leading | Standby](Leading(7)))
    address: Address = Address("127.0.0.1", 0, True)
    listener: Listener | None = None
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    def identity(self, name: str, role: pki.Role = pki.Role.NODE, *, ca: pki.Authority | None = None) -> Path:
        key = pki.make_key()
        leaf = (ca or self.ca).issue(
            key.public_key(),
            name,
            role,
            now=time.time(),
            life=3600,
            hosts=["127.0.0.1", "::1"] if role is pki.Role.PLANE else [],
        )
        path = self.directory / f"{name}-{leaf.serial_number:x}.pem"
        path.write_text(pki.key_to_pem(key) + pki.to_pem(leaf))
        return path

    def context(self, identity: Path | None) -> ssl.SSLContext:
        return tls.client_context(self.directory / "ca.pem", identity)


@asynccontextmanager
async def running(directory: Path, timing: Timing | None = None, host: str = "127.0.0.1") -> AsyncIterator[Plane]:
    plane = Plane(directory, pki.make_ca("test", time.time()))
    (directory / "ca.pem").write_text(plane.ca.pem)
    context = tls.ServerTls(directory / "ca.pem", plane.identity("plane", pki.Role.PLANE)).context

    async def join(frames: Frames, address: str) -> None:
        await frames.send(b"joined")

    plane.listener = listener = Listener(
        hub=Hub(plane.fleet),
        fleet=plane.fleet,
        certificates=plane.certificates,
        join=join,
        standing=plane.standing,
        context=context,
        timing=timing or Timing(),
    )
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host=host)
        plane.address = Address(host, listeners[0].socket.getsockname()[1], True)
        plane.scope = nursery.cancel_scope
        await nursery.start(listener.serve, listeners)
        yield plane
        nursery.cancel_scope.cancel()


def register(name: str = "n1") -> Register:
    return Register(node=NodeId(name), version="0.1.0")


async def hear(frames: Frames) -> ControlMessage:
    message = control_codec.decode(await frames.receive())
    assert not isinstance(message, Unknown)
    return message


async def refusal(plane: Plane, identity: Path | None, first: Register | None) -> tuple[Goodbye, Closed]:
    """What an agent hears that is not let in: the last frame, and the close reason."""
    async with dial(plane.address, plane.context(identity)) as frames:
        if first is not None:
            with suppress(Closed):  # it may have said why, and closed, before it reads anything
                await frames.send(encode(first))
        goodbye = await hear(frames)
        assert isinstance(goodbye, Goodbye)
        with pytest.raises(Closed) as closed:
            await frames.receive()
        return goodbye, closed.value
    raise AssertionError


async def test_an_agent_with_its_certificate_is_greeted_in_order(tmp_path: Path) -> None:
    async with running(tmp_path) as plane, dial(plane.address, plane.context(plane.identity("n1"))) as frames:
        await frames.send(encode(register()))
        registered = await hear(frames)
        assert isinstance(registered, Registered)
        assert registered.epoch == 7
        assert isinstance(await hear(frames), Provision)
        assert isinstance(await hear(frames), StopShard)
        assert plane.fleet.registered == ["n1"]


Case = Callable[[Plane], tuple[Path | None, Register | None]]


def revoked(plane: Plane) -> tuple[Path, Register]:
    plane.certificates.revoked.add("n1")
    return plane.identity("n1"), register()


def standby(plane: Plane) -> tuple[Path, None]:
    plane.standing.set(Standby("wss://other:7443"))
    return plane.identity("n1"), None


@pytest.mark.parametrize(
    ("case", "code", "close", "words"),
    [
        (lambda plane: (None, register()), "identity", 4003, "no certificate was presented: join first"),
        (
            lambda plane: (plane.identity("n2"), register("n1")),
            "identity",
            4003,
            "says 'n2' and the Register says 'n1'",
        ),
        (lambda plane: (plane.identity("boss", pki.Role.ADMIN), register("boss")), "identity", 4003, "is for a admin"),
        (revoked, "revoked", 4004, "the certificate of n1 was revoked"),
        (standby, "not-leader", 4001, "this plane stands by; the leader is wss://other:7443"),
        (lambda plane: (plane.identity("n1"), register("")), "identity", 4003, "no usable node id"),
        (
            lambda plane: (plane.identity("n1"), structs.replace(register(), epoch=9)),
            "not-leader",
            4001,
            "n1 has obeyed epoch 9; this plane has 7: another one leads",
        ),
    ],
)
async def test_each_refusal_says_why(tmp_path: Path, case: Case, code: str, close: int, words: str) -> None:
    async with running(tmp_path) as plane:
        identity, first = case(plane)
        goodbye, closed = await refusal(plane, identity, first)
        assert goodbye.code == code
        assert words in goodbye.reason
        assert closed.code == close
        assert words in goodbye.reason[:123] or closed.reason in goodbye.reason
        assert plane.fleet.registered == []


async def test_what_is_taken_away_while_the_register_is_awaited_counts(tmp_path: Path) -> None:
    async with running(tmp_path) as plane:
        identity = plane.identity("n1")
        for take_away, code in ((revoked, "revoked"), (standby, "not-leader")):
            plane.certificates.revoked.clear()
            async with dial(plane.address, plane.context(identity)) as frames:
                take_away(plane)
                await frames.send(encode(register()))
                goodbye = await hear(frames)
                assert isinstance(goodbye, Goodbye)
                assert goodbye.code == code
        assert plane.fleet.registered == []


async def test_connections_that_say_nothing_keep_no_agent_waiting(tmp_path: Path) -> None:
    async with running(tmp_path) as plane, AsyncExitStack() as idle:
        for _ in range(HANDSHAKES + 10):
            await idle.enter_async_context(await trio.open_tcp_stream("127.0.0.1", plane.address.port))
        with trio.fail_after(HANDSHAKE_WITHIN - 2):  # then those that say nothing are given up
            async with dial(plane.address, plane.context(plane.identity("n1"))) as frames:
                await frames.send(encode(register()))
                assert isinstance(await hear(frames), Registered)


async def test_silence_instead_of_a_register_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path, Timing(register_within=0.2)) as plane:
        goodbye, _ = await refusal(plane, plane.identity("n1"), None)
        assert goodbye.reason == "no Register within 0.2 s"


async def test_a_certificate_of_another_ca_is_refused_by_tls_in_words(tmp_path: Path) -> None:
    async with running(tmp_path) as plane:
        foreign = plane.identity("n1", ca=pki.make_ca("other", time.time()))
        with pytest.raises(CannotDial, match="does not know our certificate's CA"):
            async with dial(plane.address, plane.context(foreign)):
                raise AssertionError("a stranger got in")


async def test_a_plane_of_another_ca_is_not_talked_to(tmp_path: Path) -> None:
    async with running(tmp_path) as plane:
        other = pki.make_ca("other", time.time())
        (tmp_path / "other.pem").write_text(other.pem)
        with pytest.raises(CannotDial, match="not signed by this fleet's CA"):
            async with dial(plane.address, tls.client_context(tmp_path / "other.pem")):
                raise AssertionError("that is another plane")


async def test_an_older_tls_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as plane:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(tmp_path / "ca.pem")
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(CannotDial):
            async with dial(plane.address, context):
                raise AssertionError("TLS 1.2 was taken")


async def test_a_path_that_is_not_served_says_so(tmp_path: Path) -> None:
    async with running(tmp_path) as plane, dial(plane.address, plane.context(plane.identity("n1")), "/x") as frames:
        goodbye = await hear(frames)
        assert isinstance(goodbye, Goodbye)
        assert "nothing is served at '/x'" in goodbye.reason


async def test_a_join_needs_no_certificate(tmp_path: Path) -> None:
    async with running(tmp_path) as plane, dial(plane.address, plane.context(None), "/join") as frames:
        assert await frames.receive() == b"joined"


async def test_a_strangers_long_message_closes_the_stream(tmp_path: Path) -> None:
    async with running(tmp_path) as plane, dial(plane.address, plane.context(None), "/agent") as frames:
        goodbye = await hear(frames)
        assert isinstance(goodbye, Goodbye)
        with pytest.raises(Closed):
            await frames.receive()


async def test_a_message_past_the_limit_closes_with_a_reason(tmp_path: Path) -> None:
    async with running(tmp_path) as plane, dial(plane.address, plane.context(plane.identity("n1"))) as frames:
        await frames.send(encode(register()))
        for _ in range(3):
            await hear(frames)
        await frames.send(b"x" * (MESSAGE_BYTES + 1))
        with pytest.raises(Closed) as closed:
            await frames.receive()
        assert closed.value.code == 1009


async def test_a_plane_that_stops_has_parted_from_its_agents_when_each_was_told(tmp_path: Path) -> None:
    async with running(tmp_path) as plane, AsyncExitStack() as stack:
        assert plane.listener is not None
        agents = []
        for number in range(5):
            name = f"n{number}"
            frames = await stack.enter_async_context(dial(plane.address, plane.context(plane.identity(name))))
            await frames.send(encode(register(name)))
            assert isinstance(await hear(frames), Registered)
            agents.append(frames)
        plane.listener.hub.disconnect_all("stopping", "the plane stops", retry_after=1.0)
        with trio.fail_after(30):
            await plane.listener.parted()
        # Nothing is to come any more: what the agents hear from here on lies in their sockets.
        plane.scope.cancel()
        with trio.CancelScope(shield=True), trio.fail_after(30):
            for frames in agents:
                said = [await hear(frames)]
                while not isinstance(said[-1], Goodbye):
                    said.append(await hear(frames))
                assert (said[-1].code, said[-1].retry_after) == ("stopping", 1.0)


async def test_a_health_check_that_only_connects_is_not_worth_a_warning(tmp_path: Path) -> None:
    async with running(tmp_path) as plane:
        with structlog.testing.capture_logs() as logged:
            async with await trio.open_tcp_stream(plane.address.host, plane.address.port) as stream:
                await stream.send_eof()
                assert await stream.receive_some() == b""
        assert logged == []


async def test_bytes_that_are_no_tls_hurt_nobody(tmp_path: Path) -> None:
    async with running(tmp_path) as plane:
        async with await trio.open_tcp_stream("127.0.0.1", plane.address.port) as stream:
            await stream.send_all(b"GET / HTTP/1.1\r\n\r\n" * 100)
            with trio.fail_after(30):
                try:
                    while await stream.receive_some():
                        pass
                except trio.BrokenResourceError:
                    pass
        async with dial(plane.address, plane.context(plane.identity("n1"))) as frames:
            await frames.send(encode(register()))
            assert isinstance(await hear(frames), Registered)


async def test_a_certificate_is_renewed_for_the_name_it_was_presented_with(tmp_path: Path) -> None:
    from llmgw.wire.agent import Renew

    async with running(tmp_path) as plane, dial(plane.address, plane.context(plane.identity("n1"))) as frames:
        await frames.send(encode(register()))
        for _ in range(3):
            await hear(frames)
        await frames.send(encode(Renew(csr="csr")))
        assert await hear(frames) == Renewed(certificate="n1:n1")


async def test_a_newer_stream_of_one_node_displaces_the_older_with_words(tmp_path: Path) -> None:
    async with running(tmp_path) as plane:
        context = plane.context(plane.identity("n1"))
        async with dial(plane.address, context) as first, dial(plane.address, context) as second:
            await first.send(encode(register()))
            for _ in range(3):
                await hear(first)
            await second.send(encode(register()))
            assert isinstance(await hear(second), Registered)
            goodbye = await hear(first)
            assert isinstance(goodbye, Goodbye)
            assert goodbye.code == "superseded"
            assert goodbye.retry_after > 0
            assert plane.fleet.detached == []


#: What a proxy's patience is counted in.
MOMENTS = 15


async def idling_out(stream: trio.SocketStream, port: int, patience: float) -> None:
    """A proxy that ends a connection in which one direction was still for so long, as load balancers do.

    It counts moments, since a process that the machine lets wait is not one in which nothing was said. An end that
    resets its connection ends the other one as well: whoever closes with something unread does so.
    """
    async with stream, await trio.open_tcp_stream("127.0.0.1", port) as behind, trio.open_nursery() as nursery:

        async def pass_on(source: trio.SocketStream, sink: trio.SocketStream) -> None:
            still = 0
            with suppress(trio.BrokenResourceError):
                while still < MOMENTS:
                    with trio.move_on_after(patience / MOMENTS) as moment:
                        data = await source.receive_some()
                    still = still + 1 if moment.cancelled_caught else 0
                    if not still:
                        if not data:
                            break
                        await sink.send_all(data)
            nursery.cancel_scope.cancel()

        nursery.start_soon(pass_on, stream, behind)
        nursery.start_soon(pass_on, behind, stream)


async def test_an_idle_stream_is_never_still_in_either_direction_so_no_proxy_ends_it(tmp_path: Path) -> None:
    shipped, quick = Timing(), Timing(ping_every=0.5)
    assert shipped.ping_every <= 15, "proxies idle out after 30 s or more"
    async with running(tmp_path, quick) as plane, trio.open_nursery() as nursery:
        proxy = partial(idling_out, port=plane.address.port, patience=30 * quick.ping_every / shipped.ping_every)
        listeners = await nursery.start(partial(trio.serve_tcp, proxy, 0, host="127.0.0.1"))
        through = Address("127.0.0.1", listeners[0].socket.getsockname()[1], True)
        async with dial(through, plane.context(plane.identity("n1"))) as frames:
            await frames.send(encode(register()))
            for _ in range(3):
                await hear(frames)
            with trio.move_on_after(2 * 30 * quick.ping_every / shipped.ping_every) as quiet:
                await frames.receive()
            assert quiet.cancelled_caught
        nursery.cancel_scope.cancel()


async def test_an_agent_reaches_a_plane_by_its_ipv6_address(tmp_path: Path) -> None:
    async with running(tmp_path, host="::1") as plane:
        assert str(plane.address).startswith("wss://[::1]:")
        async with dial(plane.address, plane.context(plane.identity("n1"))) as frames:
            await frames.send(encode(register()))
            assert isinstance(await hear(frames), Registered)


async def test_connections_that_come_to_nothing_leave_no_descriptor_on_either_side(tmp_path: Path) -> None:
    def open_now() -> int:
        return len(os.listdir("/proc/self/fd"))

    async with running(tmp_path) as plane:
        stranger = plane.identity("n1", ca=pki.make_ca("other", time.time()))

        async def go_wrong() -> None:
            with pytest.raises((CannotDial, Closed)):
                async with dial(plane.address, plane.context(stranger)) as frames:
                    await frames.receive()
            async with dial(plane.address, plane.context(None)) as frames:
                assert isinstance(await hear(frames), Goodbye)
            async with await trio.open_tcp_stream("127.0.0.1", plane.address.port) as raw:
                await raw.send_all(b"\x16\x03\x01garbage")

        await go_wrong()
        before = open_now()
        for _ in range(10):
            await go_wrong()
        with trio.fail_after(HANDSHAKE_WITHIN - 2):
            while open_now() > before + 1:  # noqa: ASYNC110  # nothing tells of a close in the kernel
                await trio.sleep(0.02)

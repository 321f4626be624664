"""The agents' listener: who may open a stream, and what happens to the rest (A1-A6).

TLS is ours to do: the web servers never show a client's certificate, and the certificate decides who a node is.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import attrs
import structlog
import trio

from llmgw import __version__
from llmgw.cell import Cell
from llmgw.plane.agents import Attachments, Hub
from llmgw.plane.first import first_register
from llmgw.plane.goodbye import Ended, refusal, say_goodbye
from llmgw.plane.stream import AgentStream, Timing
from llmgw.plane.websocket import ServerFrames
from llmgw.tls import Peer, explain, peer_of
from llmgw.tlsstream import TlsStream
from llmgw.wire.agent import Register
from llmgw.wire.codec import MOST_BYTES_STRANGER
from llmgw.wire.control import ControlMessage, Registered, Renewed
from llmgw.wire.facts import NodeId
from llmgw.wire.stream import Closed, Frames

log = structlog.get_logger("llmgw.listen")

#: Longest single WebSocket message of a verified agent: longer frames come in parts (A13).
MESSAGE_BYTES = 1 << 20
#: Seconds for the peer to answer a close.
CLOSE_WITHIN = 2.0
#: Connections in TLS or WebSocket handshake at one time; further ones wait in the kernel's queue.
HANDSHAKES = 64
HANDSHAKE_WITHIN = 15.0


@attrs.frozen
class Leading:
    """This plane leads; `epoch` fences earlier leaders off."""

    epoch: int


@attrs.frozen
class Standby:
    """Another plane leads, at `leader` when that is known (A2)."""

    leader: str = ""


class Greeter(Attachments, Protocol):
    """The fleet, as the listener needs it."""

    def greeting(self, node: NodeId) -> tuple[ControlMessage, ...]:
        """What follows the acknowledgement of a Register, in order (A7)."""
        ...


class Certificates(Protocol):
    """Who may come, and who gets a new certificate."""

    def refused(self, peer: Peer) -> str:
        """Why this certificate's holder is refused: revoked or deleted; "" when it is welcome."""
        ...

    async def renew(self, node: str, csr: str, presented: Peer) -> Renewed: ...


Join = Callable[[Frames, str], Awaitable[None]]


@attrs.define
class Listener:
    """Accepts agents. `context` is None only in the insecure mode, which config allows on loopback alone (A1)."""

    hub: Hub
    fleet: Greeter
    certificates: Certificates
    join: Join
    standing: Cell[Leading | Standby]
    context: Callable[[], ssl.SSLContext] | None
    name: str = "plane"
    heartbeat: Callable[[], float] = lambda: 5.0
    timing: Timing = attrs.field(factory=Timing)
    _handshakes: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(HANDSHAKES))
    _carried: Cell[int] = attrs.field(factory=lambda: Cell(0))

    async def serve(
        self,
        listeners: Sequence[trio.SocketListener],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept until cancelled. Every connection is its own nursery's business and none can end another."""
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, self._connection, list(listeners))
            task_status.started()

    async def parted(self) -> None:
        """Wait until no agent is connected any more, and each has been told why."""
        async for carried in self._carried.values():
            if not carried:
                return

    async def _connection(self, socket: trio.SocketStream) -> None:
        address = _address(socket)
        try:
            await self._greet(socket, address)
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError, trio.TooSlowError, Closed):
            log.debug("connection ended during its handshake", address=address)
        except Exception:
            # The edge of one connection: its failure must not become the fleet's.
            log.exception("connection failed", address=address)
        finally:
            await trio.aclose_forcefully(socket)

    async def _greet(self, socket: trio.SocketStream, address: str) -> None:
        if self.context is None:
            await self._welcome(socket, None, address)
            return
        with trio.fail_after(HANDSHAKE_WITHIN):
            # Whoever connects and says nothing (a health check, a scanner) must not hold one of the places.
            await trio.lowlevel.wait_readable(socket.socket)
            if not await socket.socket.recv(1, trio.socket.MSG_PEEK):
                return  # it only looked whether somebody listens
        secure = TlsStream(socket, self.context(), server_side=True)
        try:
            async with self._handshakes:
                with trio.fail_after(HANDSHAKE_WITHIN):
                    await secure.do_handshake()
        except trio.BrokenResourceError as error:
            log.warning("TLS refused", address=address, error=explain(error, address))
            await secure.linger()
        else:
            await self._welcome(secure, peer_of(secure), address)
        finally:
            await trio.aclose_forcefully(secure)

    async def _welcome(self, stream: trio.abc.Stream, peer: Peer | None, address: str) -> None:
        limit = MESSAGE_BYTES if peer is not None or self.context is None else MOST_BYTES_STRANGER
        async with _websocket(stream, limit) as (path, frames):
            await self.carry(path, frames, peer, address)

    async def carry(self, path: str, frames: Frames, peer: Peer | None, address: str) -> None:
        """One peer's frames from the first to the last, whatever carries them. Who is refused is told why."""
        self._carried.set(self._carried.value + 1)
        try:
            if path == "/join":
                self._led()
                await self.join(frames, address)
            elif path == "/agent":
                await self._agent(frames, peer, address)
            else:
                raise refusal("protocol", f"nothing is served at {path!r} here; agents use /agent")
        except Ended as ended:
            # A plane that stops refuses nobody.
            say = log.info if ended.goodbye.code == "stopping" else log.warning
            say("stream ended by the plane", address=address, code=ended.goodbye.code, reason=str(ended))
            await say_goodbye(frames, ended.goodbye)
        except Closed as closed:
            log.info("agent went away", address=address, reason=str(closed))
        finally:
            self._carried.set(self._carried.value - 1)

    def _led(self) -> int:
        standing = self.standing.value
        if isinstance(standing, Standby):
            where = f"; the leader is {standing.leader}" if standing.leader else ""
            raise refusal("not-leader", f"this plane stands by{where}", leader=standing.leader, retry_after=1.0)
        return standing.epoch

    async def _agent(self, frames: Frames, peer: Peer | None, address: str) -> None:
        self._led()
        self._verified(peer)
        register = await first_register(frames, self.timing.register_within)
        # Again: leadership and a certificate may both have been taken away while the Register was awaited.
        epoch = self._led()
        self._verified(peer)
        if peer is not None and peer.name != register.node:
            log.warning("identity mismatch", certificate=peer.name, register=register.node, address=address)
            raise refusal(
                "identity",
                f"the certificate says {peer.name!r} and the Register says {register.node!r}",
                retry_after=30,
            )
        if register.epoch > epoch:
            raise refusal(
                "not-leader",
                f"{register.node} has obeyed epoch {register.epoch}; this plane has {epoch}: "
                "another one leads, or its state was restored from a backup (then run `llmgw-plane restored`)",
                retry_after=30,
            )
        await self._stream(frames, register, peer, address, epoch)

    def _verified(self, peer: Peer | None) -> None:
        if self.context is None:
            return
        if peer is None:
            raise refusal("identity", "no certificate was presented: join first (`llmgw-node join`)", retry_after=30)
        if peer.role != "node":
            raise refusal("identity", f"the certificate of {peer.name!r} is for a {peer.role}, not for a node")
        if why := self.certificates.refused(peer):
            raise refusal("revoked", why, retry_after=60)

    async def _stream(self, frames: Frames, register: Register, peer: Peer | None, address: str, epoch: int) -> None:
        stream = AgentStream(frames, register, number=self.hub.number(), address=address, timing=self.timing)

        async def renew(csr: str) -> Renewed:
            if peer is None:
                return Renewed(error="this plane runs without certificates")
            return await self.certificates.renew(register.node, csr, peer)

        with self.hub.attached(stream):
            # In this order (A7): the acknowledgement, what to install, what to stop.
            stream.greet(Registered(plane=self.name, version=__version__, epoch=epoch, heartbeat=self.heartbeat()))
            self.fleet.heard(stream.node, stream.number, register)
            stream.greet(*self.fleet.greeting(stream.node))
            log.info("agent registered", node=stream.node, address=address, version=stream.version)
            goodbye = await stream.run(self.fleet, renew)
        if goodbye is not None:
            raise Ended(goodbye)


@asynccontextmanager
async def _websocket(stream: trio.abc.Stream, limit: int) -> AsyncIterator[tuple[str, Frames]]:
    """The WebSocket's path and its frames, closed when the block ends."""
    frames = ServerFrames(stream, limit)
    with trio.fail_after(HANDSHAKE_WITHIN):
        await frames.accept()
    try:
        yield frames.path, frames
    finally:
        with trio.move_on_after(CLOSE_WITHIN, shield=True):
            await frames.aclose()


def _address(socket: trio.SocketStream) -> str:
    try:
        name = socket.socket.getpeername()
    except OSError:
        return "an address that is gone already"
    return str(name[0]) if isinstance(name, tuple) else "a local socket"


async def listen(host: str, port: int, backlog: int = 1024) -> list[trio.SocketListener]:
    """Listeners on an address. Raises OSError; the caller says for what it was."""
    return await trio.open_tcp_listeners(port, host=host or None, backlog=backlog)

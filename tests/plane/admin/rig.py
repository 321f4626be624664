"""A real admin server on loopback TLS, over a fleet that the test writes, with one agent that it plays."""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import httpx
import msgspec
import trio

from llmgw.plane.admin.app import Admin
from llmgw.plane.admin.seams import Traffic
from llmgw.plane.admin.serve import serve_admin
from llmgw.plane.agents import Hub
from llmgw.plane.bearers import Bearers
from llmgw.plane.certs import Authority
from llmgw.plane.fleet import Fleet
from llmgw.plane.init import init
from llmgw.plane.own import ADMIN, ADMIN_TOKEN, CA, SERVER, load_ca
from llmgw.plane.store.memory import MemoryStore
from llmgw.plane.stream import AgentStream
from llmgw.plane.tokens import Tokens
from llmgw.plane.world import World
from llmgw.tls import ServerTls, client_context
from llmgw.wire.agent import Heartbeat, Register, Reply, RequestFailed, ShardStatus
from llmgw.wire.codec import Unknown, control_codec, encode
from llmgw.wire.control import (
    DoctorReply,
    DoctorRequest,
    FetchWeights,
    Finding,
    LogSource,
    LogsReply,
    LogsRequest,
    Renewed,
    Withdraw,
)
from llmgw.wire.facts import NodeId
from llmgw.wire.stream import Closed
from tests.fakes.frames import MemoryFrames, pair
from tests.plane.admin.sample import NOW, world
from tests.ports import free_ports


@attrs.define(slots=False)
class Agent:
    """node-a's agent. Logs of "slow" are answered only when nobody waits any more: never."""

    frames: MemoryFrames
    asked: dict[int, object] = attrs.field(factory=dict)
    hanging: trio.Event = attrs.field(factory=trio.Event)
    withdrawn: trio.Event = attrs.field(factory=trio.Event)

    def __attrs_post_init__(self) -> None:
        self.fetches, self.fetched = trio.open_memory_channel[FetchWeights](10)

    async def run(self) -> None:
        while True:
            try:
                frame = control_codec.decode(await self.frames.receive())
            except Closed:
                return
            match frame:
                case LogsRequest(source="slow"):
                    self.hanging.set()
                case LogsRequest(source="broken"):
                    await self._say(
                        RequestFailed(request_id=frame.request_id, error="there is no source 'broken'", code="failed")
                    )
                case LogsRequest(source="none"):
                    await self._say(
                        RequestFailed(request_id=frame.request_id, error="no log of none", code="not-found")
                    )
                case LogsRequest():
                    reply = LogsReply(
                        lines=() if frame.after else ("first line", "second \x1b[31mline"),
                        sources=(LogSource(name="agent", bytes=10), LogSource(name="tiny-0-0", runs=("1", "2"))),
                        source=frame.source,
                        cursor="c1",
                    )
                    await self._reply(frame.request_id, reply)
                case DoctorRequest(only=("none",)):
                    await self._say(
                        RequestFailed(request_id=frame.request_id, error="there is no check", code="bad-input")
                    )
                case DoctorRequest():
                    found = (
                        Finding(check="memlock", outcome="pass", text="unlimited"),
                        Finding(check="clock", outcome="warn", text="3 s ahead", remedy="start chrony"),
                    )
                    await self._reply(frame.request_id, DoctorReply(findings=found, seconds=0.5))
                case Withdraw():
                    self.withdrawn.set()
                case FetchWeights():
                    await self.fetches.send(frame)
                case Unknown() | _:
                    continue

    async def _reply(self, request_id: int, value: msgspec.Struct) -> None:
        await self._say(Reply(request_id=request_id, value=msgspec.Raw(encode(value))))

    async def _say(self, frame: msgspec.Struct) -> None:
        await self.frames.send(encode(frame))


class Ear:
    """Hears nothing: the world is what the test wrote."""

    def attach(self, node: NodeId, stream: int, address: str) -> None: ...
    def detach(self, node: NodeId, stream: int) -> None: ...
    def heard(self, node: NodeId, stream: int, message: Register | Heartbeat | ShardStatus) -> None: ...


@attrs.frozen
class Rig:
    """A served admin API."""

    admin: Admin
    fleet: Fleet
    hub: Hub
    agent: Agent
    directory: Path
    port: int
    carried: trio.Event  # the agent's stream has ended
    store: MemoryStore  # the fleet's

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def token(self) -> str:
        return (self.directory / ADMIN_TOKEN).read_text().strip()

    @property
    def bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def tls(self, identity: Path | None = None) -> ssl.SSLContext:
        return client_context(self.directory / CA, identity)

    @asynccontextmanager
    async def client(self, *, token: bool = True, identity: Path | None = None) -> AsyncIterator[httpx.AsyncClient]:
        headers = self.bearer if token else {}
        async with httpx.AsyncClient(
            base_url=self.url, verify=self.tls(identity), headers=headers, trust_env=False, timeout=120
        ) as http:
            yield http

    @property
    def admin_identity(self) -> Path:
        return self.directory / ADMIN


@asynccontextmanager
async def served(
    directory: Path, shown: World | None = None, features: tuple[str, ...] = ("doctor",)
) -> AsyncIterator[Rig]:
    """The admin server while the block runs; node-a's agent has these features."""
    init(directory)
    authority = Authority(load_ca(directory), MemoryStore())
    await authority.load()
    started = trio.current_time()

    def clock() -> float:
        return NOW + trio.current_time() - started

    store = MemoryStore()
    fleet = Fleet(store, clock=clock)
    await fleet.load()
    fleet.world.set(shown or world())
    fleet.events.add("node-registered", "node:node-a", "node-a registered from 127.0.0.1", clock=time.time())
    hub = Hub(Ear())
    ours, theirs = pair()
    agent = Agent(theirs)
    stream = AgentStream(
        ours, Register(node=NodeId("node-a"), version="0.1.0", features=features), number=1, address="127.0.0.1"
    )
    admin = Admin(
        fleet=fleet,
        hub=hub,
        authority=authority,
        tokens=Tokens(MemoryStore(), authority.fingerprint),
        administrator=Bearers.load(directory / ADMIN_TOKEN),
        traffic=lambda: Traffic({"tiny-0": 3}, {"requests": 12}),
        name="plane-1",
        clock=clock,
        since=NOW - 100,
    )
    (port,) = free_ports(1)  # a test may go on after the server is gone
    listeners = await trio.open_tcp_listeners(port, host="127.0.0.1")
    context = ServerTls(directory / CA, directory / SERVER).context
    config = directory / "plane.toml"
    config.write_text(config.read_text().replace('"127.0.0.1:7444"', f'"127.0.0.1:{port}"'))

    async def renew(csr: str) -> Renewed:
        return Renewed(error="not here")

    async with trio.open_nursery() as nursery:
        await nursery.start(serve_admin, admin, listeners, context)
        nursery.start_soon(agent.run)
        attached, carried = trio.Event(), trio.Event()

        async def carry() -> None:
            with hub.attached(stream):
                attached.set()
                await stream.run(Ear(), renew)
            carried.set()

        nursery.start_soon(carry)
        await attached.wait()
        yield Rig(admin, fleet, hub, agent, directory, port, carried, store)
        nursery.cancel_scope.cancel()

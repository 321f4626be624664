"""Engines that do exactly what a test says, byte by byte, and a client that sees exactly what it got."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Awaitable, Callable

import attrs
import h11
import trio

from llmgw.cell import Cell
from llmgw.plane.gateway.gateway import Gateway
from llmgw.plane.gateway.route import Endpoint, ModelRoute, ModelState, Routes
from llmgw.plane.gateway.serve import serve
from llmgw.plane.gateway.settings import GatewaySettings
from tests.ports import free_ports

OK = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 11\r\n\r\n{"ok":true}'
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def chat(model: str | None = "tiny", **fields: object) -> bytes:
    """A chat request as bytes."""
    body = json.dumps({**({"model": model} if model else {}), "messages": [], **fields}).encode()
    return post(body)


def post(body: bytes, *lines: bytes, path: bytes = b"/v1/chat/completions", kind: bytes = b"application/json") -> bytes:
    head = b"POST %b HTTP/1.1\r\nHost: gateway\r\nContent-Type: %b\r\nContent-Length: %d\r\n" % (path, kind, len(body))
    return head + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


def get(path: bytes, *lines: bytes) -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: gateway\r\n" % path + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


class HangUp(Exception):
    """A script ends its connection."""


@attrs.define
class Call:
    """One request as an engine got it, and the connection to answer on."""

    line: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    stream: trio.SocketStream
    number: int  # of the request on its connection, from 1

    def header(self, name: bytes) -> bytes | None:
        found = [value for key, value in self.headers if key.lower() == name]
        assert len(found) < 2, found
        return found[0] if found else None

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def hung_up(self) -> None:
        """Wait until the gateway closes this connection."""
        with contextlib.suppress(trio.BrokenResourceError):
            assert await self.stream.receive_some() == b""

    def reset(self) -> None:
        """End the connection as a killed process with unread data does."""
        self.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.stream.socket.close()
        raise HangUp


Script = Callable[[Call], Awaitable[None]]


async def fine(call: Call) -> None:
    await call.send(OK)


class Engine:
    """A server on loopback that answers each request by its script."""

    def __init__(self, script: Script = fine, *, replica: str = "tiny-0") -> None:
        self.script = script
        self.replica = replica
        self.calls: list[Call] = []
        self.connections = 0
        self.port = 0
        self.called = trio.Event()
        self._listeners: list[trio.SocketListener] = []
        self._scope = trio.CancelScope()

    def endpoint(self, **fields: object) -> Endpoint:
        return Endpoint(**{"replica": self.replica, "host": "127.0.0.1", "port": self.port, **fields})  # type: ignore[arg-type]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self._scope = trio.CancelScope()
        with self._scope:
            self._listeners = await trio.open_tcp_listeners(self.port, host="127.0.0.1")
            self.port = self._listeners[0].socket.getsockname()[1]
            task_status.started()
            await trio.serve_listeners(self._converse, self._listeners)

    def kill(self) -> None:
        """Everything at once, as a process dies."""
        self._scope.cancel()
        for listener in self._listeners:
            listener.socket.close()

    async def _converse(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        buffer, number = b"", 0
        try:
            async with stream:
                while True:
                    while b"\r\n\r\n" not in buffer:
                        data = await stream.receive_some()
                        if not data:
                            return
                        buffer += data
                    head, _, buffer = buffer.partition(b"\r\n\r\n")
                    line, *rest = head.split(b"\r\n")
                    pairs = [header.partition(b":")[::2] for header in rest]
                    headers = [(name, value.strip()) for name, value in pairs]
                    length = int({name.lower(): value for name, value in headers}.get(b"content-length", 0))
                    while len(buffer) < length:
                        data = await stream.receive_some()
                        if not data:
                            return
                        buffer += data
                    number += 1
                    call = Call(line, headers, buffer[:length], stream, number)
                    buffer = buffer[length:]
                    if line == b"GET /v1/models HTTP/1.1" and self.script is not fine:
                        await self.probed(call)
                        continue
                    self.calls.append(call)
                    self.called.set()
                    await self.script(call)
        except (HangUp, trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    async def probed(self, call: Call) -> None:
        """What a probe of the gateway gets."""
        await call.send(OK)


@attrs.frozen
class Answer:
    """A response as a client saw it. `whole`: it ended as HTTP says it must."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    whole: bool = True

    def header(self, name: bytes) -> bytes | None:
        found = [value for key, value in self.headers if key == name]
        assert len(found) < 2, found
        return found[0] if found else None

    @property
    def error(self) -> dict[str, str | None]:
        document = json.loads(self.body)
        assert set(document) == {"error"}
        assert set(document["error"]) == {"message", "type", "param", "code"}
        error: dict[str, str | None] = document["error"]
        return error


class Browser:
    """A client on one connection. What it gets is read by h11, which shares no code with the gateway."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.conn = h11.Connection(h11.CLIENT)

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def ask(self, data: bytes, method: bytes = b"POST") -> Answer:
        await self.send(data)
        return await self.answer(method)

    async def event(self) -> object:
        """The next thing that came."""
        while True:
            event = self.conn.next_event()
            if event is not h11.NEED_DATA:
                return event
            try:
                data = await self.stream.receive_some(64 << 10)
            except trio.BrokenResourceError:
                data = b""
            self.conn.receive_data(bytes(data))

    def expect(self, method: bytes = b"POST") -> None:
        """Tell h11 that a request was sent, which went out as bytes of the test's own making."""
        if self.conn.our_state is h11.DONE and self.conn.their_state is h11.DONE:
            self.conn.start_next_cycle()
        self.conn.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        self.conn.send(h11.EndOfMessage())

    async def head(self, method: bytes = b"POST") -> h11.Response:
        self.expect(method)
        while True:
            event = await self.event()
            if isinstance(event, h11.Response):
                return event
            assert isinstance(event, h11.InformationalResponse), event

    async def data(self) -> bytes:
        """The next piece of a body."""
        event = await self.event()
        assert isinstance(event, h11.Data), event
        return bytes(event.data)

    async def rest(self, response: h11.Response) -> Answer:
        body = b""
        whole = True
        while True:
            try:
                event = await self.event()
            except h11.RemoteProtocolError:
                whole = False
                break
            if isinstance(event, h11.EndOfMessage):
                break
            assert isinstance(event, h11.Data), event
            body += event.data
        return Answer(response.status_code, list(response.headers), body, whole)

    async def answer(self, method: bytes = b"POST") -> Answer:
        return await self.rest(await self.head(method))

    async def closed(self) -> None:
        """Wait until the gateway closes the connection."""
        with contextlib.suppress(trio.BrokenResourceError):
            while await self.stream.receive_some():
                pass

    def reset(self) -> None:
        """Go away as a killed program does."""
        assert isinstance(self.stream, trio.SocketStream)
        self.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.stream.socket.close()


class House:
    """A gateway on loopback with its engines, in the test's nursery."""

    def __init__(self, nursery: trio.Nursery, settings: GatewaySettings) -> None:
        self.nursery = nursery
        self.settings = settings
        self.routes: Cell[Routes] = Cell(Routes())
        self.stop = trio.Event()
        self.stopped = trio.Event()
        self.port = 0
        self.gateway: Gateway
        self._browsers: list[trio.SocketStream] = []

    async def start(self) -> None:
        (self.port,) = free_ports(1)  # a test may look whether anything listens there after a stop
        listeners = await trio.open_tcp_listeners(self.port, host="127.0.0.1")

        async def run(*, task_status: trio.TaskStatus[Gateway]) -> None:
            await serve(listeners, self.routes, self.settings, stop=self.stop, task_status=task_status)
            self.stopped.set()

        self.gateway = await self.nursery.start(run)

    async def engine(self, script: Script = fine, replica: str = "tiny-0", port: int = 0) -> Engine:
        """An engine that runs. It serves a model only once `serves` says so. When it dies its port stays unused."""
        engine = Engine(script, replica=replica)
        engine.port = port or free_ports(1)[0]
        await self.nursery.start(engine.run)
        return engine

    def serves(self, *engines: Engine, model: str = "tiny", **fields: object) -> None:
        self.route(model, ModelRoute(state=ModelState.READY, endpoints=tuple(e.endpoint(**fields) for e in engines)))

    def route(self, model: str, route: ModelRoute) -> None:
        self.routes.set(Routes(models={**self.routes.value.models, model: route}))

    async def browser(self) -> Browser:
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        self._browsers.append(stream)
        return Browser(stream)

    async def close(self) -> None:
        """Close what the test's clients left open; nothing of them may be left in the gateway."""
        for stream in self._browsers:
            stream.socket.close()
        gateway = self.gateway
        await until(lambda: not gateway.clients)
        assert (gateway.in_flight.own, gateway.body_bytes, gateway.metrics.held) == ({}, 0, {})

    async def ask(self, data: bytes, method: bytes = b"POST") -> Answer:
        """One request on a connection of its own."""
        browser = await self.browser()
        async with browser.stream:
            return await browser.ask(data, method)

    def counted(self, status: int, model: str = "tiny") -> int:
        return self.gateway.metrics.requests.get((model, status), 0)


async def until(true: Callable[[], bool], within: float = 30.0) -> None:
    """Wait for something that tells nobody: a count inside the gateway, a file."""
    with trio.fail_after(within):
        while not true():  # noqa: ASYNC110 - there is no event to wait for
            await trio.sleep(0.002)


Houses = Callable[..., Awaitable[House]]

"""The parts that benchmarks.gateway puts together: the stub of an engine, the client, and two of the proxies.

python -m benchmarks.gateway_parts engine PORT
python -m benchmarks.gateway_parts ours|metered|idle|uvicorn PORT ENGINE_PORT
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

#: What the client authenticates with; only LiteLLM asks for it, and wants it to look like a real one.
KEY = "sk-benchmark-5f1d7c0a9b3e48d6a2c47e9015b8f3d2"
MESSAGES = [{"role": "user", "content": "Say something about gateways, in about fifty words, please."}]
ANSWER = json.dumps(
    {
        "id": "chatcmpl-0123456789",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "tiny",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "word " * 50}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 20, "completion_tokens": 50, "total_tokens": 70},
    }
).encode()
EVENT = (
    b"data: "
    + json.dumps(
        {
            "id": "chatcmpl-0123456789",
            "object": "chat.completion.chunk",
            "created": 1700000000,
            "model": "tiny",
            "choices": [{"index": 0, "delta": {"content": "word "}, "finish_reason": None}],
        }
    ).encode()
    + b"\n\n"
)
#: Seconds between two events of one stream.
TICK = 0.01


# --- the engine


class Engine(asyncio.Protocol):
    """Answers at once, or with `max_tokens` events, one a tick."""

    def __init__(self) -> None:
        self.buffer = b""
        self.tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while True:
            head, end, rest = self.buffer.partition(b"\r\n\r\n")
            if not end:
                return
            mark = head.lower().find(b"content-length:")
            length = int(head[mark + 15 :].split(b"\r\n")[0]) if mark >= 0 else 0
            if len(rest) < length:
                return
            self.buffer = rest[length:]
            body = json.loads(rest[:length]) if length else {}
            if body.get("stream"):
                task = asyncio.get_running_loop().create_task(self.stream(int(body["max_tokens"])))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
            else:
                self.transport.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                    % (len(ANSWER), ANSWER)
                )

    async def stream(self, events: int) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        chunk = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
        for _ in range(events):
            await asyncio.sleep(TICK)
            self.transport.write(chunk)
        done = b"data: [DONE]\n\n"
        self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(done), done))


async def engine(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


# --- the client


def _request(**fields: object) -> bytes:
    body = json.dumps({"model": "tiny", "messages": MESSAGES, **fields}).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: benchmark\r\nuser-agent: benchmark/1\r\naccept: */*\r\n"
        b"authorization: Bearer %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (KEY.encode(), len(body), body)
    )


async def ask(port: int, requests: int, connections: int) -> list[float]:
    """Ask one after the other on each of the connections; the seconds that each request took."""
    request = _request()
    times: list[float] = []

    async def one(count: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(count):
            began = time.perf_counter()
            writer.write(request)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert head.startswith(b"http/1.1 200"), head
            mark = head.find(b"content-length:")
            if mark >= 0:
                await reader.readexactly(int(head[mark + 15 :].split(b"\r\n")[0]))
            else:
                await _chunks(reader)
            times.append(time.perf_counter() - began)
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*(one(requests // connections) for _ in range(connections)))
    return times


async def stream(port: int, streams: int, events: int) -> int:
    """Read so many streams of so many events at once; the events that came."""
    request = _request(stream=True, max_tokens=events)

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        body = await _chunks(reader)
        assert b"[DONE]" in body, body[-100:]
        writer.close()
        await writer.wait_closed()
        return body.count(b"data: ")

    return sum(await asyncio.gather(*(one() for _ in range(streams))))


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = []
    while True:
        size = int(await reader.readuntil(b"\r\n"), 16)
        body.append((await reader.readexactly(size + 2))[:-2])
        if not size:
            return b"".join(body)


# --- proxies


def ours(port: int, engine_port: int, *, metered: bool, idle: float) -> None:
    """`idle`: the model is one that is unloaded while nobody asks, so the plane is told of its requests."""
    import trio

    from llmgw.cell import Cell
    from llmgw.plane.gateway.demand import Demand, tell_demand
    from llmgw.plane.gateway.route import Endpoint, ModelRoute, ModelState, Routes
    from llmgw.plane.gateway.serve import serve
    from llmgw.plane.gateway.settings import GatewaySettings

    endpoint = Endpoint(replica="tiny-0", host="127.0.0.1", port=engine_port)
    routes = Cell(Routes(models={"tiny": ModelRoute(state=ModelState.READY, endpoints=(endpoint,), idle=idle)}))
    demand = Demand(routes)

    async def main() -> None:
        listeners = await trio.open_tcp_listeners(port, host="127.0.0.1")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tell_demand, demand, lambda models: None)
            await serve(listeners, routes, GatewaySettings(meter=metered), demand=demand)

    trio.run(main)


def uvicorn_httpx(port: int, engine_port: int) -> None:
    import httpx
    import uvicorn
    from starlette.applications import Starlette
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{engine_port}", timeout=60)

    async def relay(request: Request) -> Response:
        headers = {name: value for name, value in request.headers.items() if name not in ("host", "content-length")}
        ask = client.build_request(request.method, request.url.path, headers=headers, content=await request.body())
        answer = await client.send(ask, stream=True)
        kept = {name: value for name, value in answer.headers.items() if name != "transfer-encoding"}
        return StreamingResponse(answer.aiter_raw(), answer.status_code, kept)

    app = Starlette(routes=[Route("/{path:path}", relay, methods=["GET", "POST"])])
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="critical", access_log=False)


def main() -> None:
    part, port = sys.argv[1], int(sys.argv[2])
    if part == "engine":
        asyncio.run(engine(port))
    elif part == "uvicorn":
        uvicorn_httpx(port, int(sys.argv[3]))
    else:
        ours(port, int(sys.argv[3]), metered=part == "metered", idle=60.0 * (part == "idle"))


if __name__ == "__main__":
    main()

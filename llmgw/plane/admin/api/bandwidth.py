"""Bandwidth tests: started by a POST whose answer is the running test, line by line, and ended with its connection."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from types import TracebackType
from typing import TYPE_CHECKING

import trio
from msgspec import Struct
from quart import Blueprint, Response
from quart.wrappers.response import ResponseBody

from llmgw.errors import LlmgwError, NotFound, Unavailable
from llmgw.plane.admin.answers import answer, body, line
from llmgw.plane.bandwidth.desk import Desk, Work
from llmgw.plane.bandwidth.fleet import Order
from llmgw.rdma.results import Ended, History, Line, Parameters, matrix
from llmgw.wire.apicommon import ApiError

if TYPE_CHECKING:
    from llmgw.plane.admin.app import Admin

#: Lines that may wait for a client that reads slowly; a test never waits for its reader.
_WAITING = 100_000
#: A stream says nothing for at most so long: an empty line finds clients that are gone and keeps proxies awake.
_KEEPALIVE = 5.0


class PairOrder(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to test between two nodes. `when_idle`: seconds to wait for a window without requests (E8)."""

    a: str
    b: str
    parameters: Parameters = Parameters()
    force: bool = False
    when_idle: float | None = None


class FleetOrder(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to test over the fleet; see `Order`."""

    parameters: Parameters = Parameters()
    nodes: tuple[str, ...] = ()
    fabric: str = ""
    force: bool = False
    resume: bool = False
    search: bool = False


class Running(ResponseBody):
    """A test as a response's body: it begins when the body is read, and ends when nobody reads it any more (A10)."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._stack = AsyncExitStack()
        self._send, self._receive = trio.open_memory_channel[Line](_WAITING)

    async def __aenter__(self) -> AsyncIterator[bytes]:
        lines = await self._stack.enter_async_context(aclosing(self._lines()))
        nursery = await self._stack.enter_async_context(trio.open_nursery())
        nursery.start_soon(self._run)
        self._nursery = nursery
        return lines

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._nursery.cancel_scope.cancel()
        await self._stack.__aexit__(kind, error, trace)

    async def _run(self) -> None:
        with self._send:
            try:
                await self._work(self._send.send_nowait)
            except LlmgwError as error:
                said = ApiError(code=error.code, message=error.what, remedy=error.remedy)
                self._send.send_nowait(Ended(error=said))

    async def _lines(self) -> AsyncGenerator[bytes, None]:
        while True:
            found: Line | None = None
            with trio.move_on_after(_KEEPALIVE):
                try:
                    found = await self._receive.receive()
                except trio.EndOfChannel:
                    return
            yield line(found) if found is not None else b"\n"


def blueprint(admin: Admin) -> Blueprint:
    part = Blueprint("bandwidth", __name__)

    def desk() -> Desk:
        if admin.bandwidth is None:
            raise Unavailable("this plane runs no bandwidth tests")
        return admin.bandwidth

    def running(work: Work) -> Response:
        response = Response(Running(work), content_type="application/x-ndjson")
        response.timeout = None
        response.headers["X-Accel-Buffering"] = "no"
        return response

    @part.post("/fabric-test")
    async def pair() -> Response:
        order = await body(PairOrder)
        return running(desk().pair(order.a, order.b, order.parameters, force=order.force, when_idle=order.when_idle))

    @part.post("/fabric-test/all")
    async def fleet() -> Response:
        order = await body(FleetOrder)
        return running(
            desk().fleet(
                Order(
                    parameters=order.parameters,
                    nodes=order.nodes,
                    fabric=order.fabric,
                    force=order.force,
                    resume=order.resume,
                    search=order.search,
                )
            )
        )

    @part.get("/fabric-test")
    async def latest() -> Response:
        """Each pair's newest result, with all that is known of it."""
        return answer(History(results=await desk().latest()))

    @part.get("/fabric-test/matrix")
    async def squares() -> Response:
        """The same, in a line for each pair."""
        return answer(matrix(await desk().latest()))

    @part.get("/fabric-test/<a>/<b>")
    async def between(a: str, b: str) -> Response:
        found = await desk().between(a, b)
        if not found:
            raise NotFound(f"no bandwidth test of {a} and {b} is known", remedy=f"llmgw ctl fabric-test {a} {b}")
        return answer(History(results=found))

    return part

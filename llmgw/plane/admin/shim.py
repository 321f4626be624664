"""What stands between hypercorn and Quart so that connections end when they should.

Three things go wrong without it. Quart cancels a request when hypercorn says `http.disconnect`, which comes
inside the last send: `Connection: close` is cancelled half-way and never closes, so the last send is
shielded. A body that nobody reads to its end blocks hypercorn's reader for ever, so the answer lingers
until the body has been read past. And a WebSocket is nothing we serve.
"""

from __future__ import annotations

import trio
from hypercorn.typing import (
    ASGIFramework,
    ASGIReceiveCallable,
    ASGIReceiveEvent,
    ASGISendCallable,
    ASGISendEvent,
    HTTPScope,
    Scope,
)

from llmgw.plane.admin.connection import SEND_WITHIN, Caller

#: How long the rest of a refused body is read past, so that the client gets to read why.
LINGER = 10.0


class Shim:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIFramework) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        if scope["type"] == "http":
            await self._request(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000, "reason": "no WebSocket is served here"})

    async def _request(self, scope: HTTPScope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        caller: Caller = scope["state"]["caller"]
        heard_all = trio.Event()

        async def hear() -> ASGIReceiveEvent:
            event = await receive()
            if event["type"] != "http.request" or not event["more_body"]:
                heard_all.set()
            return event

        async def say(event: ASGISendEvent) -> None:
            if event["type"] == "http.response.body" and not event.get("more_body", False):
                with trio.move_on_after(LINGER):
                    await heard_all.wait()
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 2 * SEND_WITHIN) as bound:
                await send(event)
            if bound.cancelled_caught:
                caller.abort()

        await self._app(scope, hear, say)
        if not heard_all.is_set():
            caller.abort()

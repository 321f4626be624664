"""Asking an excluded replica whether it is alive (F3), so that no client's request has to find out."""

from __future__ import annotations

import trio

from llmgw.plane.gateway.link import Woken
from llmgw.plane.gateway.responses import BrokenResponse
from llmgw.plane.gateway.route import Endpoint
from llmgw.plane.gateway.upstream import Pool, Unreachable, place_of


async def alive(endpoint: Endpoint, pool: Pool, connect_within: float, within: float) -> bool:
    """Whether it answers GET /v1/models with anything but a server error.

    Every engine knows that path without working for it, and says 5xx there while it loads or after its
    workers died. A refusal (401, 404) comes from a server that lives.
    """
    authorization = f"authorization: Bearer {endpoint.api_key}\r\n" if endpoint.api_key else ""
    head = (
        f"GET {endpoint.prefix}/v1/models HTTP/1.1\r\nhost: {endpoint.authority}\r\n"
        f"{authorization}connection: close\r\n\r\n"
    )
    with trio.move_on_after(connect_within + within):
        try:
            with trio.fail_after(connect_within):
                upstream = await pool.connect(place_of(endpoint))
        except (Unreachable, trio.TooSlowError):
            return False
        try:
            upstream.responses.expect(False)
            await upstream.link.write(head.encode(), within)
            while not upstream.responses.head_done:
                data = await upstream.link.read()
                if not data:
                    return False
                upstream.responses.feed(data)
            return upstream.responses.status < 500
        except (OSError, BrokenResponse, Woken):
            return False
        finally:
            upstream.link.close()
    return False

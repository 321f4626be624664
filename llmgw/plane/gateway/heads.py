"""The heads of what is sent: to an engine, and back to the client. Pure."""

from __future__ import annotations

from msgspec import Struct

from llmgw.plane.gateway.refusal import REASONS
from llmgw.plane.gateway.requests import Request
from llmgw.plane.gateway.responses import Responses
from llmgw.plane.gateway.route import Endpoint


def request_head(request: Request, endpoint: Endpoint, length: int, *, keys: bool, metered: bool) -> bytes:
    """The head for an engine. `keys`: the client's Authorization was meant for us and goes no further.

    `metered`: the answer will be read, so it must not come compressed.
    """
    dropped: tuple[bytes, ...] = (b"authorization",) if keys or endpoint.api_key else ()
    if metered:
        dropped += (b"accept-encoding",)
    start = b"%b %b%b HTTP/1.1\r\nhost: %b\r\nx-request-id: %b\r\n" % (
        request.method,
        endpoint.prefix.encode(),
        request.target,
        endpoint.authority.encode(),
        request.id,
    )
    if endpoint.api_key:
        start += b"authorization: Bearer %b\r\n" % endpoint.api_key.encode()
    if length or request.method in (b"POST", b"PUT", b"PATCH"):
        start += b"content-length: %d\r\n" % length
    return b"".join((start, *request.passed_on(*dropped), b"\r\n"))


class ResponseHead(Struct, frozen=True):
    """`chunked`: the body goes to the client in chunks. `reusable`: the client's connection is, afterwards."""

    data: bytes
    chunked: bool
    reusable: bool


def response_head(responses: Responses, request: Request, *, close: bool) -> ResponseHead:
    """The head for the client: the engine's, framed for the client's version of HTTP."""
    status = responses.status
    lines = responses.passed_on()
    if responses.event_stream:
        # Said so that no proxy on the way keeps a stream back (nginx reads it), nor the answer for somebody else.
        if responses.buffering:
            lines = [line for line in lines if not line.lower().startswith(b"x-accel-buffering:")]
        lines.append(b"x-accel-buffering: no\r\n")
        if not responses.caching:
            lines.append(b"cache-control: no-cache\r\n")
    chunked = False
    if responses.length is not None:
        lines.append(b"content-length: %d\r\n" % responses.length)
    elif status in (204, 304) or request.method == b"HEAD":
        pass
    elif request.old:
        close = True  # HTTP/1.0 knows the end of such a body only by the end of the connection
    else:
        chunked = True
        lines.append(b"transfer-encoding: chunked\r\n")
    if close:
        lines.append(b"connection: close\r\n")
    elif request.old:
        lines.append(b"connection: keep-alive\r\n")
    start = b"HTTP/1.1 %d %b\r\nx-request-id: %b\r\n" % (
        status,
        responses.reason or REASONS.get(status, b""),
        request.id,
    )
    return ResponseHead(b"".join((start, *lines, b"\r\n")), chunked, not close)

"""The heads of what is sent: to an engine, and back to the client. Pure."""

from __future__ import annotations

import attrs

from llmgw.plane.gateway.refusal import REASONS
from llmgw.plane.gateway.requests import Request
from llmgw.plane.gateway.responses import Responses
from llmgw.plane.gateway.route import Endpoint


def request_head(request: Request, endpoint: Endpoint, length: int, *, keys: bool, metered: bool) -> bytes:
    """The head for an engine. `keys`: the client's Authorization was meant for us and goes no further.

    `metered`: the answer will be read, so it must not come compressed.
    """
    prefix = endpoint.prefix.encode()
    lines = [
        b"%b %b%b HTTP/1.1\r\nhost: %b\r\n" % (request.method, prefix, request.target, endpoint.authority.encode())
    ]
    for lower, name, value in request.passed_on():
        if lower == b"authorization" and (keys or endpoint.api_key):
            continue
        if metered and lower == b"accept-encoding":
            continue
        lines.append(b"%b: %b\r\n" % (name, value))
    if endpoint.api_key:
        lines.append(b"authorization: Bearer %b\r\n" % endpoint.api_key.encode())
    lines.append(b"x-request-id: %b\r\n" % request.id)
    if length or request.method in (b"POST", b"PUT", b"PATCH"):
        lines.append(b"content-length: %d\r\n" % length)
    lines.append(b"\r\n")
    return b"".join(lines)


@attrs.frozen
class ResponseHead:
    """`chunked`: the body goes to the client in chunks. `reusable`: the client's connection is, afterwards."""

    data: bytes
    chunked: bool
    reusable: bool


#: Said of every stream of events, so that no proxy on the way keeps it back (nginx reads the first one).
_UNBUFFERED = b"x-accel-buffering: no\r\n"


def response_head(responses: Responses, request: Request, *, close: bool) -> ResponseHead:
    """The head for the client: the engine's, framed for the client's version of HTTP."""
    status = responses.status
    lines = [b"HTTP/1.1 %d %b\r\n" % (status, responses.reason or REASONS.get(status, b""))]
    caching = False
    for lower, name, value in responses.passed_on():
        if lower == b"cache-control":
            caching = True
        elif lower == b"x-accel-buffering" and responses.event_stream:
            continue
        lines.append(b"%b: %b\r\n" % (name, value))
    lines.append(b"x-request-id: %b\r\n" % request.id)
    if responses.event_stream:
        lines.append(_UNBUFFERED)
        if not caching:
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
    lines.append(b"\r\n")
    return ResponseHead(b"".join(lines), chunked, not close)

"""What the gateway says when it cannot or will not relay, in the shape OpenAI's clients understand."""

from __future__ import annotations

import msgspec

_encode = msgspec.json.Encoder().encode

REASONS = {
    200: b"OK",
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    413: b"Content Too Large",
    415: b"Unsupported Media Type",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    501: b"Not Implemented",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
    505: b"HTTP Version Not Supported",
}


class Refusal(Exception):
    """A request ends here, with this status and these words.

    `close`: the connection cannot be used further, for what the client sends next cannot be told apart.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after: float | None = None,
        close: bool = False,
        allow: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after
        self.close = close
        self.allow = allow

    def body(self) -> bytes:
        return _encode({"error": error(self.status, self.message, code=self.code, param=self.param)})


def error(status: int, message: str, *, code: str, param: str | None = None) -> dict[str, str | None]:
    """OpenAI's error object."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"message": message, "type": kind, "param": param, "code": code}


def error_event(message: str, *, code: str) -> bytes:
    """A failure in the middle of an event stream, as the event that OpenAI's clients raise it from."""
    return b"data: " + _encode({"error": error(502, message, code=code)}) + b"\n\n"


def answer(
    status: int,
    body: bytes,
    *,
    content_type: bytes = b"application/json",
    headers: tuple[tuple[bytes, bytes], ...] = (),
    request_id: bytes = b"",
    close: bool = False,
    keep_alive: bool = False,
    head_only: bool = False,
) -> bytes:
    """A whole response. `keep_alive` says it aloud, as HTTP/1.0 clients need."""
    lines = [
        b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n"
        % (status, REASONS.get(status, b"Unknown"), content_type, len(body))
    ]
    if request_id:
        lines.append(b"x-request-id: " + request_id + b"\r\n")
    for name, value in headers:
        lines.append(b"%b: %b\r\n" % (name, value))
    if close:
        lines.append(b"connection: close\r\n")
    elif keep_alive:
        lines.append(b"connection: keep-alive\r\n")
    lines.append(b"\r\n")
    if not head_only:
        lines.append(body)
    return b"".join(lines)

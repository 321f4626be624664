"""A client's bytes to requests. No I/O: bytes in, whole requests and troubles out.

llhttp (in httptools) is strict about what makes request smuggling possible: two lengths, a length beside
chunked, folded headers, bare CR or LF, spaces before a colon. What it leaves open is refused here.
"""

from __future__ import annotations

from collections import deque

import httptools

from llmgw.plane.gateway.refusal import Refusal

#: Header fields that end at each hop (RFC 9110, 7.6.1), and those that we write ourselves.
_OURS = frozenset(
    (
        b"connection keep-alive proxy-connection proxy-authorization te trailer transfer-encoding upgrade"
        b" http2-settings content-length host expect x-request-id"
    ).split()
)
_MOST_HEADERS = 256
_ID_LETTERS = frozenset(range(0x21, 0x7F))


class Request:
    """One request. `lines` are the header fields to pass on, as sent: (lower-case name, whole line)."""

    # Defaults of the class and not of __init__: one request is made of few of them, and this is the hot path.
    method = b""
    target = b""
    size = 0
    length: int | None = None
    transfer = b""
    host: bytes | None = None
    authorization = b""
    content_type = b""
    content_encoding = b""
    id = b""
    upgrade = b""
    hop_names: tuple[bytes, ...] = ()  # header fields that Connection names: they end here too
    continues = False  # the client waits for "100 Continue" before it sends the body
    close = False  # the connection ends after the answer
    old = False  # HTTP/1.0: knows nothing of chunks
    head_done = False

    def __init__(self) -> None:
        self.lines: list[tuple[bytes, bytes]] = []
        self.pieces: list[bytes] = []

    @property
    def body(self) -> bytes:
        if len(self.pieces) > 1:
            self.pieces = [b"".join(self.pieces)]
        return self.pieces[0] if self.pieces else b""

    @property
    def path(self) -> str:
        return self.target.partition(b"?")[0].decode("ascii")

    @property
    def query(self) -> str:
        return self.target.partition(b"?")[2].decode("ascii")

    def passed_on(self, *dropped: bytes) -> list[bytes]:
        """The header lines to pass on: without the `dropped` fields and those that Connection names."""
        if not dropped and not self.hop_names:
            return [line for _, line in self.lines]
        return [line for lower, line in self.lines if lower not in dropped and lower not in self.hop_names]


class Requests:
    """The requests on one connection, in the order they came; pipelined ones wait in `done`.

    After `feed`: `done` has whole requests, `current` the one whose rest has not come (None between two), and
    `trouble` why nothing further can be read. Requests in `done` came before the trouble and are still served.
    """

    def __init__(self, most_head_bytes: int, most_body_bytes: int) -> None:
        self.done: deque[Request] = deque()
        self.current: Request | None = None
        self.trouble: Refusal | None = None
        self._most_head = most_head_bytes
        self._most_body = most_body_bytes
        self._head_bytes = 0
        self._parser = httptools.HttpRequestParser(self)

    def feed(self, data: bytes) -> None:
        """Take what the client sent. Never raises: what cannot be understood becomes `trouble`."""
        if self.trouble is not None:
            return
        whole = len(self.done)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._declined(data[upgrade.args[0] :])
        except httptools.HttpParserError as broken:
            if self.trouble is None and not (self.done and self.done[-1].close):
                self.trouble = _unreadable(broken)
        if self.trouble is None and self.current is not None and not self.current.head_done:
            self._head_bytes = self._head_bytes + len(data) if whole == len(self.done) else len(data)
            if self._head_bytes > self._most_head:
                self.trouble = _head_too_large(self._most_head)
        else:
            self._head_bytes = 0

    # --- what llhttp calls

    def on_message_begin(self) -> None:
        self.current = Request()

    def on_url(self, url: bytes) -> None:
        if self.current is not None:
            self.current.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        request = self.current
        if request is None or request.head_done:
            return  # a trailer: nobody behind us is promised one
        lower = name.lower()
        if lower not in _OURS:
            if lower == b"authorization":
                request.authorization = value
            elif lower == b"content-type":
                request.content_type = value
            elif lower == b"content-encoding":
                request.content_encoding = value.strip().lower()
            request.lines.append((lower, b"%b: %b\r\n" % (name, value)))
            if len(request.lines) > _MOST_HEADERS:
                self.trouble = self.trouble or _head_too_large(self._most_head)
        elif lower == b"host":
            if request.host is not None:
                self.trouble = Refusal(400, "The request has two Host headers.", code="bad_request", close=True)
            request.host = value
        elif lower == b"content-length":
            request.length = int(value)
        elif lower == b"transfer-encoding":
            request.transfer = request.transfer + b"," + value if request.transfer else value
        elif lower == b"connection":
            tokens = [token.strip().lower() for token in value.split(b",")]
            request.hop_names += tuple(token for token in tokens if token not in (b"keep-alive", b"close", b""))
        elif lower == b"expect":
            request.continues = value.strip().lower() == b"100-continue"
        elif lower == b"upgrade":
            request.upgrade = value.strip().lower()
        elif lower == b"x-request-id" and 0 < len(value) <= 128 and _ID_LETTERS.issuperset(value):
            request.id = value

    def on_headers_complete(self) -> None:
        request = self.current
        if request is None:
            return
        request.head_done = True
        request.method = self._parser.get_method()
        version = self._parser.get_http_version()
        request.old = version == "1.0"
        if self.trouble is None:
            self.trouble = self._wrong(request, version)

    def on_body(self, data: bytes) -> None:
        request = self.current
        if request is None or self.trouble is not None:
            return
        request.size += len(data)
        if request.size > self._most_body:
            request.pieces.clear()
            self.trouble = _body_too_large(self._most_body)
            return
        request.pieces.append(data)

    def on_message_complete(self) -> None:
        request = self.current
        if request is None or self._parser.should_upgrade():
            return
        # llhttp forgets this answer as soon as the callback is over.
        request.close = not self._parser.should_keep_alive()
        if self.trouble is None:
            self.done.append(request)
            self.current = None

    # --- what llhttp leaves open

    def _wrong(self, request: Request, version: str) -> Refusal | None:
        if version not in ("1.0", "1.1"):
            return Refusal(505, f"HTTP/{version} is not spoken here; use HTTP/1.1.", code="http_version", close=True)
        if request.method == b"CONNECT":
            return Refusal(405, "This is not a forward proxy.", code="method_not_allowed", close=True)
        if request.transfer and (request.old or request.transfer.strip().lower() != b"chunked"):
            # Some servers take such a message to be chunked and some do not: the crack that smuggling uses.
            return Refusal(
                501,
                "The only Transfer-Encoding taken is 'chunked', with HTTP/1.1.",
                code="transfer_encoding",
                close=True,
            )
        if request.host is None and not request.old:
            return Refusal(400, "The request has no Host header.", code="bad_request", close=True)
        if request.length is not None and request.length > self._most_body:
            return _body_too_large(self._most_body, request.length)
        if request.target[:1] != b"/":
            scheme, mark, rest = request.target.partition(b"://")
            if not mark or scheme.lower() not in (b"http", b"https"):
                return Refusal(400, "The request's target is not a path.", code="bad_request", close=True)
            _, slash, path = rest.partition(b"/")
            request.target = slash + path or b"/"
        if not _ID_LETTERS.issuperset(request.target):
            return Refusal(400, "The request's path has letters outside ASCII.", code="bad_request", close=True)
        return None

    def _declined(self, rest: bytes) -> None:
        """An upgrade was asked for. To h2c we say no by going on with HTTP/1.1, as RFC 9110 (7.8) allows; some
        clients ask for it with every first request, body included. Nothing else is worth tunnelling yet."""
        request = self.current
        if self.trouble is not None or request is None:
            return
        if b"h2c" not in request.upgrade:
            self.trouble = Refusal(
                501,
                "Upgrades (WebSocket and others) are not relayed by this gateway; use plain HTTP requests.",
                code="upgrade_not_supported",
                close=True,
            )
            return
        self._parser = httptools.HttpRequestParser(self)
        self.feed(_again(request) + rest)


def _again(request: Request) -> bytes:
    """The same head without the upgrade."""
    lines = [b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (request.method, request.target, request.host or b"")]
    lines += request.passed_on()
    if request.length is not None:
        lines.append(b"content-length: %d\r\n" % request.length)
    if request.transfer:
        lines.append(b"transfer-encoding: " + request.transfer + b"\r\n")
    if request.continues:
        lines.append(b"expect: 100-continue\r\n")
    if request.id:
        lines.append(b"x-request-id: " + request.id + b"\r\n")
    return b"".join((*lines, b"\r\n"))


def _unreadable(broken: httptools.HttpParserError) -> Refusal:
    return Refusal(400, f"This is not a valid HTTP/1.1 request: {broken}.", code="bad_request", close=True)


def _head_too_large(most: int) -> Refusal:
    return Refusal(
        431,
        f"The request's head is larger than {most} bytes or has more than {_MOST_HEADERS} fields.",
        code="headers_too_large",
        close=True,
    )


def _body_too_large(most: int, length: int | None = None) -> Refusal:
    size = f"The request body of {length} bytes" if length is not None else "The request body"
    return Refusal(
        413,
        f"{size} is over this gateway's limit of {most} bytes.",
        code="request_too_large",
        close=True,
    )

"""An engine's bytes to responses. No I/O. The body is not looked into."""

from __future__ import annotations

import httptools

#: Header fields that end at each hop (RFC 9110, 7.6.1), and those that we write ourselves.
_OURS = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate te trailer transfer-encoding upgrade"
    b" content-length x-request-id".split()
)
#: Limits against an engine gone wrong; the largest real heads are a few kilobytes.
_MOST_HEADERS = 256
_MOST_HEAD_BYTES = 256 << 10


class BrokenResponse(Exception):
    """The engine sent what is not HTTP, or more than it was asked for."""


class Responses:
    """The responses on one connection to an engine, one after the other.

    `pieces` are body bytes not yet taken: the reader empties the list. `reusable` counts once `complete`.
    """

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        # The list's own method: llhttp then calls no Python function for a piece of body.
        self.on_body = self.pieces.append
        self._parser = httptools.HttpResponseParser(self)
        self.expect(False)

    def expect(self, head: bool) -> None:
        """A request was sent; `head`: it was HEAD, whose response has no body whatever its headers say."""
        self._head = head
        self.pieces.clear()
        self.begun = False  # any byte of it has come
        self._blank()

    def _blank(self) -> None:
        self.status = 0
        self.reason = b""
        self.lines: list[tuple[bytes, bytes]] = []  # (lower-case name, the header's whole line)
        self.hop_names: tuple[bytes, ...] = ()
        self.length: int | None = None
        self.chunked = False
        self.event_stream = False
        self.encoded = False
        self.caching = False  # it says how it may be cached
        self.buffering = False  # it says whether it may be buffered
        self.head_done = False
        self.complete = False
        self.until_close = False
        self.reusable = False
        self._head_bytes = 0

    def feed(self, data: bytes) -> None:
        """Take what the engine sent. Raises BrokenResponse."""
        self.begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise BrokenResponse("it switched protocols without being asked") from None
        except httptools.HttpParserError as broken:
            if not self.complete:
                why = broken.__context__
                if isinstance(why, BrokenResponse):
                    raise why from None
                raise BrokenResponse(f"it sent what is not HTTP ({broken})") from None
            self.reusable = False  # the response itself was whole
        if not self.head_done:
            self._head_bytes += len(data)
            if self._head_bytes > _MOST_HEAD_BYTES or len(self.lines) > _MOST_HEADERS:
                raise BrokenResponse("the head of its response does not end")

    def end(self) -> bool:
        """The engine closed. True: the response is whole."""
        if self.head_done and self.until_close:
            self.complete = True
        return self.complete

    # --- what llhttp calls

    def on_message_begin(self) -> None:
        if self.complete:
            # An answer that nobody asked for. Stopping here keeps its bytes out of the response before.
            raise BrokenResponse("it answered twice")

    def on_status(self, reason: bytes) -> None:
        self.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head_done:
            return  # a trailer
        lower = name.lower()
        if lower not in _OURS:
            if lower == b"content-type":
                self.event_stream = value[:17].lower() == b"text/event-stream"
            elif lower == b"content-encoding":
                self.encoded = value.strip().lower() != b"identity"
            elif lower == b"cache-control":
                self.caching = True
            elif lower == b"x-accel-buffering":
                self.buffering = True
            self.lines.append((lower, b"%b: %b\r\n" % (name, value)))
        elif lower == b"content-length":
            self.length = int(value)
        elif lower == b"transfer-encoding":
            if value.strip().lower() != b"chunked":
                # Another coding under the chunks would have to be undone or passed on; no engine sends one.
                raise BrokenResponse("it used a Transfer-Encoding other than chunked")
            self.chunked = True
        elif lower == b"connection":
            tokens = [token.strip().lower() for token in value.split(b",")]
            self.hop_names += tuple(token for token in tokens if token not in (b"keep-alive", b"close", b""))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:
            return
        self.head_done = True
        if self._head:
            # llhttp cannot be told that no body follows, so this connection is not used again.
            self.complete = True
        elif self.status in (204, 304):
            self.length = None if self.status == 204 else self.length
        elif self.length is None and not self.chunked:
            self.until_close = True

    def on_message_complete(self) -> None:
        if self.status < 200:
            self._blank()  # "100 Continue" and the like: the answer itself is still to come
            return
        self.complete = True
        # llhttp forgets this answer as soon as the callback is over.
        self.reusable = not self._head and self._parser.should_keep_alive()

    def passed_on(self) -> list[bytes]:
        """The header lines to pass on: without those that Connection names."""
        if not self.hop_names:
            return [line for _, line in self.lines]
        return [line for lower, line in self.lines if lower not in self.hop_names]

"""Gives whole weights of this node to other nodes of the fleet: `llmgw-node share`.

A process of its own, so that nothing ever connects to an agent (A1). It reads the cache and changes nothing, and asks
for a node's certificate of the fleet's own CA; this node's own is shown in turn. What it gives away is checked by
digest on the other side, so a broken disk here breaks nothing there.

    GET /weights?source=SOURCE   the manifest of what is whole here; 503 while it is being fetched, else 404
    GET /blobs/FOLDER/NAME       a file's bytes, from `Range: bytes=N-` on
"""

from __future__ import annotations

import os
import signal
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import httptools
import msgspec
import structlog
import trio

from llmgw.errors import BadInput, LlmgwError
from llmgw.node.identity import CA, IDENTITY
from llmgw.node.settings import NodeSettings
from llmgw.node.weights import layout
from llmgw.node.weights.lock import attempt
from llmgw.node.weights.manifest import Manifests
from llmgw.node.weights.pace import Pace
from llmgw.node.weights.source import safe
from llmgw.pki import Role
from llmgw.tls import ServerTls, explain, peer_of
from llmgw.tlsstream import TlsStream

log = structlog.get_logger(__name__)

PIECE = 1 << 20
_MOST_HEAD = 16 << 10
_HANDSHAKE_WITHIN = 15.0
#: A peer that keeps its connection open and asks nothing, or takes nothing, is let go after so many seconds.
_IDLE = 120.0
#: Seconds after which somebody who waits for a fetch here should ask again.
ASK_AGAIN = 2


class Share:
    """What of a cache others may have."""

    def __init__(
        self, root: Path, identity: Path, pace: Callable[[int], Awaitable[None]], *, at_once: int = 64
    ) -> None:
        self._root = root
        self._manifests = Manifests(root)
        self._tls = ServerTls(identity / CA, identity / IDENTITY, clients=ssl.CERT_REQUIRED)
        self._pace = pace
        self._slots = trio.CapacityLimiter(at_once)

    async def run(self, listeners: Sequence[trio.SocketListener]) -> None:
        """Serve until cancelled. Raises LlmgwError at once for an identity that cannot be used."""
        self._tls.context()
        await trio.serve_listeners(self._welcome, list(listeners))

    async def _welcome(self, stream: trio.SocketStream) -> None:
        try:
            async with self._slots:
                tls = TlsStream(stream, self._tls.context(), server_side=True)
                try:
                    with trio.fail_after(_HANDSHAKE_WITHIN):
                        await tls.do_handshake()
                    peer = peer_of(tls)
                    if peer is None or peer.role != Role.NODE:
                        log.warning("only nodes may have weights", peer=peer.name if peer else "nobody")
                        return
                    await self._converse(tls, peer.name)
                finally:
                    await trio.aclose_forcefully(tls)
        except trio.TooSlowError:
            return
        except trio.BrokenResourceError as error:
            if isinstance(error.__cause__, ssl.SSLError):
                log.warning("a connection was refused", why=explain(error, "a node"))
        except Exception:  # one connection's trouble, and the others go on
            log.exception("a connection failed")

    async def _converse(self, stream: TlsStream, peer: str) -> None:
        """One request after the other, until the peer has no more."""
        while True:
            with trio.fail_after(_IDLE):
                asked = await _next_request(stream)
            if asked is None:
                return
            method, target, offset = asked
            split = urlsplit(target)
            parts = [unquote(part) for part in split.path.strip("/").split("/")]
            if method != "GET":
                await _say(stream, 405)
            elif parts == ["weights"]:
                source = parse_qs(split.query).get("source", [""])[0]
                status, data = await trio.to_thread.run_sync(self._manifest, source)
                await _say(stream, status, data)
            elif len(parts) == 3 and parts[0] == "blobs" and all(map(safe, parts)):
                await self._blob(stream, parts[1], parts[2], offset, peer)
            else:
                await _say(stream, 404)

    def _manifest(self, source: str) -> tuple[int, bytes]:
        manifest = self._manifests.read(source)
        if manifest is None:
            return 404, b""
        if not layout.look(self._root, manifest).missing:
            return 200, msgspec.json.encode(manifest)
        with attempt(self._root, manifest.folder) as nobody:
            return (404 if nobody else 503), b""

    async def _blob(self, stream: TlsStream, folder: str, name: str, offset: int, peer: str) -> None:
        path = self._root / folder / "blobs" / name
        handle = -1
        if not folder.startswith(".") and not name.endswith(layout.PARTIAL):
            handle = await trio.to_thread.run_sync(_opened, path)
        if handle < 0:
            await _say(stream, 404)
            return
        try:
            size = os.fstat(handle).st_size
            if offset and offset >= size:
                await _say(stream, 416)
                return
            log.info("giving weights", to=peer, folder=folder, blob=name[:12], bytes=size - offset)
            head = f"Content-Length: {size - offset}\r\n"
            if offset:
                head += f"Content-Range: bytes {offset}-{size - 1}/{size}\r\n"
            await stream.send_all(f"HTTP/1.1 {'206 Part' if offset else '200 OK'}\r\n{head}\r\n".encode())
            while offset < size:
                data = await trio.to_thread.run_sync(os.pread, handle, min(PIECE, size - offset), offset)
                if not data:
                    raise trio.BrokenResourceError("the file became shorter")
                await self._pace(len(data))
                with trio.fail_after(_IDLE):
                    await stream.send_all(data)
                offset += len(data)
        finally:
            os.close(handle)


def _opened(path: Path) -> int:
    """A descriptor of a plain file that is no link, else -1."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return -1
    if layout.stamp(path) is None:
        os.close(handle)
        return -1
    return handle


class _Head:
    """What a request's head says, as the parser tells it."""

    def __init__(self) -> None:
        self.target = b""
        self.range = b""
        self.whole = False

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"range":
            self.range = value

    def on_message_complete(self) -> None:
        self.whole = True


async def _next_request(stream: TlsStream) -> tuple[str, str, int] | None:
    """Method, target and the first byte that is wanted; None when the peer says no more, or nothing sensible."""
    head, read = _Head(), 0
    parser = httptools.HttpRequestParser(head)
    while not head.whole:
        data = await stream.receive_some(4096)
        read += len(data)
        if not data or read > _MOST_HEAD:
            return None
        try:
            parser.feed_data(data)
        except httptools.HttpParserError:
            return None
    words = head.range.decode("latin-1").removeprefix("bytes=").removesuffix("-")
    offset = int(words) if words.isascii() and words.isdigit() and len(words) < 19 else 0
    return parser.get_method().decode("latin-1"), head.target.decode("latin-1"), offset


_REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 416: "Range Not Satisfiable", 503: "Not Yet"}


async def _say(stream: TlsStream, status: int, data: bytes = b"") -> None:
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Length: {len(data)}\r\n"
    if status == 503:
        head += f"Retry-After: {ASK_AGAIN}\r\n"
    await stream.send_all(head.encode() + b"\r\n" + data)


async def serve(settings: NodeSettings) -> None:
    """Share this node's cache until SIGTERM or SIGINT. Raises LlmgwError when it cannot start."""
    if settings.insecure:
        raise BadInput("a node in insecure mode has no certificate to share weights by", remedy="join a plane")
    pace = Pace(settings.weights_bytes_per_second or None)
    share = Share(settings.path(settings.weights).absolute(), settings.directory, pace.take)
    at = settings.weights_listen
    try:
        await trio.to_thread.run_sync(layout.prepare, settings.path(settings.weights))
        listeners = await trio.open_tcp_listeners(at.port, host=at.host)
    except OSError as error:
        raise LlmgwError(f"weights cannot be shared at {at}: {error.strerror or error}") from None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(share.run, listeners)
        log.info("weights are shared", at=str(at), cache=str(settings.path(settings.weights)))
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            await anext(aiter(signals))
        nursery.cancel_scope.cancel()

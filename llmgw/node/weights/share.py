"""Gives whole weights of this node to other nodes of the fleet: `llmgw-node share`.

A process of its own, so that nothing ever connects to an agent (A1). It reads the cache and changes nothing, and asks
for a node's certificate of the fleet's own CA; this node's own is shown in turn. What it gives away is checked by
digest on the other side, so a broken disk here breaks nothing there.

    GET /weights?source=SOURCE   the manifest of what is whole here, with `Llmgw-Room: none` when no place is free;
                                 503 with how far it is (`Busy`) while it is being fetched, else 404
    GET /blobs/FOLDER/NAME       a file's bytes, from `Range: bytes=N-` on; 503 when no place is free

A few nodes are served at a time, each at its share of the wire, and the next when they have it all: by then there are
more that have it, so a fleet is served in the logarithm of its size.
"""

from __future__ import annotations

import os
import signal
import ssl
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import httptools
import msgspec
import structlog
import trio
from msgspec import Struct

from llmgw import log as logs
from llmgw.config import Listen
from llmgw.errors import BadInput, LlmgwError
from llmgw.node.identity import CA, IDENTITY
from llmgw.node.settings import NodeSettings
from llmgw.node.weights import layout
from llmgw.node.weights.errors import FetchFailed
from llmgw.node.weights.lock import held
from llmgw.node.weights.manifest import Manifest, Manifests
from llmgw.node.weights.pace import Pace
from llmgw.node.weights.revoked import Revocations
from llmgw.node.weights.sharing import Orders, announced
from llmgw.node.weights.source import parse
from llmgw.pki import Peer, Role
from llmgw.process import first_line
from llmgw.sources import pinned, safe
from llmgw.tls import ServerTls, explain, peer_of
from llmgw.tlsstream import TlsStream

log = structlog.get_logger(__name__)

PIECE = 1 << 20
_MOST_HEAD = 16 << 10
_HANDSHAKE_WITHIN = 15.0
#: A peer that keeps its connection open and asks nothing, or takes nothing, is let go after so many seconds.
_IDLE = 120.0
#: Seconds after which somebody who waits for a fetch here, or for a place, should ask again.
ASK_AGAIN = 2
#: A node that took something so few seconds ago keeps its place: between two files it is still the same fetch.
_KEEPS = 5.0
#: Connections at a time: most of them only ask.
_MOST_CONNECTIONS = 1024
#: The header that says "none" where no place is free.
ROOM = "Llmgw-Room"


class Busy(Struct, frozen=True, omit_defaults=True):
    """How a fetch is getting on here: bytes that are there, and whether it brings any or still waits for somebody."""

    moving: bool = False
    done: int = 0


class Share:
    """What of a cache others may have, `at_once` nodes at a time."""

    def __init__(self, root: Path, identity: Path, pace: Callable[[int], Awaitable[None]], *, at_once: int = 8) -> None:
        self._root = root
        self._manifests = Manifests(root)
        self._tls = ServerTls(identity / CA, identity / IDENTITY, clients=ssl.CERT_REQUIRED)
        self._revoked = Revocations(identity)
        self._pace = pace
        self._at_once = at_once
        self._connections = 0
        self._taking: dict[str, int] = {}  # transfers by node
        self._took: dict[str, float] = {}  # when a node's last transfer ended

    async def run(self, listeners: Sequence[trio.SocketListener]) -> None:
        """Serve until cancelled. Raises LlmgwError at once for an identity that cannot be used."""
        self._tls.context()
        await trio.serve_listeners(self._welcome, list(listeners))

    async def _welcome(self, stream: trio.SocketStream) -> None:
        if self._connections >= _MOST_CONNECTIONS:
            await trio.aclose_forcefully(stream)
            return
        self._connections += 1
        try:
            tls = TlsStream(stream, self._tls.context(), server_side=True)
            try:
                with trio.fail_after(_HANDSHAKE_WITHIN):
                    await tls.do_handshake()
                peer = peer_of(tls)
                if peer is None or peer.role != Role.NODE:
                    log.warning("only nodes may have weights", peer=peer.name if peer else "nobody")
                    return
                await self._converse(tls, peer)
            finally:
                await trio.aclose_forcefully(tls)
        except trio.TooSlowError:
            return
        except trio.BrokenResourceError as error:
            if isinstance(error.__cause__, ssl.SSLError):
                log.warning("a connection was refused", why=explain(error, "a node"))
        except Exception:  # one connection's trouble, and the others go on
            log.exception("a connection failed")
        finally:
            self._connections -= 1

    async def _converse(self, stream: TlsStream, who: Peer) -> None:
        """One request after the other, until the peer has no more or is no peer any more."""
        peer = who.name
        while True:
            with trio.fail_after(_IDLE):
                asked = await _next_request(stream)
            if asked is None:
                return
            if who.serial in self._revoked:
                log.warning("this node's certificate was revoked: it gets no weights", peer=peer)
                return
            method, target, offset = asked
            split = urlsplit(target)
            parts = [unquote(part) for part in split.path.strip("/").split("/")]
            if method != "GET":
                await _say(stream, 405)
            elif parts == ["weights"]:
                source = parse_qs(split.query).get("source", [""])[0]
                status, data = await trio.to_thread.run_sync(self._manifest, source)
                await _say(stream, status, data, full=not self._room(peer))
            elif len(parts) == 3 and parts[0] == "blobs" and all(map(safe, parts)):
                if not self._room(peer):
                    await _say(stream, 503)
                    continue
                self._taking[peer] = self._taking.get(peer, 0) + 1
                try:
                    await self._blob(stream, parts[1], parts[2], offset, peer)
                finally:
                    self._ended(peer)
            else:
                await _say(stream, 404)

    def _room(self, peer: str) -> bool:
        """Whether a node has a place, or one is free for it."""
        now = trio.current_time()
        for node in [node for node, at in self._took.items() if now - at >= _KEEPS]:
            del self._took[node]
        places = self._taking.keys() | self._took.keys()
        return peer in places or len(places) < self._at_once

    def _ended(self, peer: str) -> None:
        self._taking[peer] -= 1
        if not self._taking[peer]:
            del self._taking[peer]
        self._took[peer] = trio.current_time()

    def _manifest(self, source: str) -> tuple[int, bytes]:
        manifest = self._manifests.read(source)
        there = layout.look(self._root, manifest) if manifest is not None else None
        if there is None or there.missing:
            # The commit that is asked for may be what a branch is here.
            other = next((m for m in self._manifests.all() if pinned(m.source, m.revision) == source), None)
            if other is not None and not layout.look(self._root, other).missing:
                return 200, msgspec.json.encode(msgspec.structs.replace(other, source=source, reference=""))
        if manifest is not None and there is not None and not there.missing:
            return 200, msgspec.json.encode(manifest)
        note = held(self._root, folder) if (folder := _folder(source, manifest)) else None
        if note is None or note.source not in ("", source):
            return 404, b""
        return 503, msgspec.json.encode(Busy(note.moving, there.bytes if there is not None else 0))

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


def _folder(source: str, manifest: Manifest | None) -> str:
    if manifest is not None:
        return manifest.folder
    try:
        return parse(source).folder
    except FetchFailed:
        return ""


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


async def _say(stream: TlsStream, status: int, data: bytes = b"", *, full: bool = False) -> None:
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Length: {len(data)}\r\n"
    if full:
        head += f"{ROOM}: none\r\n"
    if status == 503:
        head += f"Retry-After: {ASK_AGAIN}\r\n"
    await stream.send_all(head.encode() + b"\r\n" + data)


async def serve(settings: NodeSettings) -> None:
    """Share this node's cache until SIGTERM or SIGINT. Raises LlmgwError when it cannot start."""
    if settings.insecure:
        raise BadInput("a node in insecure mode has no certificate to share weights by", remedy="join a plane")
    async with trio.open_nursery() as nursery:
        await nursery.start(carry_out, Orders.of(settings))
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            await anext(aiter(signals))
        nursery.cancel_scope.cancel()


async def carry_out(orders: Orders, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Share a cache until cancelled, and let this node's agent know where. Raises LlmgwError when it cannot start."""
    root, at = Path(orders.weights), Listen(orders.host, orders.port)
    pace = Pace(orders.bytes_per_second or None)
    share = Share(root, Path(orders.directory), pace.take, at_once=orders.at_once)
    try:
        await trio.to_thread.run_sync(layout.prepare, root)
        listeners = await trio.open_tcp_listeners(at.port, host=at.host)
    except OSError as error:
        raise LlmgwError(
            f"weights cannot be shared at {at}: {error.strerror or error}", remedy="see weights_listen in node.toml"
        ) from None
    port = listeners[0].socket.getsockname()[1]
    with announced(Path(orders.directory), Listen(at.host, port)):
        log.info("weights are shared", at=str(Listen(at.host, port)), cache=str(root))
        task_status.started()
        await share.run(listeners)


async def main() -> None:
    """As a child of the agent: its orders are the first line of standard input, and the end of that is its own."""
    stdin = trio.lowlevel.FdStream(os.dup(sys.stdin.fileno()))
    if (line := await first_line(stdin)) is None:
        return
    orders = msgspec.json.decode(line, type=Orders)
    logs.set_up(orders.logging)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(carry_out, orders)
            await stdin.receive_some()
            nursery.cancel_scope.cancel()
    except* LlmgwError as failed:
        log.error("weights are not shared", why=str(failed.exceptions[0]))
        sys.exit(1)


if __name__ == "__main__":
    trio.run(main)

"""A hub of our own on loopback: the endpoints by which huggingface_hub lists a model, and its files with ranges.

What goes wrong is set by the test: answers cut after so many bytes, statuses instead of answers, bytes changed on
the way, a wait before each piece. Every request is noted.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import attrs

COMMIT = "a" * 40


@attrs.define(eq=False)
class Hub:
    """What is served, what goes wrong, and what was asked. `files` are by repository and name."""

    files: dict[str, dict[str, bytes]] = attrs.field(factory=dict)
    commit: str = COMMIT
    #: Statuses to answer lists and files with, first come first served; 0 is an honest answer.
    lists: list[int] = attrs.field(factory=list)
    gets: list[int] = attrs.field(factory=list)
    #: After so many bytes of a longer body the connection is cut, once for each number.
    cuts: list[int] = attrs.field(factory=list)
    stalls: int = 0  # so many bodies stop after a few pieces, without an end
    ranges: bool = True
    corrupt: int = 0  # so many answers have a bit turned over
    piece: int = 64 << 10
    pause: float = 0.0  # seconds before each piece
    trickle: int | None = None  # past so many bytes of a body only one comes each second
    retry_after: str = ""
    asked: list[tuple[str, str]] = attrs.field(factory=list)  # path, range
    sent: int = 0
    url: str = ""
    authorizations: set[str] = attrs.field(factory=set)
    lfs: bool = True
    past: dict[str, dict[str, dict[str, bytes]]] = attrs.field(factory=dict)  # files as they were, by commit
    held: threading.Event = attrs.field(factory=threading.Event)  # set: bodies flow
    begun: threading.Event = attrs.field(factory=threading.Event)  # a body's first piece went out
    over: threading.Event = attrs.field(factory=threading.Event)  # the hub ends

    def __attrs_post_init__(self) -> None:
        self.held.set()

    @property
    def bodies(self) -> list[tuple[str, str]]:
        return [(path, part) for path, part in self.asked if "/api/" not in path and part != "bytes=0-0"]

    def move(self, commit: str, changed: Mapping[str, bytes] | None = None) -> str:
        """The branch moves on to a commit in which these files are other ones; the commit before."""
        old, self.commit = self.commit, commit
        self.past[old] = {name: dict(files) for name, files in self.files.items()}
        for files in self.files.values():
            files.update(changed or {})
        return old

    def at(self, revision: str, repository: str) -> dict[str, bytes]:
        return self.past.get(revision, self.files).get(repository, {})

    def info(self, repository: str, revision: str = "") -> dict[str, object]:
        siblings = []
        for name, data in self.at(revision, repository).items():
            entry: dict[str, object] = {"rfilename": name, "size": len(data)}
            entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            if self.lfs and len(data) > 1000:
                entry["lfs"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 134}
            siblings.append(entry)
        sha = revision if revision in self.past else self.commit
        return {"id": repository, "modelId": repository, "sha": sha, "siblings": siblings, "tags": [],
                "private": False, "downloads": 0, "likes": 0}  # fmt: skip


@contextmanager
def served(files: Mapping[str, Mapping[str, bytes]] | None = None) -> Iterator[Hub]:
    """A hub while the block runs."""
    hub = Hub({name: dict(inner) for name, inner in (files or {}).items()})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None: ...

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            split = urlsplit(self.path)
            path = unquote(split.path)
            hub.asked.append((path, self.headers.get("Range", "")))
            hub.authorizations.add(self.headers.get("Authorization", ""))
            if path.startswith("/api/models/"):
                self._list(path.removeprefix("/api/models/"))
            elif "/resolve/" in path:
                repository, _, rest = path.strip("/").partition("/resolve/")
                revision, _, name = rest.partition("/")
                known = revision == hub.commit or revision in hub.past
                data = hub.at(revision, repository).get(name) if known else None
                self._body(data)
            else:
                self._body(hub.files.get("", {}).get(path.strip("/")))

        def _list(self, path: str) -> None:
            status = hub.lists.pop(0) if hub.lists else 0
            repository, _, revision = path.partition("/revision/")
            if status:
                self._plain(status, b"{}")
            elif repository not in hub.files:
                self._plain(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif revision not in ("", "main", "v1", hub.commit, *hub.past):
                self._plain(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            else:
                self._plain(
                    200, json.dumps(hub.info(repository, revision)).encode(), {"Content-Type": "application/json"}
                )

        def _plain(self, status: int, data: bytes, headers: Mapping[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            if status in (429, 503) and hub.retry_after:
                self.send_header("Retry-After", hub.retry_after)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _body(self, data: bytes | None) -> None:
            status = hub.gets.pop(0) if hub.gets else 0
            if status or data is None:
                self._plain(status or 404, b"an error page, and no data")
                return
            asked, first = self.headers.get("Range", ""), 0
            if asked and hub.ranges:
                begin, _, end = asked.removeprefix("bytes=").partition("-")
                first = int(begin)
                if first >= len(data):
                    self._plain(416, b"")
                    return
                last = int(end) if end else len(data) - 1
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
                body = data[first : last + 1]
            else:
                self.send_response(200)
                body = data
            probe = asked == "bytes=0-0"
            if hub.corrupt > 0 and not probe:
                hub.corrupt -= 1
                body = bytes([body[0] ^ 1]) + body[1:]
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", hub.commit)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            cut = hub.cuts.pop(0) if hub.cuts and not probe and len(body) > hub.cuts[0] else None
            if hub.stalls and len(body) > 4 * hub.piece:
                hub.stalls -= 1
                self._send(body[: 4 * hub.piece])
                hub.over.wait(60)
                cut = 0
            self._send(body if cut is None else body[:cut])
            if cut is not None:
                self.close_connection = True
                self.connection.shutdown(2)

        def _send(self, body: bytes) -> None:
            try:
                at = 0
                while at < len(body):
                    hub.held.wait(30)
                    step = hub.piece
                    if hub.trickle is not None and at + step > hub.trickle:
                        step = max(1, hub.trickle - at)
                    pause = 1.0 if step == 1 else hub.pause
                    if pause:
                        threading.Event().wait(pause)
                    self.wfile.write(body[at : at + step])
                    at += step
                    hub.sent += step
                    hub.begun.set()
            except OSError:
                self.close_connection = True

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128
        connections: ClassVar[list[socket.socket]] = []

        def process_request(self, request: Any, client_address: Any) -> None:
            self.connections.append(request)
            super().process_request(request, client_address)

        def handle_error(self, request: object, client_address: object) -> None:
            return  # a client that went away in the middle is what many of these tests are about

    server = Server(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.held.set()
        hub.over.set()
        server.shutdown()
        server.server_close()
        for connection in Server.connections:  # a client keeps them, and must not take the next hub for this one
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

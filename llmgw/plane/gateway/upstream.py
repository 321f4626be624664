"""Connections to engines: opened when needed, kept for the next request."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Iterable
from ipaddress import ip_address
from time import monotonic

import trio

from llmgw.plane.gateway.link import Link, TlsLink
from llmgw.plane.gateway.responses import Responses
from llmgw.plane.gateway.route import Endpoint

#: What makes two endpoints share connections.
Place = tuple[str, int, bool]


def place_of(endpoint: Endpoint) -> Place:
    return endpoint.host, endpoint.port, endpoint.tls


class Unreachable(Exception):
    """No connection could be made to an engine; the words say why."""


class Upstream:
    """One connection to an engine. `used`: it has carried a request before, so it may have gone stale."""

    __slots__ = ("idle_since", "link", "place", "responses", "used")

    def __init__(self, place: Place, link: Link) -> None:
        self.place = place
        self.link = link
        self.responses = Responses()
        self.used = False
        self.idle_since = 0.0


class Pool:
    """Idle connections to engines, the last used first."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self._idle: dict[Place, list[Upstream]] = {}
        self._context = context

    def idle(self, place: Place) -> int:
        return len(self._idle.get(place, ()))

    def take(self, place: Place) -> Upstream | None:
        """An idle connection that is still good as far as can be seen."""
        idle = self._idle.get(place)
        while idle:
            upstream = idle.pop()
            if not upstream.link.stale():
                return upstream
            upstream.link.close()
        return None

    def give(self, upstream: Upstream) -> None:
        """Keep a connection whose response was whole."""
        upstream.used = True
        upstream.idle_since = monotonic()
        self._idle.setdefault(upstream.place, []).append(upstream)

    def prune(self, older_than: float) -> None:
        """Close those that have been idle since before `older_than`, and those that the engine closed."""
        for place, idle in list(self._idle.items()):
            kept = []
            for upstream in idle:
                if upstream.idle_since < older_than or upstream.link.stale():
                    upstream.link.close()
                else:
                    kept.append(upstream)
            if kept:
                self._idle[place] = kept
            else:
                del self._idle[place]

    def only(self, places: Iterable[Place]) -> None:
        """Close the idle connections to every place that no route names any more."""
        for place in set(self._idle).difference(places):
            self.drop(place)

    def drop(self, place: Place) -> None:
        """Close the idle connections to an engine that failed: what closed one has closed them all."""
        for upstream in self._idle.pop(place, ()):
            upstream.link.close()

    def close(self) -> None:
        for place in list(self._idle):
            self.drop(place)

    async def connect(self, place: Place) -> Upstream:
        """A new connection. Raises Unreachable. Callers set the deadline."""
        host, port, tls = place
        sock = await _connected(host, port)
        if not tls:
            return Upstream(place, Link(sock))
        if self._context is None:
            self._context = ssl.create_default_context()
        try:
            return Upstream(place, await TlsLink.shake_hands(sock, self._context, server=False, name=host))
        except ssl.SSLCertVerificationError as untrusted:
            raise Unreachable(f"its certificate is not trusted: {untrusted.verify_message}") from None
        except OSError as broken:
            raise Unreachable(f"no TLS could be agreed with it: {broken.strerror or broken}") from None


async def _connected(host: str, port: int) -> socket.socket:
    """A connected, non-blocking socket to the first of a name's addresses that answers."""
    try:
        ip_address(host)
    except ValueError:
        try:
            found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as unknown:
            raise Unreachable(f"{host} has no address: {unknown.strerror or unknown}") from None
        except UnicodeError:
            raise Unreachable(f"{host} has no address: no host can have this name") from None
        addresses: list[tuple[int, object]] = [(family, address) for family, _, _, _, address in found]
    else:
        addresses = [(socket.AF_INET6 if ":" in host else socket.AF_INET, (host, port))]
    why = "no address"
    for family, address in addresses:
        try:
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as broken:  # out of descriptors, or no IPv6 here
            why = broken.strerror or str(broken)
            continue
        try:
            code = sock.connect_ex(address)  # type: ignore[arg-type]
            if code == errno.EINPROGRESS:
                await trio.lowlevel.wait_writable(sock)
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        except BaseException:
            trio.lowlevel.notify_closing(sock)
            sock.close()
            raise
        if code == 0:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        trio.lowlevel.notify_closing(sock)
        sock.close()
        why = os.strerror(code)
    raise Unreachable(f"connecting to {host} port {port}: {why}")

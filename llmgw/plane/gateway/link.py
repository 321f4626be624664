"""A connection as the gateway uses it: a non-blocking socket, plain or TLS, and a way to wake who waits on it.

trio's own streams cost about twice as much per read and write; at a few microseconds each, with four of them per
request, that would be most of what a relayed request costs. What is used of trio is `wait_readable` and its
twin, so cancellation, deadlines and nurseries work as everywhere.

`wake` ends a wait from outside with a reason, without a cancel scope per request: a client that went away, a
time that ran out.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import ssl
from collections.abc import Callable
from enum import Enum

import trio

READ = 64 << 10


class Why(Enum):
    """Why a wait was ended from outside."""

    GONE = "the client went away"
    LATE = "it took too long"
    STOPPING = "the gateway stops"


class Woken(Exception):
    """Somebody ended the wait."""

    def __init__(self, why: Why) -> None:
        super().__init__(why.value)
        self.why = why


class Link:
    """One connection over TCP. One task reads and writes; any may `wake` it."""

    __slots__ = ("_full", "fd", "sock", "woken")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.woken: Why | None = None
        self._full = False  # the last read filled its buffer, so more is probably there

    async def read(self) -> bytes:
        """The bytes that have come, b"" at the end. Raises OSError when the connection broke, or Woken."""
        if self._full:
            self._full = False
            await trio.lowlevel.checkpoint()
            try:
                data = self.sock.recv(READ)
            except BlockingIOError:
                pass
            else:
                self._full = len(data) == READ
                return data
        while True:
            if self.woken is not None:
                raise Woken(self.woken)
            try:
                # Waiting first, for a proxy is nearly always ahead of both sides: trying first would
                # cost a system call and an exception each time.
                await trio.lowlevel.wait_readable(self.fd)
            except trio.ClosedResourceError:
                raise Woken(self.woken or Why.GONE) from None
            try:
                data = self.sock.recv(READ)
            except BlockingIOError:
                continue
            self._full = len(data) == READ
            return data

    def write_now(self, data: bytes) -> int:
        """Send what the kernel takes at once; how much that was."""
        try:
            return self.sock.send(data)
        except BlockingIOError:
            return 0

    async def write(self, data: bytes, within: float) -> None:
        """Send all of it. Raises OSError when the connection broke or takes nothing for `within` seconds, or Woken."""
        sent = self.write_now(data)
        if sent == len(data):
            return
        rest = memoryview(data)[sent:]
        while rest:
            with trio.move_on_after(within) as scope:
                await self._writable()
            if scope.cancelled_caught:
                raise TimeoutError(errno.ETIMEDOUT, f"nothing was taken for {within:g} s")
            rest = rest[self.write_now(rest) :]  # type: ignore[arg-type]

    async def _writable(self) -> None:
        if self.woken is not None:
            raise Woken(self.woken)
        try:
            await trio.lowlevel.wait_writable(self.fd)
        except trio.ClosedResourceError:
            raise Woken(self.woken or Why.GONE) from None

    def wake(self, why: Why) -> None:
        """End the wait that is on, or else the next one. The connection itself stays open."""
        if self.woken is None and self.fd >= 0:
            self.woken = why
            trio.lowlevel.notify_closing(self.fd)

    def stale(self) -> bool:
        """Whether an idle connection is of no more use: it was closed, or something unasked for came."""
        try:
            socket.socket.recv(self.sock, 1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def no_more(self) -> None:
        """Tell the peer that nothing further comes; what it still sends can be read."""
        with contextlib.suppress(OSError):  # it is gone already
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        if self.fd >= 0:
            trio.lowlevel.notify_closing(self.fd)
            self.fd = -1
            self.sock.close()


class TlsLink(Link):
    """The same over TLS. A read may have to write and the other way round."""

    __slots__ = ()
    sock: ssl.SSLSocket

    @classmethod
    async def shake_hands(
        cls, sock: socket.socket, context: ssl.SSLContext, *, server: bool, name: str = ""
    ) -> TlsLink:
        """Takes the socket over and closes it when the handshake fails. Callers set the deadline."""
        link = cls(
            context.wrap_socket(sock, server_side=server, server_hostname=name or None, do_handshake_on_connect=False)
        )
        try:
            while True:
                try:
                    link.sock.do_handshake()
                    return link
                except ssl.SSLWantReadError:
                    await trio.lowlevel.wait_readable(link.fd)
                except ssl.SSLWantWriteError:
                    await trio.lowlevel.wait_writable(link.fd)
        except BaseException:
            link.close()
            raise

    async def read(self) -> bytes:
        await trio.lowlevel.checkpoint()
        while True:
            try:
                # TLS may hold decrypted bytes that the kernel knows nothing of: so here the try comes first.
                return self.sock.recv(READ)
            except ssl.SSLWantReadError:
                wait = trio.lowlevel.wait_readable
            except ssl.SSLWantWriteError:
                wait = trio.lowlevel.wait_writable
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                return b""
            if self.woken is not None:
                raise Woken(self.woken)
            try:
                await wait(self.fd)
            except trio.ClosedResourceError:
                raise Woken(self.woken or Why.GONE) from None

    def write_now(self, data: bytes) -> int:
        try:
            return self.sock.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0


class Watch:
    """Tells at once when peers close, while their connections' tasks wait for something else.

    One epoll for all connections, asked only for hang-ups, each of them once: a connection costs one system call
    when it is accepted, a request costs none. A client that shuts down only its sending side counts as gone too,
    as it does with nginx and Go: the two look the same from here.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._calls: dict[int, Callable[[], None]] = {}

    def add(self, link: Link, call: Callable[[], None]) -> None:
        self._calls[link.fd] = call
        self._epoll.register(link.fd, select.EPOLLRDHUP | select.EPOLLONESHOT)

    def drop(self, link: Link) -> None:
        """To be called before the link is closed; closing takes it out of the kernel's set."""
        self._calls.pop(link.fd, None)

    async def run(self) -> None:
        try:
            while True:
                await trio.lowlevel.wait_readable(self._epoll.fileno())
                for fd, _ in self._epoll.poll(0):
                    call = self._calls.get(fd)
                    if call is not None:
                        call()
        finally:
            self._epoll.close()

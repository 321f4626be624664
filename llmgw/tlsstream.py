"""TLS on the socket itself: OpenSSL reads and writes the descriptor, and trio only waits for it.

trio's own `SSLStream` passes every byte through two buffers in memory, and leaves the alert in one of them that says
why a handshake failed. With thousands of agents on one plane both matter: this stream costs about a fifth less per
heartbeat (benchmarks/stream.py), and a refused peer hears the reason.
"""

from __future__ import annotations

import os
import socket
import ssl
from contextlib import suppress
from typing import Any

import trio

#: What is read at once when the caller does not say: two TLS records.
RECEIVE_BYTES = 32 << 10


class TlsStream(trio.abc.Stream):
    """A connection whose TLS OpenSSL carries on the descriptor. One task may send while another receives.

    Takes the socket over: closing the stream closes it. Errors are trio's own; one of TLS is the cause
    (`__cause__`) of the `BrokenResourceError`, as with `SSLStream`.
    """

    def __init__(
        self,
        stream: trio.SocketStream,
        context: ssl.SSLContext,
        *,
        server_side: bool,
        server_hostname: str | None = None,
    ) -> None:
        taken = socket.socket(fileno=stream.socket.detach())
        taken.setblocking(False)
        self.socket = context.wrap_socket(
            taken, server_side=server_side, server_hostname=server_hostname, do_handshake_on_connect=False
        )
        self._sending = trio.Lock()
        self._dry = False

    async def do_handshake(self) -> None:
        """Raises BrokenResourceError; the alert that says why has been sent by then."""
        await trio.lowlevel.checkpoint()
        while True:
            try:
                self.socket.do_handshake()
                return
            except ssl.SSLWantReadError:
                await self._readable()
            except ssl.SSLWantWriteError:
                await self._writable()
            except (OSError, ValueError) as error:
                raise trio.BrokenResourceError(f"TLS handshake failed: {error}") from error

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """What is there, at most `max_bytes`; b"" when the peer has closed, with or without saying so."""
        most = RECEIVE_BYTES if max_bytes is None else max_bytes
        if self._dry:
            # The last read took all there was: asking OpenSSL again would only cost an exception.
            self._dry = False
            await self._readable()
        while True:
            try:
                data = self.socket.recv(most)
            except ssl.SSLWantReadError:
                await self._readable()
            except ssl.SSLWantWriteError:
                await self._writable()
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                return b""
            except OSError as error:
                raise self._broken(error) from error
            else:
                self._dry = 0 < len(data) < most and not self.socket.pending()
                await trio.lowlevel.checkpoint_if_cancelled()
                return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        async with self._sending:
            left = memoryview(data)
            while left:
                try:
                    left = left[self.socket.send(left) :]
                except ssl.SSLWantWriteError:
                    await self._writable()
                except ssl.SSLWantReadError:
                    await self._readable()
                except OSError as error:
                    raise self._broken(error) from error

    async def wait_send_all_might_not_block(self) -> None:
        await self._writable()

    async def aclose(self) -> None:
        """Say that nothing more comes, if that takes no waiting, and close."""
        if self.socket.fileno() >= 0:
            with suppress(OSError, ValueError):  # the peer has not said its part, or is gone: only closing is left
                self.socket.unwrap()
            trio.lowlevel.notify_closing(self.socket)
            self.socket.close()
        await trio.lowlevel.checkpoint()

    async def linger(self, within: float = 1.0) -> None:
        """After a failed handshake: let the alert be read. Closing on unread bytes would reset the connection."""
        # Beside OpenSSL, which is done with this connection.
        raw = trio.socket.from_stdlib_socket(socket.socket(fileno=os.dup(self.socket.fileno())))
        with raw, trio.move_on_after(within):
            try:
                raw.shutdown(socket.SHUT_WR)
                while await raw.recv(4096):
                    pass
            except OSError:
                return

    def getpeercert(self) -> dict[str, Any] | None:
        """The peer's verified certificate, as `ssl` tells it; empty or None when it showed none."""
        return self.socket.getpeercert()

    async def _readable(self) -> None:
        self._open()
        await trio.lowlevel.wait_readable(self.socket)

    async def _writable(self) -> None:
        self._open()
        await trio.lowlevel.wait_writable(self.socket)

    def _open(self) -> None:
        if self.socket.fileno() < 0:
            raise trio.ClosedResourceError("this stream was closed")

    def _broken(self, error: OSError) -> Exception:
        if self.socket.fileno() < 0:
            return trio.ClosedResourceError("this stream was closed")
        return trio.BrokenResourceError(f"the connection broke: {error}")

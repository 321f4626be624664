"""One HTTPS connection as hypercorn serves it, with what hypercorn never says: whose certificate it came with.

Hypercorn's per-connection server wants a TLS stream as trio has it and copies a per-connection state into every
request's scope. So the handshake is done before, the certificate is read, and the stream is handed over.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import trio

from llmgw.tls import Peer
from llmgw.tlsstream import TlsStream

#: A peer that takes nothing for so long is given up. Hypercorn shields its sends and would wait for ever.
SEND_WITHIN = 30.0

#: What is left of a connection whose peer has left may clean up for so long.
GONE_WITHIN = 1.0


@attrs.frozen
class Caller:
    """Who is at the other end, as every request of the connection finds it in its scope."""

    address: str
    peer: Peer | None
    abort: Callable[[], None]


class Plain:
    """A connection without TLS: the insecure mode, on loopback alone (A1). `scope` is the whole connection's."""

    def __init__(self, stream: trio.SocketStream | TlsStream, scope: trio.CancelScope) -> None:
        self._stream: trio.abc.Stream = stream
        self._scope = scope
        self.socket = stream.socket

    async def receive_some(self, most: int) -> bytes:
        data = b""
        try:
            data = bytes(await self._stream.receive_some(most))
        finally:
            if not data:
                # The peer has left. Hypercorn cancels its request, but would keep the connection until it has
                # been idle long enough.
                self._scope.deadline = min(self._scope.deadline, trio.current_time() + GONE_WITHIN)
        return data

    async def send_all(self, data: bytes) -> None:
        with trio.move_on_after(SEND_WITHIN) as patience:
            await self._stream.send_all(data)
        if patience.cancelled_caught:
            await trio.aclose_forcefully(self._stream)
            raise trio.BrokenResourceError(f"the peer took nothing for {SEND_WITHIN:g} s")

    async def aclose(self) -> None:
        await self._stream.aclose()


class Secure(Plain):
    """A connection whose TLS handshake is done."""

    def __init__(self, stream: TlsStream, scope: trio.CancelScope) -> None:
        super().__init__(stream, scope)
        self.transport_stream = stream  # as hypercorn asks for the socket

    async def do_handshake(self) -> None:
        """Done already; that this method is there tells hypercorn that the scheme is https."""

    def selected_alpn_protocol(self) -> str:
        return "http/1.1"

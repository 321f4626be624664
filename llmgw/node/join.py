"""How a machine becomes a node: a token for an identity.

The token's secret is said only to a plane that has shown itself to be the one the token is from: its TLS
certificate must be signed by the CA whose fingerprint the token carries.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import structlog
import trio
import trio_websocket as ws
from cryptography import x509

from llmgw import __version__, pki, tls
from llmgw.errors import BadInput, Conflict, LlmgwError, Refused, TimedOut, Unavailable
from llmgw.files import make_directory, write_whole
from llmgw.node.epoch import EPOCH
from llmgw.node.identity import IDENTITY, Identity, pending_request, store
from llmgw.node.link import Address, address
from llmgw.node.settings import load
from llmgw.pki import Role
from llmgw.units import format_duration
from llmgw.wire.agent import Join
from llmgw.wire.codec import MOST_BYTES_STRANGER, Broken, control_codec, encode
from llmgw.wire.control import Goodbye, Joined, JoinHello
from llmgw.wire.facts import NodeId
from llmgw.wire.stream import Closed, Frames, WebSocketFrames

T = TypeVar("T", JoinHello, Joined)

log = structlog.get_logger("llmgw.join")

#: For the connection, and for each answer of the plane, in seconds.
ANSWER_WITHIN = 10.0
#: A clock that is off by more than this is worth a word.
CLOCK_TOLERANCE = 120.0


def target_of(url: str) -> Address:
    """The plane's address from wss://HOST:PORT, or HOST:PORT. Raises BadInput."""
    target = address(url if "//" in url else f"wss://{url}")
    if not target.secure:
        raise BadInput(f"{url} is without TLS", remedy="a plane in insecure mode needs no join; else write wss://")
    return target


async def join(
    url: str,
    token: str,
    node: NodeId,
    directory: Path,
    *,
    again: bool = False,
    wall: Callable[[], float] = time.time,
) -> Identity:
    """Get this machine an identity and write it to `directory`: the key (made here), its certificate, the CA.

    `again` replaces an identity that is there. Raises LlmgwError in an operator's words; whatever was there stays
    as it was then.
    """
    target = target_of(url)
    pki.check_name(node)
    fingerprint = _fingerprint(token)
    _refuse_joined(directory, again, wall())
    make_directory(directory)
    request = pending_request(directory)
    async with _connected(target) as (leaf, frames):
        hello = await _answer(frames, target, JoinHello)
        ca = pki.read_certificate(hello.ca, "the plane's answer")
        _authenticate(ca, leaf, fingerprint, target, wall())
        await frames.send(encode(Join(token=token.strip(), node=node, csr=request, version=__version__)))
        joined = await _answer(frames, target, Joined)
        if joined.error:
            raise Refused(f"{target} refused: {joined.error}")
    certificate = pki.read_certificate(joined.certificate, "the plane's answer")
    _remark_clock(pki.peer(certificate).not_before + pki.BACKDATE - wall())
    store(directory, certificate, ca, node, wall())
    # The plane that was obeyed so far may have been another one, with an epoch that this one will never reach.
    (directory / EPOCH).unlink(missing_ok=True)
    _write_settings(directory / "node.toml", node, target)
    return Identity.load(directory)


def _fingerprint(token: str) -> str:
    match token.strip().split("."):
        case ["llmgw1", _, _, fingerprint] if len(fingerprint) == 43:
            return fingerprint
    # Not the text itself: most of it may be a secret.
    raise BadInput(
        "this is not a whole join token", remedy="it looks like llmgw1.ID.SECRET.FINGERPRINT, all in one word"
    )


def _refuse_joined(directory: Path, again: bool, now: float) -> None:
    if again or not (directory / IDENTITY).exists():
        return
    try:
        peer = Identity.load(directory).peer
    except LlmgwError:
        return
    if now <= peer.not_after:
        raise Conflict(
            f"this machine has joined already as {peer.name} (until {pki.utc(peer.not_after)}, in {directory})",
            remedy="start it with `llmgw-node run`, or join anew with --again",
        )


def _authenticate(ca: x509.Certificate, leaf: x509.Certificate, fingerprint: str, target: Address, now: float) -> None:
    """Raise unless TLS showed a plane's certificate from the token's own CA. Nothing secret was said until here."""
    if pki.fingerprint(ca) != fingerprint:
        raise Refused(
            f"{target} is not the plane that this token is from (its CA is another); the token was not sent",
            remedy="check the address, or get a token from that plane",
        )
    try:
        pki.verify(leaf, ca, now=now, role=Role.PLANE, host=target.host)
    except Refused as refused:
        raise Refused(f"{target}: {refused.what}; the token was not sent", remedy=refused.remedy) from None


@asynccontextmanager
async def _connected(target: Address) -> AsyncIterator[tuple[x509.Certificate, Frames]]:
    """TLS and WebSocket to the plane, and the certificate it showed. Errors of the connection come out bare."""
    problem: LlmgwError | None = None
    try:
        async with await _socket(target) as socket, trio.open_nursery() as nursery:
            try:
                with trio.fail_after(ANSWER_WITHIN):
                    leaf, stream = await _secured(target, socket)
                    connection = await ws.wrap_client_stream(
                        nursery, stream, target.authority, "/join", max_message_size=MOST_BYTES_STRANGER
                    )
            except trio.TooSlowError:
                raise Unavailable(f"{target} did not answer within {ANSWER_WITHIN:g} s") from None
            frames = WebSocketFrames(connection)
            try:
                yield leaf, frames
            except Closed as closed:
                words = closed.reason or "without a reason"
                raise Unavailable(f"{target} closed the connection: {words}") from None
            finally:
                with trio.move_on_after(1, shield=True):
                    await frames.aclose()
                nursery.cancel_scope.cancel()
    except* LlmgwError as group:
        problem = _first(group)
    except* (ws.HandshakeError, ws.ConnectionClosed, trio.BrokenResourceError, trio.ClosedResourceError):
        problem = problem or Unavailable(f"{target} is not a plane's agent port", remedy="the default is 7443")
    if problem is not None:
        raise problem


async def _socket(target: Address) -> trio.SocketStream:
    try:
        with trio.fail_after(ANSWER_WITHIN):
            return await trio.open_tcp_stream(target.host, target.port)
    except trio.TooSlowError:
        words = f"no answer within {ANSWER_WITHIN:g} s"
    except OSError as error:
        words = error.strerror or str(error)
    raise Unavailable(f"cannot reach {target}: {words}", remedy="is the plane running there?")


async def _secured(
    target: Address, socket: trio.SocketStream
) -> tuple[x509.Certificate, trio.SSLStream[trio.SocketStream]]:
    stream = trio.SSLStream(socket, tls.unverified_context(), server_hostname=target.host, https_compatible=True)
    try:
        await stream.do_handshake()
    except trio.BrokenResourceError as error:
        raise Unavailable(tls.explain(error, str(target))) from None
    return x509.load_der_x509_certificate(stream.getpeercert(True)), stream


async def _answer(frames: Frames, target: Address, kind: type[T]) -> T:
    """The plane's next frame, when it is the one that is due."""
    data: bytes | None = None
    with trio.move_on_after(ANSWER_WITHIN):
        data = await frames.receive()
    if data is None:
        raise TimedOut(f"{target} did not answer within {ANSWER_WITHIN:g} s")
    try:
        frame = control_codec.decode(data)
    except Broken:
        raise Unavailable(f"{target} speaks another protocol", remedy="is it a plane, and of this version?") from None
    if isinstance(frame, kind):
        return frame
    match frame:
        case Joined(error=error) if error:
            raise Refused(f"{target} refused: {error}")
        case Goodbye():
            remedy = f"join at {frame.leader}" if frame.leader else ""
            raise Unavailable(f"{target} refused: {frame.reason}", remedy=remedy)
    raise Unavailable(f"{target} answered with something else", remedy="is its version another one?")


def _remark_clock(ahead: float) -> None:
    if abs(ahead) > CLOCK_TOLERANCE:
        side = "behind" if ahead > 0 else "ahead of"
        log.warning(f"this machine's clock is {format_duration(abs(ahead))} {side} the plane's: is NTP running?")


def _write_settings(path: Path, node: NodeId, target: Address) -> None:
    if path.exists():
        if str(target) not in planes_of(path):
            log.warning(f"{path} stays as it is and does not name {target}: the agent dials what it says in `planes`")
        return
    write_whole(path, f'# Written by `llmgw-node join`.\nnode = "{node}"\nplanes = ["{target}"]\n'.encode())


def planes_of(path: Path) -> tuple[str, ...]:
    """The planes in a node.toml; none for a file that cannot be read, which `llmgw-node run` will say."""
    try:
        return tuple(map(str, load(path).addresses))
    except LlmgwError:
        return ()


def _first(group: BaseExceptionGroup[LlmgwError]) -> LlmgwError:
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, LlmgwError)
    return found

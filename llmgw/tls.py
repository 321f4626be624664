"""TLS between our own processes: version 1.3 only, both ends certified by the plane's own CA (A1)."""

from __future__ import annotations

import os
import ssl
import time
from pathlib import Path

import attrs
import structlog
import trio

from llmgw import pki
from llmgw.errors import BadInput, LlmgwError, NotFound
from llmgw.files import read_whole
from llmgw.pki import Peer, Role
from llmgw.tlsstream import TlsStream

log = structlog.get_logger("llmgw.tls")

_Stream = trio.SSLStream[trio.SocketStream] | trio.SSLStream[trio.abc.Stream] | TlsStream


def client_context(ca: Path, identity: Path | None = None) -> ssl.SSLContext:
    """For a connection to the plane. Made anew for each, so that a renewed certificate is used from the next one on.

    `identity` is a file with key and certificate. Raises LlmgwError for files that cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _strict(context)
    _trust(context, ca)
    if identity is not None:
        _present(context, identity)
    return context


def unverified_context() -> ssl.SSLContext:
    """For the first contact only: the caller authenticates the plane itself before it says anything secret."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _strict(context)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def server_context(ca: Path, identity: Path, *, clients: ssl.VerifyMode = ssl.CERT_OPTIONAL) -> ssl.SSLContext:
    """For a listener of the plane. A client's certificate is verified when it presents one (a join has none yet)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _strict(context)
    _trust(context, ca)
    _present(context, identity)
    context.verify_mode = clients
    # No session tickets: a full handshake is cheaper than two tickets, and shows a fresh certificate every time.
    context.num_tickets = 0
    return context


@attrs.define
class ServerTls:
    """A listener's context that follows its files: a renewed certificate is presented from the next handshake on.

    The context object stays the same, so that a server which was given it once need not be told.
    """

    ca: Path
    identity: Path
    clients: ssl.VerifyMode = ssl.CERT_OPTIONAL
    _context: ssl.SSLContext | None = None
    _seen: tuple[int, int, int] | None = None

    def context(self) -> ssl.SSLContext:
        """The context, with what is on disk now. Raises LlmgwError only when it never was usable."""
        seen = _stamp(self.identity)
        if self._context is None:
            self._context, self._seen = server_context(self.ca, self.identity, clients=self.clients), seen
        elif seen != self._seen:
            self._seen = seen
            try:
                _present(self._context, self.identity)
            except LlmgwError as error:
                # The old certificate still serves; a half-copied file must not end every new connection.
                log.error("new certificate not usable, the old one stays", file=str(self.identity), error=str(error))
            else:
                log.info("certificate reloaded", file=str(self.identity))
        return self._context


def peer_of(stream: _Stream) -> Peer | None:
    """Whom the other side's verified certificate names; None when it presented none."""
    # Only a certificate that was verified fills this dict, whatever the context's mode.
    found = stream.getpeercert()
    if not found:
        return None
    subject = {key: value for part in found.get("subject", ()) for key, value in part}
    return Peer(
        name=subject.get("commonName", ""),
        role=subject.get("organizationalUnitName", Role.NONE),
        serial=format(int(found["serialNumber"], 16), "x"),
        not_before=ssl.cert_time_to_seconds(found["notBefore"]),
        not_after=ssl.cert_time_to_seconds(found["notAfter"]),
    )


def explain(error: BaseException, peer: str = "the other side") -> str:
    """A failed handshake in words for an operator. Takes an ssl error or a trio error that was caused by one."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return f"{peer} closed the connection during the TLS handshake ({type(error).__name__})"
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"{peer} is not who it should be: {_verification(cause)}"
    reason = (cause.reason or "").upper()
    for sign, words in _ALERTS.items():
        if sign in reason:
            return f"{peer} {words}"
    return f"TLS with {peer} failed: {reason.lower().replace('_', ' ') or cause}"


#: What the other side's TLS alert means, by a part of OpenSSL's name for it.
_ALERTS = {
    "CERTIFICATE_EXPIRED": "says that our certificate has expired or is not valid yet: join again if it has, "
    "else compare both machines' clocks",
    "CERTIFICATE_REQUIRED": "wants a certificate and we have none: join first (`llmgw-node join`)",
    "UNKNOWN_CA": "does not know our certificate's CA: this machine joined another plane, or the plane was made anew",
    "ALERT_BAD_CERTIFICATE": "refused our certificate: it is not valid yet by its clock, or broken; "
    "compare both machines' clocks, else join again",
    "CERTIFICATE_UNKNOWN": "refused our certificate: compare both machines' clocks, else join again",
    "ALERT_DECRYPT_ERROR": "could not check our certificate's signature: join again",
    "WRONG_VERSION_NUMBER": "does not speak TLS here: is this the right port, and does the plane run in insecure mode?",
    "HTTP_REQUEST": "speaks HTTP without TLS: use a https:// or wss:// address",
    "PROTOCOL_VERSION": "does not speak TLS 1.3",
    "UNSUPPORTED_PROTOCOL": "does not speak TLS 1.3",
    "NO_SHARED_CIPHER": "has no TLS 1.3 cipher in common with us",
}


def _verification(error: ssl.SSLCertVerificationError) -> str:
    now = pki.utc(time.time())
    match error.verify_code:
        case 9:
            return f"its certificate is not valid yet by this machine's clock ({now}): set the clock (is NTP running?)"
        case 10:
            return f"its certificate has expired by this machine's clock ({now}): renew it, or set the clock"
        case 18 | 19 | 20 | 21 | 7:
            return "its certificate is not signed by this fleet's CA: is this the right plane, or was it made anew?"
        case 26:
            return "its certificate is not one of a plane"
        case 62 | 64:
            return (
                f"{error.verify_message}: connect by a name it has, or add this one to `hosts` in plane.toml "
                "and restart the plane"
            )
    return error.verify_message


def _strict(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_COMPRESSION
    context.verify_flags |= ssl.VERIFY_X509_STRICT


def _trust(context: ssl.SSLContext, ca: Path) -> None:
    data = read_whole(ca, "the fleet's CA")
    try:
        context.load_verify_locations(cadata=data.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise BadInput(f"{ca} holds no CA certificate (PEM) that can be read") from None


def _present(context: ssl.SSLContext, identity: Path) -> None:
    try:
        context.load_cert_chain(identity, password="")  # an encrypted key fails here instead of asking a terminal
    except FileNotFoundError:
        raise NotFound(f"{identity} (key and certificate) is missing") from None
    except ssl.SSLError as error:
        words = "its key is not the certificate's" if "MISMATCH" in (error.reason or "") else "it cannot be read as PEM"
        raise BadInput(f"{identity} (key and certificate) cannot be used: {words}") from None
    except OSError as error:
        raise LlmgwError(f"cannot read {identity}: {error.strerror}") from None


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


__all__ = [
    "Peer",
    "ServerTls",
    "client_context",
    "explain",
    "peer_of",
    "server_context",
    "unverified_context",
]

"""Who this node is: its key, its certificate and the fleet's CA, as files, and their renewal.

Key and certificate are one file, so that a renewal swaps both in one step. A new key waits in a file of its own
until the plane has signed it; it never leaves the machine.
"""

from __future__ import annotations

import random
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import structlog
import trio
from cryptography import x509

from llmgw import pki, tls
from llmgw.backoff import Backoff
from llmgw.errors import LlmgwError, NotFound, Refused
from llmgw.files import PRIVATE, make_directory, read_whole, refuse_shared, write_whole
from llmgw.pki import Peer, Role
from llmgw.units import format_duration
from llmgw.wire.agent import Renew
from llmgw.wire.control import Renewed
from llmgw.wire.facts import NodeId

log = structlog.get_logger("llmgw.identity")

IDENTITY, CA, PENDING = "identity.pem", "ca.pem", "pending.pem"
#: How long the plane may take to sign, in seconds.
SIGNED_WITHIN = 60.0
#: The longest sleep until a renewal: the machine's clock may be set meanwhile.
LOOK_EVERY = 3600.0
RETRIES = Backoff(base=60.0, cap=3600.0)


@attrs.define
class Identity:
    """A node's identity as it is on disk."""

    directory: Path
    certificate: x509.Certificate
    ca: x509.Certificate

    @classmethod
    def load(cls, directory: Path) -> Identity:
        """Raises NotFound when this node has not joined, LlmgwError for files that cannot be used."""
        pem = read_whole(directory / IDENTITY, "this node has not joined", "`llmgw-node join URL --token TOKEN`")
        refuse_shared(directory / IDENTITY, "this node's key")
        ca = read_whole(directory / CA, "the fleet's CA", "join again")
        return cls(
            directory,
            pki.read_certificate(pem, str(directory / IDENTITY)),
            pki.read_certificate(ca, str(directory / CA)),
        )

    @property
    def peer(self) -> Peer:
        return pki.peer(self.certificate)

    @property
    def node(self) -> NodeId:
        return NodeId(self.peer.name)

    def reload(self) -> None:
        """Take what is on disk now; somebody may have put a new certificate there."""
        fresh = Identity.load(self.directory)
        self.certificate, self.ca = fresh.certificate, fresh.ca

    def context(self) -> ssl.SSLContext:
        """For one connection to the plane, with the newest certificate. Raises LlmgwError."""
        self.reload()
        return tls.client_context(self.directory / CA, self.directory / IDENTITY)

    def renew_due(self, now: float) -> bool:
        return now >= pki.renew_at(self.peer)

    def problem(self, now: float) -> str:
        """What an operator should know of the certificate's time; "" when all is well."""
        if words := pki.when(self.peer, now, "this node's certificate, that"):
            return words
        if now >= pki.renew_at(self.peer) + pki.DAY:
            return (
                f"this node's certificate expires in {format_duration(self.peer.not_after - now)} and was not renewed"
            )
        return ""

    def request(self) -> str:
        """A CSR for the pending key."""
        return pending_request(self.directory)

    def accept(self, certificate: str, now: float) -> None:
        """Swap to a new certificate for the pending key. Raises Refused for one that is not ours, and keeps the old."""
        leaf = pki.read_certificate(certificate, "the plane's answer")
        store(self.directory, leaf, self.ca, self.node, now)
        self.certificate = leaf


def pending_request(directory: Path) -> str:
    """A CSR (PEM) for the key that waits to be signed; made now when none waits."""
    path = directory / PENDING
    try:
        key = pki.read_key(path.read_bytes(), str(path))
    except (OSError, LlmgwError):
        key = pki.make_key()
        write_whole(path, pki.key_to_pem(key).encode(), PRIVATE)
    return pki.make_request(key)


def store(directory: Path, leaf: x509.Certificate, ca: x509.Certificate, node: str, now: float) -> None:
    """Make the pending key and its certificate this node's identity, in one step.

    Raises Refused for a certificate of another key, name or CA.
    """
    pending = read_whole(directory / PENDING, "the key that waits to be signed")
    key = pki.read_key(pending, str(directory / PENDING))
    if leaf.public_key() != key.public_key():
        raise Refused("the certificate is for another key than the one that waits")
    named = pki.verify(leaf, ca, now=now, role=Role.NODE)
    if named.name != node:
        raise Refused(f"the certificate names {named.name!r}, not {node!r}")
    make_directory(directory)
    write_whole(directory / CA, pki.to_pem(ca).encode())
    write_whole(directory / IDENTITY, (pki.key_to_pem(key) + pki.to_pem(leaf)).encode(), PRIVATE)
    (directory / PENDING).unlink(missing_ok=True)


async def renewals(
    identity: Identity,
    send: Callable[[Renew], None],
    replies: trio.MemoryReceiveChannel[Renewed],
    *,
    wall: Callable[[], float] = time.time,
    roll: Callable[[], float] = random.random,
) -> None:
    """Renew whenever it is due, on one stream and without ending it. Returns when `replies` ends.

    A refusal or a lost answer is tried again, later and later, and the old certificate is used until it ends.
    """
    attempt = 0
    while True:
        await _due(identity, wall)
        try:
            renewed = await _renewed(identity, send, replies)
            identity.accept(renewed.certificate, wall())
        except trio.EndOfChannel:
            return
        except LlmgwError as error:
            left = identity.peer.not_after - wall()
            log.warning("certificate not renewed", error=str(error), expires_in=format_duration(left))
            await trio.sleep(RETRIES.delay(attempt, roll(), retry_after=RETRIES.base / 2))
            attempt += 1
        else:
            attempt = 0
            log.info("certificate renewed", node=identity.node, until=pki.utc(identity.peer.not_after))


async def _due(identity: Identity, wall: Callable[[], float]) -> None:
    # Wall-clock time has no event to wait for, and somebody may set the clock.
    while (left := pki.renew_at(identity.peer) - wall()) > 0:  # noqa: ASYNC110
        await trio.sleep(min(left, LOOK_EVERY))


async def _renewed(
    identity: Identity, send: Callable[[Renew], None], replies: trio.MemoryReceiveChannel[Renewed]
) -> Renewed:
    try:
        while True:  # answers to questions we gave up on
            replies.receive_nowait()
    except trio.WouldBlock:
        pass
    send(Renew(csr=identity.request()))
    with trio.move_on_after(SIGNED_WITHIN):
        renewed = await replies.receive()
        if renewed.error:
            raise Refused(renewed.error)
        return renewed
    raise NotFound(f"no answer from the plane within {SIGNED_WITHIN:g} s")

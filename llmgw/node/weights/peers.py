"""Asks other nodes of the fleet for weights before anybody outside is asked.

They serve theirs by `llmgw-node share`. Both sides show certificates of the fleet's CA. A node's certificate is not one
of a server, since no node may pose as the plane; so it is not TLS that judges it here but `pki.verify`: signed by the
CA, valid, of a node. Nothing of an answer is used before that.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import attrs
import httpx
import msgspec
import structlog
import trio
from cryptography import x509

from llmgw import pki
from llmgw.config import Listen
from llmgw.errors import LlmgwError
from llmgw.node.identity import CA, Identity
from llmgw.node.weights.errors import FetchFailed
from llmgw.node.weights.manifest import Manifest, sound
from llmgw.node.weights.revoked import Revocations
from llmgw.node.weights.share import ASK_AGAIN, ROOM, Busy
from llmgw.node.weights.whence import Answer, Fetches, Has, Nothing, Seen, Whence, judged, watched
from llmgw.pki import Role

log = structlog.get_logger(__name__)

_TIMEOUT = httpx.Timeout(20.0, connect=5.0)


@attrs.frozen
class Held:
    """Weights that are whole at a peer: its address as a URL, its node's name, and the list that it has."""

    base: str
    node: str
    manifest: Manifest


@attrs.frozen
class Peers:
    """Nodes of node.toml to ask beside those that the plane names, and who asks: the identity in `directory`."""

    addresses: tuple[Listen, ...]
    directory: Path

    def client(self) -> httpx.AsyncClient:
        """For peers only: it shows our certificate and takes nothing but a node's. Raises LlmgwError."""
        context = Identity.load(self.directory).context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        ca, revoked = pki.read_certificate((self.directory / CA).read_bytes(), "the fleet's CA"), self._revoked()

        async def judge(response: httpx.Response) -> None:
            _node(response, ca, revoked)

        return httpx.AsyncClient(
            verify=context, timeout=_TIMEOUT, trust_env=False, event_hooks={"request": [], "response": [judge]}
        )

    def _revoked(self) -> Revocations:
        return Revocations(self.directory)

    async def holding(
        self,
        source: str,
        folder: str,
        whence: Whence,
        waiting: Callable[[str], None],
        without: Collection[str] = (),
    ) -> Held | None:
        """A peer that has all of a source; None when it is to be had from outside. Never raises but for cancellation.

        Those that the plane named are asked first, then those of node.toml, all at once; and again and again while it
        is worth waiting for one of them. `without` are peers, by base, that have failed.
        """
        began = trio.current_time()
        addresses = (*whence.complete, *self.addresses, *whence.soon)
        asked = [address for address in dict.fromkeys(addresses) if base_of(address) not in without]
        if not asked:
            return None
        try:
            own = Identity.load(self.directory).node
            client = self.client()
        except (LlmgwError, OSError) as error:
            log.warning("peers cannot be asked", why=str(error))
            return None
        seen: Mapping[Listen, Seen] = {}
        async with client:
            while True:
                answers = await self._all(client, asked, source, folder)
                now = trio.current_time()
                seen = watched(seen, answers, now)
                verdict = judged(answers, whence, own, began, seen, now)
                if verdict.take is not None:
                    has = answers[verdict.take]
                    assert isinstance(has, Has)
                    return Held(base_of(verdict.take), has.node, has.manifest)
                if not verdict.wait:
                    return None
                waiting(verdict.wait)
                await trio.sleep(ASK_AGAIN)

    async def _all(
        self, client: httpx.AsyncClient, addresses: Sequence[Listen], source: str, folder: str
    ) -> dict[Listen, Answer]:
        found: dict[Listen, Answer] = {}

        async def one(address: Listen) -> None:
            found[address] = await self._ask(client, base_of(address), source, folder)

        async with trio.open_nursery() as nursery:
            for address in addresses:
                nursery.start_soon(one, address)
        return {address: found[address] for address in addresses}

    async def _ask(self, client: httpx.AsyncClient, base: str, source: str, folder: str) -> Answer:
        try:
            answer = await client.get(f"{base}/weights", params={"source": source})
            ca = pki.read_certificate((self.directory / CA).read_bytes(), "the fleet's CA")
            node = _node(answer, ca, self._revoked()).name
            if answer.status_code == 503:
                state = msgspec.json.decode(answer.content or b"{}", type=Busy)
                return Fetches(node, state.moving, state.done)
            if answer.status_code == 200:
                manifest = sound(msgspec.json.decode(answer.content, type=Manifest))
                if manifest is not None and manifest.source == source and manifest.folder == folder:
                    return Has(node, manifest, answer.headers.get(ROOM, "") != "none")
        except (httpx.HTTPError, msgspec.MsgspecError, LlmgwError, OSError, RecursionError) as error:
            log.info("a peer could not be asked", peer=base, why=f"{type(error).__name__}: {error}")
        return Nothing()


def base_of(address: Listen) -> str:
    return f"https://{address}"


def _node(response: httpx.Response, ca: x509.Certificate, revoked: Revocations) -> pki.Peer:
    """Which node answers. Raises FetchFailed for whoever is none of this fleet, or none any more."""
    tls = response.extensions["network_stream"].get_extra_info("ssl_object")
    shown = tls.getpeercert(binary_form=True) if tls is not None else None
    if shown is None:
        raise FetchFailed(f"{response.url.host} shows no certificate")
    try:
        peer = pki.verify(x509.load_der_x509_certificate(shown), ca, now=time.time(), role=Role.NODE)
    except (LlmgwError, ValueError) as error:
        raise FetchFailed(f"{response.url.host} is no node of this fleet: {error}") from None
    if peer.serial in revoked:
        raise FetchFailed(f"{response.url.host} shows a certificate of {peer.name} that was revoked")
    return peer

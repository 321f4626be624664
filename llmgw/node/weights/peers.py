"""Asks other nodes of the fleet for weights before anybody outside is asked.

They serve theirs by `llmgw-node share`. Both sides show certificates of the fleet's CA. A node's certificate is not one
of a server, since no node may pose as the plane; so it is not TLS that judges it here but `pki.verify`: signed by the
CA, valid, of a node. Nothing of an answer is used before that.
"""

from __future__ import annotations

import random
import ssl
import time
from collections.abc import Callable
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
from llmgw.node.weights.share import ASK_AGAIN
from llmgw.pki import Role

log = structlog.get_logger(__name__)

_TIMEOUT = httpx.Timeout(20.0, connect=5.0)


@attrs.frozen
class Held:
    """Weights that are whole at a peer: its address as a URL, and the list that it has."""

    base: str
    manifest: Manifest


@attrs.frozen
class Peers:
    """The nodes to ask, and who asks: the identity in `directory`."""

    addresses: tuple[Listen, ...]
    directory: Path

    def client(self) -> httpx.AsyncClient:
        """For peers only: it shows our certificate and takes nothing but a node's. Raises LlmgwError."""
        context = Identity.load(self.directory).context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        ca = pki.read_certificate((self.directory / CA).read_bytes(), "the fleet's CA")

        async def judge(response: httpx.Response) -> None:
            _node(response, ca)

        return httpx.AsyncClient(
            verify=context, timeout=_TIMEOUT, trust_env=False, event_hooks={"request": [], "response": [judge]}
        )

    async def holding(self, source: str, folder: str, waiting: Callable[[str], None]) -> Held | None:
        """A peer that has all of a source; None when none has. Never raises but for cancellation.

        One that is fetching it is waited for if its name comes before ours: so never do two wait for one another.
        """
        try:
            own = Identity.load(self.directory).node
            client = self.client()
        except (LlmgwError, OSError) as error:
            log.warning("peers cannot be asked", why=str(error))
            return None
        async with client:
            for address in random.sample(self.addresses, len(self.addresses)):
                base = f"https://{address}"
                while (found := await self._ask(client, base, source, own)) is _LATER:
                    waiting(f"weights, {address} fetches them")
                    await trio.sleep(ASK_AGAIN)
                if isinstance(found, Manifest) and found.source == source and found.folder == folder:
                    return Held(base, found)
        return None

    async def _ask(self, client: httpx.AsyncClient, base: str, source: str, own: str) -> Manifest | object | None:
        try:
            answer = await client.get(f"{base}/weights", params={"source": source})
            if answer.status_code == 503:
                ca = pki.read_certificate((self.directory / CA).read_bytes(), "the fleet's CA")
                return _LATER if _node(answer, ca).name < own else None
            if answer.status_code != 200:
                return None
            return sound(msgspec.json.decode(answer.content, type=Manifest))
        except (httpx.HTTPError, msgspec.MsgspecError, LlmgwError, OSError, RecursionError) as error:
            log.info("a peer could not be asked", peer=base, why=f"{type(error).__name__}: {error}")
            return None


_LATER = object()


def _node(response: httpx.Response, ca: x509.Certificate) -> pki.Peer:
    """Which node answers. Raises FetchFailed for whoever is none of this fleet."""
    tls = response.extensions["network_stream"].get_extra_info("ssl_object")
    shown = tls.getpeercert(binary_form=True) if tls is not None else None
    if shown is None:
        raise FetchFailed(f"{response.url.host} shows no certificate")
    try:
        return pki.verify(x509.load_der_x509_certificate(shown), ca, now=time.time(), role=Role.NODE)
    except (LlmgwError, ValueError) as error:
        raise FetchFailed(f"{response.url.host} is no node of this fleet: {error}") from None

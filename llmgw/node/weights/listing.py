"""What belongs to a source, asked of whoever knows: a hub, a web server, or a peer that has it all."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import httpx
import structlog
import trio

from llmgw.node.weights import hub
from llmgw.node.weights.errors import FetchFailed, Unreachable
from llmgw.node.weights.manifest import File, Manifest, unchecked
from llmgw.node.weights.peers import Held
from llmgw.node.weights.transfer import Again, Patience, patiently, retry_after, words_of
from llmgw.sources import HubSource, WebSource

log = structlog.get_logger(__name__)


@attrs.frozen
class Listing:
    """The question for one source's list. `text` is the source as it was written; `noted` is told why it takes long."""

    text: str
    source: HubSource | WebSource
    base: str
    patience: Patience
    noted: Callable[[str], None]

    async def made(self, commit: str = "") -> Manifest:
        """The list as the source has it now, or at a `commit` if that can still be had. Raises FetchFailed."""
        if commit and isinstance(self.source, HubSource):
            try:
                return await self._asked(commit)
            except hub.NoRevision:
                log.warning("the commit that the fleet holds is gone", source=self.text, commit=commit)
        return await self._asked()

    async def _asked(self, commit: str = "") -> Manifest:
        found: list[Manifest] = []

        async def ask() -> bool:
            if isinstance(self.source, WebSource):
                found.append(self._of_web(self.source, await self._size(self.source)))
                return True
            try:
                # A question changes nothing, so nobody waits for an answer that is not wanted any more.
                found.append(
                    await trio.to_thread.run_sync(
                        hub.listed, self.source, self.text, self.base, commit, abandon_on_cancel=True
                    )
                )
            except Unreachable as error:
                raise Again(error.what.removeprefix(f"{self.text}: "), error.after) from None
            return True

        await patiently(ask, self.patience, self.text, self.noted)
        return found[-1]

    async def beside(self, peer: Held) -> Manifest:
        """The list where a peer has it all: of the same commit, for a fleet serves one model and not two.

        From the source itself if it can be had: a peer is believed by digest.
        """
        if isinstance(self.source, WebSource):
            return self._of_web(self.source, peer.manifest.bytes)
        try:
            return await attrs.evolve(self, patience=attrs.evolve(self.patience, seconds=0.0)).made(
                peer.manifest.revision
            )
        except Unreachable as error:
            log.warning("the hub cannot be asked, a peer's list is taken", source=self.text, why=error.what)
            return unchecked(peer.manifest)

    def _of_web(self, source: WebSource, size: int) -> Manifest:
        file = File(name=source.name, size=size, digest=f"sha256:{source.sha256}")
        return Manifest(
            source=self.text, folder=source.folder, revision=source.sha256, files=(file,), entry=source.name
        )

    async def _size(self, source: WebSource) -> int:
        """A file's size, by asking for its first byte: not every server answers HEAD."""
        headers = {"Range": "bytes=0-0", "Accept-Encoding": "identity"}
        try:
            async with (
                anybody(self.patience) as client,
                client.stream("GET", source.url, headers=headers) as answer,
            ):
                status = answer.status_code
                whole = answer.headers.get("content-range", "").rpartition("/")[2]
                size = whole if status == 206 else answer.headers.get("content-length", "")
        except httpx.TransportError as error:
            raise Again(words_of(error)) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise FetchFailed(f"{self.text} cannot be fetched: {error}", remedy="check the source") from None
        if status == 429 or status >= 500:
            raise Again(f"it answers {status}", retry_after(answer.headers))
        if status not in (200, 206) or not size.isdecimal():
            words = f"the server answers {status}" if status not in (200, 206) else "the server tells no size"
            raise FetchFailed(f"{self.text}: {words}", remedy="check the source")
        return int(size)


def anybody(patience: Patience) -> httpx.AsyncClient:
    """A client for the world outside: its CAs, its proxies, redirects to where the bytes are."""
    timeout = httpx.Timeout(patience.silent, connect=min(15.0, patience.silent))
    return httpx.AsyncClient(follow_redirects=True, timeout=timeout)

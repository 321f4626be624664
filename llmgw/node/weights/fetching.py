"""Fetches one source whole: its list, the room on the disk, every file, and what it says of itself in the end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import attrs
import httpx
import structlog
import trio
from msgspec import structs

from llmgw.errors import LlmgwError
from llmgw.files import FULL, NoSpace
from llmgw.node.engines.contents import read_contents
from llmgw.node.weights import hub, layout
from llmgw.node.weights.errors import BrokenWeights, DiskFull, FetchFailed
from llmgw.node.weights.listing import Listing, anybody
from llmgw.node.weights.lock import Note, locked
from llmgw.node.weights.manifest import File, Manifest, Manifests
from llmgw.node.weights.peers import Held, Peers
from llmgw.node.weights.source import parse
from llmgw.node.weights.transfer import Gone, Patience, Way, bring
from llmgw.node.weights.verify import verified
from llmgw.node.weights.whence import Whence
from llmgw.sources import HubSource, WebSource

log = structlog.get_logger(__name__)

#: Files that are brought at the same time: one connection seldom fills a link.
AT_ONCE = 4
#: A peer has to be worth it: the source itself is still there to be asked.
_PEER = Patience(seconds=20.0)


@attrs.frozen
class Means:
    """What a fetch needs of its node.

    `others` is room on the disk that other fetches have been promised, `reserve` what is never taken, in bytes.
    `whence` is what the plane said of the source.
    """

    root: Path
    base: str
    reserve: int
    patience: Patience
    pace: Callable[[int], Awaitable[None]]
    others: Callable[[], int]
    peers: Peers | None = None
    whence: Whence = Whence()


@attrs.define(eq=False)
class Fetch:
    """One source on its way into the cache. `tell` gets every step: what is done, bytes done, bytes in all."""

    source: str
    means: Means
    tell: Callable[[str, int, int | None], None]
    what: str = "weights"
    done: int = 0
    total: int | None = None
    #: The peer that has it all, while it can be relied on.
    peer: Held | None = None
    #: Peers, by base, that have failed this fetch.
    failed: set[str] = attrs.field(factory=set)
    _choosing: trio.Lock = attrs.field(factory=trio.Lock)
    _note: Callable[[Note], None] = lambda note: None

    @property
    def left(self) -> int:
        """Bytes that it will still write."""
        return max(0, (self.total or 0) - self.done)

    async def run(self) -> Path:
        """Bring what is missing; where an engine finds the files. Raises FetchFailed."""
        means, source = self.means, parse(self.source)
        try:
            await trio.to_thread.run_sync(layout.prepare, means.root)
            if (path := await trio.to_thread.run_sync(self._there, source.folder)) is not None:
                return path  # whole already: neither the hub nor whoever holds the lock need be asked
            async with locked(means.root, source.folder, lambda: self._say("weights, after another fetch")) as note:
                self._note = note
                note(Note(self.source))
                manifest = await self._manifest(source)
                note(Note(self.source, moving=True))
                return await self._fetched(source, manifest)
        except FetchFailed:
            raise
        except OSError as error:
            if error.errno in FULL:
                raise self._full() from None
            raise FetchFailed(
                f"{self.source}: the cache {means.root} cannot be used: {error.strerror or error}",
                remedy="check the agent's `weights` directory",
            ) from None
        except NoSpace:  # not even for the list of its files
            raise self._full() from None
        except LlmgwError as error:
            raise FetchFailed(f"{self.source}: {error.what}", remedy=error.remedy) from None

    def _there(self, folder: str) -> Path | None:
        found = Manifests(self.means.root).read(self.source)
        if found is None or found.folder != folder or layout.look(self.means.root, found).missing:
            return None
        return self._sound(layout.entry(self.means.root, found))

    def _sound(self, path: Path) -> Path:
        if faults := read_contents(path).faults:
            words = "; ".join(fault.text for fault in faults)
            raise BrokenWeights(
                f"{self.source} came as announced, and is no whole model: {words}", remedy="the source itself is broken"
            )
        return path

    # --- steps -----------------------------------------------------------------------------------------

    async def _manifest(self, source: HubSource | WebSource) -> Manifest:
        """The list that an earlier fetch began with, else the source's own."""
        manifests = Manifests(self.means.root)
        found = await trio.to_thread.run_sync(manifests.read, self.source)
        self.peer = await self._holder(source.folder)
        if found is not None and found.folder == source.folder:
            return found
        self._say("weights, asking for their list")
        listing = self._listing(source)
        made = await (listing.made(self.means.whence.revision) if self.peer is None else listing.beside(self.peer))
        await trio.to_thread.run_sync(manifests.write, made)
        return made

    async def _holder(self, folder: str) -> Held | None:
        """A peer that has it all, waited for where one is about to; None: it comes from the source itself."""
        peers, whence = self.means.peers, self.means.whence
        return await peers.holding(self.source, folder, whence, self._say, self.failed) if peers is not None else None

    def _listing(self, source: HubSource | WebSource) -> Listing:
        means = self.means
        return Listing(self.source, source, means.base, means.patience, lambda words: self._say(f"weights ({words})"))

    async def _fetched(self, source: HubSource | WebSource, manifest: Manifest) -> Path:
        means, manifests = self.means, Manifests(self.means.root)
        there = await trio.to_thread.run_sync(layout.look, means.root, manifest)
        if there.missing:
            self.done, self.total = there.bytes, manifest.bytes
            try:
                await self._room(manifest)
                manifest = await self._files(source, manifest, there.missing)
            except Gone:
                # The commit of an earlier list may have been deleted since. A newer list decides, and only once.
                newer = await self._listing(source).made()
                if newer.revision == manifest.revision:
                    raise
                log.warning("a commit is gone, taking a newer one", source=self.source, revision=newer.revision)
                await trio.to_thread.run_sync(layout.drop_partials, means.root, manifest)
                await trio.to_thread.run_sync(manifests.write, newer)
                there = await trio.to_thread.run_sync(layout.look, means.root, newer)
                self.done, self.total = there.bytes, newer.bytes
                await self._room(newer)
                manifest = await self._files(source, newer, there.missing)
            await trio.to_thread.run_sync(layout.refer, means.root, manifest)
        return await trio.to_thread.run_sync(self._sound, layout.entry(means.root, manifest))

    async def _room(self, manifest: Manifest) -> None:
        """Refuse before the first byte what cannot fit (DL02)."""
        means, needed = self.means, self.left
        free = await trio.to_thread.run_sync(layout.free_bytes, means.root)
        promised = means.others()
        if needed <= free - means.reserve - promised:
            return
        await trio.to_thread.run_sync(self._give_back, manifest)
        beside = "".join(
            f", of which {size(count)} {words}"
            for count, words in ((promised, "are promised to other fetches"), (means.reserve, "are kept free"))
            if count
        )
        raise DiskFull(
            f"{self.source} needs {size(needed)} more of {size(manifest.bytes)}, and {means.root} has {size(free)} "
            f"free{beside}",
            remedy="remove weights that nothing needs (`llmgw ctl gc`), or use a larger disk",
        )

    async def _files(self, source: HubSource | WebSource, manifest: Manifest, missing: tuple[File, ...]) -> Manifest:
        """Bring the missing files, several at a time; the manifest with all of them noted as found right."""
        means, manifests = self.means, Manifests(self.means.root)
        failures: list[FetchFailed | OSError | LlmgwError] = []
        slots = trio.CapacityLimiter(AT_ONCE)
        writing = trio.Lock()
        same: dict[Path, trio.Lock] = {}
        token = await trio.to_thread.run_sync(hub.token) if isinstance(source, HubSource) else None
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._moved(0)

        async def one(client: httpx.AsyncClient, file: File) -> None:
            nonlocal manifest
            whole = layout.blob(means.root, manifest, file)
            url = (
                hub.url(means.base, source, manifest.revision, file.name)
                if isinstance(source, HubSource)
                else source.url
            )
            way = Way(client, url, headers, means.pace, means.patience, self._moved, self._noted)
            at, giver = layout.partial(means.root, manifest, file), manifest.came_from
            try:
                # Two names of one content are one blob: the second finds it whole.
                async with slots, same.setdefault(whole, trio.Lock()):
                    before = layout.stamp(whole)
                    stamp = await verified(file, whole, lambda: self._say("weights, verifying"))
                    if stamp is None:
                        if before is not None and before[0] == file.size:  # it was counted and was not it
                            part = layout.stamp(at)
                            self._moved(min(part[0], file.size) - file.size if part is not None else -file.size)
                        stamp, giver = await self._from_peer(peers, way, file, at, whole)
                        if stamp is None:
                            stamp = await bring(way, file, at, whole, self.source)
                async with writing:
                    noted = structs.replace(manifest.checked(file, stamp), came_from=giver)
                    await trio.to_thread.run_sync(layout.point, means.root, noted, file)
                    await trio.to_thread.run_sync(manifests.write, noted)
                    manifest = noted
            except (LlmgwError, OSError) as error:
                failures.append(error)
                nursery.cancel_scope.cancel()

        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(anybody(means.patience))
            peers = None
            if self.peer is not None and means.peers is not None:
                peers = await stack.enter_async_context(means.peers.client())
            nursery = await stack.enter_async_context(trio.open_nursery())
            for file in missing:
                nursery.start_soon(one, client, file)
        if failures:
            error = failures[0]
            if isinstance(error, NoSpace) or (isinstance(error, OSError) and error.errno in FULL):
                full = self._full()
                await trio.to_thread.run_sync(self._give_back, manifest)
                raise full from None
            raise error
        return manifest

    async def _from_peer(
        self, client: httpx.AsyncClient | None, way: Way, file: File, at: Path, whole: Path
    ) -> tuple[tuple[int, int] | None, str]:
        """A file from a peer that has it all, and its name; None when none gave it. What came of it counts."""
        folder = whole.parent.parent.name
        while client is not None and (peer := self.peer) is not None:
            url = f"{peer.base}/blobs/{folder}/{whole.name}"
            near = attrs.evolve(way, client=client, url=url, headers={}, patience=_PEER)
            try:
                return await bring(near, file, at, whole, self.source), peer.node
            except FetchFailed as error:
                log.warning("a peer's weights did not come", source=self.source, peer=peer.base, why=error.what)
            async with self._choosing:
                if self.peer is peer:
                    self.failed.add(peer.base)
                    self._note(Note(self.source))  # who asks must not take us for one that brings bytes meanwhile
                    self.peer = await self._holder(folder)
                    self._note(Note(self.source, moving=True))
                    self._moved(0)
        return None, ""

    def _full(self) -> DiskFull:
        """What a write ran into although there was room before: somebody else took it."""
        free, files = layout.free_bytes(self.means.root), layout.free_files(self.means.root)
        room = "it can hold no more files" if files == 0 else f"{size(free)} free"
        left = f" with {size(self.left)} of {size(self.total)} still to fetch" if self.total is not None else ""
        return DiskFull(
            f"{self.source}: the disk of {self.means.root} is full ({room}){left}",
            remedy="remove weights that nothing needs (`llmgw ctl gc`), or use a larger disk",
        )

    def _give_back(self, manifest: Manifest) -> None:
        """A disk without room is everybody's trouble: what this fetch cannot finish goes."""
        layout.drop_partials(self.means.root, manifest)
        if not layout.look(self.means.root, manifest).bytes:
            Manifests(self.means.root).remove(manifest.source)

    # --- telling ---------------------------------------------------------------------------------------

    def _moved(self, count: int) -> None:
        self.done += count
        self._say("weights" if self.peer is None else f"weights from {self.peer.node}")

    def _noted(self, words: str) -> None:
        self._say(f"weights ({words}; trying again)")

    def _say(self, what: str) -> None:
        self.what = what
        self.tell(what, self.done, self.total)


def size(count: int) -> str:
    """Bytes as an operator reads them."""
    for unit, step in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= step:
            return f"{count / step:.1f} {unit}"
    return f"{count} B"

"""The cache as the rest of the agent sees it: weights for shards, weights ahead of need, and what is there.

A source is fetched once, however many want it: each who wants it waits for the one fetch and is told its progress.
When nobody waits any more the fetch is cancelled, and what came is kept for the next.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

import attrs
import structlog
import trio
from msgspec import structs

from llmgw.cell import Cell
from llmgw.errors import LlmgwError
from llmgw.node.answers import Answers, Say
from llmgw.node.engines import source_of
from llmgw.node.engines.contents import read_contents
from llmgw.node.weights import hub, layout, removal
from llmgw.node.weights.errors import FetchFailed
from llmgw.node.weights.fetching import Fetch, Means
from llmgw.node.weights.listing import Listing
from llmgw.node.weights.lock import locked
from llmgw.node.weights.manifest import Manifests
from llmgw.node.weights.pace import Pace
from llmgw.node.weights.peers import Peers
from llmgw.node.weights.source import parse
from llmgw.node.weights.transfer import Patience
from llmgw.node.weights.whence import Whence
from llmgw.sources import HubSource, pinned
from llmgw.wire.agent import Working
from llmgw.wire.control import (
    FetchWeights,
    RemoveWeightsReply,
    RemoveWeightsRequest,
    WeightsReply,
    WeightsRequest,
)
from llmgw.wire.facts import Progress, ShardSpec, Weights

log = structlog.get_logger(__name__)

#: Seconds between two notes that weights are in use, from which it is told how long they have not been.
_USED_EVERY = 60.0
#: Seconds between two words on a fetch's progress: more would only be read by machines.
_TELL_EVERY = 0.5
#: Seconds for which it is told that a source could not be fetched, unless it is tried again or removed.
REMEMBERED = 86400.0


@attrs.define(eq=False)
class _Shared:
    """One fetch and those who wait for it."""

    fetch: Fetch
    pace: Pace
    progress: Cell[Progress]
    waiting: int = 0
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    over: bool = False
    path: Path | None = None
    error: FetchFailed | None = None
    told_at: float = float("-inf")


class Cache:
    """Models on this node's disk. `run` must be running, in a nursery that lives as long as the daemon."""

    def __init__(
        self,
        root: Path,
        *,
        in_use: Callable[[], Collection[str]] = frozenset,
        bytes_per_second: int | None = None,
        reserve: int = 0,
        patience: Patience | None = None,
        base: str | None = None,
        peers: Peers | None = None,
    ) -> None:
        """`in_use` names the sources of this node's shards; `reserve` bytes of the disk are never taken."""
        self._root = root.absolute()
        self._in_use = in_use
        self._pace = Pace(bytes_per_second)
        self._reserve = reserve
        self._patience = patience or Patience()
        self._base = base
        self._peers = peers
        self._whence: dict[str, Whence] = {}
        self._facts: dict[str, Weights] = {}
        #: When the last fetch of a source failed; none of those that have succeeded since.
        self._failed: dict[str, float] = {}
        self._shared: dict[str, _Shared] = {}
        self._removing: dict[str, trio.Event] = {}
        self._nursery: trio.Nursery | None = None
        #: Set once it is known what is there: register after it.
        self.looked = trio.Event()

    # --- what is there -----------------------------------------------------------------------------------

    @property
    def weights(self) -> tuple[Weights, ...]:
        """What the plane is told, by source. It changes when a fetch begins or ends, never with its progress (B7)."""
        used = self._in_use()
        return tuple(
            structs.replace(found, in_use=source in used, fetching=source in self._shared)
            for source, found in sorted(self._facts.items())
        )

    @property
    def answers(self) -> Answers:
        return {WeightsRequest: self._list, RemoveWeightsRequest: self._remove}

    def told(self, source: str, whence: Whence) -> None:
        """What the plane says of where a source may be had, for fetches that begin from now on."""
        self._whence[source] = whence

    # --- wanting some --------------------------------------------------------------------------------------

    async def fetch(self, spec: ShardSpec, tell: Callable[[Progress], None]) -> Path:
        """The files of a shard's source, fetched if they are not there. Cancelled, the fetch ends unless others wait.

        Raises FetchFailed.
        """
        return await self.bring(spec.source, tell)

    async def bring(self, source: str, tell: Callable[[Progress], None], bytes_per_second: int | None = None) -> Path:
        """The files of a source; `bytes_per_second` holds only while nobody wants them faster."""
        await self.looked.wait()
        while (removal_over := self._removing.get(source)) is not None:
            await removal_over.wait()
        shared = self._join(source, bytes_per_second)
        try:
            version = -1
            while not shared.over:
                progress, version = await shared.progress.next(version)
                if not shared.over and progress.what:
                    tell(progress)
        finally:
            shared.waiting -= 1
            if not shared.waiting and not shared.over:
                shared.scope.cancel()
                if self._shared.get(source) is shared:  # whoever comes now begins anew, after this one has ended
                    del self._shared[source]
        if shared.path is None:
            error = shared.error or FetchFailed(f"{source}: the fetch was cancelled")
            raise type(error)(error.what, remedy=error.remedy)
        return shared.path

    def ahead(self, order: FetchWeights) -> None:
        """Fetch a source before it is needed. What goes wrong is logged, and told with the node's weights."""
        if self._nursery is None:
            log.warning("weights were asked for before the cache was ready", source=order.source)
            return
        self._nursery.start_soon(self._ahead, order)

    async def _ahead(self, order: FetchWeights) -> None:
        try:
            if source_of(order.source)[0] is None:
                if order.refresh:
                    await self._refresh(order.source, order.bytes_per_second)
                await self.bring(order.source, lambda progress: None, order.bytes_per_second)
                log.info("weights are there ahead of need", source=order.source)
        except (LlmgwError, OSError) as error:  # a full disk, a folder that went away: this order's trouble alone
            log.warning("weights could not be fetched ahead", source=order.source, error=str(error))

    async def _refresh(self, source: str, bytes_per_second: int | None) -> None:
        """Where a branch has moved on, bring its new commit and let the source be that one. Raises FetchFailed.

        Until all of it is there the old one is what shards get; afterwards it is kept under its commit's own name.
        """
        await self.looked.wait()
        found, manifests = parse(source), Manifests(self._root)
        held = await trio.to_thread.run_sync(manifests.read, source)
        if held is None or not isinstance(found, HubSource):
            return
        listing = Listing(source, found, self._base or hub.endpoint(), self._patience, lambda words: None)
        newest = await listing.made()
        if newest.revision == held.revision or source == pinned(source, held.revision):
            log.info("weights are the newest already", source=source, revision=held.revision)
            return
        commit = pinned(source, newest.revision)
        known = self._whence.get(source, Whence())
        self.told(commit, attrs.evolve(known, revision=newest.revision))
        await self.bring(commit, lambda progress: None, bytes_per_second)

        def swap() -> None:
            old, new = manifests.read(source), manifests.read(commit)
            if new is None:
                return
            if old is not None and not layout.look(self._root, old).missing:
                manifests.write(structs.replace(old, source=pinned(source, old.revision), reference=""))
            manifests.write(structs.replace(new, source=source, reference=held.reference))
            manifests.remove(commit)

        async with locked(self._root, found.folder, lambda: None):
            await trio.to_thread.run_sync(swap)
        log.info("a branch has moved on, and so have its weights", source=source, revision=newest.revision)
        for name in (commit, pinned(source, held.revision), source):
            await self._look_again(name, None)

    def _join(self, source: str, bytes_per_second: int | None) -> _Shared:
        shared = self._shared.get(source)
        if shared is None:
            assert self._nursery is not None
            shared = self._begin(source, bytes_per_second)
            self._nursery.start_soon(self._carry_out, source, shared)
        elif bytes_per_second is None or (shared.pace.rate is not None and bytes_per_second > shared.pace.rate):
            shared.pace.rate = bytes_per_second
        shared.waiting += 1
        return shared

    def _begin(self, source: str, bytes_per_second: int | None) -> _Shared:
        pace = Pace(bytes_per_second)

        async def take(count: int) -> None:
            await pace.take(count)
            await self._pace.take(count)

        def tell(what: str, done: int, total: int | None) -> None:
            now, before = trio.current_time(), shared.progress.value
            if what == before.what and now < shared.told_at + _TELL_EVERY and done != total:
                return
            shared.told_at = now
            shared.progress.set(Progress(what, done, total))

        def others() -> int:
            return sum(other.fetch.left for other in self._shared.values() if other is not shared and not other.over)

        means = Means(
            self._root,
            self._base or hub.endpoint(),
            self._reserve,
            self._patience,
            take,
            others,
            self._peers,
            self._whence.get(source, Whence()),
        )
        shared = self._shared[source] = _Shared(Fetch(source, means, tell), pace, Cell(Progress("")))
        return shared

    async def _carry_out(self, source: str, shared: _Shared) -> None:
        with shared.scope:
            try:
                shared.path = await shared.fetch.run()
            except FetchFailed as error:
                shared.error = error
            except Exception as error:  # one source's failure, whatever it was
                log.exception("a fetch failed", source=source)
                shared.error = FetchFailed(f"{source}: the agent itself failed: {error!r}", remedy="see its log")
        shared.over = True
        if self._shared.get(source) is shared:
            del self._shared[source]
        if shared.path is None or source not in self._facts or not self._facts[source].complete:
            await self._look_again(source, shared.error)
        shared.progress.set(Progress("over"))

    # --- the daemon's task -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Look at what is there, then carry out fetches, for ever. Cancelled, it keeps what came of each."""
        async with trio.open_nursery() as self._nursery:
            try:
                await trio.to_thread.run_sync(layout.prepare, self._root)
                found = await trio.to_thread.run_sync(layout.survey, self._root, Manifests(self._root))
                self._facts = {weights.source: weights for weights in found}
            except OSError as error:
                log.error("the cache of weights cannot be used", path=str(self._root), error=str(error))
            self.looked.set()
            while True:
                await trio.to_thread.run_sync(self._note_use, frozenset(self._in_use()))
                self._forget(self._past())
                await trio.sleep(_USED_EVERY)

    async def _look_again(self, source: str, error: FetchFailed | None) -> None:
        def look() -> Weights | None:
            manifest = Manifests(self._root).read(source)
            return layout.facts(self._root, manifest) if manifest is not None else None

        found = await trio.to_thread.run_sync(look)
        self._failed.pop(source, None)
        if error is not None:
            self._failed[source] = time.monotonic()
            found = structs.replace(found or Weights(source=source), error=str(error), complete=False)
        if found is not None:
            self._facts[source] = found
        else:
            self._facts.pop(source, None)

    def _past(self) -> list[str]:
        oldest = time.monotonic() - REMEMBERED
        return [source for source, at in self._failed.items() if at < oldest]

    def _forget(self, sources: Collection[str]) -> None:
        """Of these it is told no more that a fetch failed, and nothing at all of those that have no bytes here."""
        for source in sources:
            self._failed.pop(source, None)
            if (known := self._facts.get(source)) is not None and not known.path:
                del self._facts[source]
            elif known is not None:
                self._facts[source] = structs.replace(known, error="")

    def _note_use(self, sources: Collection[str]) -> None:
        manifests = Manifests(self._root)
        for source in sources:
            try:
                os.utime(manifests.path(source))
            except OSError:
                continue  # served in place, or not fetched yet

    # --- requests --------------------------------------------------------------------------------------

    async def _list(self, request: WeightsRequest, say: Say) -> WeightsReply:
        """All that is in the cache or on its way, and the models elsewhere that shards serve in place, as it is now."""
        used, coming = frozenset(self._in_use()), dict(self._shared)
        self._forget(self._past())
        facts, failures = dict(self._facts), dict(self._failed)

        def look() -> tuple[Weights, ...]:
            failed = [weights for weights in facts.values() if weights.error]
            found = {weights.source: weights for weights in layout.survey(self._root, Manifests(self._root), failed)}
            for source in coming.keys() - found.keys():
                fetch = coming[source].fetch
                found[source] = Weights(source=source, bytes=fetch.done, total_bytes=fetch.total)
            for source in used - found.keys():
                path = source_of(source)[0]
                if path is not None:
                    contents = read_contents(path)
                    error = "; ".join(fault.text for fault in contents.faults)
                    found[source] = Weights(
                        source=source, path=str(contents.path), bytes=contents.bytes, total_bytes=contents.bytes,
                        complete=not error, error=error,
                    )  # fmt: skip
            return tuple(seen(found[source]) for source in sorted(found))

        def seen(found: Weights) -> Weights:
            fetching, known = found.source in coming, facts.get(found.source)
            idle: float | None = 0.0 if found.source in used or fetching else None
            if idle is None:
                try:
                    idle = max(0.0, time.time() - Manifests(self._root).path(found.source).stat().st_mtime)
                except OSError:
                    idle = time.monotonic() - failures[found.source] if found.source in failures else None
            error = found.error or (known.error if known is not None and not found.complete else "")
            return structs.replace(
                found, in_use=found.source in used, fetching=fetching, idle=idle, error="" if fetching else error
            )

        return WeightsReply(weights=await trio.to_thread.run_sync(look))

    async def _remove(self, request: RemoveWeightsRequest, say: Say) -> RemoveWeightsReply:
        say(Working(request_id=request.request_id, seconds=120.0, note="checking what may be removed"))
        busy = {source: "it is being fetched" for source in request.sources if source in self._shared}
        busy |= {source: "it is being removed" for source in request.sources if source in self._removing}
        sources = [source for source in request.sources if source not in busy]
        over, used = trio.Event(), frozenset(self._in_use())
        told = [
            s for s in sources if s in self._failed and s not in used and s in self._facts and not self._facts[s].path
        ]
        sources = [source for source in sources if source not in told]
        # From here on a shard that starts is either among those that use a source, or waits until it is gone.
        self._removing |= dict.fromkeys(sources, over)
        try:
            outcome = await trio.to_thread.run_sync(removal.remove, self._root, sources, used, request.dry_run)
        finally:
            for source in sources:
                del self._removing[source]
            over.set()
        outcome.removed += told
        if not request.dry_run:
            self._forget(told)
            for source in sources:
                if source in outcome.removed or (source in outcome.kept and source not in used):
                    await self._look_again(source, None)
            for source in outcome.removed:
                log.info("weights removed", source=source)
        return RemoveWeightsReply(
            removed=tuple(outcome.removed), kept={**busy, **outcome.kept}, freed_bytes=outcome.freed
        )

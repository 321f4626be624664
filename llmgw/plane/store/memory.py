"""A store that lasts as long as its process: for tests and for planes that may forget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import trio

from llmgw.plane.store import Change, Moved, Snapshot

#: Deletions are remembered for this many revisions; who looks more rarely has to load everything again.
REMEMBERED = 20_000


def moved(revision: int, if_revision: int) -> Moved:
    return Moved(
        f"the store is at revision {revision}, not at {if_revision}", remedy="another plane wrote to it: load it again"
    )


def pruned(since: int) -> Moved:
    return Moved(f"what changed since revision {since} is not known any more", remedy="load everything again")


class MemoryStore:
    """The map in a dictionary. Two planes of one test may share it."""

    def __init__(self, *, remembered: int = REMEMBERED) -> None:
        self._entries: dict[str, Change] = {}
        self._revision = 0
        self._pruned = 0
        self._remembered = remembered

    async def load(self, prefix: str) -> Snapshot:
        await trio.lowlevel.checkpoint()
        found = {
            key: change.value
            for key, change in sorted(self._entries.items())
            if change.value is not None and key.startswith(prefix)
        }
        return Snapshot(self._revision, found)

    async def commit(
        self, puts: Mapping[str, bytes], deletes: Iterable[str] = (), *, if_revision: int | None = None
    ) -> int:
        # The checkpoint comes first: once something is written, no cancellation may hide that it was.
        await trio.lowlevel.checkpoint()
        if if_revision is not None and if_revision != self._revision:
            raise moved(self._revision, if_revision)
        gone = [key for key in deletes if key not in puts and key in self._entries]
        if not puts and not gone:
            return self._revision
        self._revision += 1
        for key, value in puts.items():
            self._entries[key] = Change(key, bytes(value), self._revision)
        for key in gone:
            self._entries[key] = Change(key, None, self._revision)
        horizon = self._revision - self._remembered
        if horizon >= self._pruned + self._remembered:
            self._entries = {k: c for k, c in self._entries.items() if c.value is not None or c.revision > horizon}
            self._pruned = horizon
        return self._revision

    async def changes(self, since: int) -> tuple[Change, ...]:
        await trio.lowlevel.checkpoint()
        if since < self._pruned:
            raise pruned(since)
        newer = (change for change in self._entries.values() if change.revision > since)
        return tuple(sorted(newer, key=lambda change: (change.revision, change.key)))

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()

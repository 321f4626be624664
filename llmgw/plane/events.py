"""What happened, in order: kept in memory for readers and in the store for after a restart.

Adding is synchronous and cheap, so that pure code can return events and the loop can add them; writing them down
is the loop's next commit. Only so many are kept. Every event is one line of the log as well (B7).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

import msgspec
import structlog

from llmgw.cell import Cell
from llmgw.plane.event import Event
from llmgw.plane.store import Store

__all__ = ["Event", "Events"]

PREFIX = "events/"

#: Kinds that an operator should see even in a quiet log.
WARNINGS = frozenset(
    {
        "fabric-cable-misplaced",
        "fabric-cables-swapped",
        "fabric-link-errors",
        "fabric-link-gone",
        "fabric-link-slow",
        "fabric-part-gone",
        "fabric-partial",
        "fabric-scan-failed",
        "fabric-switch-gone",
        "identity-cloned",
        "losses-frozen",
        "model-unplaced",
        "node-lost",
        "node-unreachable",
        "replica-overdue",
        "rollout-paused",
        "shard-failed",
        "shard-stray",
        "sm-equal-priority",
        "sm-hung",
        "sm-none",
        "sm-split",
        "sm-standby-missing",
        "sm-unseen",
        "store-failed",
    }
)

_log = structlog.get_logger("llmgw.events")


def of_node(event: Event, node: str) -> bool:
    return event.subject == f"node:{node}" or event.data.get("node") == node


class Events:
    """The newest events, and a way to wait for the next one: `latest` holds the last id."""

    def __init__(self, *, kept: int = 10_000) -> None:
        self._kept = kept
        self._ring: deque[Event] = deque(maxlen=kept)
        self._unwritten: list[Event] = []
        self._written_from = 1  # the smallest id that the store may hold
        self.latest: Cell[int] = Cell(0)

    def add(self, kind: str, subject: str, text: str, *, clock: float, data: Mapping[str, str] | None = None) -> Event:
        """One more event; its id."""
        return self.extend([Event(kind=kind, subject=subject, text=text, clock=clock, data=dict(data or {}))])[0]

    def extend(self, events: Iterable[Event]) -> tuple[Event, ...]:
        """Events that pure code returned, with ids."""
        last = self.latest.value
        added = tuple(msgspec.structs.replace(event, id=last + n) for n, event in enumerate(events, 1))
        if not added:
            return ()
        self._ring.extend(added)
        self._unwritten.extend(added)
        if len(self._unwritten) > 2 * self._kept:  # a store that fails for long must not cost memory without end
            del self._unwritten[: -self._kept]
        for event in added:
            write = _log.warning if event.kind in WARNINGS else _log.info
            write(event.text, kind=event.kind, subject=event.subject, **({"data": event.data} if event.data else {}))
        self.latest.set(added[-1].id)
        return added

    def after(self, id: int, limit: int = 1000) -> tuple[Event, ...]:
        """The oldest `limit` events with a larger id, oldest first."""
        newer: list[Event] = []
        for event in reversed(self._ring):
            if event.id <= id:
                break
            newer.append(event)
        return tuple(newer[: -limit - 1 : -1])

    def last(self, count: int) -> tuple[Event, ...]:
        """The newest `count` events, oldest first."""
        return self.after(self.latest.value - count, count)

    def about(self, node: str, count: int) -> tuple[Event, ...]:
        """The newest `count` events about a node, oldest first: those of its own, and of shards and models there."""
        found: list[Event] = []
        for event in reversed(self._ring):
            if len(found) == count:
                break
            if of_node(event, node):
                found.append(event)
        return tuple(reversed(found))

    async def load(self, store: Store) -> None:
        """What the store kept; ids go on where they ended."""
        snapshot = await store.load(PREFIX)
        for value in snapshot.values.values():
            try:
                event = msgspec.json.decode(value, type=Event)
            except msgspec.MsgspecError:
                continue  # written by another version: history is not worth refusing to start for
            if event.id > self.latest.value:
                if not self.latest.value:
                    self._written_from = event.id
                self._ring.append(event)
                self.latest.set(event.id)

    def due(self) -> tuple[dict[str, bytes], tuple[str, ...], int]:
        """What the next commit should write and delete, and a mark for `written`."""
        newest = self.latest.value
        keep_from = max(1, newest - self._kept + 1)
        puts = {_key(e.id): msgspec.json.encode(e) for e in self._unwritten if e.id >= keep_from}
        return puts, tuple(_key(n) for n in range(self._written_from, keep_from)), newest

    def written(self, mark: int) -> None:
        """The commit of what `due` gave has succeeded."""
        self._unwritten = [event for event in self._unwritten if event.id > mark]
        self._written_from = max(self._written_from, mark - self._kept + 1)


def _key(id: int) -> str:
    return f"{PREFIX}{id:012d}"

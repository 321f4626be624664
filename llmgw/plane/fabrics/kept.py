"""The scans that are kept, in the store: a line about each, and its map beside it.

All of the last hour, one an hour for a day, one a day for two weeks: enough to answer "what changed since yesterday",
and bounded. A failed scan is kept with its error (D8).
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import quote

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from llmgw.plane.fabrics.verdict import Counts, Fault
from llmgw.plane.store import Store

SCANS, MAPS, NAMES = "fabrics/scans/", "fabrics/maps/", "fabrics/names/"

#: So many of the newest scans are kept whatever their age, one of each hour for a day, one of each day for two weeks.
NEWEST, HOURS, DAYS = 12, 24, 14


class Scan(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A look at a fabric. `id` grows; `error` is why there is no map, "" when there is one. `clock` is Unix seconds."""

    id: int
    fabric: str
    clock: float
    node: str = ""
    device: str = ""
    number: int = 1
    seconds: float = 0.0  # on the node: the tools' time and the reading
    complete: bool = False
    holes: tuple[str, ...] = ()
    error: str = ""
    counts: Counts = Counts()
    changes: int = 0
    faults: tuple[Fault, ...] = ()
    bytes: int = 0
    forced: bool = False

    @property
    def vantage(self) -> str:
        return f"{self.node} {self.device}/{self.number}"

    @property
    def has_map(self) -> bool:
        return not self.error


class _Stored(Struct, frozen=True):
    map: bytes


class _Names(Struct, frozen=True):
    guids: tuple[str, ...]
    name: str = ""


class Kept:
    """The scans by fabric, oldest first; maps are read from the store when they are asked for."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._scans: dict[str, list[Scan]] = {}
        self._last = 0
        self._named: dict[str, tuple[str, ...]] = {}

    async def load(self) -> dict[str, tuple[str, ...]]:
        """Read what a former life of the plane kept; the managers' GUIDs of each fabric it had named."""
        for value in (await self._store.load(SCANS)).values.values():
            try:
                one = msgspec.json.decode(value, type=Scan)
            except msgspec.MsgspecError:
                continue  # written by another version: history is not worth refusing to start for
            self._scans.setdefault(one.fabric, []).append(one)
            self._last = max(self._last, one.id)
        for scans in self._scans.values():
            scans.sort(key=lambda one: one.id)
        for value in (await self._store.load(NAMES)).values.values():
            try:
                names = msgspec.json.decode(value, type=_Names)
            except msgspec.MsgspecError:
                continue
            self._named[names.name] = names.guids
        return dict(self._named)

    @property
    def fabrics(self) -> tuple[str, ...]:
        return tuple(sorted(self._scans))

    def of(self, fabric: str) -> tuple[Scan, ...]:
        """A fabric's scans, oldest first."""
        return tuple(self._scans.get(fabric, ()))

    def last(self, fabric: str, *, complete: bool = False) -> Scan | None:
        """The newest scan with a map, or the newest complete one."""
        return next(
            (one for one in reversed(self._scans.get(fabric, ())) if one.has_map and (one.complete or not complete)),
            None,
        )

    async def map(self, scan: Scan) -> bytes:
        """The packed map of a scan. Raises KeyError when it is not kept any more."""
        key = _key(MAPS, scan.fabric, scan.id)
        return msgspec.json.decode((await self._store.load(key)).values[key], type=_Stored).map

    async def add(self, scan: Scan, packed: bytes) -> Scan:
        """Keep one more scan, with its map if it has one, and drop old ones in the same commit; with its id."""
        self._last += 1
        scan = replace(scan, id=self._last, bytes=len(packed))
        scans = [*self._scans.get(scan.fabric, ()), scan]
        drop = set(dropped(scans, scan.clock))
        puts = {_key(SCANS, scan.fabric, scan.id): msgspec.json.encode(scan)}
        if packed:
            puts[_key(MAPS, scan.fabric, scan.id)] = msgspec.json.encode(_Stored(packed))
        deletes = [_key(prefix, scan.fabric, id_) for id_ in drop for prefix in (SCANS, MAPS)]
        await self._store.commit(puts, deletes)
        self._scans[scan.fabric] = [one for one in scans if one.id not in drop]
        return scan

    async def rename(self, old: str, new: str) -> None:
        """A fabric is known by another name from now on; what was kept of it moves."""
        scans = self._scans.pop(old, [])
        puts: dict[str, bytes] = {}
        deletes: list[str] = []
        for one in scans:
            moved = replace(one, fabric=new)
            deletes += [_key(SCANS, old, one.id), _key(MAPS, old, one.id)]
            puts[_key(SCANS, new, one.id)] = msgspec.json.encode(moved)
            if one.has_map:
                puts[_key(MAPS, new, one.id)] = msgspec.json.encode(_Stored(await self.map(one)))
            self._scans.setdefault(new, []).append(moved)
        self._scans.get(new, []).sort(key=lambda one: one.id)
        if deletes:
            await self._store.commit(puts, deletes)

    async def name(self, fabric: str, guids: Iterable[str]) -> None:
        """Remember which managers a fabric is named by, so that it keeps its name over a restart. Cheap when known."""
        known = tuple(sorted(guids))
        if self._named.get(fabric) == known:
            return
        self._named[fabric] = known
        value = msgspec.json.encode(_Names(known, fabric))
        await self._store.commit({f"{NAMES}{quote(fabric, safe='')}": value})


def _key(prefix: str, fabric: str, id_: int) -> str:
    return f"{prefix}{quote(fabric, safe='')}/{id_:010d}"


def dropped(scans: Iterable[Scan], now: float) -> list[int]:
    """The ids of the scans that are not kept any more. Pure.

    The newest complete one always stays: it is what the next is compared with.
    """
    newest_first = sorted(scans, key=lambda one: -one.id)
    stay = {one.id for one in newest_first[:NEWEST]}
    complete = next((one for one in newest_first if one.complete), None)
    if complete is not None:
        stay.add(complete.id)
    for width, count in ((3600.0, HOURS), (86400.0, DAYS)):
        # By the clock's own hours and days: counted from now, each would be pushed out by the next for ever.
        taken: set[int] = set()
        for one in newest_first:
            span = int(one.clock // width)
            if one.complete and int(now // width) - span < count and span not in taken:
                taken.add(span)
                stay.add(one.id)
    return [one.id for one in newest_first if one.id not in stay]

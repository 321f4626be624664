from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmgw.plane.fabrics.kept import DAYS, HOURS, NEWEST, Kept, Scan, dropped
from llmgw.plane.store.memory import MemoryStore

T0 = 1_700_000_000.0


def scan(id_: int, clock: float, *, complete: bool = True, error: str = "") -> Scan:
    return Scan(id=id_, fabric="f", clock=clock, complete=complete and not error, error=error)


def after(days: float, every: float = 300.0) -> list[Scan]:
    """What is kept after scanning for so long, dropping as it goes."""
    kept: list[Scan] = []
    for at in range(int(days * 86400 / every)):
        kept.append(scan(at, T0 + at * every))
        gone = set(dropped(kept, kept[-1].clock))
        kept = [one for one in kept if one.id not in gone]
    return kept


def test_the_last_hour_the_last_day_by_hours_and_two_weeks_by_days_are_kept() -> None:
    kept = after(20)
    ages = [(kept[-1].clock - one.clock) / 3600 for one in kept]
    assert len(kept) <= NEWEST + HOURS + DAYS
    assert len([age for age in ages if age <= 1.0]) >= NEWEST
    assert len([age for age in ages if age <= 24]) >= HOURS
    assert max(ages) > 24 * (DAYS - 2)


def test_the_newest_complete_map_stays_however_many_failed_since() -> None:
    scans = [scan(0, T0), *(scan(at, T0 + at * 300, error="gone") for at in range(1, 40))]
    assert 0 not in dropped(scans, T0 + 90 * 86400)


@given(st.lists(st.tuples(st.floats(0, 40 * 86400), st.booleans()), max_size=80))
def test_what_is_kept_is_bounded_and_holds_the_newest(history: list[tuple[float, bool]]) -> None:
    scans = [scan(at, T0 + clock, complete=whole) for at, (clock, whole) in enumerate(sorted(history))]
    now = max((one.clock for one in scans), default=T0)
    gone = set(dropped(scans, now))
    left = [one for one in scans if one.id not in gone]
    assert len(left) <= NEWEST + HOURS + DAYS + 3
    assert {one.id for one in scans[-NEWEST:]} <= {one.id for one in left}


async def test_scans_maps_and_names_come_back_after_a_restart() -> None:
    store = MemoryStore()
    kept = Kept(store)
    first = await kept.add(Scan(id=0, fabric="a/b %", clock=T0, complete=True), b"one")
    await kept.add(Scan(id=0, fabric="a/b %", clock=T0 + 1, error="no"), b"")
    await kept.name("a/b %", ["1", "2"])
    again = Kept(store)
    assert await again.load() == {"a/b %": ("1", "2")}
    assert [one.id for one in again.of("a/b %")] == [1, 2]
    assert again.last("a/b %") == first
    assert await again.map(first) == b"one"
    third = await again.add(Scan(id=0, fabric="a/b %", clock=T0 + 2, complete=True), b"two")
    assert third.id == 3


async def test_a_fabric_that_is_renamed_takes_its_scans_along() -> None:
    kept = Kept(MemoryStore())
    await kept.add(Scan(id=0, fabric="old", clock=T0, complete=True), b"one")
    await kept.add(Scan(id=0, fabric="new", clock=T0 + 1, complete=True), b"two")
    await kept.rename("old", "new")
    assert kept.of("old") == ()
    assert [await kept.map(one) for one in kept.of("new")] == [b"one", b"two"]


async def test_values_of_another_version_are_passed_over() -> None:
    store = MemoryStore()
    await store.commit({"fabrics/scans/f/0000000001": b"[]", "fabrics/names/f": b"{}"})
    kept = Kept(store)
    assert await kept.load() == {}
    assert kept.of("f") == ()

"""Events: in order, bounded, kept over a restart."""

from __future__ import annotations

import trio
import trio.testing

from llmgw.plane.events import Event, Events
from llmgw.plane.store.memory import MemoryStore


def filled(count: int, kept: int = 100) -> Events:
    events = Events(kept=kept)
    for number in range(1, count + 1):
        events.add("k", "plane", f"text {number}", clock=float(number))
    return events


async def flush(events: Events, store: MemoryStore) -> None:
    puts, deletes, mark = events.due()
    await store.commit(puts, deletes)
    events.written(mark)


def test_ids_grow_by_one_and_latest_follows() -> None:
    events = filled(3)
    assert [event.id for event in events.after(0)] == [1, 2, 3]
    assert events.latest.value == 3


def test_after_gives_the_oldest_newer_ones_up_to_a_limit() -> None:
    events = filled(10)
    assert [event.id for event in events.after(3, 2)] == [4, 5]
    assert [event.id for event in events.after(8)] == [9, 10]
    assert events.after(10) == ()
    assert events.after(99) == ()
    assert [event.id for event in events.last(2)] == [9, 10]


def test_only_so_many_are_kept() -> None:
    events = filled(10, kept=4)
    assert [event.id for event in events.after(0)] == [7, 8, 9, 10]


async def test_a_follower_is_woken_by_the_next_event() -> None:
    events, seen = filled(1), list[int]()
    version = events.latest.version

    async def follow() -> None:
        latest, _ = await events.latest.next(version)
        seen.append(latest)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow)
        await trio.testing.wait_all_tasks_blocked()
        events.extend([Event(kind="a", subject="plane", text="x"), Event(kind="b", subject="plane", text="y")])
    assert seen == [3]


async def test_what_was_stored_is_there_after_a_restart_and_ids_go_on() -> None:
    store, events = MemoryStore(), filled(3)
    await flush(events, store)
    again = Events()
    await again.load(store)
    assert again.after(0) == events.after(0)
    assert again.add("k", "plane", "next", clock=9.0).id == 4


async def test_the_store_holds_only_so_many() -> None:
    store, events = MemoryStore(), filled(3, kept=4)
    await flush(events, store)
    for number in range(20):
        events.add("k", "plane", "x", clock=float(number))
        if number % 3 == 0:
            await flush(events, store)
    await flush(events, store)
    assert sorted(int(key.partition("/")[2]) for key in (await store.load("events/")).values) == [20, 21, 22, 23]
    again = Events(kept=2)
    await again.load(store)
    assert [event.id for event in again.after(0)] == [22, 23]
    await flush(again, store)
    assert len((await store.load("events/")).values) == 2


async def test_an_event_that_cannot_be_read_is_left_out() -> None:
    store = MemoryStore()
    await store.commit(
        {"events/000000000001": b"{", "events/000000000002": b'{"kind":"k","subject":"s","text":"t","id":2}'}
    )
    events = Events()
    await events.load(store)
    assert [event.id for event in events.after(0)] == [2]


def test_what_is_written_is_not_due_again_and_what_came_meanwhile_is() -> None:
    events = filled(2)
    puts, _, mark = events.due()
    events.add("k", "plane", "meanwhile", clock=1.0)
    events.written(mark)
    assert len(puts) == 2
    assert list(events.due()[0]) == ["events/000000000003"]


def test_a_store_that_fails_for_long_costs_no_memory_without_end() -> None:
    events = filled(1000, kept=10)
    assert len(events.due()[0]) == 10

"""What every store does, whatever it is made of."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from llmgw.plane.store import Change, Moved, Store
from llmgw.plane.store.memory import MemoryStore
from llmgw.plane.store.sqlite import SqliteStore


@pytest.fixture(params=["memory", pytest.param("sqlite", marks=pytest.mark.real)])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    made: Store = MemoryStore(remembered=3)
    if request.param == "sqlite":
        made = await SqliteStore.open(tmp_path / "plane.db", remembered=3)
    yield made
    await made.aclose()


async def test_an_empty_store_is_at_revision_zero(store: Store) -> None:
    snapshot = await store.load("")
    assert (snapshot.revision, dict(snapshot.values)) == (0, {})
    assert await store.changes(0) == ()


async def test_what_is_put_is_loaded_by_its_prefix(store: Store) -> None:
    revision = await store.commit({"shards/a": b"1", "shards/b": b"2", "shardsx": b"3", "nodes/a": b"4", "shard": b"5"})
    snapshot = await store.load("shards/")
    assert (snapshot.revision, dict(snapshot.values)) == (revision, {"shards/a": b"1", "shards/b": b"2"})
    assert list((await store.load("")).values) == ["nodes/a", "shard", "shards/a", "shards/b", "shardsx"]


async def test_a_commit_is_one_revision_and_replaces_and_deletes(store: Store) -> None:
    first = await store.commit({"a": b"1", "b": b"1"})
    second = await store.commit({"a": b"2", "c": b"1"}, ["b", "never"])
    assert second == first + 1
    assert dict((await store.load("")).values) == {"a": b"2", "c": b"1"}


async def test_a_commit_of_nothing_is_no_revision(store: Store) -> None:
    first = await store.commit({"a": b"1"})
    assert await store.commit({}) == first
    assert await store.commit({}, ["never"]) == first


async def test_a_commit_on_an_older_revision_is_refused_whole(store: Store) -> None:
    first = await store.commit({"a": b"1"})
    await store.commit({"a": b"2"})
    with pytest.raises(Moved, match="another plane wrote"):
        await store.commit({"a": b"3", "b": b"3"}, if_revision=first)
    assert dict((await store.load("")).values) == {"a": b"2"}
    assert await store.commit({"a": b"3"}, if_revision=first + 1) == first + 2


async def test_a_key_that_is_put_and_deleted_at_once_is_put(store: Store) -> None:
    await store.commit({"a": b"1"}, ["a"])
    assert dict((await store.load("")).values) == {"a": b"1"}


async def test_changes_are_the_newest_value_of_each_key_oldest_first(store: Store) -> None:
    start = await store.commit({"a": b"1", "b": b"1"})
    await store.commit({"c": b"1"})
    await store.commit({"a": b"2"}, ["b"])
    assert await store.changes(start) == (
        Change("c", b"1", start + 1),
        Change("a", b"2", start + 2),
        Change("b", None, start + 2),
    )


async def test_deletions_are_forgotten_after_a_while_and_a_late_reader_is_told(store: Store) -> None:
    await store.commit({"gone": b"1"})
    await store.commit({}, ["gone"])
    for number in range(8):
        await store.commit({"a": b"%d" % number})
    with pytest.raises(Moved, match="load everything again"):
        await store.changes(1)
    newest = (await store.load("")).revision
    assert await store.changes(newest - 1) == (Change("a", b"7", newest),)


async def test_any_text_is_a_key_and_any_bytes_are_a_value(store: Store) -> None:
    key, value = "nodes/ü\U0001f600 ' \" %_\\", bytes(range(256))
    await store.commit({key: value})
    assert dict((await store.load("nodes/")).values) == {key: value}


async def test_commits_from_many_tasks_are_all_kept(store: Store) -> None:
    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(store.commit, {f"k/{number}": b"x"})
    snapshot = await store.load("k/")
    assert (snapshot.revision, len(snapshot.values)) == (20, 20)


async def test_a_cancelled_commit_is_whole_or_not_there(store: Store) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await store.commit({"a": b"1", "b": b"1"})
    assert scope.cancelled_caught
    assert dict((await store.load("")).values) in ({}, {"a": b"1", "b": b"1"})

"""Whatever goes wrong on the way, in whatever order: what is called complete is complete, and in the end it is."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import attrs
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.backoff import Backoff
from llmgw.node.weights.cache import Cache
from llmgw.node.weights.errors import FetchFailed
from llmgw.node.weights.transfer import Patience
from tests.node.weights.hubserver import Hub, served
from tests.node.weights.test_fetching import PATIENT, SOURCE, nothing, safetensors

pytestmark = pytest.mark.real

FILES = {
    "config.json": b"{}",
    "a-00001-of-00002.safetensors": safetensors(90_000),
    "a-00002-of-00002.safetensors": safetensors(50_000),
}
QUICK = Patience(seconds=0.15, backoff=Backoff(base=0.01, cap=0.02))
STATUS = st.sampled_from([0, 0, 0, 500, 503, 429, 404, 416, 403, 200])


@attrs.frozen
class Trouble:
    """One try: what the hub does wrong, and when whoever waits goes away (None: never)."""

    lists: list[int]
    gets: list[int]
    cuts: list[int]
    corrupt: int
    ranges: bool
    leaves: float | None
    meddle: str  # what happens to the cache afterwards


TROUBLES = st.builds(
    Trouble,
    lists=st.lists(st.sampled_from([0, 500, 503]), max_size=3),
    gets=st.lists(STATUS, max_size=6),
    cuts=st.lists(st.integers(0, 80_000), max_size=6),
    corrupt=st.integers(0, 3),
    ranges=st.booleans(),
    leaves=st.none() | st.floats(0.0, 0.1),
    meddle=st.sampled_from(["", "", "truncate", "flip", "remove", "grow"]),
)


async def fetched(root: Path, hub: Hub, leaves: float | None, patience: Patience = QUICK) -> Path | None:
    """One agent's life: it comes, fetches, and goes."""
    path: Path | None = None
    cache = Cache(root, base=hub.url, patience=patience)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cache.run)
        await cache.looked.wait()
        assert all(right(Path(weights.path)) for weights in cache.weights if weights.complete)
        with trio.move_on_after(leaves if leaves is not None else 120), suppress(FetchFailed):
            path = await cache.bring(SOURCE, nothing)
        for weights in cache.weights:
            assert weights.bytes <= (weights.total_bytes or 0)
            assert not weights.complete or right(Path(weights.path))
        nursery.cancel_scope.cancel()
    return path


def right(path: Path) -> bool:
    return all((path / name).read_bytes() == data for name, data in FILES.items())


def meddle(root: Path, how: str) -> None:
    """What disks, people and other programs do to files."""
    for blob in sorted(root.glob("models--*/blobs/*"))[:2]:
        before = blob.stat()
        match how:
            case "truncate":
                blob.write_bytes(blob.read_bytes()[: blob.stat().st_size // 2])
            case "flip":
                data = bytearray(blob.read_bytes())
                if data:
                    data[-1] ^= 1
                    blob.write_bytes(data)
            case "remove":
                blob.unlink()
            case "grow":
                blob.write_bytes(blob.read_bytes() + b"more")
        if how and blob.exists():  # a file system's clock may stand still for as long as all this takes
            os.utime(blob, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


@settings(max_examples=40)
@given(st.lists(TROUBLES, max_size=4))
def test_complete_is_complete_and_the_end_is_good(troubles: list[Trouble]) -> None:
    with tempfile.TemporaryDirectory() as directory, served({"org/model": FILES}) as hub:
        root = Path(directory)
        for trouble in troubles:
            hub.lists[:], hub.gets[:], hub.cuts[:] = trouble.lists, trouble.gets, trouble.cuts
            hub.corrupt, hub.ranges, hub.piece = trouble.corrupt, trouble.ranges, 8 << 10
            path = trio.run(fetched, root, hub, trouble.leaves)
            assert path is None or right(path)
            meddle(root, trouble.meddle)
        hub.lists[:], hub.gets[:], hub.cuts[:], hub.corrupt = [], [], [], 0
        path = trio.run(fetched, root, hub, None, PATIENT)
        assert path is not None
        assert right(path)
        assert not list(root.rglob("*.partial"))

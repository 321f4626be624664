"""Fetching from a real HTTP server, in every way that it can go wrong (C8, DL01 to DL05)."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import attrs
import pytest
import trio
from trio.testing import MockClock

from llmgw.backoff import Backoff
from llmgw.node.weights.cache import Cache
from llmgw.node.weights.errors import BrokenWeights, DiskFull, FetchFailed, Unreachable
from llmgw.node.weights.transfer import Again, Patience, patiently
from llmgw.wire.control import FetchWeights
from llmgw.wire.facts import Progress
from tests.disks import small_file_system
from tests.engines import until
from tests.node.weights.hubserver import COMMIT, Hub, served
from tests.ports import free_ports

pytestmark = pytest.mark.real

#: For what comes in the end: that the machine is busy is no reason to give up. And for what is to be given up.
PATIENT = Patience(seconds=60.0, backoff=Backoff(base=0.02, cap=0.1))
QUICK = attrs.evolve(PATIENT, seconds=1.5)
SOURCE = "hf://org/model"


def safetensors(size: int) -> bytes:
    """A whole file with one tensor of `size` bytes that do not repeat."""
    header = json.dumps({"t": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    data = b"".join(hashlib.sha256(struct.pack("<I", n)).digest() for n in range(size // 32 + 1))[:size]
    return struct.pack("<Q", len(header)) + header + data


WHOLE = safetensors(3_000_000)
FILES = {
    "config.json": json.dumps({"max_position_embeddings": 64}).encode(),
    "tokenizer.model": b"t" * 5000,
    "model.safetensors": WHOLE,
    "pytorch_model.bin": b"the same again",
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with served({"org/model": FILES}) as made:
        yield made


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")


@asynccontextmanager
async def cache(
    root: Path, hub: Hub, *, patience: Patience = PATIENT, reserve: int = 0, bytes_per_second: int | None = None
) -> AsyncIterator[Cache]:
    made = Cache(root, base=hub.url, patience=patience, reserve=reserve, bytes_per_second=bytes_per_second)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        await made.looked.wait()
        yield made
        nursery.cancel_scope.cancel()


def nothing(progress: Progress) -> None: ...


async def bring(root: Path, hub: Hub, source: str = SOURCE, *, patience: Patience = PATIENT) -> Path:
    outcome: Path | FetchFailed
    async with cache(root, hub, patience=patience) as made:
        try:
            outcome = await made.bring(source, nothing)
        except FetchFailed as error:
            outcome = error  # raised below, outside the nursery, so that it arrives bare
    if isinstance(outcome, FetchFailed):
        raise outcome
    return outcome


def complete(made: Cache) -> list[bool]:
    return [weights.complete for weights in made.weights]


def everything(root: Path) -> bytes:
    return b"".join(file.read_bytes() for file in root.rglob("*") if file.is_file())


def partials(root: Path) -> list[Path]:
    return list(root.rglob("*.partial"))


async def test_a_snapshot_is_as_the_hub_library_has_it(tmp_path: Path, hub: Hub) -> None:
    path = await bring(tmp_path, hub)
    assert {file.name for file in path.iterdir()} == {"config.json", "tokenizer.model", "model.safetensors"}
    assert (path / "model.safetensors").read_bytes() == WHOLE
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    found = try_to_load_from_cache("org/model", "model.safetensors", cache_dir=tmp_path)
    assert found == str(path / "model.safetensors")
    assert (tmp_path / "models--org--model" / "refs" / "main").read_text() == COMMIT
    names = {blob.name for blob in (tmp_path / "models--org--model" / "blobs").iterdir()}
    assert hashlib.sha256(WHOLE).hexdigest() in names
    allowed = ["*.json", "*.model", "*.safetensors"]
    local = snapshot_download("org/model", cache_dir=tmp_path, local_files_only=True, allow_patterns=allowed)
    assert Path(local) == path


async def test_the_token_goes_to_the_hub(tmp_path: Path, hub: Hub) -> None:
    await bring(tmp_path, hub)
    assert hub.authorizations == {"Bearer secret"}


async def test_what_is_whole_is_used_without_asking_anybody(tmp_path: Path, hub: Hub) -> None:
    path = await bring(tmp_path, hub)
    hub.asked.clear()
    hub.lists[:] = [503] * 100
    told: list[Progress] = []
    async with cache(tmp_path, hub) as made:
        assert made.weights[0].complete
        assert await made.bring(SOURCE, told.append) == path
    assert (hub.asked, told) == ([], [])


async def test_a_connection_cut_midway_is_taken_up_where_it_ended(tmp_path: Path, hub: Hub) -> None:
    hub.files["org/model"] = {"config.json": b"{}", "model.safetensors": WHOLE}
    hub.cuts[:] = [2, 1_000_000, 500_000]
    path = await bring(tmp_path, hub)
    assert (path / "model.safetensors").read_bytes() == WHOLE
    assert hub.sent < len(WHOLE) + 400_000
    assert any(part not in ("", "bytes=0-") for _, part in hub.bodies)


async def test_progress_grows_to_the_whole(tmp_path: Path, hub: Hub) -> None:
    hub.pause = 0.03
    told: list[Progress] = []
    async with cache(tmp_path, hub) as made:
        await made.bring(SOURCE, told.append)
    total = sum(len(FILES[name]) for name in ("config.json", "tokenizer.model", "model.safetensors"))
    counted = [progress for progress in told if progress.total is not None]
    assert {progress.total for progress in counted} == {total}
    assert [p.done for p in counted] == sorted(p.done for p in counted)
    assert counted[-1].done <= total
    assert len({p.done for p in counted}) > 2


async def test_an_interrupted_fetch_is_never_complete(tmp_path: Path, hub: Hub) -> None:
    """DL01: neither offline nor with an error in the list's place is half a snapshot taken for one."""
    hub.cuts[:] = [700_000]
    hub.gets[:] = [0, 0, 0] + [503] * 1000
    with pytest.raises(Unreachable, match=r"answers 503.*given up"):
        await bring(tmp_path, hub, patience=QUICK)
    async with cache(tmp_path, hub, patience=QUICK) as made:
        (weights,) = made.weights
        assert not weights.complete
        assert weights.bytes < (weights.total_bytes or 0)
        with pytest.raises(Unreachable):
            await made.bring(SOURCE, nothing)
    hub.gets.clear()
    hub.lists[:] = [500] * 1000  # the list is known, so this is nobody's trouble
    path = await bring(tmp_path, hub)
    assert (path / "model.safetensors").read_bytes() == WHOLE
    assert partials(tmp_path) == []


async def test_errors_of_the_hub_pass(tmp_path: Path, hub: Hub) -> None:
    """DL05: tried again with growing pauses, for lists and for files."""
    hub.lists[:] = [503, 500]
    hub.gets[:] = [502, 503, 429]
    path = await bring(tmp_path, hub)
    assert (path / "model.safetensors").read_bytes() == WHOLE


async def test_a_server_that_says_when_to_come_back_is_obeyed(tmp_path: Path, hub: Hub) -> None:
    hub.files["org/model"] = {"model.safetensors": WHOLE, "config.json": b"{}"}
    hub.lists[:] = [429]
    hub.gets[:] = [503]
    hub.retry_after = "2"
    began = trio.current_time()
    await bring(tmp_path, hub)
    assert trio.current_time() - began >= 4.0


async def test_who_is_bidden_to_come_back_late_does_not_lose_patience_over_it(autojump_clock: MockClock) -> None:
    """A hub's limits are of five minutes; but it is not waited for without an end."""
    tries = 0

    async def refused() -> bool:
        nonlocal tries
        tries += 1
        if tries == 4:
            return True
        raise Again("answers 429", 300.0)

    patience = Patience(seconds=1.5, bidden=900.0, backoff=Backoff(base=0.02, cap=0.1))
    await patiently(refused, patience, "x", lambda words: None)
    assert 900.0 <= trio.current_time() < 902.0
    tries = -100
    with pytest.raises(Unreachable, match="given up"):
        await patiently(refused, patience, "x", lambda words: None)
    assert 1800.0 <= trio.current_time() < 1806.0


async def test_files_in_folders_and_empty_ones_come_too(tmp_path: Path, hub: Hub) -> None:
    hub.files["org/model"] |= {"code/deep/__init__.py": b"", "code/deep/model with spaces é.py": b"x = 1"}
    path = await bring(tmp_path, hub)
    assert (path / "code" / "deep" / "__init__.py").read_bytes() == b""
    assert (path / "code" / "deep" / "model with spaces é.py").read_bytes() == b"x = 1"


async def test_a_hub_that_stays_away_is_given_up_with_its_words(tmp_path: Path, hub: Hub) -> None:
    hub.lists[:] = [503] * 1000
    with pytest.raises(Unreachable, match=r"hf://org/model: .*answers 503; given up after \d+ tries") as caught:
        await bring(tmp_path, hub, patience=QUICK)
    assert caught.value.code == "weights-unreachable"
    async with cache(tmp_path, hub) as made:
        assert made.weights == ()


async def test_nobody_listening_is_unreachable(tmp_path: Path) -> None:
    gone = Hub(url=f"http://127.0.0.1:{free_ports(1)[0]}")
    with pytest.raises(Unreachable, match="cannot be asked"):
        await bring(tmp_path, gone, patience=QUICK)


async def test_an_error_page_is_no_data(tmp_path: Path, hub: Hub) -> None:
    hub.gets[:] = [404] * 50
    with pytest.raises(FetchFailed, match=r"is not there \(404\)"):
        await bring(tmp_path, hub)
    assert b"error page" not in everything(tmp_path)


async def test_a_truncated_file_in_the_cache_is_fetched_anew(tmp_path: Path, hub: Hub) -> None:
    """DL04: the size differs from the hub's."""
    path = await bring(tmp_path, hub)
    blob = (path / "model.safetensors").resolve()
    with blob.open("r+b") as file:
        file.truncate(100_000)
    async with cache(tmp_path, hub) as made:
        assert complete(made) == [False]
        assert await made.bring(SOURCE, nothing) == path
        assert complete(made) == [True]
    assert blob.read_bytes() == WHOLE


async def test_a_file_changed_in_the_cache_is_found_by_its_digest(tmp_path: Path, hub: Hub) -> None:
    path = await bring(tmp_path, hub)
    blob = (path / "model.safetensors").resolve()
    written = blob.stat().st_mtime_ns
    blob.write_bytes(WHOLE[:-1] + b"!")
    os.utime(blob, ns=(written, written + 1))  # a file system's clock may stand still for so short a time
    await bring(tmp_path, hub)
    assert blob.read_bytes() == WHOLE


async def test_a_file_only_touched_is_read_and_not_fetched(tmp_path: Path, hub: Hub) -> None:
    path = await bring(tmp_path, hub)
    os.utime(path / "model.safetensors", (1, 1))
    hub.asked.clear()
    await bring(tmp_path, hub)
    assert hub.asked == []


async def test_bytes_changed_on_the_way_are_fetched_again(tmp_path: Path, hub: Hub) -> None:
    hub.files["org/model"] = {"config.json": b"{}", "model.safetensors": WHOLE}
    hub.corrupt = 2
    with pytest.raises(BrokenWeights, match="is not what was announced"):
        await bring(tmp_path, hub)
    hub.corrupt = 0  # one of the two files may not have been asked for any more
    path = await bring(tmp_path, hub)
    assert (path / "model.safetensors").read_bytes() == WHOLE


async def test_a_partial_file_of_something_else_is_started_over(tmp_path: Path, hub: Hub) -> None:
    """As after a power cut: the size was written and the bytes were not."""
    blobs = tmp_path / "models--org--model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(WHOLE).hexdigest()}.partial").write_bytes(bytes(1_000_000))
    path = await bring(tmp_path, hub)
    assert (path / "model.safetensors").read_bytes() == WHOLE


async def test_a_server_without_ranges_works_and_is_given_up_when_it_always_cuts(tmp_path: Path, hub: Hub) -> None:
    hub.ranges = False
    hub.cuts[:] = [1_000_000, 1_000_000, 900_000, 900_000]
    path = await bring(tmp_path / "a", hub)
    assert (path / "model.safetensors").read_bytes() == WHOLE
    hub.cuts[:] = [1_000_000] * 1000
    with pytest.raises(Unreachable, match="given up"):
        await bring(tmp_path / "b", hub, patience=QUICK)


async def test_a_connection_on_which_nothing_comes_is_given_up_for_another(tmp_path: Path, hub: Hub) -> None:
    hub.files["org/model"] = {"model.safetensors": WHOLE, "config.json": b"{}"}
    hub.stalls = 1
    impatient = Patience(seconds=20.0, silent=0.5, backoff=Backoff(base=0.02, cap=0.1))
    async with cache(tmp_path, hub, patience=impatient) as made:
        path = await made.bring(SOURCE, nothing)
    assert (path / "model.safetensors").read_bytes() == WHOLE


async def test_a_fetch_takes_no_more_than_its_rate(tmp_path: Path, hub: Hub) -> None:
    hub.files["org/model"] = {"model.safetensors": safetensors(200_000), "config.json": b"{}"}
    async with cache(tmp_path, hub, bytes_per_second=400_000) as made:
        began = trio.current_time()
        await made.bring(SOURCE, nothing)
        assert trio.current_time() - began >= 0.5


async def test_a_limit_ahead_of_need_falls_when_a_shard_needs_it_now(tmp_path: Path, hub: Hub) -> None:
    async with cache(tmp_path, hub) as made:
        made.ahead(FetchWeights(source=SOURCE, bytes_per_second=10_000))  # five minutes
        await until(hub.begun.is_set)
        with trio.fail_after(60):
            await made.bring(SOURCE, nothing)


async def test_two_at_once_are_one_fetch(tmp_path: Path, hub: Hub) -> None:
    hub.pause = 0.01
    first: list[Progress] = []
    second: list[Progress] = []
    paths: list[Path] = []
    async with cache(tmp_path, hub) as made:

        async def want(told: list[Progress]) -> None:
            paths.append(await made.bring(SOURCE, told.append))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(want, first)
            nursery.start_soon(want, second)
    assert paths[0] == paths[1]
    assert len(hub.bodies) == 3
    assert first
    assert second


async def test_one_leaving_does_not_end_the_others_fetch_and_the_last_one_does(tmp_path: Path, hub: Hub) -> None:
    hub.held.clear()
    async with cache(tmp_path, hub) as made, trio.open_nursery() as nursery:
        scopes = [trio.CancelScope(), trio.CancelScope()]
        left = [trio.Event(), trio.Event()]

        async def want(number: int) -> None:
            with scopes[number]:
                await made.bring(SOURCE, nothing)
            left[number].set()

        nursery.start_soon(want, 0)
        nursery.start_soon(want, 1)
        await until(lambda: len(hub.bodies) == 3)
        scopes[0].cancel()
        await left[0].wait()
        assert made.weights[0].fetching if made.weights else True
        assert made._shared
        scopes[1].cancel()
        await left[1].wait()
        assert not made._shared
        hub.held.set()
        # Whoever comes now begins anew, after the cancelled one has let go of the lock.
        path = await made.bring(SOURCE, nothing)
        assert (path / "model.safetensors").read_bytes() == WHOLE


async def test_another_process_is_waited_for(tmp_path: Path, hub: Hub) -> None:
    from llmgw.node.weights.layout import prepare
    from llmgw.node.weights.lock import attempt

    prepare(tmp_path)
    told: list[Progress] = []
    async with cache(tmp_path, hub) as made, trio.open_nursery() as nursery:
        with attempt(tmp_path, "models--org--model") as mine:
            assert mine
            nursery.start_soon(made.bring, SOURCE, told.append)
            await until(lambda: any("after another" in p.what for p in told))
            assert hub.asked == []
    assert partials(tmp_path) == []


async def test_a_repository_goes_on_with_the_commit_it_began_with(tmp_path: Path, hub: Hub) -> None:
    hub.gets[:] = [0] + [503] * 1000
    with pytest.raises(Unreachable):
        await bring(tmp_path, hub, patience=QUICK)
    hub.gets.clear()
    asked = len(hub.asked)
    await bring(tmp_path, hub)
    assert not any("/api/" in path for path, _ in hub.asked[asked:])


async def test_a_commit_that_is_gone_is_asked_for_anew(tmp_path: Path, hub: Hub) -> None:
    hub.gets[:] = [0] + [503] * 1000
    with pytest.raises(Unreachable):
        await bring(tmp_path, hub, patience=QUICK)
    hub.gets.clear()
    hub.commit = "b" * 40
    path = await bring(tmp_path, hub)
    assert path.name == "b" * 40
    assert (path / "model.safetensors").read_bytes() == WHOLE


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("hf://org/other", "knows no model 'org/other'"),
        ("hf://org/model@nope", "no revision 'nope'"),
        ("hf://org/model@main/model.safetensor", "did you mean model.safetensors"),
        ("ftp://x/y", "is no source of weights"),
        ("https://h/x.gguf", "says no SHA-256"),
        ("hf://org/../x", "names"),
    ],
)
async def test_a_source_that_cannot_be_meant_says_so_at_once(tmp_path: Path, hub: Hub, source: str, words: str) -> None:
    with pytest.raises(FetchFailed) as caught:
        await bring(tmp_path, hub, source)
    assert words in str(caught.value)
    assert caught.value.code == "missing-weights"


async def test_a_gated_model_says_what_to_do(tmp_path: Path, hub: Hub) -> None:
    hub.lists[:] = [403]
    with pytest.raises(FetchFailed, match="HF_TOKEN"):
        await bring(tmp_path, hub)


# --- a web server -------------------------------------------------------------------------------------


async def test_a_file_with_a_digest_comes_from_any_web_server(tmp_path: Path, hub: Hub) -> None:
    hub.files[""] = {"x/m.safetensors": WHOLE}
    digest = hashlib.sha256(WHOLE).hexdigest()
    hub.cuts[:] = [900_000]
    path = await bring(tmp_path, hub, f"{hub.url}/x/m.safetensors#sha256={digest}")
    assert (path.name, path.read_bytes()) == ("m.safetensors", WHOLE)
    assert hub.authorizations == {""}


async def test_a_file_with_another_digest_is_refused(tmp_path: Path, hub: Hub) -> None:
    hub.files[""] = {"m.safetensors": WHOLE}
    with pytest.raises(BrokenWeights, match=r"its digest is sha256:.*not sha256:00"):
        await bring(tmp_path, hub, f"{hub.url}/m.safetensors?sha256={'0' * 64}")
    assert partials(tmp_path) == []


# --- the disk -----------------------------------------------------------------------------------------


async def test_room_is_asked_for_before_the_first_byte(tmp_path: Path, hub: Hub) -> None:
    """DL02: it fails with sizes, and nothing is left of it."""
    async with cache(tmp_path, hub, reserve=1 << 60) as made:
        with pytest.raises(DiskFull, match=r"needs 3\.0 MB more of 3\.0 MB, and .* GB free") as caught:
            await made.bring(SOURCE, nothing)
        assert caught.value.code == "disk-full"
        assert hub.bodies == []
        assert [weights.bytes for weights in made.weights] == [0]
        assert "free" in made.weights[0].error


async def test_a_disk_that_fills_midway_is_given_back(tmp_path: Path, hub: Hub) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(DiskFull, match=r"is full \(.* free\) with .* MB of 3\.0 MB still to fetch"):
            await bring(tmp_path, hub)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert partials(tmp_path) == []
    path = await bring(tmp_path, hub)
    assert (path / "model.safetensors").read_bytes() == WHOLE


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    with small_file_system(tmp_path / "disk", "2m") as place:
        yield place


async def test_a_real_disk_that_is_too_small_is_refused_with_its_size(small_disk: Path, hub: Hub) -> None:
    with pytest.raises(DiskFull, match=r"needs 3\.0 MB more of 3\.0 MB, and .* has 2\.\d MB free"):
        await bring(small_disk, hub)
    assert hub.bodies == []


async def test_a_real_disk_that_somebody_else_fills_fails_only_this_fetch(small_disk: Path, hub: Hub) -> None:
    hub.files = {"org/model": {"model.safetensors": safetensors(1_500_000), "config.json": b"{}"},
        "org/small": {"model.safetensors": safetensors(1000), "config.json": b"{}"}}  # fmt: skip
    hub.held.clear()
    async with cache(small_disk, hub) as made, trio.open_nursery() as nursery:
        caught: list[DiskFull] = []

        async def want() -> None:
            try:
                await made.bring(SOURCE, nothing)
            except DiskFull as error:
                caught.append(error)

        nursery.start_soon(want)
        await until(lambda: len(hub.bodies) == 2)
        (small_disk / "others").write_bytes(bytes(1_500_000))
        hub.held.set()
        await until(lambda: bool(caught))
        assert "is full" in str(caught[0])
        assert partials(small_disk) == []
        path = await made.bring("hf://org/small", nothing)
        assert (path / "config.json").read_bytes() == b"{}"


@pytest.mark.parametrize("left", [0, 4096, 8192])
async def test_a_disk_without_room_for_the_list_itself_is_full_and_no_model_missing(
    small_disk: Path, hub: Hub, left: int
) -> None:
    with (small_disk / "others").open("wb", buffering=0) as file:
        with suppress(OSError):
            while True:
                file.write(bytes(4096))
        file.truncate(file.tell() - left)
    with pytest.raises(DiskFull, match=r"hf://org/model.* (is full|has 0 B free)"):
        await bring(small_disk, hub)
    (small_disk / "others").unlink()
    hub.files["org/model"] = {"model.safetensors": safetensors(1000), "config.json": b"{}"}
    await bring(small_disk, hub)


async def test_a_disk_that_can_hold_no_more_files_says_that(tmp_path: Path, hub: Hub) -> None:
    with small_file_system(tmp_path / "disk", "20m,nr_inodes=16") as disk:
        with suppress(OSError):
            for number in range(16):
                (disk / f"other-{number}").touch()
        with pytest.raises(DiskFull, match="it can hold no more files"):
            await bring(disk, hub)


async def test_two_fetches_are_not_promised_the_same_room(small_disk: Path, hub: Hub) -> None:
    # Room for one and a half of them, on a disk that nobody else writes to.
    for name in ("org/model", "org/second"):
        hub.files[name] = {"model.safetensors": safetensors(1_200_000), "config.json": b"{}"}
    hub.held.clear()
    async with cache(small_disk, hub) as made, trio.open_nursery() as nursery:
        nursery.start_soon(made.bring, SOURCE, nothing)
        await until(lambda: len(hub.bodies) == 2)
        with pytest.raises(DiskFull, match="are promised to other fetches"):
            await made.bring("hf://org/second", nothing)
        hub.held.set()

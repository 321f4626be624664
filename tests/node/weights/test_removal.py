"""Removing weights: a proposal is checked again on the node, file by file (C8)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from llmgw.backoff import Backoff
from llmgw.node.weights.cache import Cache
from llmgw.node.weights.layout import prepare
from llmgw.node.weights.lock import attempt
from llmgw.node.weights.removal import Outcome, remove
from llmgw.node.weights.transfer import Patience
from llmgw.wire.agent import Listening, Working
from llmgw.wire.control import FetchWeights, RemoveWeightsReply, RemoveWeightsRequest, WeightsReply, WeightsRequest
from llmgw.wire.facts import Weights
from tests.engines import tiny_model, until
from tests.node.weights.hubserver import Hub, served
from tests.node.weights.test_fetching import FILES, PATIENT, SOURCE, bring, cache, nothing

pytestmark = pytest.mark.real

OTHER = "hf://org/model@v1/tokenizer.model"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with served({"org/model": {**FILES, "tiny.gguf": tiny_model().read_bytes()}}) as made:
        yield made


def gone(root: Path, *sources: str, in_use: tuple[str, ...] = (), dry_run: bool = False) -> Outcome:
    return remove(root, sources, in_use, dry_run)


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if "locks" not in path.parts and not path.is_dir()}


async def test_a_dry_run_says_what_would_go_and_leaves_it(tmp_path: Path, hub: Hub) -> None:
    await bring(tmp_path, hub)
    before = files(tmp_path)
    outcome = gone(tmp_path, SOURCE, dry_run=True)
    assert (outcome.removed, outcome.kept) == ([SOURCE], {})
    assert outcome.freed > 3_000_000
    assert files(tmp_path) == before


async def test_what_goes_goes_whole(tmp_path: Path, hub: Hub) -> None:
    await bring(tmp_path, hub)
    outcome = gone(tmp_path, SOURCE)
    assert (outcome.removed, outcome.freed) == ([SOURCE], sum(len(FILES[n]) for n in FILES if n[-3:] != "bin"))
    assert files(tmp_path) == set()
    assert not (tmp_path / "models--org--model").exists()
    assert gone(tmp_path, SOURCE).kept == {SOURCE: "it is not in this node's cache"}


async def test_what_a_shard_uses_stays(tmp_path: Path, hub: Hub) -> None:
    path = await bring(tmp_path, hub)
    outcome = gone(tmp_path, SOURCE, in_use=(SOURCE,))
    assert (outcome.removed, outcome.kept) == ([], {SOURCE: "a shard on this node uses it"})
    assert (path / "model.safetensors").exists()


async def test_what_any_process_has_mapped_stays(tmp_path: Path, hub: Hub) -> None:
    path = await bring(tmp_path, hub)
    program = (
        "import mmap,sys; f=open(sys.argv[1],'rb'); m=mmap.mmap(f.fileno(),0,access=mmap.ACCESS_READ); f.close(); "
        "print(1,flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", program, str(path / "model.safetensors")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        outcome = gone(tmp_path, SOURCE)
        process.communicate(b"")
    assert outcome.removed == []
    assert f"process {process.pid} has" in outcome.kept[SOURCE]
    assert gone(tmp_path, SOURCE).removed == [SOURCE]


async def test_what_is_being_fetched_stays(tmp_path: Path, hub: Hub) -> None:
    await bring(tmp_path, hub)
    with attempt(tmp_path, "models--org--model") as mine:
        assert mine
        assert gone(tmp_path, SOURCE).kept == {SOURCE: "it is being fetched"}


async def test_a_file_that_another_source_needs_stays(tmp_path: Path, hub: Hub) -> None:
    await bring(tmp_path, hub)
    tokenizer = await bring(tmp_path, hub, "hf://org/model@main/tiny.gguf")
    hub.files["org/model"]["tokenizer.model"] = FILES["tokenizer.model"]
    both = "hf://org/model@v1"
    await bring(tmp_path, hub, both)
    outcome = gone(tmp_path, SOURCE)
    assert outcome.removed == [SOURCE]
    assert set(outcome.kept.values()) == {f"{both} needs it too"}
    assert outcome.freed == 0
    async with cache(tmp_path, hub) as made:
        assert all(weights.complete for weights in made.weights)
    assert tokenizer.exists()


async def test_a_folder_that_leads_out_of_the_cache_stays(tmp_path: Path, hub: Hub) -> None:
    root, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    await bring(root, hub)
    (root / "models--org--model").rename(elsewhere)
    (root / "models--org--model").symlink_to(elsewhere)
    outcome = gone(root, SOURCE)
    assert outcome.removed == []
    assert "is not in the cache" in outcome.kept[SOURCE]
    assert len(list((elsewhere / "blobs").iterdir())) == 3


async def test_a_blob_that_is_a_link_stays(tmp_path: Path, hub: Hub) -> None:
    root = tmp_path / "cache"
    path = await bring(root, hub)
    blob = (path / "model.safetensors").resolve()
    blob.rename(tmp_path / "mine")
    blob.symlink_to(tmp_path / "mine")
    outcome = gone(root, SOURCE)
    assert outcome.kept == {str(blob): f"it is a link to {tmp_path / 'mine'}"}
    assert (tmp_path / "mine").exists()


async def test_a_manifest_that_somebody_wrote_leads_nowhere(tmp_path: Path) -> None:
    prepare(tmp_path / "cache")
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "x").write_text("mine")
    from llmgw.sources import key

    for folder in ("../victim", ".llmgw", "..", "a/b"):
        manifest = tmp_path / "cache" / ".llmgw" / "manifests" / f"{key('s')}.json"
        manifest.write_text(
            f'{{"source":"s","folder":"{folder}","revision":"r","files":[{{"name":"../../x","size":4,"digest":""}}]}}'
        )
        assert gone(tmp_path / "cache", "s").removed == []
    assert (victim / "x").read_text() == "mine"


async def test_the_cache_answers_what_is_there_and_removes_when_asked(tmp_path: Path, hub: Hub) -> None:
    said: list[Working | Listening] = []
    async with cache(tmp_path, hub) as made:
        await made.bring(SOURCE, nothing)
        listed = await made.answers[WeightsRequest](WeightsRequest(), said.append)
        assert isinstance(listed, WeightsReply)
        (held,) = listed.weights
        assert (held.source, held.complete, held.in_use, held.error) == (SOURCE, True, False, "")
        assert held.idle is not None
        assert held.bytes == held.total_bytes
        request = RemoveWeightsRequest(request_id=1, sources=(SOURCE, "hf://org/none"), dry_run=False)
        reply = await made.answers[RemoveWeightsRequest](request, said.append)
        assert isinstance(reply, RemoveWeightsReply)
        assert reply.removed == (SOURCE,)
        assert reply.kept == {"hf://org/none": "it is not in this node's cache"}
        assert made.weights == ()


async def test_what_was_copied_into_the_cache_is_checked_and_not_fetched(tmp_path: Path, hub: Hub) -> None:
    """As another program or `rsync -a` leaves it: only the list is asked for."""
    import shutil

    await bring(tmp_path / "a", hub)
    shutil.copytree(tmp_path / "a" / "models--org--model", tmp_path / "b" / "models--org--model", symlinks=True)
    hub.asked.clear()
    await bring(tmp_path / "b", hub)
    assert hub.bodies == []


NONE = "hf://org/none"


async def told(made: Cache) -> dict[str, Weights]:
    listed = await made.answers[WeightsRequest](WeightsRequest(), lambda word: None)
    assert isinstance(listed, WeightsReply)
    return {weights.source: weights for weights in listed.weights}


async def failing(made: Cache) -> None:
    made.ahead(FetchWeights(source=NONE))
    await until(lambda: any(weights.error for weights in made.weights))


async def test_a_fetch_that_failed_is_told_with_its_age_and_forgotten_on_request(tmp_path: Path, hub: Hub) -> None:
    async with cache(tmp_path, hub) as made:
        await failing(made)
        failed = (await told(made))[NONE]
        assert (failed.complete, failed.fetching, failed.bytes) == (False, False, 0)
        assert "knows no model 'org/none'" in failed.error
        assert failed.idle is not None
        assert failed.idle < 600.0
        for dry_run in (True, False):
            assert NONE in await told(made)
            request = RemoveWeightsRequest(request_id=1, sources=(NONE,), dry_run=dry_run)
            reply = await made.answers[RemoveWeightsRequest](request, lambda word: None)
            assert reply == RemoveWeightsReply(removed=(NONE,))
        assert (await told(made), made.weights) == ({}, ())


async def test_a_fetch_that_failed_long_ago_is_told_no_more(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Cache(tmp_path, base=hub.url, patience=PATIENT)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        await made.looked.wait()
        await failing(made)
        monkeypatch.setattr("llmgw.node.weights.cache.REMEMBERED", 0.0)
        assert (await told(made), made.weights) == ({}, ())
        nursery.cancel_scope.cancel()


async def test_a_fetch_is_told_before_it_has_a_byte(tmp_path: Path, hub: Hub) -> None:
    hub.lists[:] = [503] * 1000
    async with cache(tmp_path, hub, patience=Patience(seconds=60.0, backoff=Backoff(base=0.01, cap=0.02))) as made:
        made.ahead(FetchWeights(source=SOURCE))
        await until(lambda: bool(hub.asked))
        coming = (await told(made))[SOURCE]
        assert (coming.fetching, coming.bytes, coming.total_bytes, coming.error) == (True, 0, None, "")

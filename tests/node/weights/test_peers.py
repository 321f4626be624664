"""Weights from another node of the fleet: over TLS with both sides' certificates, before anybody outside is asked."""

from __future__ import annotations

import hashlib
import os
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from llmgw import pki
from llmgw.config import Listen
from llmgw.node.identity import CA, IDENTITY, Identity, pending_request, store
from llmgw.node.weights.cache import Cache
from llmgw.node.weights.errors import FetchFailed
from llmgw.node.weights.layout import prepare
from llmgw.node.weights.lock import Note, locked
from llmgw.node.weights.pace import Pace
from llmgw.node.weights.peers import Peers
from llmgw.node.weights.revoked import Revocations
from llmgw.node.weights.share import Share
from llmgw.node.weights.whence import Whence
from llmgw.pki import Role
from llmgw.wire.control import FetchWeights
from llmgw.wire.facts import Progress, Weights
from tests.engines import until
from tests.node.weights.hubserver import Hub, served
from tests.node.weights.test_fetching import FILES, PATIENT, SOURCE, WHOLE, nothing

pytestmark = pytest.mark.real


class Fleet:
    """A CA and nodes that joined."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ca = pki.make_ca("llmgw test", time.time())

    def administrator(self) -> Path:
        """A file with a key, and a certificate for one who is no node."""
        key = pki.make_key()
        leaf = self.ca.issue(key.public_key(), "boss", Role.ADMIN, now=time.time(), life=3600)
        path = self.root / "boss.pem"
        path.write_text(pki.key_to_pem(key) + pki.to_pem(leaf))
        return path

    def node(self, name: str) -> Path:
        """A node's directory, with its identity."""
        directory = self.root / name
        directory.mkdir(parents=True)
        key = pki.requested_key(pending_request(directory))
        leaf = self.ca.issue(key, name, Role.NODE, now=time.time(), life=pki.NODE_LIFE)
        store(directory, leaf, self.ca.certificate, name, time.time())
        return directory


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path / "fleet")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with served({"org/model": FILES}) as made:
        yield made


@asynccontextmanager
async def sharing(directory: Path, port: int = 0, at_once: int = 8) -> AsyncIterator[Listen]:
    """A node's share of its cache, at an address."""
    prepare(directory / "weights")
    listeners = await trio.open_tcp_listeners(port, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        share = Share(directory / "weights", directory, Pace().take, at_once=at_once)
        nursery.start_soon(share.run, listeners)
        yield Listen("127.0.0.1", port)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def cache(directory: Path, hub: Hub, *peers: Listen) -> AsyncIterator[Cache]:
    made = Cache(directory / "weights", base=hub.url, patience=PATIENT, peers=Peers(peers, directory))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        await made.looked.wait()
        yield made
        nursery.cancel_scope.cancel()


async def bring(directory: Path, hub: Hub, *peers: Listen, source: str = SOURCE) -> Path:
    async with cache(directory, hub, *peers) as made:
        return await made.bring(source, nothing)


async def test_what_a_peer_has_comes_from_there_and_only_the_list_from_outside(fleet: Fleet, hub: Hub) -> None:
    first, second = fleet.node("n1"), fleet.node("n2")
    await bring(first, hub)
    hub.asked.clear()
    async with sharing(first) as address:
        path = await bring(second, hub, address)
    assert (path / "model.safetensors").read_bytes() == WHOLE
    assert second in path.parents
    assert hub.bodies == []


async def test_without_the_outside_a_peers_list_is_taken(fleet: Fleet, hub: Hub) -> None:
    first, second = fleet.node("n1"), fleet.node("n2")
    await bring(first, hub)
    hub.lists[:] = [503] * 100
    async with sharing(first) as address:
        path = await bring(second, hub, address)
    assert (path / "model.safetensors").read_bytes() == WHOLE


async def test_a_file_of_a_web_server_comes_from_a_peer_too(fleet: Fleet, hub: Hub) -> None:
    first, second = fleet.node("n1"), fleet.node("n2")
    hub.files[""] = {"m.safetensors": WHOLE}
    source = f"{hub.url}/m.safetensors#sha256={hashlib.sha256(WHOLE).hexdigest()}"
    await bring(first, hub, source=source)
    hub.asked.clear()
    async with sharing(first) as address:
        path = await bring(second, hub, address, source=source)
    assert path.read_bytes() == WHOLE
    assert hub.asked == []


async def test_a_peer_that_has_nothing_or_is_not_there_costs_nothing_but_the_question(fleet: Fleet, hub: Hub) -> None:
    first, second = fleet.node("n1"), fleet.node("n2")
    async with sharing(first) as address:
        path = await bring(second, hub, address, Listen("127.0.0.1", 1))
    assert (path / "model.safetensors").read_bytes() == WHOLE
    assert len(hub.bodies) == 3


async def test_a_peers_broken_disk_breaks_nothing_here(fleet: Fleet, hub: Hub) -> None:
    first, second = fleet.node("n1"), fleet.node("n2")
    blob = (await bring(first, hub) / "model.safetensors").resolve()
    seen = blob.stat()
    with blob.open("r+b") as file:
        file.write(b"x")
    os.utime(blob, ns=(seen.st_atime_ns, seen.st_mtime_ns))  # as rot does it: nothing tells
    async with sharing(first) as address:
        path = await bring(second, hub, address)
    assert (path / "model.safetensors").read_bytes() == WHOLE


async def test_a_peer_that_is_fetching_is_waited_for(fleet: Fleet, hub: Hub) -> None:
    first, second = fleet.node("n1"), fleet.node("n2")
    told: list[Progress] = []
    hub.held.clear()
    async with sharing(first) as address, cache(first, hub) as one, cache(second, hub, address) as other:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.bring, SOURCE, nothing)
            await until(lambda: len(hub.bodies) == 3)
            nursery.start_soon(other.bring, SOURCE, told.append)
            await until(lambda: any("until n1 has them" in progress.what for progress in told))
            hub.held.set()
    assert len(hub.bodies) == 3


async def test_a_peer_of_a_later_name_that_waits_itself_is_not_waited_for(fleet: Fleet, hub: Hub) -> None:
    """Else two could wait for one another for ever."""
    first, second = fleet.node("n1"), fleet.node("n2")
    prepare(second / "weights")
    async with sharing(second) as address, cache(first, hub) as earlier:
        async with cache(second, hub) as later:
            hub.gets[:] = [0, 0, 0]
            await later.bring(SOURCE, nothing)
        blob = next((second / "weights").rglob("model.safetensors")).resolve()
        blob.unlink()
        async with locked(second / "weights", "models--org--model", lambda: None) as note:
            note(Note(SOURCE))
            earlier._peers = Peers((address,), first)
            with trio.fail_after(60):
                await earlier.bring(SOURCE, nothing)
    assert len(hub.bodies) == 6


@pytest.mark.parametrize("who", ["stranger", "administrator", "nobody"])
async def test_only_nodes_of_the_fleet_are_given_anything(fleet: Fleet, hub: Hub, who: str) -> None:
    first = fleet.node("n1")
    await bring(first, hub)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if who == "stranger":
        context.load_cert_chain(Fleet(fleet.root / "other").node("n2") / IDENTITY)
    elif who == "administrator":
        context.load_cert_chain(fleet.administrator())
    async with sharing(first) as address, httpx.AsyncClient(verify=context, trust_env=False) as client:
        with pytest.raises(httpx.TransportError):
            await client.get(f"https://{address}/weights", params={"source": SOURCE})


async def test_nothing_is_taken_from_whoever_is_no_node_of_the_fleet(fleet: Fleet, hub: Hub) -> None:
    impostor, second = Fleet(fleet.root / "other").node("n1"), fleet.node("n2")
    await bring(impostor, hub)
    # It lets everybody in, and has what is asked for.
    (impostor / CA).write_bytes((second / CA).read_bytes())
    async with sharing(impostor) as address:
        client = Peers((address,), second).client()
        async with client:
            with pytest.raises(FetchFailed, match="is no node of this fleet"):
                await client.get(f"https://{address}/weights", params={"source": SOURCE})
        hub.asked.clear()
        await bring(second, hub, address)
    assert len(hub.bodies) == 3


async def test_a_revoked_node_is_given_nothing_and_nothing_is_taken_from_it(fleet: Fleet, hub: Hub) -> None:
    first, second = fleet.node("n1"), fleet.node("n2")
    await bring(first, hub)
    async with sharing(first) as address, Peers((), second).client() as client:
        url = f"https://{address}/weights"
        assert (await client.get(url, params={"source": SOURCE})).status_code == 200
        Revocations(first).take([Identity.load(second).peer.serial])
        with pytest.raises(httpx.TransportError):  # over the connection that is open, too
            await client.get(url, params={"source": SOURCE})
        Revocations(first).take([])
        Revocations(second).take([Identity.load(first).peer.serial])
        with pytest.raises(FetchFailed, match="that was revoked"):
            await client.get(url, params={"source": SOURCE})
        hub.asked.clear()
        await bring(second, hub, address)
    assert len(hub.bodies) == 3


@pytest.mark.parametrize(
    "path",
    [
        "/blobs/.llmgw/x", "/blobs/models--org--model/../refs", "/blobs/%2e%2e/%2e%2e/identity.pem", "/../identity.pem",
        "/blobs/models--org--model/x.partial", "/", "/weights", "/blobs/a/b/c",
    ],
)  # fmt: skip
async def test_nothing_but_whole_blobs_is_given(fleet: Fleet, hub: Hub, path: str) -> None:
    first, second = fleet.node("n1"), fleet.node("n2")
    blobs = (await bring(first, hub) / "config.json").resolve().parent
    (blobs / "x.partial").write_text("half")
    (first / "weights" / ".llmgw" / "blobs").mkdir()
    (first / "weights" / ".llmgw" / "blobs" / "x").write_text("ours")
    async with sharing(first) as address, Peers((address,), second).client() as client:
        assert (await client.get(f"https://{address}{path}")).status_code == 404
        blob = next(iter(blobs.glob("*[0-9a-f]")))
        good = await client.get(
            f"https://{address}/blobs/models--org--model/{blob.name}", headers={"Range": "bytes=2-"}
        )
        assert (good.status_code, good.content) == (206, blob.read_bytes()[2:])
    assert Identity.load(first).node == "n1"


class Member:
    """A node that fetches and shares, and can die."""

    def __init__(self, directory: Path, hub: Hub) -> None:
        self.directory, self.hub = directory, hub
        self.told: list[str] = []
        self.scope = trio.CancelScope()
        self.address: Listen
        self.cache: Cache
        self._nursery: trio.Nursery

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        with self.scope:
            async with (
                sharing(self.directory) as self.address,
                cache(self.directory, self.hub) as self.cache,
                trio.open_nursery() as self._nursery,
            ):
                task_status.started()
                await trio.sleep_forever()

    def want(self, *earlier: Member) -> None:
        self.cache.told(SOURCE, Whence(soon=tuple(member.address for member in earlier)))
        self._nursery.start_soon(self.cache.bring, SOURCE, lambda progress: self.told.append(progress.what))

    @property
    def held(self) -> Weights:
        (held,) = self.cache.weights
        return held

    @property
    def done(self) -> bool:
        return bool(self.cache.weights) and self.held.complete


@pytest.fixture
async def three(fleet: Fleet, hub: Hub, nursery: trio.Nursery) -> list[Member]:
    made = [Member(fleet.node(name), hub) for name in ("n1", "n2", "n3")]
    for member in made:
        await nursery.start(member.run)
    return made


async def test_of_three_nodes_that_want_the_same_at_once_one_goes_outside(three: list[Member], hub: Hub) -> None:
    first, second, third = three
    hub.held.clear()
    # The last one is the first to ask: it waits for others that have yet to begin.
    third.want(first, second)
    await until(lambda: bool(third.told))
    second.want(first)
    await until(lambda: bool(second.told))
    first.want()
    await until(lambda: all("weights, until n1 has them" in member.told for member in (second, third)))
    hub.held.set()
    await until(lambda: all(member.done for member in three), within=60)
    for member in three:
        assert (Path(member.held.path) / "model.safetensors").read_bytes() == WHOLE
        assert member.directory in Path(member.held.path).parents
    assert [member.held.came_from != "" for member in three] == [False, True, True]
    assert any(words.startswith("weights from n1") for words in second.told)
    assert len(hub.bodies) == 3


async def test_when_the_first_dies_midway_the_next_goes_on_and_the_third_waits_for_that_one(
    three: list[Member], hub: Hub
) -> None:
    first, second, third = three
    hub.held.clear()
    first.want()
    await until(lambda: len(hub.bodies) == 3)
    second.want(first)
    third.want(first, second)
    await until(lambda: all("weights, until n1 has them" in member.told for member in (second, third)))
    first.scope.cancel()
    await until(lambda: len(hub.bodies) == 6, within=60)  # one of them, and not both
    await until(lambda: "weights, until n2 has them" in third.told)
    hub.held.set()
    await until(lambda: second.done and third.done, within=60)
    assert third.held.came_from == "n2"
    assert len(hub.bodies) == 6


async def test_a_peer_that_gives_broken_bytes_is_left_for_another_one(fleet: Fleet, hub: Hub) -> None:
    rotten, good, third = fleet.node("n1"), fleet.node("n2"), fleet.node("n3")
    blob = (await bring(rotten, hub) / "model.safetensors").resolve()
    await bring(good, hub)
    hub.asked.clear()
    seen = blob.stat()
    with blob.open("r+b") as file:
        file.write(b"x")
    os.utime(blob, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    async with sharing(rotten) as first, sharing(good) as second, cache(third, hub) as made:
        made.told(SOURCE, Whence(complete=(first, second)))
        path = await made.bring(SOURCE, nothing)
        assert made.weights[0].came_from == "n2"
    assert (path / "model.safetensors").read_bytes() == WHOLE
    assert hub.bodies == []


async def test_a_place_that_is_taken_is_waited_for(fleet: Fleet, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmgw.node.weights.share._KEEPS", 1000.0)  # all of it may be on its way without being read
    first, second, third = (fleet.node(name) for name in ("n1", "n2", "n3"))
    await bring(first, hub)
    hub.asked.clear()
    told: list[str] = []
    async with sharing(first, at_once=1) as address:
        peers = Peers((), second)
        async with peers.client() as taking:
            blob = (first / "weights").rglob("model.safetensors").__next__().resolve()
            url = f"https://{address}/blobs/models--org--model/{blob.name}"
            async with taking.stream("GET", url) as answer, cache(third, hub) as made, trio.open_nursery() as nursery:
                assert answer.status_code == 200
                made.told(SOURCE, Whence(complete=(address,)))
                nursery.start_soon(made.bring, SOURCE, lambda progress: told.append(progress.what))
                await until(lambda: "weights, until n1 has a place free" in told)
                await answer.aread()
                monkeypatch.setattr("llmgw.node.weights.share._KEEPS", 0.0)
        assert made.weights[0].came_from == "n1"
    assert hub.bodies == []


async def test_a_commit_is_had_from_a_peer_that_knows_it_as_a_branch(fleet: Fleet, hub: Hub) -> None:
    first, second = fleet.node("n1"), fleet.node("n2")
    await bring(first, hub)
    hub.asked.clear()
    async with sharing(first) as address:
        path = await bring(second, hub, address, source=f"hf://org/model@{hub.commit}")
    assert (path / "model.safetensors").read_bytes() == WHOLE
    assert hub.bodies == []


async def test_a_node_takes_the_commit_that_the_fleet_holds_and_not_a_newer_one(fleet: Fleet, hub: Hub) -> None:
    first, second, third = (fleet.node(name) for name in ("n1", "n2", "n3"))
    await bring(first, hub)
    old = hub.move("b" * 40)
    async with sharing(first) as address:
        await bring(second, hub, address)
    async with cache(third, hub) as made:  # nobody gives it any, but the plane knows
        made.told(SOURCE, Whence(revision=old))
        await made.bring(SOURCE, nothing)
        assert made.weights[0].revision == old
    async with cache(second, hub) as made:
        assert made.weights[0].revision == old


async def test_a_commit_of_the_fleet_that_is_gone_from_the_hub_holds_nobody_up(fleet: Fleet, hub: Hub) -> None:
    async with cache(fleet.node("n1"), hub) as made:
        made.told(SOURCE, Whence(revision="c" * 40))
        await made.bring(SOURCE, nothing)
        assert made.weights[0].revision == hub.commit


async def test_a_refresh_brings_the_new_commit_beside_the_old_one(fleet: Fleet, hub: Hub) -> None:
    node = fleet.node("n1")
    async with cache(node, hub) as made:
        before = await made.bring(SOURCE, nothing)
        made.ahead(FetchWeights(source=SOURCE, refresh=True))
        old = hub.move("b" * 40, {"config.json": b'{"new": 1}'})
        made.ahead(FetchWeights(source=SOURCE, refresh=True))
        await until(lambda: any(held.revision == "b" * 40 and held.source == SOURCE for held in made.weights))
        assert {held.source: (held.revision[0], held.complete) for held in made.weights} == {
            SOURCE: ("b", True),
            f"hf://org/model@{old}": ("a", True),
        }
        after = await made.bring(SOURCE, nothing)
        assert (before / "config.json").read_bytes() == FILES["config.json"]
        assert (after / "config.json").read_bytes() == b'{"new": 1}'
        assert (after / "model.safetensors").resolve() == (before / "model.safetensors").resolve()


async def test_a_refresh_that_fails_leaves_what_was_there(fleet: Fleet, hub: Hub) -> None:
    async with cache(fleet.node("n1"), hub) as made:
        before = await made.bring(SOURCE, nothing)
        hub.move("b" * 40, {"config.json": b'{"new": 1}'})
        hub.gets[:] = [403] * 10
        made.ahead(FetchWeights(source=SOURCE, refresh=True))
        await until(lambda: any(held.error for held in made.weights))
        assert await made.bring(SOURCE, nothing) == before
        held = {weights.source: weights for weights in made.weights}
        assert held[SOURCE].complete


async def test_a_refresh_that_meets_a_sick_disk_costs_the_agent_nothing(fleet: Fleet, hub: Hub) -> None:
    node = fleet.node("n1")
    async with cache(node, hub) as made:
        before = await made.bring(SOURCE, nothing)
        hub.move("b" * 40, {"config.json": b'{"new": 1}'})
        await made.bring(f"hf://org/model@{'b' * 40}", nothing)
        (lock,) = (node / "weights" / ".llmgw" / "locks").iterdir()
        lock.unlink()
        lock.mkdir()
        with capture_logs() as logs:
            made.ahead(FetchWeights(source=SOURCE, refresh=True))
            await until(lambda: any("could not be fetched ahead" in entry["event"] for entry in logs))
        assert await made.bring(SOURCE, nothing) == before


async def test_a_web_servers_file_has_nothing_to_refresh(fleet: Fleet, hub: Hub) -> None:
    hub.files[""] = {"m.safetensors": WHOLE}
    source = f"{hub.url}/m.safetensors#sha256={hashlib.sha256(WHOLE).hexdigest()}"
    async with cache(fleet.node("n1"), hub) as made:
        await made.bring(source, nothing)
        hub.asked.clear()
        made.ahead(FetchWeights(source=source, refresh=True))
        await trio.testing.wait_all_tasks_blocked(0.1)
        assert (hub.asked, len(made.weights)) == ([], 1)

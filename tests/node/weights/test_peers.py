"""Weights from another node of the fleet: over TLS with both sides' certificates, before anybody outside is asked."""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trio

from llmgw import pki
from llmgw.config import Listen
from llmgw.node.identity import CA, IDENTITY, Identity, pending_request, store
from llmgw.node.weights.cache import Cache
from llmgw.node.weights.errors import FetchFailed
from llmgw.node.weights.layout import prepare
from llmgw.node.weights.lock import attempt
from llmgw.node.weights.pace import Pace
from llmgw.node.weights.peers import Peers
from llmgw.node.weights.share import Share
from llmgw.pki import Role
from llmgw.wire.facts import Progress
from tests.engines import until
from tests.node.weights.hubserver import Hub, served
from tests.node.weights.test_fetching import FILES, QUICK, SOURCE, WHOLE, nothing

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
async def sharing(directory: Path) -> AsyncIterator[Listen]:
    """A node's share of its cache, at an address."""
    prepare(directory / "weights")
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Share(directory / "weights", directory, Pace().take).run, listeners)
        yield Listen("127.0.0.1", port)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def cache(directory: Path, hub: Hub, *peers: Listen) -> AsyncIterator[Cache]:
    asked = Peers(peers, directory) if peers else None
    made = Cache(directory / "weights", base=hub.url, patience=QUICK, peers=asked)
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
    import hashlib

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
    import os

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
            await until(lambda: any("fetches them" in progress.what for progress in told))
            hub.held.set()
    assert len(hub.bodies) == 3


async def test_a_peer_of_a_later_name_is_not_waited_for(fleet: Fleet, hub: Hub) -> None:
    """Else two could wait for one another for ever."""
    first, second = fleet.node("n1"), fleet.node("n2")
    prepare(second / "weights")
    async with sharing(second) as address, cache(first, hub) as earlier:
        async with cache(second, hub) as later:
            hub.gets[:] = [0, 0, 0]
            await later.bring(SOURCE, nothing)
        blob = next((second / "weights").rglob("model.safetensors")).resolve()
        blob.unlink()
        with attempt(second / "weights", "models--org--model") as mine:
            assert mine
            earlier._peers = Peers((address,), first)
            with trio.fail_after(10):
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

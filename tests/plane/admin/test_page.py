"""The admin page: its door over plain HTTP calls, and itself in a real browser."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from msgspec import structs

from llmgw.plane.admin.auth import COOKIE
from llmgw.plane.admin.files import FileBody
from llmgw.plane.world import Want
from llmgw.wire.facts import ModelName, ReplicaId, ShardId
from tests.plane.admin.browser import Page, browser
from tests.plane.admin.rig import Rig, served
from tests.plane.admin.sample import EVIL, draining_world, evil_world, gang_world

pytestmark = pytest.mark.real


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with served(tmp_path / "plane", evil_world()) as made:
        yield made


async def test_a_stranger_is_sent_to_the_door(rig: Rig) -> None:
    async with rig.client(token=False) as http:
        assert (await http.get("/nodes/gpu-01")).headers["Location"] == "/login"
        assert (await http.get("/replicas/tiny-0")).headers["Location"] == "/login"
        response = await http.get("/")
        assert (response.status_code, response.headers["Location"]) == (303, "/login")
        door = await http.get("/login")
    assert "Administrator&#39;s token" in door.text or "Administrator's token" in door.text


async def test_a_wrong_token_is_told_so_and_opens_nothing(rig: Rig) -> None:
    async with rig.client(token=False) as http:
        response = await http.post("/login", data={"token": "wrong"})
    assert response.status_code == 401
    assert "not an administrator" in response.text
    assert "Set-Cookie" not in response.headers


async def test_a_token_opens_a_session_that_may_only_read(rig: Rig) -> None:
    async with rig.client(token=False) as http:
        response = await http.post("/login", data={"token": rig.token})
        assert response.status_code == 303
        cookie = response.headers["Set-Cookie"]
        for word in (COOKIE, "HttpOnly", "Secure", "SameSite=Strict", "Path=/"):
            assert word in cookie
        assert rig.token not in cookie
        assert (await http.get("/")).status_code == 200
        assert (await http.get("/api/v1/overview")).status_code == 200
        refused = await http.post("/api/v1/nodes/node-a/cordon")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "refused")
        assert (await http.post("/logout")).status_code == 303
        assert (await http.get("/api/v1/overview")).status_code == 401


async def test_a_session_ends_with_the_token_that_opened_it(rig: Rig) -> None:
    async with rig.client(token=False) as http:
        await http.post("/login", data={"token": rig.token})
        assert (await http.get("/api/v1/overview")).status_code == 200
        (rig.directory / "admin.token").write_text("lga-another-token-of-some-length\n")
        assert (await http.get("/api/v1/overview")).status_code == 401


async def test_a_form_of_another_site_is_refused(rig: Rig) -> None:
    async with rig.client(token=False) as http:
        response = await http.post("/login", data={"token": rig.token}, headers={"Sec-Fetch-Site": "cross-site"})
    assert response.status_code == 403


async def test_a_certificate_needs_no_token(rig: Rig) -> None:
    async with rig.client(token=False, identity=rig.admin_identity) as http:
        assert (await http.get("/")).status_code == 200


@pytest.mark.parametrize("path", ["/login", "/", "/static/page.js", "/static/page.css", "/api/v1/status", "/nothing"])
async def test_nothing_from_elsewhere_may_run_or_frame_us(rig: Rig, path: str) -> None:
    async with rig.client() as http:
        response = await http.get(path)
    assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in response.headers["Content-Security-Policy"]
    assert response.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py"])
async def test_static_files_are_the_pages_own_only(rig: Rig, path: str) -> None:
    async with rig.client() as http:
        assert (await http.get(path)).status_code == 404


async def test_a_file_is_closed_when_the_client_leaves_while_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    body, open_file = FileBody(__file__), trio.open_file

    async def opened(*args: Any, **more: Any) -> object:
        file = await open_file(*args, **more)
        scope.cancel()
        return file

    monkeypatch.setattr(trio, "open_file", opened)
    with trio.CancelScope() as scope:
        async with body:
            raise AssertionError("it goes on for nobody")
    assert scope.cancelled_caught
    assert body.file is not None
    assert body.file.closed


async def signed_in(page: Page, rig: Rig) -> None:
    await page.open(rig.url)
    await page.until("document.querySelector('#token') !== null")
    await page.evaluate(
        f"document.querySelector('#token').value = {rig.token!r}; document.querySelector('form').requestSubmit()"
    )
    await page.until("document.querySelector('#live')?.dataset.state === 'live'")


@pytest.mark.slow
async def test_the_page_in_a_browser_shows_the_fleet_live_and_honestly(tmp_path: Path) -> None:
    async with browser() as page:
        async with served(tmp_path / "plane", evil_world()) as rig:
            await signed_in(page, rig)
            nodes = await page.evaluate("document.querySelector('#nodes').innerText")
            replicas = await page.evaluate("document.querySelector('#replicas').innerText")
            assert "gpu-01" in nodes
            assert "node-a" in nodes
            assert "lost" in nodes
            assert "tiny-0" in replicas
            assert "20001" in replicas
            assert "killed by SIGKILL" in replicas
            # Text of a node stays text.
            assert EVIL in await page.evaluate("document.querySelector('#problems').innerText")
            assert await page.evaluate("document.querySelectorAll('main img').length") == 0
            if directory := os.environ.get("LLMGW_PICTURES"):
                await page.picture(Path(directory) / "page.png")
                await page.call(
                    "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}]
                )
                await page.picture(Path(directory) / "page-dark.png")
            # What happens now is on the page without anybody asking.
            rig.fleet.events.add("node-lost", "node:node-b", "node-b is lost", clock=1.0)
            await page.until("document.querySelector('#events').innerText.includes('node-b is lost')")
            assert page.complaints == []
        # The plane is gone: the page says so, and keeps what it knew.
        said = await page.until(
            "document.querySelector('#live').dataset.state === 'gone' && document.querySelector('#live').innerText"
        )
        assert "plane not answering since" in said
        assert "what you see is of" in said
        assert "gpu-01" in await page.evaluate("document.querySelector('#nodes').innerText")


@pytest.mark.slow
async def test_the_page_of_a_node_shows_its_hardware_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    async with browser() as page, served(tmp_path / "plane", evil_world()) as rig:
        await signed_in(page, rig)
        problems = await page.evaluate("document.querySelector('#problems').innerText")
        assert "bad" in problems
        assert re.search(r"\b[5-9] min", problems)  # how long the Xid is there
        assert await page.evaluate("document.querySelector('#problems a').getAttribute('href')") == "/nodes/gpu-01"
        await page.evaluate("[...document.querySelectorAll('#nodes a')].find(a => a.innerText === 'gpu-01').click()")
        await page.until(
            "location.pathname === '/nodes/gpu-01' && document.querySelector('#live')?.dataset.state === 'live'"
        )
        shown = {
            name: await page.evaluate(f"document.querySelector('#{name}').innerText")
            for name in ("sums", "problems", "gpus", "processes", "ports", "shards", "host", "history")
        }
        assert "cordoned" in shown["sums"]
        assert "XID 79" in shown["problems"]
        assert "acknowledged for" in shown["problems"]
        assert EVIL in shown["problems"]
        assert await page.evaluate("document.querySelectorAll('main img').length") == 0
        for words in ("NVIDIA H200", "100 GiB of 139 GiB", "5.0 GiB", "97 %", "61 °C", "?/18 c1.7"):
            assert words in shown["gpus"]
        assert "4242" in shown["processes"]
        assert "foreign" in shown["processes"]
        for words in ("mlx5_0/1", "active", "400 Gb/s", "blue", "40.00 Gb/s"):
            assert words in shown["ports"]
        assert "big-0-0" in shown["shards"]
        assert "92 s ahead of the plane's" in shown["host"]
        assert "2 NVIDIA H200 GPUs" in shown["host"]
        assert "Nothing has happened yet" in shown["history"]
        if directory := os.environ.get("LLMGW_PICTURES"):
            await page.picture(Path(directory) / "node.png")
        rig.fleet.events.add("port-changed", "node:gpu-01", "gpu-01 mlx5_0/1: ACTIVE -> DOWN", clock=1.0)
        await page.until("document.querySelector('#history').innerText.includes('ACTIVE -> DOWN')")
        assert page.complaints == []
        await page.open(f"{rig.url}/nodes/nobody")
        said = await page.until(
            "document.querySelector('#live')?.dataset.state === 'gone' && document.querySelector('#live').innerText"
        )
        assert said.startswith("no node is called 'nobody'")


@pytest.mark.slow
async def test_the_page_shows_replicas_of_several_nodes_changes_and_drains(tmp_path: Path) -> None:
    async with browser() as page, served(tmp_path / "plane", draining_world()) as rig:
        await signed_in(page, rig)
        shown = {
            name: await page.evaluate(f"document.querySelector('#{name}').innerText")
            for name in ("nodes", "models", "replicas")
        }
        assert "draining" in shown["nodes"]
        for words in ("gpu-01+node-a", "outdated", "sockets are used where RDMA was meant"):
            assert words in shown["replicas"]
        links = "[...document.querySelectorAll('#replicas a')].map(a => a.getAttribute('href')).join(' ')"
        assert "/nodes/gpu-01 /nodes/node-a" in await page.evaluate(links)
        if directory := os.environ.get("LLMGW_PICTURES"):
            await page.picture(Path(directory) / "page-several.png")
        await page.open(f"{rig.url}/nodes/node-a")
        await page.until(
            "location.pathname === '/nodes/node-a' && document.querySelector('#live')?.dataset.state === 'live'"
        )
        shards = await page.evaluate("document.querySelector('#shards').innerText")
        assert "to drain; gets no new requests; finishes what it serves" in shards
        assert "serves until its replacement is ready" in shards
        # A model that is unloaded, then a change that pauses.
        world = rig.fleet.world.value
        failed = attrs.evolve(
            world.shards[ShardId("org_large-0-0")],
            id=ShardId("org_large-1-0"),
            replica=ReplicaId("org_large-1"),
            want=Want.RUN,
            revision=2,
            status=None,
        )
        idle = structs.replace(world.models[ModelName("tiny")], idle=60.0)
        models = world.models.set(idle.name, idle)
        shards_ = world.shards.set(failed.id, failed).delete(ShardId("tiny-0-0"))
        running = attrs.evolve(shards_[ShardId("org_large-0-0")], want=Want.RUN)
        mate = attrs.evolve(shards_[ShardId("org_large-0-1")], want=Want.RUN)
        shards_ = shards_.set(running.id, running).set(mate.id, mate)
        rig.fleet.world.set(attrs.evolve(world, models=models, shards=shards_, version=world.version + 1))
        await page.open(rig.url)
        await page.until("document.querySelector('#models')?.innerText.includes('paused')")
        shown["models"] = await page.evaluate("document.querySelector('#models').innerText")
        assert "replica org_large-1 of revision 2 failed 2 times in a row" in shown["models"]
        assert "0 of 1 replicas have revision 2, 1 on the way" in shown["models"]
        assert "unloaded" in shown["models"]
        assert page.complaints == []


@pytest.mark.slow
async def test_the_page_of_a_replica_shows_its_members_and_what_they_wait_for(tmp_path: Path) -> None:
    async with browser() as page, served(tmp_path / "plane", gang_world()) as rig:
        await signed_in(page, rig)
        await page.evaluate(
            "[...document.querySelectorAll('#replicas a')].find(a => a.innerText === 'org_large-0').click()"
        )
        await page.until(
            "location.pathname === '/replicas/org_large-0' && document.querySelector('#live')?.dataset.state === 'live'"
        )
        shown = {
            name: await page.evaluate(f"document.querySelector('#{name}').innerText")
            for name in ("waiting", "sums", "members", "network", "environment", "evidence", "failures", "commands")
        }
        for name, words in {
            "waiting": "its followers: org_large-0-1 on node-a (fetching, 75 %)",
            "sums": "outdated: 2 is wanted",
            "members": "weights 3.0 GiB of 4.0 GiB",
            "network": "mlx5_1:1",
            "environment": "eth0 (the profile says so)",
            "evidence": "gpu-01 mlx5_0/1: 12 Gb/s of 400",
            "failures": "llmgw ctl logs node-a org_large-0-1 --run 1",
            "commands": "vllm serve --node-rank 1",
        }.items():
            assert words in shown[name], shown[name]
        assert "NCCL WARN Call to ibv_reg_mr failed" in shown["failures"]
        assert shown["environment"].count("VLLM_HOST_IP") == 1
        assert await page.evaluate("document.querySelector('#warning').hidden")
        if directory := os.environ.get("LLMGW_PICTURES"):
            await page.picture(Path(directory) / "replica.png")
        rig.fleet.world.set(gang_world(ready=True))
        await page.until("document.querySelector('#warning').innerText.includes('sockets are used')")
        assert await page.evaluate("document.querySelector('#waiting').hidden")
        assert page.complaints == []
        await page.open(f"{rig.url}/replicas/org_large-7")
        said = await page.until(
            "document.querySelector('#live')?.dataset.state === 'gone' && document.querySelector('#live').innerText"
        )
        assert said.startswith("no replica is called 'org_large-7'")


async def test_a_browser_without_the_token_sees_only_the_door(rig: Rig) -> None:
    async with browser() as page:
        await page.open(rig.url)
        await page.until("document.querySelector('#token') !== null")
        await page.evaluate(
            "document.querySelector('#token').value = 'wrong'; document.querySelector('form').requestSubmit()"
        )
        assert "not an administrator" in await page.until("document.querySelector('#problem')?.innerText")
        assert await page.evaluate("fetch('/api/v1/overview').then(answer => answer.status)") == 401


def test_the_page_keeps_to_the_trio_of_files_it_is_made_of() -> None:
    import llmgw.plane.admin

    home = Path(llmgw.plane.admin.__file__).parent
    text = "".join(path.read_text() for path in [*home.glob("pages/*"), *home.glob("static/*")])
    text = text.replace('"http://www.w3.org/2000/svg"', "")  # a name, fetched from nowhere
    assert "http://" not in text
    assert "https://" not in text
    assert "innerHTML" not in text

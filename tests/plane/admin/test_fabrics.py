"""Fabrics in the API, in `ctl` and in a real browser, over a plane that has seen a fabric with faults."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog.testing
import trio
from click.testing import CliRunner, Result
from msgspec.structs import replace
from quart_trio import QuartTrio

from llmgw.aside import here
from llmgw.ctl import client
from llmgw.ctl.main import ctl
from llmgw.errors import AgentGone
from llmgw.plane.admin import app as app_module
from llmgw.plane.admin import serve
from llmgw.plane.admin.app import Admin
from llmgw.plane.fabrics.desk import FabricDesk
from llmgw.rdma.fabric import Map, PortState
from llmgw.wire.control import ScanRequest
from llmgw.wire.facts import NodeId
from tests.plane.admin.browser import browser
from tests.plane.admin.rig import Rig, served
from tests.plane.fabrics.fleets import MASTER, STANDBY, Plane, ib_port, on_fabric, plane, seen_by
from tests.rdma.trees import guid_of, link, paced, swapped, tree, without
from tests.rigs.ib.net import host_guid

pytestmark = pytest.mark.real

TREE = tree(16, 2, 8, aggregation=True)
NASTY = '<script>alert("x")</script> & "leaf"'


def broken() -> Map:
    """A cable cut, a link at 1x that both ends confirm, two cables swapped."""
    slow = link(TREE, host_guid(6, 1), 1)
    found = paced(TREE, slow, 1, "HDR")
    able = {"widths": (1, 4), "speeds": ("EDR", "HDR"), "enabled_widths": (1, 4), "enabled_speeds": ("EDR", "HDR")}
    states = tuple(PortState(*end, 1, "HDR", **able) for end in slow.ends)  # type: ignore[arg-type]
    found = swapped(found, link(found, host_guid(9, 0), 1), link(found, host_guid(9, 1), 1))
    found = without(found, link(found, guid_of(found, "MF0;leaf-su000-r0"), 5))
    return replace(found, states=states)


async def seen(*maps: Map | Exception) -> tuple[Plane, FabricDesk]:
    """A plane that saw these maps one after the other; the last one again and again."""
    left = list(maps)

    def see(node: NodeId, request: ScanRequest) -> Map | Exception:
        return left.pop(0) if len(left) > 1 else left[0]

    one, _ = plane(see, takes=0.0)
    managers = [seen_by("mlx5_0", MASTER, STANDBY), seen_by("mlx5_1", MASTER, STANDBY)]
    one.hears(*(on_fabric(f"node-{n}", ib_port(n, 0), ib_port(n, 1), managers=managers) for n in (0, 6, 9)))
    await one.fabrics.look_at_managers()
    for _ in maps:
        await one.fabrics.round()
    return one, FabricDesk(one.fabrics, lambda: one.fleet.world.value, think=here)


@asynccontextmanager
async def serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *maps: Map | Exception
) -> AsyncIterator[tuple[Rig, Plane]]:
    """The real admin server, with the parts of fabrics in it."""
    one, desk = await seen(*maps)
    real = app_module.app

    def app(admin: Admin) -> QuartTrio:
        admin.fabrics = desk
        return real(admin)

    monkeypatch.setattr(serve, "app", app)
    monkeypatch.setattr(client, "CONNECT_WITHIN", 60.0)  # plane and command are one process, which may have to wait
    for name in list(os.environ):
        if name.startswith("LLMGW_"):
            monkeypatch.delenv(name)
    async with served(tmp_path / "plane") as rig:
        yield rig, one


async def call(rig: Rig, *args: str) -> Result:
    with structlog.testing.capture_logs():  # the plane runs in the process whose output the command's is taken from
        return await trio.to_thread.run_sync(
            lambda: CliRunner().invoke(ctl, ["--dir", str(rig.directory), *args], prog_name="llmgw ctl")
        )


async def ok(rig: Rig, *args: str) -> str:
    result = await call(rig, *args)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


async def test_fabrics_are_listed_with_their_managers_map_and_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, monkeypatch, TREE, broken()) as (rig, _):
        text = await ok(rig, "fabrics")
        listed = json.loads(await ok(rig, "fabrics", "-o", "json"))
    assert MASTER in text
    assert "1 bad, 2 warn" in " ".join(text.split())
    (row,) = listed["fabrics"]
    assert (row["name"], row["nodes"], row["ports"], row["managers"]) == (MASTER, 3, 6, 2)
    assert row["scan"]["counts"] == {"switches": 12, "hosts": 16, "adapters": 32, "links": 75, "others": 12}


async def test_one_fabric_shows_managers_faults_leaves_and_its_scans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, monkeypatch, TREE, broken()) as (rig, _):
        text = await ok(rig, "fabric")
        every = await ok(rig, "fabric", MASTER, "--all")
        svg = await ok(rig, "fabric", "--svg")
    assert "runs at 1xHDR, links of its kind at 4xHDR; both ends support more" in text
    assert "node-9 mlx5_0 is on the leaf of rail mlx5_1" in text
    assert "leaf-su003-r1" in text
    assert "spine-0003" not in text
    assert "spine-0003" in every
    assert STANDBY in text
    assert svg.startswith("<svg ")


async def test_a_scan_now_says_what_it_saw_and_a_failed_one_ends_with_8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, monkeypatch, TREE, AgentGone("node-0 has no agent connected")) as (rig, _):
        failed = await call(rig, "fabric-scan")
        assert failed.exit_code == 8
        assert "node-0 mlx5_0/1: node-0 has no agent connected" in failed.stdout
    async with serving(tmp_path / "again", monkeypatch, TREE) as (rig, _):
        assert "12 switches, 16 hosts with 32 adapters, 76 links" in await ok(rig, "fabric-scan")
        assert "from node-6 mlx5_1/1" in await ok(rig, "fabric-scan", "node-6", "mlx5_1/1")
        wrong = await call(rig, "fabric-scan", "node-6", "mlx5_9")
        assert (wrong.exit_code, "it has mlx5_0/1, mlx5_1/1" in wrong.stderr) == (2, True)
        nowhere = await call(rig, "fabric-scan", "east")
        assert (nowhere.exit_code, "there is no fabric 'east'" in nowhere.stderr) == (3, True)


async def test_differences_are_told_between_any_two_maps_kept_with_what_they_touch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, monkeypatch, TREE, broken()) as (rig, _):
        text = await ok(rig, "fabric-diff")
        found = json.loads(await ok(rig, "fabric-diff", "1", "2", "-o", "json"))
        back = json.loads(await ok(rig, "fabric-diff", MASTER, "2", "1", "-o", "json"))
        missing = await call(rig, "fabric-diff", "77")
        odd = await call(rig, "fabric-diff", MASTER, "soon")
    assert "cables-swapped" in text
    assert sorted(one["kind"] for one in found["changes"]) == ["cables-swapped", "link-gone", "link-slower"]
    gone = next(one for one in found["changes"] if one["kind"] == "link-gone")
    assert "node-0" in gone["nodes"]
    assert sorted(one["kind"] for one in back["changes"]) == ["cables-swapped", "link-faster", "link-new"]
    assert (missing.exit_code, "no kept map 77" in missing.stderr) == (3, True)
    assert (odd.exit_code, "'soon' is no scan" in odd.stderr) == (2, True)


async def test_a_cable_has_its_numbers_and_its_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = f"{host_guid(6, 1):016x}/1"
    async with serving(tmp_path, monkeypatch, TREE, broken()) as (rig, _), rig.client() as http:
        found = (await http.get("/api/v1/fabric/link", params={"end": end})).json()
        bad = await http.get("/api/v1/fabric/link", params={"end": "x"})
        none = await http.get("/api/v1/fabric/link", params={"end": "1/1"})
    assert (found["pace"], found["rate_gbps"]) == ("1xHDR", 53.125)
    assert [one["owner"] for one in found["ends"] if one["kind"] == "host"] == ["node-6 mlx5_1"]
    assert [moment["pace"] for moment in found["history"]] == ["4xHDR", "1xHDR"]
    assert len(found["faults"]) == 1
    assert (bad.status_code, none.status_code) == (400, 404)


async def test_without_a_fabric_everything_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = plane(lambda *_: TREE)
    desk = FabricDesk(one.fabrics, lambda: one.fleet.world.value, think=here)
    assert desk.all().fabrics == ()
    async with serving(tmp_path, monkeypatch, TREE) as (rig, _):
        assert "MASTER SM" in await ok(rig, "fabrics")


async def test_a_browser_shows_the_fabric_its_faults_in_colour_and_a_clicked_cables_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nasty = replace(
        broken(),
        nodes=tuple(replace(n, name=NASTY) if n.name.startswith("MF0;spine-0003") else n for n in broken().nodes),
    )
    async with serving(tmp_path, monkeypatch, TREE, nasty) as (rig, _), browser() as page:
        await page.open(f"{rig.url}/login")
        await page.until("document.getElementById('token') !== null")
        await page.evaluate(f"document.getElementById('token').value = {json.dumps(rig.token)}")
        await page.evaluate("document.forms[0].requestSubmit()")
        await page.until("location.pathname === '/'")
        await page.open(f"{rig.url}/fabrics")
        await page.until("document.querySelectorAll('#drawing svg .switch').length === 12")
        assert await page.evaluate("document.querySelectorAll('#drawing a.cable.bad').length") == 1
        assert await page.evaluate("document.querySelectorAll('#drawing a.cable.warn').length") == 2
        assert await page.evaluate("document.querySelector('#drawing a.bad rect').getAttribute('fill')") == "#c62828"
        assert NASTY in await page.evaluate("document.getElementById('drawing').textContent"), "a name is only words"
        assert await page.evaluate("document.querySelectorAll('#drawing script').length") == 0
        await page.evaluate(
            "document.querySelector('#drawing a.bad').dispatchEvent(new MouseEvent('click', {bubbles: true}))"
        )
        await page.until("!document.getElementById('cable').hidden")
        await page.until("document.querySelectorAll('#cable-history tr').length === 2")
        assert "1xHDR, 53 Gb/s" in await page.evaluate("document.getElementById('cable-pace').textContent")
        assert "node-6 mlx5_1" in await page.evaluate("document.getElementById('cable-title').textContent")
        texts = await page.evaluate(
            "[...document.querySelectorAll('#cable-history td:nth-child(2)')].map(c => c.textContent)"
        )
        assert texts == ["1xHDR", "4xHDR"]
        await page.picture(tmp_path / "fabrics.png")
        assert page.complaints == []
    assert (tmp_path / "fabrics.png").stat().st_size > 10_000

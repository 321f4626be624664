"""The API's and the page's view of bandwidth tests: stored results as a matrix, one pair, and errors in words."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from llmgw.plane.bandwidth import history
from llmgw.plane.bandwidth.desk import Desk
from llmgw.plane.store.memory import MemoryStore
from llmgw.rdma.grade import Verdict
from llmgw.rdma.results import EndView, Failure, PairResult, RailResult
from tests.plane.admin.browser import browser
from tests.plane.admin.rig import Rig, served
from tests.plane.admin.test_page import signed_in

pytestmark = pytest.mark.real

EVIL = "<img src=x onerror=alert(1)>"


def result(a: str, b: str, share: float | None, grade: str, clock: float = 1.0) -> PairResult:
    ends = EndView(node=a, device="mlx5_0"), EndView(node=b, device="mlx5_0")
    failure = Failure(side=b, error="exit code 1", cause=EVIL, remedy="look there") if grade == "failed" else None
    rail = RailResult(
        rail="0",
        a=ends[0],
        b=ends[1],
        gbps=None if failure else 97.0,
        verdict=Verdict(
            grade=grade, share=share, ceiling_gbps=98.0, rule="the rule", why=(failure.text,) if failure else ()
        ),
        failure=failure,
    )
    return PairResult(a=a, b=b, clock=clock, rails=(rail,))


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    store = MemoryStore()
    for each in (
        result("n1", "n2", 0.5, "bad"),
        result("n2", "n1", 0.99, "good", clock=2.0),
        result("n1", "n3", None, "failed"),
    ):
        await history.keep(store, each)
    async with served(tmp_path / "plane") as made:
        made.admin.bandwidth = Desk(made.hub, store, made.fleet.world)
        yield made


async def test_the_matrix_has_each_pairs_newest_result(rig: Rig) -> None:
    async with rig.client() as http:
        found = (await http.get("/api/v1/fabric-test/matrix")).json()
    assert found["nodes"] == ["n1", "n2", "n3"]
    assert [(s["a"], s["b"], s["grade"], s["share"]) for s in found["squares"]] == [
        ("n1", "n3", "failed", 0.0),
        ("n2", "n1", "good", 0.99),
    ]
    assert found["squares"][1]["text"] == "rail 0 97 Gb/s"


async def test_a_pairs_results_are_newest_first_whichever_way_they_are_asked_for(rig: Rig) -> None:
    async with rig.client() as http:
        there = (await http.get("/api/v1/fabric-test/n1/n2")).json()
        back = (await http.get("/api/v1/fabric-test/n2/n1")).json()
    assert there == back
    assert [each["clock"] for each in there["results"]] == [2.0, 1.0]


@pytest.mark.parametrize(
    ("order", "status", "words"),
    [
        ({"a": "node-a", "b": "nobody"}, 404, "nobody"),
        ({"a": "node-a", "b": "node-a"}, 400, "against itself"),
        ({"a": "node-a"}, 400, "cannot be read"),
        ({"a": "node-a", "b": "gpu-01", "parameters": {"seconds": 0}}, 400, "seconds"),
        ({"a": "node-a", "b": "gpu-01", "paramters": {}}, 400, "paramters"),
    ],
)
async def test_an_order_that_cannot_be_carried_out_is_an_error_and_no_stream(
    rig: Rig, order: dict[str, object], status: int, words: str
) -> None:
    async with rig.client() as http:
        answer = await http.post("/api/v1/fabric-test", json=order)
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]["message"]


async def test_a_pair_that_was_never_tested_is_told_how_to_be(rig: Rig) -> None:
    async with rig.client() as http:
        answer = await http.get("/api/v1/fabric-test/n2/n3")
    assert answer.status_code == 404
    assert answer.json()["error"]["remedy"] == "llmgw ctl fabric-test n2 n3"


async def test_a_session_of_the_page_may_start_no_test(rig: Rig) -> None:
    async with rig.client(token=False) as http:
        await http.post("/login", data={"token": rig.token})
        assert (await http.get("/bandwidth")).status_code == 200
        assert (await http.get("/api/v1/fabric-test/matrix")).status_code == 200
        assert (await http.post("/api/v1/fabric-test", json={"a": "node-a", "b": "gpu-01"})).status_code == 403


async def test_a_stranger_sees_only_the_door(rig: Rig) -> None:
    async with rig.client(token=False) as http:
        answer = await http.get("/bandwidth")
    assert (answer.status_code, answer.headers["Location"]) == (303, "/login")


async def test_the_heat_map_in_a_browser_shows_every_pair_and_the_one_that_is_chosen(rig: Rig) -> None:
    async with browser() as page:
        await signed_in(page, rig)
        await page.open(f"{rig.url}/bandwidth")
        await page.until("document.querySelectorAll('#heat tbody a').length === 4")
        assert await page.evaluate("document.querySelector('#heat td.good').innerText") == "99%"
        await page.evaluate("document.querySelector('#heat td.failed a').click()")
        told = await page.until("document.querySelector('#rails tr')?.innerText")
        for words in ("n3 mlx5_0", "failed", EVIL, "look there"):
            assert words in told
        assert await page.evaluate("document.querySelectorAll('#rails img').length") == 0
        assert page.complaints == []

"""Where a replica of two nodes goes, over real verbs: what it is told of the wires, and what keeps it away.

The nodes' own tables are real (Soft-RoCE in two guests), and so are the tests between them. Nothing is loaded: a
profile that names weights which are not there shows where it was placed, and with what.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import trio

from tests.rigs.roce.fleet import BOUND, GOOD, Fleet, fleet
from tests.rigs.roce.guests import IN_GUESTS, Guest

pytestmark = IN_GUESTS

WIDE = """
[[models]]
name = "wide"
[models.profile]
engine = "vllm"
source = "/no/such/model"
nodes = 2
network = "rdma"
rails = {rails}
"""


@pytest.fixture(scope="module")
def whole(pair: tuple[Guest, Guest], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet of its own, whose nodes are reached at an address of their rails."""
    with fleet(tmp_path_factory.mktemp("on-rails"), pair, on_rails=True) as made:
        yield made


@pytest.fixture(autouse=True)
async def _nothing_is_wanted(whole: Fleet) -> AsyncIterator[None]:
    yield
    await want(whole, "")
    await until(whole, "replicas", lambda told: told["replicas"] == [])


async def want(whole: Fleet, text: str) -> None:
    def ask() -> None:
        with whole.api() as api:
            api.post("apply", content=text).raise_for_status()

    await trio.to_thread.run_sync(ask)


async def until(whole: Fleet, path: str, holds: Callable[[Any], bool]) -> Any:
    """What the API says once something holds of it."""

    def ask() -> Any:
        with whole.api() as api:
            answer = api.get(path)
            return answer.json() if answer.status_code == 200 else None

    told: Any = None
    with trio.move_on_after(BOUND):
        while True:
            told = await trio.to_thread.run_sync(ask)
            if told is not None and holds(told):
                return told
            await trio.sleep(0.5)
    raise AssertionError(f"{path} does not become so within {BOUND:g} s: {told}")


def checks(told: Any) -> set[str]:
    return {reason["check"] for reason in told["reasons"]}


async def placed(whole: Fleet) -> list[dict[str, Any]]:
    """The members of the replica, by rank."""
    told = await until(whole, "replicas/wide-0", lambda told: True)
    found: list[dict[str, Any]] = told["members"]
    return found


async def test_both_are_told_of_the_same_rails_in_the_same_order_and_of_the_same_network(whole: Fleet) -> None:
    await whole.test(*GOOD)
    await want(whole, WIDE.format(rails=0))
    members = await placed(whole)
    assert {member["shard"]["node"] for member in members} == {"a", "b"}
    for member in members:
        environment = {variable["name"]: variable["value"] for variable in member["environment"]}
        guest = whole.a if member["shard"]["node"] == "a" else whole.b
        assert member["rdma"] == ["rxe0:1", "rxe1:1"]
        assert environment["GLOO_SOCKET_IFNAME"] == "eth1"
        assert environment["VLLM_HOST_IP"] == guest.address(0)


async def test_a_dated_test_that_went_badly_keeps_it_away_until_one_goes_well(whole: Fleet) -> None:
    await whole.test()  # by the usual thresholds an emulated link is bad
    await want(whole, WIDE.format(rails=0))
    told = await until(whole, "why/wide", lambda told: "evidence" in checks(told))
    assert "fabric-test" in told["smallest_change"]
    await whole.test(*GOOD)
    assert len(await placed(whole)) == 2


async def test_a_pulled_cable_keeps_it_away_unless_fewer_rails_will_do(whole: Fleet) -> None:
    await whole.test(*GOOD)
    await whole.b.sh("ip link set eth2 down")
    try:
        await until(
            whole,
            "nodes/b",
            lambda told: any(p["device"] == "rxe1" and "ACTIVE" not in p["state"] for p in told["ports"]),
        )
        await want(whole, WIDE.format(rails=0))
        told = await until(whole, "why/wide", lambda told: "rails" in checks(told))
        assert any("rxe1" in reason["text"] and reason["node"] == "b" for reason in told["reasons"])
        await want(whole, WIDE.format(rails=1))
        # What was there by the profile before goes in the next round of the planner.
        await until(
            whole,
            "replicas/wide-0",
            lambda told: [member["rdma"] for member in told["members"]] == [["rxe0:1"], ["rxe0:1"]],
        )
    finally:
        await whole.b.sh("ip link set eth2 up")

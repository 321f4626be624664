"""The routes' way from the plane to gateway processes, and their counts' way back."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import trio

from llmgw.cell import Cell
from llmgw.errors import Conflict
from llmgw.plane.gateway import feed
from llmgw.plane.gateway.in_flight import InFlight
from llmgw.plane.gateway.publish import first_routes, keep_routes
from llmgw.plane.gateway.route import Endpoint, ModelRoute, ModelState, Routes, StaticEndpoint
from llmgw.plane.world import World
from tests.plane.gateway.parts import until

pytestmark = pytest.mark.real


def routes(*replicas: str, settling: bool = False) -> Routes:
    endpoints = tuple(Endpoint(replica=replica, host="h", port=1, api_key="k") for replica in replicas)
    state = ModelState.READY if endpoints else ModelState.STARTING
    return Routes(models={"tiny": ModelRoute(state=state, endpoints=endpoints)}, settling=settling)


class Plane:
    """The plane's half, which can be stopped and started anew."""

    def __init__(self, directory: Path, first: Routes) -> None:
        self.directory = directory
        self.routes = Cell(first)
        self.in_flight = InFlight(self.routes)
        self.scope = trio.CancelScope()

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        with self.scope:
            await feed.serve_routes(self.directory, self.routes, self.in_flight, task_status=task_status)


async def test_routes_come_at_once_and_counts_go_back(nursery: trio.Nursery, tmp_path: Path) -> None:
    plane = Plane(tmp_path, routes("a"))
    await nursery.start(plane.run)
    mine: Cell[Routes] = Cell(Routes())
    flying = InFlight(mine)
    nursery.start_soon(feed.follow_routes, tmp_path, mine, flying)
    await until(lambda: mine.value == routes("a"))
    plane.routes.set(routes("a", "b"))
    await until(lambda: mine.value == routes("a", "b"))
    flying.begin("b")
    await until(lambda: plane.in_flight.of("b") == 1)
    plane.routes.set(routes("a"))
    async with trio.open_nursery() as draining:
        draining.start_soon(plane.in_flight.idle, "b")
        flying.end("b")


async def test_a_gateway_keeps_its_routes_while_the_plane_is_away_and_while_it_settles(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    plane = Plane(tmp_path, routes("a"))
    await nursery.start(plane.run)
    mine: Cell[Routes] = Cell(Routes())
    nursery.start_soon(feed.follow_routes, tmp_path, mine, InFlight(mine))
    await until(lambda: mine.value == routes("a"))
    plane.scope.cancel()
    await until(lambda: not feed.socket_path(tmp_path).exists())
    again = Plane(tmp_path, routes(settling=True))
    await nursery.start(again.run)
    await until(lambda: mine.value.settling)
    assert mine.value.models == routes("a").models
    again.routes.set(routes("b"))
    await until(lambda: mine.value == routes("b"))


async def test_routes_are_saved_for_gateways_that_start_while_the_plane_is_away(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    assert feed.saved_routes(tmp_path) is None
    plane = Plane(tmp_path, routes("a"))
    await nursery.start(plane.run)
    await until(lambda: feed.saved_routes(tmp_path) == routes("a"))
    plane.routes.set(routes(settling=True))
    plane.routes.set(routes("b", settling=True))
    await trio.testing.wait_all_tasks_blocked()
    assert feed.saved_routes(tmp_path) == routes("a")
    for path in (feed.saved_path(tmp_path), feed.socket_path(tmp_path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_saved_routes_that_are_broken_are_none(tmp_path: Path) -> None:
    path = feed.saved_path(tmp_path)
    path.parent.mkdir()
    for text in (b"", b"{", b'{"models": 7}', b"\xff"):
        path.write_bytes(text)
        assert feed.saved_routes(tmp_path) is None


async def test_a_socket_left_by_a_killed_plane_is_replaced_and_a_living_ones_is_not(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    left = await feed.listen(feed.socket_path(tmp_path))
    with pytest.raises(Conflict, match="in use"):
        await feed.listen(feed.socket_path(tmp_path))
    left.socket.close()
    assert feed.socket_path(tmp_path).exists()
    await nursery.start(Plane(tmp_path, routes("a")).run)


async def test_a_directory_with_a_long_path_works_too(nursery: trio.Nursery, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    await nursery.start(Plane(deep, routes("a")).run)
    mine: Cell[Routes] = Cell(Routes())
    nursery.start_soon(feed.follow_routes, deep, mine, InFlight(mine))
    await until(lambda: mine.value == routes("a"))


async def test_a_stranger_on_the_socket_disturbs_nobody(nursery: trio.Nursery, tmp_path: Path) -> None:
    plane = Plane(tmp_path, routes("a"))
    await nursery.start(plane.run)
    for junk in (b"\x00\x00\x00\x04junk", b"\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n", b"\x00"):
        async with feed.connected(feed.socket_path(tmp_path)) as stream:
            await stream.send_all(junk)
    mine: Cell[Routes] = Cell(Routes())
    nursery.start_soon(feed.follow_routes, tmp_path, mine, InFlight(mine))
    await until(lambda: mine.value == routes("a"))


async def test_the_planes_routes_follow_its_world(nursery: trio.Nursery) -> None:
    static = [StaticEndpoint("gpt", "http://h:1")]
    world: Cell[World] = Cell(World())
    mine = Cell(first_routes(static))
    assert mine.value.settling
    assert mine.value.models["gpt"].endpoints
    nursery.start_soon(keep_routes, world, static, mine)
    await until(lambda: not mine.value.settling)
    before = mine.version
    world.set(World(version=7))
    await trio.testing.wait_all_tasks_blocked()
    assert mine.version == before

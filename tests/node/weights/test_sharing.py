"""The process that shares beside the agent: kept, found again, and gone with the agent."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing

from llmgw.config import Listen
from llmgw.node.settings import NodeSettings
from llmgw.node.weights.layout import prepare
from llmgw.node.weights.peers import Peers
from llmgw.node.weights.sharing import Orders, Sharing, announced, child, shared_at
from tests.engines import until
from tests.node.weights.test_peers import Fleet
from tests.ports import free_ports

pytestmark = pytest.mark.real


def orders(directory: Path, port: int) -> Orders:
    return Orders(directory=str(directory), weights=str(directory / "weights"), host="127.0.0.1", port=port)


def pid(directory: Path) -> int:
    return int(msgspec.json.decode((directory / "share.json").read_bytes())["pid"])


def test_where_a_process_shares_is_known_while_it_does(tmp_path: Path) -> None:
    assert shared_at(tmp_path) == ""
    with announced(tmp_path, Listen("0.0.0.0", 7445)):
        assert shared_at(tmp_path) == ":7445"
    assert shared_at(tmp_path) == ""
    with announced(tmp_path, Listen("::1", 7445)):
        assert shared_at(tmp_path) == "[::1]:7445"


def test_what_a_killed_process_left_says_nothing(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    for left in (
        msgspec.json.encode({"pid": process.pid, "started": "1", "address": ":1"}),
        msgspec.json.encode({"pid": os.getpid(), "started": "1", "address": ":1"}),  # the number is somebody else's
        msgspec.json.encode({"pid": 0, "started": "", "address": ":1"}),
        b"{",
        b"\xff",
    ):
        (tmp_path / "share.json").write_bytes(left)
        assert shared_at(tmp_path) == ""


def test_the_orders_are_what_node_toml_says(tmp_path: Path) -> None:
    made = Orders.of(NodeSettings(directory=tmp_path, weights_bytes_per_second=5, weights_listen=Listen("::", 9)))
    assert (made.weights, made.host, made.port, made.bytes_per_second) == (str(tmp_path / "weights"), "::", 9, 5)


async def test_a_child_shares_comes_again_when_it_dies_and_ends_with_the_agent(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    directory, other = fleet.node("n1"), fleet.node("n2")
    prepare(directory / "weights")
    (port,) = free_ports(1)
    sharing = Sharing(directory, orders(directory, port))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sharing.run)
        await until(lambda: sharing.address == f"127.0.0.1:{port}", within=60)
        async with Peers((), other).client() as client:
            assert (await client.get(f"https://{sharing.address}/weights?source=hf://a/b")).status_code == 404
        first = pid(directory)
        os.kill(first, signal.SIGKILL)
        await until(lambda: shared_at(directory) != "" and pid(directory) != first, within=60)
        second = pid(directory)
        nursery.cancel_scope.cancel()
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)
    assert shared_at(directory) == ""


async def test_a_child_that_cannot_listen_is_tried_again_and_nobody_is_told_of_it(tmp_path: Path) -> None:
    directory = Fleet(tmp_path).node("n1")
    (port,) = free_ports(1)
    taken = await trio.open_tcp_listeners(port, host="127.0.0.1")
    assert await child(orders(directory, port)) == 1
    assert shared_at(directory) == ""
    sharing = Sharing(directory, orders(directory, port))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sharing.run)
        for listener in taken:
            await listener.aclose()
        await until(lambda: sharing.address != "", within=60)
        nursery.cancel_scope.cancel()


async def test_one_that_an_operator_runs_is_found_too(tmp_path: Path) -> None:
    sharing = Sharing(tmp_path, None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sharing.run)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert sharing.address == ""
        with announced(tmp_path, Listen("0.0.0.0", 7445)):
            await until(lambda: sharing.address == ":7445")
        nursery.cancel_scope.cancel()

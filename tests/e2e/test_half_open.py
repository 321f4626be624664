"""A connection whose packets vanish is noticed by both of its ends, and comes back by itself (A14, C1)."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import DEVNULL, STDOUT

import pytest
import trio

from llmgw.demo.processes import call, command
from tests.e2e.rig import Rig
from tests.e2e.wire import OURS, Wire, wire
from tests.ports import free_ports

pytestmark = [pytest.mark.real, pytest.mark.slow]


async def start(fleet: Rig, link: Wire) -> None:
    """A plane at this end, and at the far one a node that has joined it."""
    await fleet.make_plane()
    config = fleet.directory / "plane.toml"
    text = config.read_text().replace('hosts = ["127.0.0.1"]', f'hosts = ["127.0.0.1", "{OURS}"]')
    config.write_text(text.replace(f'"127.0.0.1:{fleet.agents}"', f'"{OURS}:{fleet.agents}"'))
    await fleet.start_plane()
    token = (await fleet.api.post("tokens", json={"node": "n1"})).json()["token"]
    directory = str(fleet.root / "n1")
    await call("llmgw-node", "join", f"wss://{OURS}:{fleet.agents}", "--token", token, "--name", "n1",
               "--dir", directory, env=fleet.env)  # fmt: skip
    with (fleet.root / "n1.log").open("ab") as output:
        fleet.nodes["n1"] = await trio.lowlevel.open_process(
            [*link.prefix, *command("llmgw-node", "run", "--dir", directory)],
            stdin=DEVNULL,
            stdout=output,
            stderr=STDOUT,
            env=fleet.env,
            start_new_session=True,
        )


async def test_both_ends_notice_that_packets_vanish_and_the_stream_comes_back(tmp_path: Path) -> None:
    agents, admin, serve = free_ports(3)
    fleet = Rig(tmp_path, agents, admin, serve, json.dumps(str(tmp_path)))

    async def connected() -> bool:
        return bool((await fleet.node("n1"))["connected"])

    async def given_up() -> bool:
        plane, node = fleet.log("plane", 400), fleet.log("n1", 400)
        told = "no answer to a ping for 10 s" in plane or "nothing was heard" in plane
        return told and ("answers no ping within 10 s" in node or "nothing was heard" in node) and not await connected()

    with wire() as link:
        try:
            await start(fleet, link)
            await fleet.until(connected, what="the node is connected")
            link.cut()
            # One period until the ping, one for its answer; TCP itself would try for a quarter of an hour.
            await fleet.until(given_up, what="both ends have given the stream up")
            link.mend()
            await fleet.until(connected, what="the node is back")
        finally:
            with trio.CancelScope(shield=True):
                await fleet.down()

"""Two hundred agents over real TLS: all register, the plane is killed, and all return without lockstep (C1, D2)."""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from llmgw.backoff import Backoff
from llmgw.cell import Cell
from llmgw.node.identity import Identity
from llmgw.node.join import join
from llmgw.node.link import address, keep
from llmgw.node.stream import Duties, PlaneStream
from llmgw.wire.agent import Heartbeat, Register, ShardStatus
from llmgw.wire.control import Goodbye, Registered
from llmgw.wire.facts import HostLoad, NodeId
from llmgw.wire.stream import Frames
from tests.e2e.rig import SOON_LOST, Rig, rig

pytestmark = [pytest.mark.real, pytest.mark.slow]

AGENTS = 200
#: Shorter than what is shipped, so that the test does not wait for it; the shape is the same.
BACKOFF = Backoff(base=1.0, cap=4.0)


class Silent:
    def receive_nowait(self) -> ShardStatus:
        raise trio.WouldBlock

    def __aiter__(self) -> AsyncIterator[ShardStatus]:
        return self

    async def __anext__(self) -> ShardStatus:
        await trio.sleep_forever()
        raise AssertionError


class Beats:
    async def next(self) -> Heartbeat:
        await trio.lowlevel.checkpoint()
        return Heartbeat(load=HostLoad(1.0, 0.1, 1 << 30, 0.0))


@attrs.define
class Simulated:
    """An agent's stream and link as they are shipped, without a machine behind them."""

    identity: Identity
    tried: list[float] = attrs.field(factory=list)
    hardware: Cell[int] = attrs.field(factory=lambda: Cell(0))
    mute: bool = False

    async def register(self) -> Register:
        await trio.lowlevel.checkpoint()
        return Register(node=NodeId(self.identity.node), version="0.1.0", address="127.0.0.1")

    def obey(self, registered: Registered) -> None:
        pass

    def context(self) -> ssl.SSLContext:
        """Asked for at the beginning of each try."""
        self.tried.append(trio.current_time())
        return self.identity.context()

    async def carry(self, frames: Frames) -> Goodbye:
        duties = Duties(
            register=self.register,
            beats=lambda told: Beats(),
            hardware=self.hardware.values,
            changes=lambda: nullcontext(Silent()),
            command=lambda order: None,
            obey=self.obey,
            renewals=None,
            answers={},
        )
        return await PlaneStream(frames, duties).run()

    async def run(self, url: str) -> None:
        await keep([address(url)], self.context, self.carry, backoff=BACKOFF)


async def made(fleet: Rig, count: int) -> list[Simulated]:
    """Agents that have joined, each with a token and a certificate of its own."""
    agents: list[Simulated] = []
    limit = trio.CapacityLimiter(8)

    async def one(n: int) -> None:
        async with limit:
            name = f"sim-{n:03d}"
            answer = await fleet.api.post("tokens", json={"node": name})
            directory = fleet.root / "agents" / name
            await join(f"wss://127.0.0.1:{fleet.agents}", answer.json()["token"], NodeId(name), directory)
            agents.append(Simulated(Identity.load(directory)))

    async with trio.open_nursery() as nursery:
        for n in range(count):
            nursery.start_soon(one, n)
    return agents


async def test_two_hundred_agents_come_back_after_the_planes_death_without_lockstep(tmp_path: Path) -> None:
    async with rig(tmp_path, nodes=0) as fleet:
        agents = await made(fleet, AGENTS)

        async def connected() -> bool:
            rows: list[Any] = (await fleet.get("nodes"))["nodes"]
            return len([row for row in rows if row["connected"] and row["stage"] == "ready"]) == AGENTS

        async with trio.open_nursery() as nursery:
            for agent in agents:
                nursery.start_soon(agent.run, f"wss://127.0.0.1:{fleet.agents}")
            await fleet.until(connected, within=60, what="all agents registered")
            assert fleet.plane is not None
            await fleet.kill(fleet.plane)
            for agent in agents:
                agent.tried.clear()
            await fleet.start_plane()
            await fleet.until(connected, within=60, what="all agents are back")
            nursery.cancel_scope.cancel()
        # When they tried first after the loss: spread over a second, so that no tenth of it sees many of them. (A fifth
        # of them in one is chance and this process out of breath; in lockstep it would be nearly all.)
        times = sorted(agent.tried[0] for agent in agents)
        spread = Counter(int((at - times[0]) / 0.1) for at in times)
        assert times[-1] - times[0] > 0.8
        assert max(spread.values()) < AGENTS / 2
        assert not await fleet.events("node-lost")


async def test_a_third_of_the_fleet_silent_at_once_freezes_losses(tmp_path: Path) -> None:
    async with rig(tmp_path, nodes=0, settings=SOON_LOST) as fleet:
        agents = await made(fleet, 12)

        async def stages() -> Counter[str]:
            return Counter(row["stage"] for row in (await fleet.get("nodes"))["nodes"])

        async def are(**wanted: int) -> bool:
            return await stages() == Counter(wanted)

        async with trio.open_nursery() as nursery:
            url = f"wss://127.0.0.1:{fleet.agents}"
            async with trio.open_nursery() as third:
                for n, agent in enumerate(agents):
                    (third if n < 4 else nursery).start_soon(agent.run, url)
                await fleet.until(lambda: are(ready=12), within=30, what="all are here")
                await trio.sleep(4)  # past the quiet time after a start
                third.cancel_scope.cancel()
            await fleet.until(lambda: are(ready=8, unreachable=4), within=10, what="a third is unreachable")
            (event,) = await fleet.events("losses-frozen")
            assert "4 of 12 nodes fell silent together" in event["text"]
            await trio.sleep(6)  # past the time after which one node alone is lost
            assert await stages() == Counter(ready=8, unreachable=4)
            assert not await fleet.events("node-lost")
            for agent in agents[:4]:
                nursery.start_soon(agent.run, url)
            await fleet.until(lambda: are(ready=12), within=30, what="they are back")
            nursery.cancel_scope.cancel()

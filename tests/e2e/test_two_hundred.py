"""Two hundred agents over real TLS: all register, the plane is killed, and all return without lockstep (C1, D2)."""

from __future__ import annotations

import re
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
from tests.e2e.rig import LOST_AFTER, SOON_LOST, Rig, rig

pytestmark = [pytest.mark.real, pytest.mark.slow]

AGENTS = 200
#: Seconds for all of them to come, one process with all of their TLS and one with the plane's.
ALL_WITHIN = 300.0


@attrs.frozen
class Noted(Backoff):
    """Notes each pause: from when on, and how long. Shorter than what is shipped; the shape is the same."""

    cap: float = 4.0
    pauses: list[tuple[float, float]] = attrs.field(factory=list)

    def delay(self, attempt: int, roll: float, *, retry_after: float = 0.0) -> float:
        pause = super().delay(attempt, roll, retry_after=retry_after)
        self.pauses.append((trio.current_time(), pause))
        return pause


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
    backoff: Noted = attrs.field(factory=Noted)
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
        await keep([address(url)], self.context, self.carry, backoff=self.backoff)


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
            await fleet.until(connected, within=ALL_WITHIN, what="all agents registered")
            assert fleet.plane is not None
            for agent in agents:
                agent.tried.clear()
                agent.backoff.pauses.clear()
            await fleet.kill(fleet.plane)
            await fleet.start_plane()
            await fleet.until(connected, within=ALL_WITHIN, what="all agents are back")
            nursery.cancel_scope.cancel()
        # How long each waited before its first try after the loss: spread over a second, so that no tenth of it sees
        # many of them. When they came to it is this process's breath besides.
        firsts = [agent.backoff.pauses[0] for agent in agents]
        spread = Counter(int(pause / 0.1) for _, pause in firsts)
        assert max(pause for _, pause in firsts) - min(pause for _, pause in firsts) > 0.8
        assert max(spread.values()) < AGENTS / 4
        assert all(agent.tried[0] >= since + pause for agent, (since, pause) in zip(agents, firsts, strict=True))
        assert not await fleet.events("node-lost")


async def test_a_third_of_the_fleet_silent_at_once_freezes_losses(tmp_path: Path) -> None:
    async with rig(tmp_path, nodes=0, settings=SOON_LOST) as fleet:
        agents = await made(fleet, 12)

        async def are(**wanted: int) -> bool:
            return Counter(row["stage"] for row in (await fleet.get("nodes"))["nodes"]) == Counter(wanted)

        async with trio.open_nursery() as nursery:
            url = f"wss://127.0.0.1:{fleet.agents}"
            async with trio.open_nursery() as third:
                for n, agent in enumerate(agents):
                    (third if n < 4 else nursery).start_soon(agent.run, url)
                await fleet.until(lambda: are(ready=12), what="all are here")
                third.cancel_scope.cancel()
            await fleet.until(lambda: are(ready=8, unreachable=4), what="a third is unreachable")
            told = [event["text"] for event in await fleet.events("losses-frozen")]
            # The third of them is enough, and the fourth may have been heard of a moment later.
            assert any(re.match("[34] of 12 nodes fell silent together", text) for text in told), told
            gone = {str(agent.identity.node) for agent in agents[:4]}

            async def long_gone() -> bool:
                rows = (await fleet.get("nodes"))["nodes"]
                return all(row["heard_age"] > LOST_AFTER + 3 for row in rows if row["id"] in gone)

            await fleet.until(long_gone, what="they are silent for longer than one node alone may be")
            assert await are(ready=8, unreachable=4)
            assert not await fleet.events("node-lost")
            for agent in agents[:4]:
                nursery.start_soon(agent.run, url)
            await fleet.until(lambda: are(ready=12), what="they are back")
            nursery.cancel_scope.cancel()

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio

from llmgw.plane.gateway.settings import GatewaySettings
from tests.plane.gateway.parts import House, Houses


@pytest.fixture
async def house(nursery: trio.Nursery) -> AsyncIterator[House]:
    """A gateway with the default settings, and no engine yet."""
    house = House(nursery, GatewaySettings())
    await house.start()
    yield house
    await house.close()


@pytest.fixture
async def houses(nursery: trio.Nursery) -> AsyncIterator[Houses]:
    """Makes a gateway with other settings."""
    made: list[House] = []

    async def make(**settings: object) -> House:
        house = House(nursery, GatewaySettings(**settings))  # type: ignore[arg-type]
        await house.start()
        made.append(house)
        return house

    yield make
    for house in made:
        await house.close()

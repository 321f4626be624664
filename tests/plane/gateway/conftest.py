from __future__ import annotations

import resource
from collections.abc import AsyncIterator, Iterator

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


@pytest.fixture
def many_files() -> Iterator[None]:
    """As many descriptors as this process may have."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 10_000:
        pytest.skip(f"NOT TESTED: a thousand streams, since a process may have {before[1]} open files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)

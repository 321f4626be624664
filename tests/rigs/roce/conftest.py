from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.rigs.roce.fleet import Fleet, fleet
from tests.rigs.roce.guests import Guest, guests
from tests.rigs.roce.image import CannotBuild


@pytest.fixture(scope="session")
def pair() -> Iterator[tuple[Guest, Guest]]:
    """Two guests with RDMA between them, for all tests of a session."""
    running = guests()
    try:
        made = running.__enter__()
    except CannotBuild as error:
        words = f"NOT TESTED: bandwidth tests over real RDMA verbs, because the guests cannot be had: {error}"
        if os.environ.get("CI") == "true":
            pytest.fail(words)
        pytest.skip(words)
    try:
        yield made
    finally:
        running.__exit__(None, None, None)


@pytest.fixture(scope="session")
def whole(pair: tuple[Guest, Guest], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A plane on this machine with a whole agent in each guest."""
    with fleet(tmp_path_factory.mktemp("fleet"), pair) as made:
        yield made

"""Scopes that others end by their key."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from llmgw.scopes import Scopes


async def sleep() -> None:
    await trio.sleep_forever()


async def test_an_entry_exists_exactly_as_long_as_its_block() -> None:
    scopes: Scopes[int, str] = Scopes()
    with scopes.open(1):
        assert 1 in scopes
        with pytest.raises(KeyError), scopes.open(1):
            pass
    assert len(scopes) == 0
    assert not scopes.end(1, "late")


async def test_the_first_word_counts() -> None:
    scopes: Scopes[int, str] = Scopes()
    with scopes.open(1) as slot:
        assert scopes.end(1, "reply")
        assert not scopes.end(1, "stream's end")
        await sleep()
    assert slot.value == "reply"


async def test_a_deadline_leaves_no_word_and_is_never_shortened(autojump_clock: MockClock) -> None:
    scopes: Scopes[int, str] = Scopes()
    began = trio.current_time()
    with scopes.open(1, deadline=began + 10) as slot:
        scopes.extend(1, began + 20)
        scopes.extend(1, began + 1)
        await sleep()
    assert trio.current_time() - began == 20
    assert slot.value is None


async def test_cancellation_from_outside_passes_through() -> None:
    scopes: Scopes[int, str] = Scopes()
    with trio.CancelScope() as outside:
        outside.cancel()
        with scopes.open(1):
            await sleep()
        raise AssertionError("the outer cancellation was swallowed")
    assert outside.cancelled_caught
    assert len(scopes) == 0

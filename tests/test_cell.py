"""A value and a way to wait for the next one."""

from __future__ import annotations

import trio

from llmgw.cell import Cell


async def test_a_slow_reader_skips_values_and_never_misses_the_newest() -> None:
    cell = Cell(0)
    seen: list[int] = []

    async def read() -> None:
        async for value in cell.values():
            seen.append(value)
            if value == 5:
                return

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        for value in (1, 2, 3, 4, 5):
            cell.set(value)
    assert seen == [0, 5]


async def test_setting_the_identical_value_wakes_nobody() -> None:
    value = object()
    cell = Cell(value)
    cell.set(value)
    assert cell.version == 0
    cell.set(object())
    assert cell.version == 1
    assert (await cell.next(0))[1] == 1

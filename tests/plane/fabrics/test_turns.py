from __future__ import annotations

import trio

from llmgw.plane.fabrics.turns import Turns


async def test_long_work_lets_others_run_between_its_turns() -> None:
    others = 0

    async def other() -> None:
        nonlocal others
        while True:
            others += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        await trio.lowlevel.checkpoint()
        turns, taken = Turns(0.0005), 0
        while taken < 20:
            if turns.over():
                await turns.next()
                taken += 1
        nursery.cancel_scope.cancel()
    assert others >= 20

"""One side of a bandwidth test as an agent would run it, for a guest: `python -m tests.rigs.roce.side`.

The request is JSON on the command line ({"server": ..., "run": {...}}); what is said and the reply are lines of JSON.
With {"turn": PATH} it makes that file when it is ready, and begins when somebody has taken it away: Python takes long
to start in a guest, and the other side does not wait for so long.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
import trio

from llmgw.node.perftest import Perftest
from llmgw.wire.agent import Listening, Working
from llmgw.wire.control import Bandwidth, BandwidthClient, BandwidthServe


class Asked(msgspec.Struct):
    run: Bandwidth
    server: str | None = None
    turn: str = ""


def say(word: Working | Listening | msgspec.Struct) -> None:
    print(msgspec.json.encode(word).decode(), flush=True)


def wait(turn: Path) -> None:
    turn.touch()
    while turn.exists():
        time.sleep(0.1)


async def main(asked: Asked) -> None:
    side = Perftest(install=False)
    if asked.server is None:
        say(await side.serve(BandwidthServe(run=asked.run), say))
    else:
        say(await side.client(BandwidthClient(run=asked.run, server=asked.server), say))


if __name__ == "__main__":
    asked = msgspec.json.decode(sys.argv[1], type=Asked)
    if asked.turn:
        wait(Path(asked.turn))
    trio.run(main, asked)

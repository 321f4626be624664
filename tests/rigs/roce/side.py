"""One side of a bandwidth test as an agent would run it, for a guest: `python -m tests.rigs.roce.side`.

The request is JSON on the command line ({"server": ..., "run": {...}}); what is said and the reply are lines of JSON.
"""

from __future__ import annotations

import sys

import msgspec
import trio

from llmgw.node.perftest import Perftest
from llmgw.wire.agent import Listening, Working
from llmgw.wire.control import Bandwidth, BandwidthClient, BandwidthServe


class Asked(msgspec.Struct):
    run: Bandwidth
    server: str | None = None


def say(word: Working | Listening | msgspec.Struct) -> None:
    print(msgspec.json.encode(word).decode(), flush=True)


async def main() -> None:
    asked = msgspec.json.decode(sys.argv[1], type=Asked)
    side = Perftest(install=False)
    if asked.server is None:
        say(await side.serve(BandwidthServe(run=asked.run), say))
    else:
        say(await side.client(BandwidthClient(run=asked.run, server=asked.server), say))


if __name__ == "__main__":
    trio.run(main)

"""TCP ports for tests, which nobody else on this machine is given meanwhile.

A number that the kernel chooses is free only for a moment: it is one that any connection or any other test may be given
next, before what was to listen on it does. So each test process holds a block of numbers, below those that the kernel
gives out, and each test takes its own from there.
"""

from __future__ import annotations

import socket
import time
from functools import cache
from itertools import chain, count, repeat

from llmgw.node.perftest import TCP_PORTS
from llmgw.node.tcp import is_free

SIZE = 2500
#: Seconds to wait for a block.
WITHIN = 600
_turn = count()
_held: list[socket.socket] = []


@cache
def _block() -> range:
    """This process's numbers. An abstract Unix socket of a name that all agree on holds them until it ends.

    Where other test runs on this machine have them all, one of them ends sometime.
    """
    blocks = [
        first for first in range(10_000, 32_768 - SIZE, SIZE) if not TCP_PORTS.start - SIZE < first <= TCP_PORTS.stop
    ]
    for first in chain.from_iterable(repeat(blocks, WITHIN)):
        holder = socket.socket(socket.AF_UNIX)
        try:
            holder.bind(f"\0llmgw-test-ports-{first}")
        except OSError:
            holder.close()
            if first == blocks[-1]:
                time.sleep(1)
            continue
        _held.append(holder)
        return range(first, first + SIZE)
    raise AssertionError("too many test runs on this machine at once: no block of ports is left")


def free_ports(wanted: int) -> list[int]:
    """Numbers that nothing listens on; one is given again only after hundreds of others."""
    ours = _block()[:500]
    found: list[int] = []
    while len(found) < wanted:
        number = ours[next(_turn) % len(ours)]
        if number not in found and is_free(number):
            found.append(number)
    return found


def of_an_agent(number: int = 0) -> range:
    """What an agent in this process may choose from."""
    return _block()[500:1000][100 * number : 100 * (number + 1)]


def of_a_fleet() -> range:
    """What the agents of a fleet, each in a process of its own, may choose from."""
    return _block()[1000:]

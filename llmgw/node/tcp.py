"""TCP ports for shards: each shard has numbers of its own, free when it starts (EN05 to EN08).

A port that was free a moment ago can be taken before the engine binds it, which takes vLLM 20 s of imports. Nobody can
hold it for the engine, so three things make up for it: no two shards of this agent ever get the same numbers, a lost
race is noticed and tried again with others, and readiness is believed only of a socket that belongs to the engine's own
processes.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence

from llmgw.errors import Unavailable
from llmgw.wire.facts import ShardId
from llmgw.wire.spans import span, spanned


def width(purposes: Sequence[str]) -> int:
    """How many numbers in a row these purposes take."""
    return sum(map(span, purposes))


def laid_out(first: int, purposes: Sequence[str]) -> dict[str, int]:
    """The number for each purpose, from `first` on."""
    numbers: dict[str, int] = {}
    for purpose in purposes:
        numbers[purpose] = first
        first += span(purpose)
    return numbers


def choose(
    purposes: Sequence[str], allowed: range, reserved: Iterable[int], after: int, free: Callable[[int], bool]
) -> dict[str, int] | None:
    """A run of numbers, all unreserved and free, looking from `after` on and around; None when there is none."""
    known = dict.fromkeys(reserved, False)
    starts = range(allowed.start, allowed.stop - width(purposes) + 1)
    turn = min(max(after - allowed.start, 0), len(starts))
    for first in (*starts[turn:], *starts[:turn]):
        numbers = laid_out(first, purposes)
        for number in spanned(numbers):
            if number not in known:
                known[number] = free(number)
            if not known[number]:
                break
        else:
            return numbers
    return None


def is_free(port: int) -> bool:
    """Whether nothing listens on the port, on any address. Connections in TIME_WAIT do not count, as for engines."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
                probe.listen(1)
        except OSError as error:
            if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                continue  # no IPv6 on this machine
            return False
    return True


class Ports:
    """The agent's range of ports and who has which."""

    def __init__(self, allowed: range, *, after: int | None = None, free: Callable[[int], bool] = is_free) -> None:
        self._allowed = allowed
        self._after = allowed.start if after is None else after
        self._free = free
        self._reserved: dict[ShardId, dict[str, int]] = {}

    def take(self, shard: ShardId, purposes: Sequence[str], given: Mapping[str, int]) -> dict[str, int]:
        """Numbers for a shard; what the plane gave is kept to. Raises Unavailable when there are none."""
        self.release(shard)
        rest = [purpose for purpose in purposes if purpose not in given]
        fixed = {purpose: given[purpose] for purpose in purposes if purpose in given}
        others = {number for numbers in self._reserved.values() for number in spanned(numbers)}
        for purpose, number in fixed.items():
            if number in others or not self._free(number):
                raise Unavailable(f"port {number} ({purpose}) is in use", remedy="choose another one for this shard")
        chosen = choose(rest, self._allowed, others | set(spanned(fixed)), self._after, self._free) if rest else {}
        if chosen is None:
            raise Unavailable(
                f"no {width(rest)} free ports in a row between {self._allowed.start} and {self._allowed.stop - 1}",
                remedy="give the agent a larger range",
            )
        if chosen:
            # Never the same number twice in a row: what comes too late for the engine before finds nobody there.
            after = max(spanned(chosen)) + 1
            self._after = after if after < self._allowed.stop else self._allowed.start
        numbers = {**fixed, **chosen}
        self._reserved[shard] = numbers
        return dict(numbers)

    def keep(self, shard: ShardId, numbers: Mapping[str, int]) -> None:
        """Those of an adopted shard."""
        self._reserved[shard] = dict(numbers)

    def release(self, shard: ShardId) -> None:
        self._reserved.pop(shard, None)

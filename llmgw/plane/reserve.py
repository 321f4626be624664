"""Which port numbers the members of a replica are given, so that all know them before any of them starts. Pure.

What only one process of one machine needs (HTTP, a port of its own) stays the node's choice. Nodes hand out their
range from the bottom up, the plane from the top down, so that they meet only where a range is full. Several agents on
one machine share its numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain

from llmgw.wire.spans import span

#: What agents that do not say their range have: the default of `engine_ports` in node.toml.
RANGE = (20000, 29999)

#: Who listens where, by engine: what rank 0 is given, and what every other rank is. vLLM's TCP store (`--master-port`),
#: SGLang's (`--dist-init-addr`), and one llama.cpp RPC server for each follower, never shared.
LEADER: Mapping[str, tuple[str, ...]] = {"vllm": ("master",), "sglang": ("dist+",)}
FOLLOWER: Mapping[str, tuple[str, ...]] = {"llamacpp": ("rpc",)}


def purposes(engine: str, rank: int) -> tuple[str, ...]:
    """What a member's reserved numbers are for."""
    return (FOLLOWER if rank else LEADER).get(engine, ())


def reserve(
    names: tuple[str, ...],
    allowed: tuple[int, int] | None,
    held: Collection[int],
    last: Mapping[str, int] | None = None,
) -> dict[str, int] | None:
    """A number for each purpose out of `allowed`, none that is `held`; None when too few are left.

    `last` are the numbers of the attempt before: the search goes on below them, so that a number which somebody else
    has taken is not tried again at once, unless it is the only one.
    """
    first, end = allowed or RANGE
    taken = set(held)
    found: dict[str, int] = {}
    for name in names:
        number = _next(range(first, end + 1), span(name), taken, (last or {}).get(name))
        if number is None:
            return None
        found[name] = number
        taken.update(range(number, number + span(name)))
    return found


def _next(allowed: range, width: int, taken: Collection[int], last: int | None) -> int | None:
    """The first of `width` numbers in a row, from below the last ones down and then from the top; those only if there
    are no others."""
    starts = range(allowed.stop - width, allowed.start - 1, -1)
    if last is not None:
        below = (start for start in starts if start <= last - width)
        above = (start for start in starts if start >= last + width)
        near = (start for start in starts if last - width < start < last + width)
        starts_from: Iterator[int] = chain(below, above, near)
    else:
        starts_from = iter(starts)
    return next((s for s in starts_from if not any(n in taken for n in range(s, s + width))), None)

"""How many port numbers each purpose of `ShardSpec.ports` takes, from the one that is given for it on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

#: Purposes that take several in a row. vLLM counts up from VLLM_PORT; SGLang with DP attention uses dist-init, the six
#: after it and, over several nodes, the thirteenth (server_args.py, PortArgs).
SPANS: Mapping[str, int] = {"internal+": 8, "dist+": 16}


def span(purpose: str) -> int:
    """How many numbers a purpose takes."""
    return SPANS.get(purpose, 1)


def spanned(numbers: Mapping[str, int]) -> Iterator[int]:
    """Every number that a shard with these may use."""
    for purpose, first in numbers.items():
        yield from range(first, first + span(purpose))

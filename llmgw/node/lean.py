"""A Register that fits the limit for the first frame of a stream, however much a node has (A3, A7). Pure."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import structs

from llmgw.node.outbox import TooLong
from llmgw.wire.agent import Register
from llmgw.wire.codec import MOST_BYTES_STRANGER, encode


def lean(register: Register, limit: int = MOST_BYTES_STRANGER) -> tuple[Register, Register | None]:
    """A Register that fits the limit for first frames; the whole one, to be told right behind it, if that is another.

    What goes first is what nothing is decided by in that moment; the shards that run are always told (A7).
    """
    for short in _shorter(register):
        if len(encode(short)) <= limit:
            return short, register if short is not register else None
    raise TooLong(f"a Register that cannot be made shorter than {limit} bytes")


def _shorter(register: Register) -> Iterator[Register]:
    yield register
    ports = tuple(structs.replace(port, gids=(), unreadable=()) for port in register.ports)
    yield (short := structs.replace(register, ports=ports, weights=()))
    shards = tuple(structs.replace(status, lines=(), command=()) for status in register.shards)
    yield (short := structs.replace(short, shards=shards))
    host = structs.replace(register.host, interfaces=register.host.interfaces[:16])
    yield (short := structs.replace(short, host=host))
    yield (short := structs.replace(short, problems=(), managers=(), labels={}))
    bare = tuple(structs.replace(status, detail="", cause="", progress=None) for status in shards)
    yield Register(
        node=register.node,
        version=register.version,
        features=register.features,
        address=register.address,
        shards=bare,
        epoch=register.epoch,
        engine_ports=register.engine_ports,
    )

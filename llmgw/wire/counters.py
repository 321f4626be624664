"""Counters on the wire: states apart from numbers, and names told once.

A port's state changes rarely and its counters with every look. So a heartbeat brings `ports` only when a state
changed, and `counts` always: the bare numbers of every port, packed, in the order of the ports and of the names that
the stream was told. The plane keeps these bytes as they are until somebody looks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import structs

from llmgw.wire.agent import Heartbeat
from llmgw.wire.facts import PortLoad

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[tuple[int | None, ...], ...]).decode


class Packer:
    """What one stream was told of ports and names."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._ports: tuple[PortLoad, ...] | None = None

    def pack(self, beat: Heartbeat) -> Heartbeat:
        """The heartbeat with `counts`, and with `ports` only when one of their states changed."""
        if beat.ports is None:
            return beat
        known = frozenset(self._names)
        fresh = dict.fromkeys(name for port in beat.ports for name in port.counters if name not in known)
        self._names = names = (*self._names, *fresh)
        ports = tuple(structs.replace(port, counters={}) for port in beat.ports)
        changed = ports != self._ports
        self._ports = ports
        return structs.replace(
            beat,
            ports=ports if changed else None,
            counters=names if fresh else None,
            counts=_encode([list(map(port.counters.get, names)) for port in beat.ports]) if names else None,
        )


def unpack(counts: bytes, names: Sequence[str]) -> tuple[Mapping[str, int], ...]:
    """Every port's counters by name. A list shorter than the names is an older one: names are only ever appended.

    What cannot be read is no counters at all: they came from a verified node, but not from one that we can mend.
    """
    try:
        rows = _decode(counts)
    except msgspec.MsgspecError:
        return ()
    return tuple({name: value for name, value in zip(names, row, strict=False) if value is not None} for row in rows)

"""Counters on the wire: their names are told once, and each heartbeat brings only the numbers.

Eight ports of twenty counters take 2.2 kB in this form and 5.4 kB with a name before each number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import structs

from llmgw.wire.agent import Heartbeat
from llmgw.wire.facts import PortLoad


class Packer:
    """What one stream was told of names. A heartbeat with a new one brings the longer list with it."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()

    def pack(self, beat: Heartbeat) -> Heartbeat:
        """The heartbeat with `values` in place of `counters`; the same one when it has no ports."""
        if not beat.ports:
            return beat
        known = frozenset(self._names)
        fresh = dict.fromkeys(name for port in beat.ports for name in port.counters if name not in known)
        if fresh:
            self._names = (*self._names, *fresh)
        ports = tuple(_packed(port, self._names) for port in beat.ports)
        return structs.replace(beat, ports=ports, counters=self._names if fresh else None)


def _packed(port: PortLoad, names: Sequence[str]) -> PortLoad:
    if not port.counters:
        return port
    values = tuple(map(port.counters.get, names))
    return structs.replace(port, counters={}, values=values)


def counters(load: PortLoad, names: Sequence[str]) -> Mapping[str, int]:
    """A port's readings by name, however they came."""
    if not load.values:
        return load.counters
    # A list that is shorter than the names is an older reading: names are only ever appended.
    return {name: value for name, value in zip(names, load.values, strict=False) if value is not None}

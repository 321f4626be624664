"""What `ibstat` and `ibaddr` print: the local adapters as the kernel tells them.

The agent reads sysfs itself; this reads what an operator pastes or a support bundle holds. Read as `key: value`,
unknown keys ignored; output that ends in an `ibpanic` line is what could be read before it. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import attrs

_CA = re.compile(r"CA:? '(?P<device>[^']+)'\s*$")
_PORT = re.compile(r"\s*Port (?P<number>\d+):\s*$")
_PAIR = re.compile(r"\s*(?P<key>[^:]+):\s*(?P<value>.*)$")
_ADDRESS = re.compile(r"GID (?P<gid>[0-9a-f:]+) LID start 0x(?P<low>[0-9a-f]+) end 0x(?P<high>[0-9a-f]+)")


@attrs.frozen
class Adapter:
    """One adapter: its own values, and each port's, by the words that `ibstat` uses."""

    device: str
    values: dict[str, str]
    ports: dict[int, dict[str, str]]


def parse(lines: Iterable[str]) -> tuple[Adapter, ...]:
    """The adapters in order, as printed: a LID of 65535 means none, and a port that is down keeps a stale rate."""
    found: list[Adapter] = []
    port: dict[str, str] | None = None
    for line in lines:
        if match := _CA.match(line):
            found.append(Adapter(match["device"], {}, {}))
            port = None
        elif not found:
            continue
        elif match := _PORT.match(line):
            port = found[-1].ports.setdefault(int(match["number"]), {})
        elif line.startswith(("ibpanic", "ibwarn")):
            continue
        elif match := _PAIR.match(line):
            (found[-1].values if port is None else port)[match["key"].strip()] = match["value"].strip()
    return tuple(found)


def address(text: str) -> tuple[str, int] | None:
    """The GID and the first LID of `ibaddr`; None when it printed neither."""
    match = _ADDRESS.search(text)
    return (match["gid"], int(match["low"], 16)) if match else None

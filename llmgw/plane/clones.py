"""Two machines with one identity, told from one machine with a poor network (A6). Pure but for its memory."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from llmgw.plane.event import Event
from llmgw.wire.facts import NodeId

#: Displacements further apart than this have nothing to do with one another, in seconds.
WINDOW = 120.0
#: So many displacements of a living stream within the window are two machines, even behind one address.
MANY = 5
#: A clone is told once, and again after so long a time.
SILENT = 600.0


class Displacements:
    """Remembers which addresses displaced which."""

    def __init__(self) -> None:
        self._seen: dict[NodeId, deque[tuple[float, str, str]]] = {}
        self._told: dict[NodeId, float] = {}

    def add(self, node: NodeId, older: str, newer: str, now: float, clock: float) -> Event | None:
        """A stream from `newer` displaced a living one from `older`. An event when this is a cloned identity.

        One address after the other, and the first one back again: a machine that moved would not return. From
        one address only their number tells, since every reconnect has a new port.
        """
        seen = self._seen.setdefault(node, deque(maxlen=MANY))
        while seen and now - seen[0][0] > WINDOW:
            seen.popleft()
        seen.append((now, older, newer))
        came = [host_of(seen[0][1]), *(host_of(entry[2]) for entry in seen)]
        back_again = any(a != b and a in came[:n] for n, (b, a) in enumerate(pairwise(came), 1))
        if not back_again and len(seen) < MANY:
            return None
        if now - self._told.get(node, float("-inf")) < SILENT:
            return None
        self._told[node] = now
        text = (
            f"two machines use the identity {node}, from {older} and from {newer}: they displace one another; "
            "let one of them join under a name of its own"
        )
        data = {"node": str(node), "first": older, "second": newer}
        return Event(kind="identity-cloned", subject=f"node:{node}", text=text, clock=clock, data=data)


def host_of(address: str) -> str:
    """The host of "host:port" or "[host]:port"; an address without a port is a host."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.rpartition(":")[0] if address.count(":") == 1 else address

"""How many requests each replica is answering, over all gateways: what choosing and draining look at."""

from __future__ import annotations

from collections.abc import Mapping

import trio

from llmgw.cell import Cell
from llmgw.plane.gateway.route import Routes


class InFlight:
    """Requests in flight by replica: this process's own, and what gateway processes report.

    A gateway process that has not yet taken the newest routes may still send requests by the older ones, so
    `idle` waits for its word too.
    """

    def __init__(self, routes: Cell[Routes]) -> None:
        self.own: dict[str, int] = {}
        self._routes = routes
        self._reports: dict[int, tuple[int, Mapping[str, int]]] = {}
        self._waiting = 0
        self._changed: Cell[int] = Cell(0)

    def begin(self, replica: str) -> None:
        self.own[replica] = self.own.get(replica, 0) + 1

    def end(self, replica: str) -> None:
        left = self.own[replica] - 1
        if left:
            self.own[replica] = left
            return
        del self.own[replica]
        if self._waiting:
            self._changed.set(self._changed.value + 1)

    def of(self, replica: str) -> int:
        """Requests that the replica is answering now, as far as all gateways have told."""
        return self.own.get(replica, 0) + sum(counts.get(replica, 0) for _, counts in self._reports.values())

    def all(self) -> dict[str, int]:
        """The same for every replica that has any."""
        total = dict(self.own)
        for _, counts in self._reports.values():
            for replica, count in counts.items():
                total[replica] = total.get(replica, 0) + count
        return total

    def report(self, gateway: int, seen: int, counts: Mapping[str, int]) -> None:
        """A gateway process's counts. `seen`: the version of the routes that it works by."""
        self._reports[gateway] = (seen, counts)
        self._changed.set(self._changed.value + 1)

    def gone(self, gateway: int) -> None:
        """A gateway process is no longer connected: nothing can be said of it."""
        self._reports.pop(gateway, None)
        self._changed.set(self._changed.value + 1)

    async def idle(self, replica: str) -> None:
        """Wait until no gateway has a request at this replica or could still send one by routes older than now's.

        Take the replica out of the routes first, or this may never return. Callers set the deadline.
        """
        routes = self._routes.version
        self._waiting += 1
        try:
            while True:
                version = self._changed.version
                behind = any(seen < routes for seen, _ in self._reports.values())
                if not behind and not self.of(replica):
                    await trio.lowlevel.checkpoint()
                    return
                await self._changed.next(version)
        finally:
            self._waiting -= 1

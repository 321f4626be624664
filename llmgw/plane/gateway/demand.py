"""Which models are asked for, so that the plane loads those that it has unloaded and unloads those that nobody uses.

Counted where requests are, told a few times a second and not once a request: see `take`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import trio

from llmgw.cell import Cell
from llmgw.plane.gateway.route import Routes

#: What is asked for is told this often (seconds), and at once when it was not for so long.
TELL_EVERY = 0.25

Tell = Callable[[Collection[str]], None]


class Demand:
    """The models that one gateway process has requests for, waiting ones and such as are being answered."""

    def __init__(self, routes: Cell[Routes]) -> None:
        #: Moves when there is something to be told at once.
        self.bell: Cell[int] = Cell(0)
        self._routes = routes
        self._open: dict[str, int] = {}
        self._fresh: set[str] = set()  # asked for since the last `take`, perhaps answered already
        self._rang: dict[str, float] = {}

    def begin(self, model: str, now: float) -> None:
        """A request for a model that there is has come, at this time of the process's monotonic clock."""
        self._open[model] = self._open.get(model, 0) + 1
        self._fresh.add(model)
        if now - self._rang.get(model, 0.0) >= TELL_EVERY:
            self._rang[model] = now
            if self._unloads(model):
                self.bell.set(self.bell.value + 1)

    def end(self, model: str) -> None:
        """It has its answer."""
        self._fresh.add(model)
        left = self._open[model] - 1
        if left:
            self._open[model] = left
        else:
            del self._open[model]

    def take(self) -> tuple[str, ...]:
        """The models asked for since the last time, of those that are unloaded while nobody does."""
        found = tuple(sorted(model for model in self._fresh.union(self._open) if self._unloads(model)))
        self._fresh.clear()
        return found

    def forget(self) -> None:
        """What is answered already concerns nobody any more, since there was nobody to be told."""
        self._fresh.clear()

    def _unloads(self, model: str) -> bool:
        route = self._routes.value.models.get(model)
        return route is not None and route.idle > 0


async def tell_demand(demand: Demand, tell: Tell) -> None:
    """Tell what is asked for, until cancelled."""
    version = demand.bell.version
    while True:
        with trio.move_on_after(TELL_EVERY):
            _, version = await demand.bell.next(version)
        if models := demand.take():
            tell(models)

"""What all connections of one gateway process share: routes, failures, the pool, the counts."""

from __future__ import annotations

import os
import random
import ssl
from collections.abc import Awaitable, Callable, Iterable
from time import monotonic
from typing import TYPE_CHECKING

import structlog
import trio

from llmgw.backoff import Backoff
from llmgw.cell import Cell
from llmgw.plane.gateway import balance
from llmgw.plane.gateway.balance import Strike, Strikes
from llmgw.plane.gateway.demand import Demand
from llmgw.plane.gateway.in_flight import InFlight
from llmgw.plane.gateway.keys import Keyring
from llmgw.plane.gateway.link import Watch
from llmgw.plane.gateway.metrics import Metrics
from llmgw.plane.gateway.probe import alive
from llmgw.plane.gateway.route import Endpoint, Routes, choose
from llmgw.plane.gateway.settings import GatewaySettings
from llmgw.plane.gateway.upstream import Pool, place_of

if TYPE_CHECKING:
    from llmgw.plane.gateway.client import Client

log = structlog.get_logger()


class Gateway:
    """One process's gateway. `run` is its upkeep; connections are served by `Client`."""

    def __init__(
        self,
        routes: Cell[Routes],
        settings: GatewaySettings,
        *,
        in_flight: InFlight | None = None,
        demand: Demand | None = None,
        trust: ssl.SSLContext | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.routes = routes
        self.settings = settings
        self.in_flight = in_flight or InFlight(routes)
        self.demand = demand or Demand(routes)
        self.keyring = Keyring(settings.keys)
        self.pool = Pool(trust)
        self.watch = Watch()
        self.metrics = metrics if metrics is not None else Metrics()
        self.clients: set[Client] = set()
        #: Where several processes share the port: the counts of the others.
        self.siblings: Callable[[], Awaitable[Iterable[Metrics]]] | None = None
        self.stopping = False
        #: Moves when a request that is held may find an endpoint: new routes, or a replica back.
        self.bell: Cell[int] = Cell(0)
        self.body_bytes = 0  # of request bodies that are still arriving or being relayed
        self.out: dict[str, Strike] = {}
        self._strikes: Strikes = Strikes()
        self._turn = 0
        self._probing: set[str] = set()
        self._nursery: trio.Nursery | None = None
        self._run_id = os.urandom(5).hex().encode()
        self._requests = 0

    def counts(self) -> Metrics:
        """This process's counts, with what is true of the moment filled in."""
        self.metrics.in_flight = dict(self.in_flight.own)
        self.metrics.connections = len(self.clients)
        return self.metrics

    def new_id(self) -> bytes:
        """A request id that no other gateway process gives."""
        self._requests += 1
        return b"%b-%x" % (self._run_id, self._requests)

    # --- which replica

    def pick(self, endpoints: tuple[Endpoint, ...]) -> Endpoint | None:
        self._turn += 1
        return choose(endpoints, self.in_flight.own, self.out, self._turn)

    def failed(self, endpoint: Endpoint, kind: str, reason: str) -> None:
        """A replica failed a request: it is out until a probe finds it alive (F3)."""
        self.metrics.failed(endpoint.replica, kind)
        log.warning("replica excluded", replica=endpoint.replica, at=endpoint.authority, kind=kind, reason=reason)
        self._set(balance.failed(self._strikes, endpoint.replica, reason, monotonic()))
        self.pool.drop(place_of(endpoint))
        if endpoint.replica not in self._probing and self._nursery is not None:
            self._probing.add(endpoint.replica)
            self._nursery.start_soon(self._probe, endpoint)

    def succeeded(self, endpoint: Endpoint) -> None:
        if self._strikes and endpoint.replica not in self.out:
            self._set(balance.succeeded(self._strikes, endpoint.replica))

    def _set(self, strikes: Strikes) -> None:
        self._strikes = strikes
        self.out = balance.out(strikes)

    async def _probe(self, endpoint: Endpoint) -> None:
        backoff = Backoff(base=self.settings.probe_first, cap=self.settings.probe_most)
        try:
            while (strike := self._strikes.get(endpoint.replica)) is not None and strike.out:
                # Half of it fixed, half of it random: gateways do not probe in step, nor at once.
                bound = backoff.delay(strike.failures - 1, 1.0)
                await trio.sleep(bound * (0.5 + random.random() / 2))
                if await alive(endpoint, self.pool, self.settings.connect_within, self.settings.probe_most):
                    log.info("replica is back", replica=endpoint.replica, at=endpoint.authority)
                    self._set(balance.alive(self._strikes, endpoint.replica))
                    self.bell.set(self.bell.value + 1)
                    return
                if (strike := self._strikes.get(endpoint.replica)) is not None:
                    self._set(balance.failed(self._strikes, endpoint.replica, strike.reason, monotonic()))
        finally:
            self._probing.discard(endpoint.replica)

    # --- upkeep

    async def run(self) -> None:
        """Hang-ups, time-outs, probes and the news about routes, until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self.watch.run)
                nursery.start_soon(self._follow_routes)
                await self._sweep()
        finally:
            self._nursery = None
            self.pool.close()

    async def _follow_routes(self) -> None:
        async for routes in self.routes.values():
            endpoints = [endpoint for route in routes.models.values() for endpoint in route.endpoints]
            self.pool.only(place_of(endpoint) for endpoint in endpoints)
            # A replica that left the routes and comes back has been started anew: it begins with a clean slate.
            self._set(balance.only(self._strikes, frozenset(endpoint.replica for endpoint in endpoints)))
            self.bell.set(self.bell.value + 1)

    async def _sweep(self) -> None:
        """End what has taken too long.

        One pass over the connections now and then, in place of a deadline in trio for each read: moving a
        deadline with every piece of every stream would cost more than relaying it. Limits are so kept to within
        a quarter second, or a quarter of the shortest of them.
        """
        settings = self.settings
        shortest = min(
            settings.head_within,
            settings.body_within,
            settings.idle_within,
            settings.first_byte_within,
            settings.stream_idle_within,
            settings.pool_idle_within,
        )
        period = max(0.01, min(0.25, shortest / 4))
        pruned_at = monotonic()
        while True:
            await trio.sleep(period)
            now = monotonic()
            for client in self.clients:
                if client.limit < now:
                    client.expire()
            if now - pruned_at >= min(1.0, settings.pool_idle_within):
                pruned_at = now
                self.pool.prune(now - settings.pool_idle_within)

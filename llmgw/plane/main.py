"""The plane as a process: what it is made of, and whose nursery each part lives in.

Only here are the parts wired together. The listeners open before anything is decided, and close last: agents are
told goodbye when the gateway's streams have ended.
"""

from __future__ import annotations

import hashlib
import signal
import ssl
import time
from collections.abc import Awaitable, Callable
from functools import partial

import attrs
import structlog
import trio

from llmgw import pki
from llmgw.cell import Cell
from llmgw.config import Listen
from llmgw.errors import BadInput, LlmgwError, Unavailable
from llmgw.plane.admin.app import Admin
from llmgw.plane.admin.seams import Traffic
from llmgw.plane.admin.serve import serve_admin
from llmgw.plane.agents import Hub
from llmgw.plane.bandwidth.desk import Desk
from llmgw.plane.bearers import Bearers
from llmgw.plane.certs import Authority
from llmgw.plane.fabric import Fabrics
from llmgw.plane.fabrics.desk import FabricDesk
from llmgw.plane.fleet import Fleet
from llmgw.plane.gateway import counts
from llmgw.plane.gateway.demand import Demand, tell_demand
from llmgw.plane.gateway.feed import serve_routes
from llmgw.plane.gateway.in_flight import InFlight
from llmgw.plane.gateway.publish import first_routes, keep_routes
from llmgw.plane.gateway.route import Routes
from llmgw.plane.gateway.serve import serve
from llmgw.plane.joining import answer_join, refuse_join
from llmgw.plane.listen import Leading, Listener, Standby
from llmgw.plane.own import Own, load_ca, machine_hosts
from llmgw.plane.revoked import tell_revoked
from llmgw.plane.settings import PlaneSettings
from llmgw.plane.store import Store
from llmgw.plane.store.sqlite import SqliteStore
from llmgw.plane.tokens import Tokens
from llmgw.plane.world import Want
from llmgw.process import prepare
from llmgw.tls import ServerTls
from llmgw.wire.facts import ReplicaId

log = structlog.get_logger("llmgw.plane")

#: The digest of models.toml when it was last applied, so that an unchanged file does not undo `ctl apply`.
MODELS_KEY = "plane/models-file"

#: How long a plane that stops waits until every agent has been told, in seconds.
GOODBYES_WITHIN = 3.0


async def run(settings: PlaneSettings, again: Callable[[], PlaneSettings] | None = None) -> None:
    """Run a plane until SIGTERM or SIGINT. Raises LlmgwError when it cannot start.

    `again` reads the settings anew, at SIGHUP: of them only the engines may change while it runs.
    """
    async with await SqliteStore.open(settings.path(settings.store)) as store:
        plane = await assemble(settings, store)
        async with trio.open_nursery() as nursery:
            listeners = await _listeners(settings)
            listener = await _start(plane, listeners, nursery)
            prepare()
            log.info(
                "plane runs",
                name=settings.name,
                epoch=plane.fleet.epoch,
                directory=str(settings.directory),
                agents=str(settings.agents_listen),
                admin=str(settings.admin_listen),
                gateway=str(settings.gateway_listen) if settings.gateway.inside else "processes of their own",
            )
            await _until_stopped(plane, again)
            log.info("plane stops")
            plane.stop.set()
            await plane.stopped()
            plane.hub.disconnect_all("stopping", "the plane stops", retry_after=1.0)
            with trio.move_on_after(GOODBYES_WITHIN):
                await listener.parted()
            nursery.cancel_scope.cancel()


@attrs.define
class Plane:
    """A plane's parts, assembled and not yet running."""

    settings: PlaneSettings
    store: Store
    fleet: Fleet
    hub: Hub
    authority: Authority
    tokens: Tokens
    own: Own | None
    administrator: Callable[[str], str | None]
    routes: Cell[Routes]
    in_flight: InFlight
    demand: Demand
    counts: counts.Counts
    fabrics: Fabrics
    stop: trio.Event = attrs.field(factory=trio.Event)
    _serving: int = 0
    _quiet: trio.Event = attrs.field(factory=trio.Event)

    @property
    def context(self) -> Callable[[], ssl.SSLContext] | None:
        return ServerTls(self.own.ca, self.own.server).context if self.own is not None else None

    async def apply_file(self) -> None:
        """Apply models.toml when it is not as it was applied last. An error leaves what was wanted before."""
        file = self.settings.path(self.settings.models)
        try:
            text = await trio.Path(file).read_text()
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError) as error:
            log.error("models file cannot be read; what was wanted stays wanted", file=str(file), error=str(error))
            return
        digest = hashlib.sha256(text.encode()).hexdigest().encode()
        known = (await self.store.load(MODELS_KEY)).values.get(MODELS_KEY)
        if digest == known:
            return
        try:
            await self.fleet.apply(text)
        except BadInput as error:
            log.error("models file refused; what was wanted stays wanted", file=str(file), error=str(error))
            return
        await self.store.commit({MODELS_KEY: digest})
        log.info("models file applied", file=str(file))

    async def gateway(self, listeners: list[trio.SocketListener], *, task_status: trio.TaskStatus[object]) -> None:
        """The gateway inside this process; `stopped` waits for its streams."""
        self._serving += 1
        try:
            await serve(
                listeners,
                self.routes,
                self.settings.gateway,
                in_flight=self.in_flight,
                demand=self.demand,
                metrics=self.counts.own,
                stop=self.stop,
                task_status=task_status,
            )
        finally:
            self._serving -= 1
            self._quiet.set()

    async def stopped(self) -> None:
        if self._serving:
            await self._quiet.wait()

    async def end_drains(self) -> None:
        """Tell the fleet when no gateway has a request at a draining replica, so that nobody waits for nothing."""
        async with trio.open_nursery() as nursery:
            waiting: set[ReplicaId] = set()

            async def wait(replica: ReplicaId) -> None:
                # The plan keeps the drain's deadline; ours only ends the wait for a replica that is gone.
                while any(
                    shard.replica == replica and shard.want is Want.DRAIN
                    for shard in self.fleet.world.value.shards.values()
                ):
                    with trio.move_on_after(self.settings.judgement.drain):
                        await self.in_flight.idle(replica)
                        self.fleet.idle(replica)
                        break
                waiting.discard(replica)

            async for world in self.fleet.world.values():
                for shard in world.shards.values():
                    routed = any(
                        endpoint.replica == shard.replica
                        for route in self.routes.value.models.values()
                        for endpoint in route.endpoints
                    )
                    if shard.want is Want.DRAIN and not routed and shard.replica not in waiting:
                        waiting.add(shard.replica)
                        nursery.start_soon(wait, shard.replica)


async def assemble(settings: PlaneSettings, store: Store) -> Plane:
    """The parts of a plane, with what the store knows. Raises LlmgwError for an identity that cannot be used."""
    own: Own | None = None
    if settings.insecure:
        authority = Authority(pki.make_ca("insecure", time.time()), store)
        await authority.load()
    else:
        authority = Authority(load_ca(settings.directory), store)
        await authority.load()
        own = Own(settings.directory, authority, settings.name, machine_hosts(settings.reached))
        await own.freshen()
    fleet = Fleet(
        store,
        settings=settings.judgement,
        engines=settings.wanted_engines,
        packages=settings.engine_packages,
        heartbeat=settings.heartbeat,
    )
    await fleet.load()
    routes = Cell(first_routes(settings.endpoints))
    hub = Hub(fleet)
    fabrics = Fabrics(fleet, hub, store, every=settings.scan_every)
    await fabrics.load()
    plane = Plane(
        settings=settings,
        store=store,
        fleet=fleet,
        hub=hub,
        authority=authority,
        tokens=Tokens(store, authority.fingerprint),
        own=own,
        administrator=Bearers.load(settings.path(settings.admin_tokens)),
        routes=routes,
        in_flight=InFlight(routes),
        demand=Demand(routes),
        counts=counts.Counts(settings.directory),
        fabrics=fabrics,
    )
    await plane.apply_file()
    return plane


@attrs.frozen
class _Listeners:
    agents: list[trio.SocketListener]
    admin: list[trio.SocketListener]
    gateway: list[trio.SocketListener]


async def _listeners(settings: PlaneSettings) -> _Listeners:
    """All listeners at once, so that a port in use is an error before anything has begun."""
    agents = await _open(settings.agents_listen, "agents", "agents_listen")
    admin = await _open(settings.admin_listen, "the admin API", "admin_listen")
    inside = settings.gateway.inside
    gateway = await _open(settings.gateway_listen, "the gateway", "gateway_listen", backlog=4096) if inside else []
    return _Listeners(agents, admin, gateway)


async def _open(listen: Listen, what: str, key: str, backlog: int = 1024) -> list[trio.SocketListener]:
    try:
        return await trio.open_tcp_listeners(listen.port, host=listen.host, backlog=backlog)
    except OSError as error:
        raise Unavailable(
            f"cannot listen on {listen} for {what}: {error.strerror or error}",
            remedy=f"see what holds it (`ss -ltnp`), or set {key} in plane.toml",
        ) from None


async def _start(plane: Plane, listeners: _Listeners, nursery: trio.Nursery) -> Listener:
    settings = plane.settings
    join: Callable[..., Awaitable[None]] = partial(answer_join, authority=plane.authority, tokens=plane.tokens)
    listener = Listener(
        hub=plane.hub,
        fleet=plane.fleet,
        certificates=plane.authority,
        join=refuse_join if settings.insecure else join,
        standing=Cell[Leading | Standby](Leading(plane.fleet.epoch)),
        context=plane.context,
        name=settings.name,
        heartbeat=plane.fleet.heartbeat,
    )
    elsewhere: dict[str, tuple[str, ...]] = {}
    for endpoint in settings.endpoints:
        elsewhere[endpoint.model] = (*elsewhere.get(endpoint.model, ()), endpoint.url)

    def traffic() -> Traffic:
        known, in_flight = plane.counts.all(), plane.in_flight.all()
        totals = {**counts.totals(known), "in_flight": sum(in_flight.values())}
        return Traffic(in_flight=in_flight, totals=totals, elsewhere=elsewhere, served=counts.by_model(known))

    admin = Admin(
        fleet=plane.fleet,
        hub=plane.hub,
        authority=plane.authority,
        tokens=plane.tokens,
        administrator=plane.administrator,
        traffic=traffic,
        name=settings.name,
        agents_url=settings.agents_url,
        bandwidth=Desk(
            plane.hub,
            plane.store,
            plane.fleet.world,
            plane.in_flight.all,
            maps=plane.fabrics,
            tested=plane.fleet.tested,
        ),
        fabrics=FabricDesk(plane.fabrics, lambda: plane.fleet.world.value),
    )
    nursery.start_soon(plane.fleet.run, plane.hub)
    nursery.start_soon(keep_routes, plane.fleet.world, settings.endpoints, plane.routes)
    nursery.start_soon(plane.end_drains)
    nursery.start_soon(plane.counts.run)
    nursery.start_soon(tell_demand, plane.demand, plane.fleet.asked)
    nursery.start_soon(tell_revoked, plane.authority.revoked, lambda: plane.fleet.world.value, plane.hub)
    nursery.start_soon(plane.fabrics.run)
    await nursery.start(serve_routes, settings.directory, plane.routes, plane.in_flight, plane.fleet.asked)
    if plane.own is not None:
        nursery.start_soon(plane.own.run)
    await nursery.start(listener.serve, listeners.agents)
    await nursery.start(serve_admin, admin, listeners.admin, plane.context)
    if listeners.gateway:
        await nursery.start(plane.gateway, listeners.gateway)
    return listener


async def _until_stopped(plane: Plane, again: Callable[[], PlaneSettings] | None) -> None:
    """Until SIGTERM or SIGINT. SIGHUP reads models.toml again, and the engines of plane.toml."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async for number in signals:
            if number != signal.SIGHUP:
                return
            try:
                # Engines first: what models ask for may come from them.
                if again is not None:
                    settings = await trio.to_thread.run_sync(again)
                    plane.fleet.want_engines(settings.wanted_engines, settings.engine_packages)
                await plane.apply_file()
            except LlmgwError as error:
                log.error("settings or models file not applied", error=str(error))

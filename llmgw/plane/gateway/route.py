"""Which engines serve which model, decided from the world (F1). Pure.

`Routes` is also what the plane sends to gateways that are processes of their own, so it is a wire value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from urllib.parse import urlsplit

import attrs
from msgspec import Struct
from msgspec.structs import replace

from llmgw.plane.gang import mates, size
from llmgw.plane.world import Shard, Stage, Unplaced, Want, World, seen
from llmgw.wire.facts import ModelName, NodeId, ShardState


class Endpoint(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where one replica answers.

    `replica` is its id; a static endpoint's is "static:" and its URL. `prefix` stands before "/v1/...".
    `api_key` is sent upstream as a bearer token; `upstream_model` replaces the model's name there.
    """

    replica: str
    host: str
    port: int
    tls: bool = False
    prefix: str = ""
    api_key: str = ""
    upstream_model: str = ""

    def __repr__(self) -> str:
        return f"<Endpoint {self.replica} at {self.authority}>"

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


#: Why a model has no replica that is unloaded while nobody asks for it. A request for it is held like any other that
#: waits for a start, and that it waits is what starts it.
UNLOADED = "it is unloaded while nobody asks for it; a request loads it"


class ModelState(StrEnum):
    """READY: an engine serves it. STARTING: one is on its way, so waiting helps. UNPLACED: waiting does not."""

    READY = "ready"
    STARTING = "starting"
    UNPLACED = "unplaced"


class ModelRoute(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model's endpoints, and in words why there are none. Engines take it first come, first served.

    `idle`: after so many seconds without a request it is unloaded, so the plane wants to hear of requests; 0: never.
    """

    state: ModelState
    endpoints: tuple[Endpoint, ...] = ()
    reason: str = ""
    idle: float = 0.0


class Routes(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything a gateway knows of the fleet. Never changed in place.

    `settling`: the plane has started a moment ago and not all nodes have returned, so that an endpoint that is
    missing here may well be serving (D3). `blind`: no plane has been heard of, so that a model that is missing here
    may well exist.
    """

    models: dict[str, ModelRoute] = {}
    settling: bool = False
    blind: bool = False


def _usable_url(_endpoint: object, _attribute: object, url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or any(not "!" <= letter <= "~" for letter in url):
        raise ValueError(f"{url!r} is not an address like http://host:port or https://host/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("an address with a user, a query or a fragment in it; a key goes into api_key")


def _plain(_endpoint: object, _attribute: object, value: str) -> None:
    if any(not "!" <= letter <= "~" for letter in value):
        raise ValueError("it has spaces, control characters or letters outside ASCII")


@attrs.frozen
class StaticEndpoint:
    """An engine (or another service with OpenAI's API) that llmgw does not run, from `[[endpoints]]`.

    `url` may end in /v1 or not. `upstream_model` is the model's name there, where it differs.
    """

    model: str = attrs.field(validator=attrs.validators.min_len(1))
    url: str = attrs.field(validator=_usable_url)
    api_key: str = attrs.field(default="", repr=False, validator=_plain)
    upstream_model: str = ""

    def endpoint(self) -> Endpoint:
        parts = urlsplit(self.url)
        tls = parts.scheme == "https"
        return Endpoint(
            replica=f"static:{self.url}",
            host=parts.hostname or "",
            port=parts.port or (443 if tls else 80),
            tls=tls,
            prefix=parts.path.rstrip("/").removesuffix("/v1").rstrip("/"),
            api_key=self.api_key,
            upstream_model=self.upstream_model,
        )


def routes_of(world: World, endpoints: Iterable[StaticEndpoint] = ()) -> Routes:
    """The routes that the world as it is asks for.

    A replica is routed to where its leading shard listens, when all its members are ready at one generation and wanted
    to run; a node that is silent for a moment keeps its traffic, a lost one does not (D1).
    """
    serving: dict[str, list[Endpoint]] = {}
    placed: dict[str, list[Shard]] = {}
    for shard in sorted(world.shards.values(), key=lambda shard: shard.id):
        if shard.rank != 0:
            continue
        if shard.want is Want.RUN:
            placed.setdefault(shard.model, []).append(shard)
        endpoint = _endpoint_of(world, shard)
        if endpoint is not None:
            serving.setdefault(shard.model, []).append(endpoint)
    outside: dict[str, list[Endpoint]] = {}
    for entry in endpoints:
        outside.setdefault(entry.model, []).append(entry.endpoint())

    models: dict[str, ModelRoute] = {}
    idle = {str(name): model.idle for name, model in world.models.items() if model.idle}
    silent = {node.id for node in world.nodes.values() if node.stage in (Stage.EXPECTED, Stage.UNREACHABLE)}
    for name in sorted({*world.models, *serving, *outside}):
        ready = (*serving.get(name, ()), *outside.get(name, ()))
        if ready:
            models[name] = ModelRoute(state=ModelState.READY, endpoints=ready, idle=idle.get(name, 0.0))
        else:
            route = _without_endpoint(world, name, placed.get(name, []), silent)
            models[name] = replace(route, idle=idle.get(name, 0.0))
    return Routes(models=models, settling=world.settling_until is not None)


def _endpoint_of(world: World, leader: Shard) -> Endpoint | None:
    if not _serves(world, leader) or not leader.status or not leader.status.port:
        return None
    if size(leader) > 1:
        followers = tuple(mates(world, leader))
        if len(followers) != size(leader) - 1:
            return None
        if any(f.generation != leader.generation or not (_serves(world, f) or _returns(world, f)) for f in followers):
            return None
    address = world.nodes[leader.node].address
    return Endpoint(replica=leader.replica, host=address, port=leader.status.port) if address else None


def _serves(world: World, shard: Shard) -> bool:
    node = world.nodes.get(shard.node)
    there = node is not None and node.stage in (Stage.READY, Stage.UNREACHABLE)
    return there and shard.want is Want.RUN and shard.state is ShardState.READY


def _returns(world: World, follower: Shard) -> bool:
    """Whether a plane that has just started has yet to hear of it. Its leader never was ready without it."""
    node = world.nodes.get(follower.node)
    expected = node is not None and node.stage is Stage.EXPECTED
    return expected and follower.want is Want.RUN and follower.status is None


def _hindering(world: World, leader: Shard) -> Shard:
    """The member that keeps a replica from serving: one that has ended, else the first that is not ready."""
    members = (leader, *mates(world, leader))
    unready = [m for m in (*members[1:], leader) if not _serves(world, m)]
    return next((m for m in unready if not m.state.alive), unready[0] if unready else leader)


def _without_endpoint(world: World, name: str, placed: list[Shard], silent: Collection[NodeId]) -> ModelRoute:
    there = [leader for leader in placed if not _gone(world, leader)]
    unplaced = world.unplaced.get(ModelName(name))
    if there or (placed and unplaced is None):
        nearest = (_hindering(world, leader) for leader in there or placed)
        shard = max(nearest, key=lambda shard: _NEARNESS.get(shard.state, 0))
        reason = f"replica {shard.replica} on {shard.node} is {shard.state.value}"
        if size(shard) > 1:
            reason = f"replica {shard.replica} waits for its part on {shard.node}, which is {shard.state.value}"
        if seen(shard, world.nodes.get(shard.node)) is ShardState.UNKNOWN:
            reason = f"{shard.node}, where replica {shard.replica} is, has not been heard of"
        failure = shard.last_failure
        if shard.status and shard.status.progress and shard.status.progress.total:
            progress = shard.status.progress
            reason += f" ({100 * progress.done // (progress.total or 1)} % of {progress.what})"
        elif failure and failure.cause:
            reason += f"; it failed before: {failure.cause}"
        return ModelRoute(state=ModelState.STARTING, reason=reason)
    if world.settling_until is not None:
        return ModelRoute(state=ModelState.STARTING, reason="the plane has just started and waits for its nodes")
    model = world.models.get(ModelName(name))
    if model is not None and model.replicas == 0:
        return ModelRoute(state=ModelState.UNPLACED, reason="it is scaled to zero replicas")
    if unplaced is None:
        if model is not None and model.idle:
            return ModelRoute(state=ModelState.STARTING, reason=UNLOADED)
        return ModelRoute(state=ModelState.STARTING, reason="it is about to be placed")
    if silent and _may_return(silent, unplaced):
        return ModelRoute(
            state=ModelState.STARTING, reason="a node that may take it has not been heard of, and may return"
        )
    # Names of nodes are for operators: `ctl why` tells them all. A client learns the kinds of check that failed.
    checks = sorted({reason.check for reason in unplaced.reasons if reason.check})
    why = f"no node fits ({', '.join(checks)})" if checks else "no node fits"
    return ModelRoute(state=ModelState.UNPLACED, reason=why)


def _gone(world: World, leader: Shard) -> bool:
    """Whether a replica is where nothing runs it any more: a node of it is lost, or not known."""
    nodes = (world.nodes.get(member.node) for member in (leader, *mates(world, leader)))
    return any(node is None or node.stage is Stage.LOST for node in nodes)


def _may_return(silent: Collection[NodeId], unplaced: Unplaced) -> bool:
    """Whether only silence keeps a node from taking it, by what is known, and it is not lost: it may be back soon."""
    away = {reason.node for reason in unplaced.reasons if reason.check in ("inventory", "stage")}
    away -= {reason.node for reason in unplaced.reasons if reason.check not in ("inventory", "stage")}
    return any(node in silent for node in away)


#: How near to ready a shard is: a client is told of the nearest one.
_NEARNESS = {ShardState.FETCHING: 1, ShardState.STARTING: 2, ShardState.READY: 3}


def settled(old: Routes | None, new: Routes) -> Routes:
    """The routes to use on news from the plane: while it settles, what served before goes on serving (D3)."""
    if old is None or not new.settling:
        return new
    models = dict(new.models)
    for name, before in old.models.items():
        if not before.endpoints:
            models.setdefault(name, before)
            continue
        now = models.get(name)
        known = {endpoint.replica for endpoint in now.endpoints} if now else set()
        kept = tuple(endpoint for endpoint in before.endpoints if endpoint.replica not in known)
        if kept:
            there = now.endpoints if now else ()
            models[name] = replace(now or before, state=ModelState.READY, endpoints=(*there, *kept), reason="")
    return replace(new, models=models)


def choose(
    endpoints: tuple[Endpoint, ...],
    in_flight: Mapping[str, int],
    out: Mapping[str, object],
    turn: int,
    tried: Iterable[str] = (),
) -> Endpoint | None:
    """The endpoint with the fewest requests in flight; `turn` rotates those that tie. None: none is left.

    Those that are `out` (excluded, F3) or were `tried` by this request already are left out.
    """
    best, least = None, 0
    count = len(endpoints)
    for step in range(count):
        endpoint = endpoints[(turn + step) % count]
        if endpoint.replica in out or endpoint.replica in tried:
            continue
        flying = in_flight.get(endpoint.replica, 0)
        if best is None or flying < least:
            best, least = endpoint, flying
            if not flying:
                break
    return best

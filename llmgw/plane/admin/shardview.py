"""Shards, replicas and models as the admin API shows them. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from immutables import Map
from msgspec import structs

from llmgw.plane.why import why
from llmgw.plane.world import Failure, Model, Node, Shard, Stray, World, seen
from llmgw.wire.api import (
    FailureView,
    ModelView,
    ProgressView,
    ReasonView,
    ReplicaView,
    ShardView,
    StandingView,
    WhyReply,
)
from llmgw.wire.facts import ModelName, ReplicaId, ShardState

#: From "not at all" to "serving": a replica is as far as its least advanced shard.
_ADVANCE = (
    ShardState.FAILED,
    ShardState.UNKNOWN,
    ShardState.STOPPED,
    ShardState.STOPPING,
    ShardState.DRAINING,
    ShardState.STARTING,
    ShardState.FETCHING,
    ShardState.READY,
)


def shard_view(shard: Shard, node: Node | None, now: float) -> ShardView:
    """One placed shard: the plane's wish beside the node's word."""
    said = shard.status if shard.status is not None and shard.status.generation == shard.generation else None
    state = seen(shard, node)
    load = node.shard_loads.get(shard.id) if node else None
    retry = shard.not_before - now if shard.not_before is not None and shard.not_before > now else None
    return ShardView(
        id=shard.id,
        replica=shard.replica,
        model=shard.model,
        rank=shard.rank,
        node=shard.node,
        engine=" ".join(filter(None, (shard.spec.engine, shard.spec.engine_version))),
        generation=shard.generation,
        want=shard.want.value,
        why=shard.why,
        state=state.value,
        detail=said.detail if said else "",
        state_age=now - shard.status_at if said and shard.status_at is not None else None,
        ready_age=now - shard.ready_at if shard.ready_at is not None and state is ShardState.READY else None,
        placed_clock=shard.placed_clock,
        address=node.address if node else "",
        port=(said.port if said else 0) or shard.spec.ports.get("http") or None,
        pid=said.pid if said else None,
        adopted=bool(said and said.adopted),
        gpus=shard.spec.gpus,
        cpu_percent=load.cpu_percent if load else None,
        rss_bytes=load.rss_bytes if load else None,
        gpu_memory_bytes=load.gpu_memory_bytes if load else None,
        restarts=shard.restarts,
        retry_in=retry,
        progress=ProgressView(what=said.progress.what, done=said.progress.done, total=said.progress.total)
        if said and said.progress
        else None,
        first_failure=_failure(shard.first_failure),
        last_failure=_failure(shard.last_failure),
        command=said.command if said else (),
    )


def stray_view(stray: Stray, node: Node | None) -> ShardView:
    """A process that runs and should not: nothing claims it, or its generation is an old one."""
    said = stray.status
    load = node.shard_loads.get(said.shard) if node else None
    return ShardView(
        id=said.shard,
        replica=said.replica,
        model=said.model,
        node=stray.node,
        generation=said.generation,
        want="stop",
        why="no placement claims this generation",
        state=said.state.value,
        detail=said.detail,
        address=node.address if node else "",
        port=said.port or None,
        pid=said.pid,
        adopted=said.adopted,
        cpu_percent=load.cpu_percent if load else None,
        rss_bytes=load.rss_bytes if load else None,
        command=said.command,
    )


def _failure(failure: Failure | None) -> FailureView | None:
    if failure is None:
        return None
    return FailureView(
        generation=failure.generation,
        clock=failure.clock,
        exit_code=failure.exit_code,
        signal=failure.signal,
        cause=failure.cause,
        lines=failure.lines,
    )


def replica_views(
    world: World, now: float, wall: float, *, model: ModelName | None = None, in_flight: Mapping[str, int] | None = None
) -> tuple[ReplicaView, ...]:
    """Every replica, or those of one model, by model and name. `in_flight` are the gateway's requests by replica."""
    members: dict[ReplicaId, list[Shard]] = defaultdict(list)
    for shard in world.shards.values():
        if model is None or shard.model == model:
            members[shard.replica].append(shard)
    views = (
        _replica(replica, sorted(shards, key=lambda shard: shard.rank), world, now, wall, in_flight)
        for replica, shards in members.items()
    )
    return tuple(sorted(views, key=lambda view: (view.model, view.id)))


def _replica(
    replica: ReplicaId,
    shards: list[Shard],
    world: World,
    now: float,
    wall: float,
    in_flight: Mapping[str, int] | None,
) -> ReplicaView:
    views = tuple(shard_view(shard, world.nodes.get(shard.node), now) for shard in shards)
    failures = [shard.last_failure for shard in shards if shard.last_failure is not None]
    placed = [shard.placed_clock for shard in shards if shard.placed_clock]
    ready_ages = [view.ready_age for view in views if view.ready_age is not None]
    state = least_advanced(seen(shard, world.nodes.get(shard.node)) for shard in shards)
    return ReplicaView(
        id=replica,
        model=shards[0].model,
        state=state.value,
        nodes=tuple(dict.fromkeys(view.node for view in views)),
        address=views[0].address,
        port=views[0].port,
        age=max(0.0, wall - min(placed)) if placed else None,
        ready_age=min(ready_ages) if state is ShardState.READY and ready_ages else None,
        restarts=max(view.restarts for view in views),
        cause=_cause(max(failures, key=lambda failure: failure.clock)) if failures else "",
        in_flight=in_flight.get(replica) if in_flight is not None else None,
        shards=views,
    )


def _cause(failure: Failure) -> str:
    if failure.cause:
        return failure.cause
    if failure.signal:
        return f"ended by {failure.signal}"
    return f"exit status {failure.exit_code}" if failure.exit_code is not None else "ended for an unknown reason"


def least_advanced(states: Iterable[ShardState]) -> ShardState:
    """The state that holds the others back; UNKNOWN of none."""
    return min(states, key=_ADVANCE.index, default=ShardState.UNKNOWN)


def model_views(
    world: World, now: float, wall: float, elsewhere: Mapping[str, tuple[str, ...]] = Map()
) -> tuple[ModelView, ...]:
    """Every wanted model, those that still have replicas, and those that are served elsewhere, by name."""
    replicas: dict[str, list[ReplicaView]] = defaultdict(list)
    for view in replica_views(world, now, wall):
        replicas[view.model].append(view)
    names = {*world.models, *map(ModelName, replicas), *map(ModelName, elsewhere)}
    return tuple(
        structs.replace(_model(name, world.models.get(name), replicas[name], world), elsewhere=elsewhere.get(name, ()))
        for name in sorted(names)
    )


def _model(name: ModelName, model: Model | None, replicas: list[ReplicaView], world: World) -> ModelView:
    unplaced = world.unplaced.get(name)
    ready = sum(view.state == ShardState.READY for view in replicas)
    if model is None:
        reason = "no longer wanted: its replicas end" if replicas else ""
        return ModelView(name=name, placed=len(replicas), ready=ready, reason=reason)
    profile = model.profile
    reason = ""
    if unplaced is not None:
        reason = unplaced.reasons[0].text if len(unplaced.reasons) == 1 else _tally(unplaced.reasons)
    elif ready < model.replicas:
        reason = next((view.cause for view in replicas if view.state != ShardState.READY and view.cause), "")
    return ModelView(
        name=name,
        engine=" ".join(filter(None, (profile.engine, profile.engine_version))),
        source=profile.source,
        revision=model.revision,
        wanted=model.replicas,
        placed=len(replicas),
        ready=ready,
        nodes_each=profile.nodes,
        gpus_each=profile.resources.gpus,
        reason=reason,
        smallest_change=unplaced.smallest_change if unplaced else "",
    )


def _tally(reasons: Iterable[object]) -> str:
    counts: dict[str, int] = defaultdict(int)
    for reason in reasons:
        counts[str(getattr(reason, "check", ""))] += 1
    worst = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{check} on {count} node{'s' if count > 1 else ''}" for check, count in worst)


def why_reply(model: ModelName, world: World, now: float, wall: float) -> WhyReply:
    """Why a model has fewer replicas than wanted, per node (D7). Raises NotFound."""
    found = why(world, model, now)
    return WhyReply(
        model=model,
        wanted=found.wanted,
        placed=found.placed,
        ready=found.ready,
        waiting=waiting(world, now)[0],
        reasons=tuple(
            ReasonView(
                node=reason.node,
                check=reason.check,
                value=reason.value,
                needed=reason.needed,
                age=reason.age,
                text=reason.text,
            )
            for reason in found.reasons
        ),
        smallest_change=found.smallest_change,
        replicas=replica_views(world, now, wall, model=model),
        text=found.text,
        standings=tuple(
            StandingView(shard=one.shard, node=one.node, generation=one.generation, state=one.state, text=one.text)
            for one in found.standings
        ),
    )


def waiting(world: World, now: float) -> tuple[str, float | None]:
    """What the plane puts off and why (D2, D3), and the seconds left; "" when it puts nothing off."""
    if world.settling_until is not None and world.settling_until > now:
        return "nothing is placed before the known nodes have had time to come back", world.settling_until - now
    if world.frozen is not None:
        return f"no node is taken for lost: {world.frozen.reason}", max(0.0, world.frozen.until - now)
    return "", None

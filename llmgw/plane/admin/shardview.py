"""Shards and replicas as the admin API shows them, and why a model is not served. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from llmgw.plane import drains
from llmgw.plane.gang import Replica
from llmgw.plane.why import why
from llmgw.plane.world import DEFAULT, Failure, Node, Settings, Shard, Stage, Stray, Want, World, seen
from llmgw.units import format_duration
from llmgw.wire.facts import ModelName, ReplicaId, ShardState
from llmgw.wire.modelapi import ChangeView, ReasonView, StandingView, WhyReply
from llmgw.wire.replicaapi import FailureView, ProgressView, ReplicaView, ShardView

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


def shard_view(shard: Shard, node: Node | None, now: float, within: float | None = None) -> ShardView:
    """One placed shard: the plane's wish beside the node's word. `within`: seconds that it may take to drain."""
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
        first_failure=failure_view(shard.first_failure),
        last_failure=failure_view(shard.last_failure),
        command=said.command if said else (),
        revision=shard.revision,
        network=said.network if said else "",
        warning=said.warning if said else "",
        stop_in=stop_in(shard, now, within),
    )


def stop_in(shard: Shard, now: float, within: float | None) -> float | None:
    """Seconds that a draining shard may still go on at most; None for one that does not drain."""
    if shard.want is not Want.DRAIN or within is None:
        return None
    return max(0.0, shard.want_at + within - now) if shard.want_at is not None else 0.0


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


def failure_view(failure: Failure | None) -> FailureView | None:
    if failure is None:
        return None
    return FailureView(
        generation=failure.generation,
        clock=failure.clock,
        exit_code=failure.exit_code,
        signal=failure.signal,
        cause=failure.cause,
        lines=failure.lines,
        node=failure.node,
    )


def replica_views(
    world: World,
    now: float,
    wall: float,
    *,
    model: ModelName | None = None,
    in_flight: Mapping[str, int] | None = None,
    settings: Settings = DEFAULT,
) -> tuple[ReplicaView, ...]:
    """Every replica, or those of one model, by model and name. `in_flight` are the gateway's requests by replica."""
    views = (
        replica_view(members, world, now, wall, in_flight, settings)
        for members in members_of(world.shards.values(), model).values()
    )
    return tuple(sorted(views, key=lambda view: (view.model, view.id)))


def members_of(shards: Iterable[Shard], model: ModelName | None = None) -> dict[ReplicaId, list[Shard]]:
    """The members of each replica, or of those of one model, by rank."""
    found: dict[ReplicaId, list[Shard]] = defaultdict(list)
    for shard in shards:
        if model is None or shard.model == model:
            found[shard.replica].append(shard)
    for members in found.values():
        if len(members) > 1:
            members.sort(key=lambda shard: shard.rank)
    return found


def replica_view(
    shards: list[Shard],
    world: World,
    now: float,
    wall: float,
    in_flight: Mapping[str, int] | None,
    settings: Settings = DEFAULT,
) -> ReplicaView:
    """A replica by its members, in the order of their ranks."""
    leader, model = shards[0], world.models.get(shards[0].model)
    leaving = any(shard.want is Want.DRAIN for shard in shards)
    within = drains.of_replica(world, shards, settings) if leaving else None
    views = tuple(shard_view(shard, world.nodes.get(shard.node), now, within) for shard in shards)
    failures = [shard.last_failure for shard in shards if shard.last_failure is not None]
    placed = [shard.placed_clock for shard in shards if shard.placed_clock]
    ready_ages = [view.ready_age for view in views if view.ready_age is not None]
    state = least_advanced(seen(shard, world.nodes.get(shard.node)) for shard in shards)
    return ReplicaView(
        id=leader.replica,
        model=leader.model,
        state=state.value,
        nodes=tuple(dict.fromkeys(view.node for view in views)),
        address=views[0].address,
        port=views[0].port,
        age=max(0.0, wall - min(placed)) if placed else None,
        ready_age=min(ready_ages) if state is ShardState.READY and ready_ages else None,
        restarts=max(view.restarts for view in views),
        cause=_cause(newest(failures)) if failures else "",
        in_flight=in_flight.get(leader.replica) if in_flight is not None else None,
        shards=views,
        generation=max(shard.generation for shard in shards),
        revision=leader.revision,
        outdated=model is not None and model.revision != leader.revision,
        warning=next((view.warning for view in views if view.warning), ""),
        waiting="; ".join(words for _, words in waits(shards, world, now)),
    )


def waits(members: Sequence[Shard], world: World, now: float) -> tuple[tuple[Shard, str], ...]:
    """What the members of a replica wait for, of each that waits for something: the shard, and in words."""
    replica = Replica(members[0].replica, tuple(members))
    over = replica.blamed if replica.runs and replica.broken else None
    found = ((shard, _waits(shard, members, over, world, now)) for shard in members)
    return tuple((shard, words) for shard, words in found if words)


def _node_stands(node: Node | None) -> str:
    """How a node that is not ready stands, in words."""
    if node is None:
        return "not known"
    return "not back since the plane started" if node.stage is Stage.EXPECTED else node.stage.value


def _waits(shard: Shard, members: Sequence[Shard], over: Shard | None, world: World, now: float) -> str:
    """What one member waits for. `over`: the one that ended the replica's attempt, if it has ended."""
    node, state = world.nodes.get(shard.node), shard.state
    if node is None or node.stage is not Stage.READY:
        if state is ShardState.READY and node is not None and node.stage is Stage.UNREACHABLE:
            return ""
        return f"{shard.node} is {_node_stands(node)}"
    if state is ShardState.STOPPING and (left := _said(shard)):
        return f"its end: {left}"
    if shard.want is not Want.RUN:
        return ""
    if over is not None:
        if shard is not over:
            return ""
        if shard.not_before is not None and shard.not_before > now:
            return f"the next attempt, in {format_duration(shard.not_before - now)}"
        return "room for its next attempt" if shard.model in world.unplaced else ""
    if not node.connected:
        # One that serves goes on: its replica waits for nothing.
        return "" if state is ShardState.READY else f"{shard.node} has no stream: its agent is awaited"
    if shard.status is None or shard.status.generation != shard.generation:
        late = [other for other in members if other.rank and not _is_ready(other, shard.generation)]
        if shard.rank == 0 and late:
            those = ", ".join(f"{other.id} on {other.node} ({_stands(other)})" for other in late)
            return f"its followers: {those}"
        return f"{shard.node} to take up generation {shard.generation}"
    # "waits for vllm 0.32.0 to be installed"
    return _said(shard).removeprefix("waits for ") if state is ShardState.STARTING else ""


def _said(shard: Shard) -> str:
    return shard.status.detail if shard.status is not None else ""


def _is_ready(shard: Shard, generation: int) -> bool:
    return shard.generation == generation and shard.state is ShardState.READY


def _stands(shard: Shard) -> str:
    """A shard's state in a word or two, with how far a transfer is."""
    progress = shard.status.progress if shard.status is not None else None
    if shard.state is ShardState.FETCHING and progress is not None and progress.total:
        return f"fetching, {100 * progress.done // progress.total} %"
    return shard.state.value


def newest(failures: Iterable[Failure]) -> Failure:
    """The failure that ended the newest attempt: the member's that was the first to end. The others went with it."""
    return min(failures, key=lambda failure: (-failure.generation, failure.clock))


def _cause(failure: Failure) -> str:
    if failure.cause:
        return failure.cause
    if failure.signal:
        return f"ended by {failure.signal}"
    return f"exit status {failure.exit_code}" if failure.exit_code is not None else "ended for an unknown reason"


def least_advanced(states: Iterable[ShardState]) -> ShardState:
    """The state that holds the others back; UNKNOWN of none."""
    return min(states, key=_ADVANCE.index, default=ShardState.UNKNOWN)


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
        changes=tuple(ChangeView(kind=one.key[0], effort=one.effort, text=one.text) for one in found.changes),
    )


def waiting(world: World, now: float) -> tuple[str, float | None]:
    """What the plane puts off and why (D2, D3), and the seconds left; "" when it puts nothing off."""
    if world.settling_until is not None and world.settling_until > now:
        return "nothing is placed before the known nodes have had time to come back", world.settling_until - now
    if world.frozen is not None:
        return f"no node is taken for lost: {world.frozen.reason}", max(0.0, world.frozen.until - now)
    return "", None

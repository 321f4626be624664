"""Models as the admin API shows them: how many of their replicas serve, how a change goes on, what they were. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from msgspec import structs

from llmgw.plane import idle
from llmgw.plane.admin.seams import NOTHING, Traffic
from llmgw.plane.gateway.counts import Served
from llmgw.plane.profiles import differences
from llmgw.plane.rollout import Rollout, rollout_of
from llmgw.plane.world import DEFAULT, Model, Profile, Settings, Want, World
from llmgw.units import format_duration
from llmgw.wire.facts import ModelName, ShardState
from llmgw.wire.modelapi import HistoryReply, ModelView, RevisionView
from llmgw.wire.replicaapi import ReplicaView


def model_views(
    world: World,
    now: float,
    running: Iterable[ReplicaView],
    traffic: Traffic = NOTHING,
    settings: Settings = DEFAULT,
) -> tuple[ModelView, ...]:
    """Every wanted model, those that still have replicas (`running`), and those that are served elsewhere, by name."""
    replicas: dict[str, list[ReplicaView]] = defaultdict(list)
    for view in running:
        replicas[view.model].append(view)
    names = {*world.models, *map(ModelName, replicas), *map(ModelName, traffic.elsewhere)}
    return tuple(
        _with_traffic(_model(name, world.models.get(name), replicas[name], world, now, settings), traffic)
        for name in sorted(names)
    )


def _with_traffic(view: ModelView, traffic: Traffic) -> ModelView:
    served = traffic.served.get(view.name, Served())
    return structs.replace(
        view,
        elsewhere=traffic.elsewhere.get(view.name, ()),
        requests=served.requests,
        failed=served.failed,
        prompt_tokens=served.prompt_tokens,
        completion_tokens=served.completion_tokens,
        held=served.held,
    )


def _model(
    name: ModelName, model: Model | None, replicas: list[ReplicaView], world: World, now: float, settings: Settings
) -> ModelView:
    unplaced = world.unplaced.get(name)
    ready = sum(view.state == ShardState.READY for view in replicas)
    if model is None:
        reason = "no longer wanted: its replicas end" if replicas else ""
        return ModelView(name=name, placed=len(replicas), ready=ready, reason=reason)
    profile, wanted = model.profile, idle.wanted(world, model, now)
    unloaded = wanted < model.replicas
    reason = ""
    if unplaced is not None:
        reason = unplaced.reasons[0].text if len(unplaced.reasons) == 1 else _tally(unplaced.reasons)
    elif ready < wanted:
        reason = next((view.cause for view in replicas if view.state != ShardState.READY and view.cause), "")
    elif unloaded:
        lately = f"for {format_duration(model.idle)}" if name in world.asked else "since the plane started"
        reason = f"unloaded: nobody has asked for it {lately}; a request loads it"
    left = idle.awake_until(world, model) - now
    rollout = None
    if any(view.outdated for view in replicas):
        rollout = rollout_of(world, model, settings)
    return ModelView(
        name=name,
        engine=" ".join(filter(None, (profile.engine, profile.engine_version))),
        source=profile.source,
        revision=model.revision,
        wanted=wanted,
        placed=len(replicas),
        ready=ready,
        nodes_each=profile.nodes,
        gpus_each=profile.resources.gpus,
        reason=reason,
        smallest_change=unplaced.smallest_change if unplaced else "",
        updated=sum(not view.outdated for view in replicas),
        rollout=_far(rollout) if rollout is not None else "",
        paused=rollout.why if rollout is not None else "",
        surge=model.surge,
        replicas=model.replicas,
        idle=model.idle,
        idle_in=max(0.0, left) if model.idle and wanted else None,
        unloaded=unloaded,
        revisions=len(model.history) + 1,
    )


def _far(rollout: Rollout) -> str:
    loading = f", {rollout.updated - rollout.ready} on the way" if rollout.updated > rollout.ready else ""
    waiting = f", waiting for {rollout.waits}" if rollout.waits else ""
    return f"{rollout.ready} of {rollout.total} replicas have revision {rollout.revision}{loading}{waiting}"


def _tally(reasons: Iterable[object]) -> str:
    counts: dict[str, int] = defaultdict(int)
    for reason in reasons:
        counts[str(getattr(reason, "check", ""))] += 1
    worst = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{check} on {count} node{'s' if count > 1 else ''}" for check, count in worst)


def history_reply(world: World, model: Model) -> HistoryReply:
    """The profiles that a model had and has, with what each changed."""
    running = Counter(
        shard.revision
        for shard in world.shards.values()
        if shard.model == model.name and shard.rank == 0 and shard.want is not Want.STOP
    )
    before: Profile | None = None
    views: list[RevisionView] = []
    kept = [(entry.revision, entry.profile, entry.clock) for entry in model.history]
    for revision, profile, clock in (*kept, (model.revision, model.profile, 0.0)):
        views.append(
            RevisionView(
                revision=revision,
                current=revision == model.revision,
                clock=clock,
                engine=" ".join(filter(None, (profile.engine, profile.engine_version))),
                source=profile.source,
                changes=differences(before, profile) if before is not None else (),
                replicas=running[revision],
            )
        )
        before = profile
    return HistoryReply(model=model.name, revision=model.revision, revisions=tuple(views))

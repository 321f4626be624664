"""What a node's word makes of a shard: its transitions, its failures and how long to wait before the next attempt.

Pure. Fencing is here as well (D4): what is told of another generation, or by another node than the one that holds
the placement, never touches the shard; it is a stray, to be stopped.

A replica of several nodes fails as a whole: the first member that ends is the cause, it is counted once, and the count
and the wait are the same on all members. What ends after it went with it; its own cause stays on its own shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from llmgw.plane.event import Event
from llmgw.plane.gang import counted, ended, mates, size
from llmgw.plane.world import ENDED, Failure, Settings, Shard, Stage, Stray, Want, World
from llmgw.wire.agent import ShardStatus
from llmgw.wire.facts import NodeId, ShardId, ShardState

#: Causes that the same command meets on every node: moving it would only spread the failure.
EVERYWHERE = frozenset({"bad-argument", "bad-profile", "bad-shape", "context-too-long", "model-unsupported"})

#: Causes that a restart does not mend: waiting longer costs nothing, and logs stay readable.
HOPELESS = EVERYWHERE | {
    "broken-weights",
    "cpu-unsupported",
    "driver-too-old",
    "gpu-missing",
    "gpu-unsupported",
    "missing-weights",
    "module-missing",
    "not-installed",
    "unsupported",
}


def delay(failures: int, *, was_ready: bool, cause_code: str = "", settings: Settings) -> float:
    """Seconds from the failure number `failures` (the first is 1) of a crash loop to the next attempt.

    An engine that served and died is tried again at once; one that never came up is given time.
    """
    hopeless = cause_code in HOPELESS
    base, cap = (settings.hopeless, settings.hopeless_cap) if hopeless else (settings.restart, settings.restart_cap)
    if failures <= 1 and was_ready and not hopeless:
        return 0.0
    return float(min(cap, base * 2.0 ** min(max(failures - 1, 0), 40)))


def tell(
    world: World, node: NodeId, status: ShardStatus, now: float, clock: float, settings: Settings
) -> tuple[World, tuple[Event, ...]]:
    """What one node says of one shard."""
    shard = world.shards.get(status.shard)
    if shard is None or shard.node != node or shard.generation != status.generation:
        return _stray(world, shard, node, status, now, clock)
    if (node, status.shard) in world.strays:
        world = attrs.evolve(world, strays=world.strays.delete((node, status.shard)))
    before = shard.status
    if before is not None and before.state is status.state and before.port == status.port:
        # Progress, or the same told again: no transition (B7).
        if before == status:
            return world, ()
        at = now if _begins(before, status) else shard.status_at
        updated = attrs.evolve(shard, status=status, status_at=at)
        return attrs.evolve(world, shards=world.shards.set(shard.id, updated)), ()
    changed = _transition(world, shard, status, now, clock, settings)
    updated = changed[0]
    world = _with(world, changed)
    if before is not None and before.state is status.state:
        return world, ()  # only the port is new: routes need it, nobody else does
    return world, (_event(shard, updated, status, clock),)


def _begins(before: ShardStatus, status: ShardStatus) -> bool:
    """Whether a start's own time begins: its engine, which it waited for, was installed, or it has a process."""
    if status.state is not ShardState.STARTING or before.pid is not None:
        return False
    return status.pid is not None or bool(before.detail and not status.detail)


def unmentioned(
    world: World, node: NodeId, listed: frozenset[tuple[ShardId, int]], now: float, clock: float
) -> tuple[World, tuple[Event, ...]]:
    """A Register does not list attempts (shard, generation) that are placed on its node: it does not run them.

    One that was seen there at this generation has ended, whatever ended it. One that was never seen may not have
    been told to start at all; it is left for its command to be told again, at the same generation. A node may list
    an older attempt in its place: its agent died between taking the start of this one and writing it down.
    """
    events: list[Event] = []
    for shard in world.shards.values():
        if shard.node != node or shard.status is None or shard.state in ENDED:
            continue
        if (shard.id, shard.generation) in listed:
            continue
        gone = ShardStatus(
            shard=shard.id,
            replica=shard.replica,
            model=shard.model,
            generation=shard.generation,
            state=ShardState.STOPPED,
            cause="the node does not know this shard any more",
            cause_code="forgotten",
        )
        updated = attrs.evolve(shard, status=gone, status_at=now, ready_at=None, not_before=now)
        world = attrs.evolve(world, shards=world.shards.set(shard.id, updated), version=world.version + 1)
        events.append(_event(shard, updated, gone, clock))
    return world, tuple(events)


def overdue(
    world: World, member: Shard, words: str, now: float, clock: float, settings: Settings
) -> tuple[World, tuple[Event, ...]]:
    """An attempt of a replica of several nodes is given up, since this member keeps the others waiting for too long."""
    cause = f"not all of it was ready within {member.spec.ready_within:g} s: {words}"
    failure = Failure(member.generation, clock, exit_code=None, signal="", cause=cause, node=member.node)
    changed = _failed(world, member, failure, None, "", now, settings)
    text = f"{member.replica} is given up at generation {member.generation}: {cause}"
    data = {"node": str(member.node), "model": str(member.model), "generation": str(member.generation)}
    event = Event(kind="replica-overdue", subject=f"shard:{member.id}", text=text, clock=clock, data=data)
    return _with(world, changed), (event,)


def proved(world: World, now: float, settings: Settings) -> World:
    """The world in which a replica that has been ready for `Settings.stable` is no crash loop any more: its next
    failure is the first of another, and no rollout is paused by the ones before.

    That is a change of the shards' records, so it is stored: a plane that has just started hears first what is ready
    now, and not since when. What had not proved itself before then has to begin its time anew.
    """
    shards = world.shards
    for shard in world.shards.values():
        if not shard.restarts or shard.rank or shard.want is not Want.RUN:
            continue
        members = (shard, *mates(world, shard))
        since = _ready_since(members, size(shard))
        heard = all((node := world.nodes.get(one.node)) is not None and node.stage is Stage.READY for one in members)
        if heard and since is not None and now - since >= settings.stable:
            for one in members:
                shards = shards.set(one.id, attrs.evolve(one, restarts=0, failed_here=0, first_failure=None))
    return world if shards is world.shards else attrs.evolve(world, shards=shards, version=world.version + 1)


def _ready_since(members: Sequence[Shard], many: int) -> float | None:
    """Since when all of so many members are ready; None while they are not."""
    ready = [member.ready_at for member in members if member.ready_at is not None]
    return max(ready) if len(ready) == len(members) == many else None


def _with(world: World, changed: Iterable[Shard]) -> World:
    return attrs.evolve(
        world, shards=world.shards.update({shard.id: shard for shard in changed}), version=world.version + 1
    )


def _transition(
    world: World, shard: Shard, status: ShardStatus, now: float, clock: float, settings: Settings
) -> tuple[Shard, ...]:
    """The shard as its node's word makes it, and the other members of its replica where that concerns them."""
    updated = attrs.evolve(shard, status=status, status_at=now)
    if status.state is ShardState.READY:
        return (attrs.evolve(updated, ready_at=shard.ready_at if shard.ready_at is not None else now),)
    if status.state not in ENDED or shard.want is not Want.RUN:
        return (attrs.evolve(updated, ready_at=None),)
    was_ready = shard.ready_at is not None
    if counted(shard):
        # Told again after this plane or the stream started anew, or given up before it ended: counted already.
        wait = delay(shard.restarts, was_ready=was_ready, cause_code=status.cause_code, settings=settings)
        due = now + wait if shard.not_before is None or size(shard) == 1 else shard.not_before
        return (attrs.evolve(updated, ready_at=None, not_before=due),)
    failure = Failure(
        generation=status.generation,
        clock=clock,
        exit_code=status.exit_code,
        signal=status.signal,
        cause=status.cause or status.detail,
        lines=status.lines,
        node=shard.node,
    )
    others = tuple(mates(world, shard))
    if any(other.generation == shard.generation and (counted(other) or ended(other)) for other in others):
        return (_went_with_it(updated, failure, status),)
    since = _ready_since((shard, *others), size(shard))
    return _failed(world, updated, failure, since, status.cause_code, now, settings)


def _went_with_it(updated: Shard, failure: Failure, status: ShardStatus) -> Shard:
    """A member that ended after another had ended the attempt. One that was merely stopped has not failed."""
    if status.state is not ShardState.FAILED:
        return attrs.evolve(updated, ready_at=None)
    first = failure if updated.first_failure is None else updated.first_failure
    return attrs.evolve(updated, ready_at=None, first_failure=first, last_failure=failure)


def _failed(
    world: World,
    shard: Shard,
    failure: Failure,
    ready_since: float | None,
    cause_code: str,
    now: float,
    settings: Settings,
) -> tuple[Shard, ...]:
    """The attempt has failed, and this shard is the cause: counted once, on all members of its replica."""
    fresh = ready_since is not None and now - ready_since >= settings.stable
    failures = 1 if fresh else shard.restarts + 1
    failed_here = 1 if fresh else shard.failed_here + 1
    wait = delay(failures, was_ready=ready_since is not None, cause_code=cause_code, settings=settings)
    blamed = attrs.evolve(
        shard,
        ready_at=None,
        restarts=failures,
        failed_here=failed_here,
        not_before=now + wait,
        first_failure=failure if fresh or shard.first_failure is None else shard.first_failure,
        last_failure=failure,
    )
    others = (
        attrs.evolve(
            other,
            restarts=failures,
            failed_here=failed_here,
            not_before=now + wait,
            first_failure=None if fresh else other.first_failure,
        )
        for other in mates(world, shard)
    )
    return blamed, *others


def _stray(
    world: World, shard: Shard | None, node: NodeId, status: ShardStatus, now: float, clock: float
) -> tuple[World, tuple[Event, ...]]:
    key, known = (node, status.shard), world.strays.get((node, status.shard))
    if not status.state.alive:
        if known is None:
            return world, ()
        return attrs.evolve(world, strays=world.strays.delete(key), version=world.version + 1), ()
    if known is not None and known.status.generation == status.generation:
        if known.status == status:
            return world, ()
        turned = known.status.state is not status.state
        stray = Stray(node, status, now if turned else known.at)
        return attrs.evolve(world, strays=world.strays.set(key, stray), version=world.version + turned), ()
    if shard is None:
        why = "nothing placed it"
    elif shard.node != node:
        why = f"it is placed on {shard.node} at generation {shard.generation}"
    elif status.generation < shard.generation:
        why = f"generation {shard.generation} has replaced it"
    else:
        why = f"the newest generation known here is {shard.generation}"
    event = Event(
        kind="shard-stray",
        subject=f"shard:{status.shard}",
        text=f"{node} runs {status.shard} at generation {status.generation}, but {why}: it is to be stopped",
        clock=clock,
        data={"node": str(node), "generation": str(status.generation), "state": status.state.value},
    )
    world = attrs.evolve(world, strays=world.strays.set(key, Stray(node, status, now)), version=world.version + 1)
    return world, (event,)


def _event(before: Shard, after: Shard, status: ShardStatus, clock: float) -> Event:
    data = {
        "node": str(after.node),
        "model": str(after.model),
        "generation": str(after.generation),
        "before": before.state.value,
        "after": status.state.value,
    }
    text = f"{after.id} on {after.node}: {before.state.value} -> {status.state.value}"
    if before.status is None:
        text = f"{after.id} on {after.node}: {status.state.value}"
    how = []
    if status.signal:
        how.append(f"signal {status.signal}")
    elif status.exit_code is not None and status.state is ShardState.FAILED:
        how.append(f"exit code {status.exit_code}")
    if status.cause:
        how.append(status.cause)
    if status.adopted and before.status is None:
        how.append("adopted")
    if status.lines and status.state is ShardState.FAILED:
        data["last_line"] = status.lines[-1]
    if how:
        text += f" ({', '.join(how)})"
    return Event(kind=f"shard-{status.state.value}", subject=f"shard:{after.id}", text=text, clock=clock, data=data)

"""What time makes of nodes and replicas: silence, and when the plane distrusts itself instead (D1, D2, D3); what takes
too long, and what has proved itself.

Pure. Everything is measured on the plane's monotonic clock at receipt. docs/decisions/0020-silence.md says why
the numbers are what they are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import attrs

from llmgw.plane import attempts, gang
from llmgw.plane.event import Event
from llmgw.plane.world import Frozen, Node, Settings, Stage, World

#: Up to so many nodes each sends every SHORTEST seconds; then the period grows so that heartbeats arrive
#: no faster, up to LONGEST at 5,000 nodes, where two of them still fit into the 15 s of D1.
UNHURRIED, CROWDED = 1_000, 5_000
SHORTEST, LONGEST = 5.0, 7.0

_TOGETHER = "fell silent together"


def heartbeat_for(nodes: int) -> float:
    """The heartbeat period for a fleet of this size, in seconds (B1)."""
    if nodes <= UNHURRIED:
        return SHORTEST
    if nodes <= CROWDED:
        return SHORTEST + (LONGEST - SHORTEST) * (nodes - UNHURRIED) / (CROWDED - UNHURRIED)
    return LONGEST * nodes / CROWDED


def silence_allowed(nodes: int, settings: Settings) -> float:
    """How long a node may be silent before it is unreachable: D1's time, or two periods of a huge fleet."""
    return max(settings.unreachable_after, 2.0 * heartbeat_for(nodes) + 1.0 if nodes > CROWDED else 0.0)


def silence(node: Node, now: float) -> float:
    """For how long nothing was heard of a node, in seconds; for an expected one, since it is expected."""
    return now - (node.stage_at if node.heard_at is None else node.heard_at)


def started(world: World, now: float, clock: float, settings: Settings) -> tuple[World, tuple[Event, ...]]:
    """A plane that has just started, or just become leader, knows nothing of silence yet (D2, D3)."""
    expected = sum(node.stage is Stage.EXPECTED for node in world.nodes.values())
    if not world.nodes:
        return world, ()
    reason = "the plane has just started"
    world = attrs.evolve(
        world,
        frozen=Frozen(reason, now, now + settings.quiet),
        settling_until=now + settings.settle if expected else None,
        version=world.version + 1,
    )
    text = f"{reason}: waiting for {expected} known nodes, up to {settings.settle:g} s, before anything is placed"
    return world, (Event(kind="plane-started", subject="plane", text=text, clock=clock),)


def expire(
    world: World, now: float, clock: float, settings: Settings, late: float = 0.0
) -> tuple[World, tuple[Event, ...]]:
    """Judge every node's silence. `late` is by how much the plane's own loop missed its time, in seconds."""
    events: list[Event] = []
    nodes, frozen, settling = world.nodes, world.frozen, world.settling_until
    say = _Say(events, clock)

    if late > settings.late:
        # What the nodes sent meanwhile is still unread in the sockets: no verdict in this round.
        frozen = _freeze(frozen, f"the plane's own loop was {late:.1f} s late", now, now + settings.quiet, say)
    else:
        allowed = silence_allowed(len(nodes), settings)
        for node in world.nodes.values():
            if node.stage is Stage.READY and (quiet := silence(node, now)) >= allowed:
                nodes = nodes.set(node.id, attrs.evolve(node, stage=Stage.UNREACHABLE, stage_at=now))
                say.node(
                    "node-unreachable", node, f"has been silent for {quiet:.0f} s: no new placements", silent=quiet
                )
        together = _together(nodes.values(), now, settings)
        if together is not None:
            count, fleet, last = together
            if last + settings.believe > now:
                reason = f"{count} of {fleet} nodes {_TOGETHER}"
                frozen = _freeze(frozen, reason, now, last + settings.believe, say)
        elif frozen is not None and frozen.reason.endswith(_TOGETHER):
            # They are back, or most of them: a quiet period is enough for whoever is not.
            frozen = attrs.evolve(frozen, until=min(frozen.until, now + settings.quiet))

    if frozen is not None and now >= frozen.until:
        say("losses-resumed", f"losses are decided again after a quiet period: {frozen.reason}")
        frozen = None
    if frozen is None and late <= settings.late:
        for node in nodes.values():
            if (
                node.stage in (Stage.UNREACHABLE, Stage.EXPECTED)
                and (quiet := silence(node, now)) >= settings.lost_after
            ):
                nodes = nodes.set(node.id, attrs.evolve(node, stage=Stage.LOST, stage_at=now))
                say.node("node-lost", node, f"has been silent for {quiet:.0f} s: its shards are replaced", silent=quiet)

    for node in nodes.values():
        if node.acks and (over := [key for key, ack in node.acks.items() if ack.until_at <= now]):
            nodes = nodes.set(node.id, _unacknowledged(node, over, say))

    if settling is not None and (now >= settling or not any(n.stage is Stage.EXPECTED for n in nodes.values())):
        missing = sorted(n.id for n in nodes.values() if n.stage is Stage.EXPECTED)
        say("settled", f"placing begins; not returned: {', '.join(missing) or 'none'}")
        settling = None

    if not (nodes is world.nodes and frozen is world.frozen and settling == world.settling_until):
        version = world.version + bool(events)
        world = attrs.evolve(world, nodes=nodes, frozen=frozen, settling_until=settling, version=version)
    if late > settings.late:
        return world, tuple(events)
    world, overdue = _overdue(world, now, clock, settings)
    return attempts.proved(world, now, settings), (*events, *overdue)


def _overdue(world: World, now: float, clock: float, settings: Settings) -> tuple[World, tuple[Event, ...]]:
    """Replicas of several nodes whose members were not all ready in time: their attempt is given up."""
    events: list[Event] = []
    for shard in sorted((s for s in world.shards.values() if s.rank == 0 and gang.size(s) > 1), key=lambda s: s.id):
        if (found := gang.overdue(world, shard, now)) is not None:
            world, said = attempts.overdue(world, *found, now, clock, settings)
            events += said
    return world, tuple(events)


def _together(nodes: Iterable[Node], now: float, settings: Settings) -> tuple[int, int, float] | None:
    """How many nodes fell silent within one window, of how many, and when the last of them did."""
    fleet, silent = 0, list[float]()
    for node in nodes:
        if node.stage is Stage.LOST:
            continue
        fleet += 1
        if node.stage is Stage.UNREACHABLE:
            silent.append(node.stage_at)
        elif node.stage is Stage.EXPECTED and now - node.stage_at >= settings.settle:
            silent.append(node.stage_at + settings.settle)
    silent.sort()
    # The latest window that holds enough of them: later silences prolong the doubt, older ones are believed.
    for end in range(len(silent) - 1, -1, -1):
        count = end + 1 - bisect_left(silent, silent[end] - settings.together)
        if count >= settings.together_least and count > settings.together_share * fleet:
            return count, fleet, silent[end]
    return None


def _unacknowledged(node: Node, over: list[tuple[str, str]], say: _Say) -> Node:
    acks, problems = node.acks, node.problems
    for key in over:
        acks = acks.delete(key)
        if key in problems:
            problems = problems.set(key, attrs.evolve(problems[key], acknowledged_until=None))
            say.node("acknowledgement-ended", node, f"{key[0]}: {key[1]} is acknowledged no more, and is still there")
    return attrs.evolve(node, acks=acks, problems=problems)


def _freeze(frozen: Frozen | None, reason: str, now: float, until: float, say: _Say) -> Frozen:
    if frozen is None:
        say("losses-frozen", f"{reason}: no node is taken for lost before {until - now:.0f} s have passed quietly")
        return Frozen(reason, now, until)
    return frozen if frozen.until >= until else attrs.evolve(frozen, reason=reason, until=until)


class _Say:
    """Collects events with the one clock reading of this round."""

    def __init__(self, events: list[Event], clock: float) -> None:
        self._events, self._clock = events, clock

    def __call__(self, kind: str, text: str) -> None:
        self._events.append(Event(kind=kind, subject="plane", text=text, clock=self._clock))

    def node(self, kind: str, node: Node, text: str, *, silent: float | None = None) -> None:
        data = {"node": str(node.id)}
        if silent is not None:
            data |= {"silent": f"{silent:.1f}", "before": node.stage.value}
        event = Event(kind=kind, subject=f"node:{node.id}", text=f"{node.id} {text}", clock=self._clock, data=data)
        self._events.append(event)

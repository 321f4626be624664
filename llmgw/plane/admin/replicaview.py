"""One replica on one screen: its members, what they reach each other by, what they wait for, how they failed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from llmgw.convert import near
from llmgw.errors import BadInput, NotFound
from llmgw.plane.admin.shardview import failure_view, members_of, newest, replica_view, waits
from llmgw.plane.profiles import secret
from llmgw.plane.world import Failure, Settings, Shard, Want, World
from llmgw.wire.facts import ModelName, NodeId, ReplicaId, ShardSpec
from llmgw.wire.replicaapi import AttemptView, EvidenceView, MemberView, ReplicaReply, ShardView, VariableView

#: What stands for the value of a variable that is a secret.
_HIDDEN = "(hidden)"


def replica_reply(
    world: World, name: str, now: float, wall: float, in_flight: Mapping[str, int], settings: Settings
) -> ReplicaReply:
    """A replica by its id, the beginning of one, a shard's id, or its model's name. Raises NotFound, BadInput."""
    members = members_of(world.shards.values())
    if ModelName(name) in world.models and not any(shard.model == name for shard in world.shards.values()):
        raise NotFound(f"{name} has no replica that is placed", remedy=f"`llmgw ctl why {name}` says why")
    shards = members[_named(name, members)]
    view = replica_view(shards, world, now, wall, in_flight, settings)
    leader, model = shards[0], world.models.get(shards[0].model)
    awaited = waits(shards, world, now)
    words = {shard.id: text for shard, text in awaited}
    return ReplicaReply(
        replica=view,
        engine=" ".join(filter(None, (leader.spec.engine, leader.spec.engine_version))),
        source=leader.spec.source,
        wanted_revision=model.revision if model is not None else None,
        want=_want(shards).value,
        why=leader.why,
        waiting=tuple(f"{shard.id}: {text}" if len(shards) > 1 else text for shard, text in awaited),
        restarts=view.restarts,
        members=tuple(
            _member(shard, one, world, words.get(shard.id, "")) for shard, one in zip(shards, view.shards, strict=True)
        ),
        evidence=_evidence(world, shards, wall, settings),
        first=_attempt(_failures(shards, "first_failure"), last=False),
        last=_attempt(_failures(shards, "last_failure"), last=True),
    )


def _named(name: str, replicas: Mapping[ReplicaId, Sequence[Shard]]) -> ReplicaId:
    if (exact := ReplicaId(name)) in replicas:
        return exact
    by_shard = [id for id, members in replicas.items() if any(shard.id == name for shard in members)]
    by_model = [id for id, members in replicas.items() if members[0].model == name]
    by_beginning = [id for id in replicas if name and id.startswith(name)]
    for found, what in ((by_shard, ""), (by_model, "replicas of it"), (by_beginning, "replicas that begin so")):
        if len(found) == 1:
            return found[0]
        if found:
            raise BadInput(f"{name!r} is not one replica: there are {len(found)} {what}", remedy=_choice(found))
    meant = near(name, (*replicas, *(members[0].model for members in replicas.values())))
    remedy = f"did you mean {meant!r}? (`llmgw ctl replicas` lists all)" if meant else "`llmgw ctl replicas` lists all"
    raise NotFound(f"no replica is called {name!r}", remedy=remedy)


def _choice(found: Iterable[str]) -> str:
    names = sorted(found, key=lambda id: (len(id), id))
    return f"say which: {', '.join(names[:10])}{' ...' if len(names) > 10 else ''}"


def _want(shards: Iterable[Shard]) -> Want:
    """What is wanted of a replica: of the member of which the least is."""
    order = (Want.STOP, Want.DRAIN, Want.RUN)
    return min((shard.want for shard in shards), key=order.index)


def _member(shard: Shard, view: ShardView, world: World, waiting: str) -> MemberView:
    node = world.nodes.get(shard.node)
    return MemberView(
        shard=view,
        stage=node.stage.value if node is not None else "",
        ports=dict(sorted(shard.spec.ports.items())),
        environment=tuple(_environment(shard.spec)),
        rdma=shard.spec.rdma,
        waiting=waiting,
    )


def _environment(spec: ShardSpec) -> Iterable[VariableView]:
    """What the plane wrote; where the profile says otherwise it wins, and both are shown."""
    for name in sorted(spec.network):
        written, said = spec.network[name], spec.env.get(name)
        if said is None:
            yield VariableView(name=name, value=written)
        else:
            yield VariableView(name=name, value=_HIDDEN if secret(name) else said, by="profile", instead=written)


def _evidence(world: World, shards: Sequence[Shard], wall: float, settings: Settings) -> tuple[EvidenceView, ...]:
    """The newest bandwidth test between each two members' nodes; those that use RDMA and have none are shown too."""
    found: list[EvidenceView] = []
    for a, b in combinations(sorted({shard.node for shard in shards}), 2):
        known = world.evidence.get((a, b))
        if known is not None:
            age = max(0.0, wall - known.clock)
            found.append(
                EvidenceView(
                    a=a,
                    b=b,
                    clock=known.clock,
                    age=age,
                    stale=age > settings.evidence,
                    good=known.good,
                    bad=known.bad,
                    text=known.text,
                    figures=known.figures,
                )
            )
        elif _use_rdma(shards, (a, b)):
            found.append(EvidenceView(a=a, b=b))
    return tuple(found)


def _use_rdma(shards: Iterable[Shard], nodes: tuple[NodeId, ...]) -> bool:
    return any(shard.spec.rdma for shard in shards if shard.node in nodes)


def _failures(shards: Iterable[Shard], which: str) -> list[tuple[Shard, Failure]]:
    return [(shard, failure) for shard in shards if (failure := getattr(shard, which)) is not None]


def _attempt(failures: list[tuple[Shard, Failure]], *, last: bool) -> AttemptView | None:
    """The first or the last attempt that failed, with the member whose failure it was."""
    if not failures:
        return None
    wanted = newest(failure for _, failure in failures) if last else min((f for _, f in failures), key=_when)
    shard, failure = next(pair for pair in failures if pair[1] is wanted)
    node = failure.node or shard.node
    view = failure_view(failure)
    assert view is not None
    log = f"llmgw ctl logs {node} {shard.id} --run {failure.generation}"
    return AttemptView(shard=shard.id, node=node, failure=view, log=log)


def _when(failure: Failure) -> tuple[int, float]:
    return failure.generation, failure.clock

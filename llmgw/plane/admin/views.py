"""The admin API's answers about the fleet, each a pure function of the world and the time.

`now` is the plane's monotonic clock, from which ages are counted; `wall` is Unix seconds and only shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from llmgw import __version__
from llmgw.convert import near
from llmgw.errors import NotFound
from llmgw.plane.admin.modelview import history_reply, model_views
from llmgw.plane.admin.nodeview import event_view, grades, node_reply, node_rows, problem_views
from llmgw.plane.admin.replicaview import replica_reply
from llmgw.plane.admin.seams import NOTHING, Traffic
from llmgw.plane.admin.shardview import replica_views, waiting, why_reply
from llmgw.plane.events import Event
from llmgw.plane.operate import known_model
from llmgw.plane.world import DEFAULT, Node, Settings, Stage, World
from llmgw.wire.api import OverviewReply, StatusReply
from llmgw.wire.apicommon import ProblemsReply
from llmgw.wire.facts import ModelName, NodeId
from llmgw.wire.modelapi import HistoryReply, ModelsReply, WhyReply
from llmgw.wire.nodeapi import NodeReply, NodesReply
from llmgw.wire.replicaapi import ReplicaReply, ReplicasReply


def nodes(world: World, now: float) -> NodesReply:
    return NodesReply(nodes=node_rows(world, now))


def node(
    world: World,
    now: float,
    name: str,
    history: Iterable[Event] = (),
    traffic: Traffic = NOTHING,
    settings: Settings = DEFAULT,
) -> NodeReply:
    """One node. Raises NotFound, naming the near miss."""
    return node_reply(known_node(world, name), world, now, history, traffic.in_flight, settings)


def models(
    world: World, now: float, wall: float, traffic: Traffic = NOTHING, settings: Settings = DEFAULT
) -> ModelsReply:
    running = replica_views(world, now, wall, settings=settings)
    return ModelsReply(models=model_views(world, now, running, traffic, settings))


def history(world: World, name: str) -> HistoryReply:
    """What a model was. Raises NotFound, naming the near miss."""
    return history_reply(world, known_model(world, name))


def replicas(world: World, now: float, wall: float, traffic: Traffic, settings: Settings = DEFAULT) -> ReplicasReply:
    return ReplicasReply(replicas=replica_views(world, now, wall, in_flight=traffic.in_flight, settings=settings))


def replica(
    world: World, now: float, wall: float, name: str, traffic: Traffic, settings: Settings = DEFAULT
) -> ReplicaReply:
    """One replica, by its id, the beginning of it, or its model's name. Raises NotFound, BadInput."""
    return replica_reply(world, name, now, wall, traffic.in_flight, settings)


def problems(world: World, now: float) -> ProblemsReply:
    return ProblemsReply(problems=problem_views(world.nodes.values(), now))


def why(world: World, now: float, wall: float, name: str, traffic: Traffic = NOTHING) -> WhyReply:
    """Why a model is not fully placed (D7). Raises NotFound for one that is neither wanted nor running."""
    model = ModelName(name)
    if model not in world.models and all(shard.model != model for shard in world.shards.values()):
        if urls := traffic.elsewhere.get(name):
            return WhyReply(model=name, text=f"it is served elsewhere ([[endpoints]] of plane.toml): {', '.join(urls)}")
        raise NotFound(f"no model is called {name!r}", remedy=_near(name, world.models, "llmgw ctl models"))
    return why_reply(model, world, now, wall)


def status(
    world: World,
    now: float,
    wall: float,
    *,
    plane: str,
    since: float,
    traffic: Traffic,
    latest: int,
    settings: Settings = DEFAULT,
) -> StatusReply:
    """The fleet in a few numbers; `since` is when this plane started (monotonic)."""
    running = replicas(world, now, wall, traffic, settings)
    wanted = ModelsReply(models=model_views(world, now, running.replicas, settings=settings))
    return _status(world, now, wall, plane, since, traffic, latest, running, wanted)


def overview(
    world: World,
    now: float,
    wall: float,
    *,
    plane: str,
    since: float,
    traffic: Traffic,
    latest: int,
    events: Iterable[Event],
    settings: Settings = DEFAULT,
) -> OverviewReply:
    """What the page shows, of one moment."""
    running = replicas(world, now, wall, traffic, settings)
    wanted = ModelsReply(models=model_views(world, now, running.replicas, traffic, settings))
    return OverviewReply(
        status=_status(world, now, wall, plane, since, traffic, latest, running, wanted),
        nodes=node_rows(world, now),
        models=wanted.models,
        replicas=running.replicas,
        problems=problem_views(world.nodes.values(), now),
        events=tuple(map(event_view, events)),
    )


def _status(
    world: World,
    now: float,
    wall: float,
    plane: str,
    since: float,
    traffic: Traffic,
    latest: int,
    running: ReplicasReply,
    wanted: ModelsReply,
) -> StatusReply:
    stages = Counter(node.stage for node in world.nodes.values())
    states = Counter(view.state for view in running.replicas)
    why, seconds = waiting(world, now)
    return StatusReply(
        plane=plane,
        version=__version__,
        uptime=max(0.0, now - since),
        clock=wall,
        nodes={stage.value: stages[stage] for stage in Stage if stages[stage]},
        nodes_connected=sum(node.connected for node in world.nodes.values()),
        nodes_cordoned=sum(node.cordoned or node.draining for node in world.nodes.values()),
        gpus=sum(len(node.facts.gpus) for node in world.nodes.values() if node.facts),
        models=len(world.models),
        models_complete=sum(view.ready >= view.wanted for view in wanted.models if view.name in world.models),
        replicas_wanted=sum(view.wanted for view in wanted.models),
        replicas=dict(sorted(states.items())),
        strays=len(world.strays),
        problems=grades(world.nodes.values(), now),
        waiting=why,
        waiting_for=seconds,
        gateway=dict(traffic.totals),
        latest_event=latest,
    )


#: An event as the API shows it.
event = event_view


def known_node(world: World, name: str) -> Node:
    """A node by name. Raises NotFound, naming the near miss."""
    found = world.nodes.get(NodeId(name))
    if found is None:
        raise NotFound(f"no node is called {name!r}", remedy=_near(name, world.nodes, "llmgw ctl nodes"))
    return found


def _near(name: str, names: Mapping[NodeId, object] | Mapping[ModelName, object], listing: str) -> str:
    close = near(name, names)
    return f"did you mean {close!r}? (`{listing}` lists all)" if close else f"`{listing}` lists all"

"""Weights on the nodes: what is there, fetching some ahead of need, and removing what nothing needs (C8)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import trio
from msgspec import Struct
from quart import Blueprint, Response, request

from llmgw.errors import BadInput, LlmgwError, TooOld, Unavailable
from llmgw.plane import weights as judge
from llmgw.plane import whence
from llmgw.plane.admin import views
from llmgw.plane.admin.answers import answer, body
from llmgw.plane.admin.api.requests import asked
from llmgw.plane.world import Node, World
from llmgw.sources import is_path, parse
from llmgw.units import format_duration
from llmgw.wire.agent import REFRESH
from llmgw.wire.api import DoneReply
from llmgw.wire.control import FetchWeights, RemoveWeightsRequest, WeightsRequest
from llmgw.wire.facts import ModelName, NodeId, Weights
from llmgw.wire.weightsapi import CacheView, HeldView, RemovalReply, RemovalView, WeightsReply

if TYPE_CHECKING:
    from llmgw.plane.admin.app import Admin

T = TypeVar("T")

#: Seconds that a node has to look through its cache, and to remove from it.
LIST_WITHIN = 20.0
REMOVE_WITHIN = 60.0
#: So many nodes are asked at the same time.
AT_ONCE = 64
#: The shortest and the longest grace, in seconds.
_MOST_GRACE = 366 * 86400.0


class FetchOrder(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights to be fetched ahead of need; without `nodes` by every node that is connected.

    `source` may be the name of a wanted model. `refresh`: what its branch is now, if that has moved on.
    """

    source: str
    nodes: tuple[str, ...] = ()
    bytes_per_second: int | None = None
    refresh: bool = False


class RemovalOrder(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What nothing has used for `grace` seconds goes; without `nodes` on every node, of `sources` if there are any."""

    nodes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    grace: float = 3600.0
    dry_run: bool = True


def blueprint(admin: Admin) -> Blueprint:
    part = Blueprint("weights", __name__)

    def world() -> World:
        return admin.fleet.world.value

    def chosen(names: Iterable[str]) -> tuple[Node, ...]:
        """The nodes of these names, else all. Raises NotFound."""
        named = tuple(views.known_node(world(), name) for name in names)
        return named or tuple(node for _, node in sorted(world().nodes.items()))

    async def held(node: NodeId) -> tuple[Weights, ...]:
        return (await asked(admin, node, WeightsRequest(), LIST_WITHIN)).weights

    @part.get("/weights")
    async def weights() -> Response:
        needed = judge.needed(world())

        async def look(node: Node) -> CacheView:
            error, found = "", node.facts.weights if node.facts is not None else ()
            try:
                found = await held(node.id)
            except LlmgwError as problem:
                error = str(problem)
            return cache_view(node, found, needed, error)

        names = [name for name in request.args.getlist("node") if name]
        nodes = await _all(look, chosen(names))
        return answer(WeightsReply(nodes=nodes, warnings=judge.warnings(world())))

    @part.post("/weights/fetch")
    async def fetch() -> Response:
        order = await body(FetchOrder)
        if not order.source.strip():
            raise BadInput("no source was given", remedy="give one such as hf://org/model")
        if order.bytes_per_second is not None and order.bytes_per_second < 1:
            raise BadInput(f"{order.bytes_per_second} bytes a second cannot be meant", remedy="give 1 or more, or none")
        nodes = [node for node in chosen(order.nodes) if order.nodes or node.connected]
        if not nodes:
            raise Unavailable("no node is connected that could fetch it", remedy="see `llmgw ctl nodes`")
        if order.refresh and (old := [n.id for n in nodes if n.facts is None or REFRESH not in n.facts.features]):
            raise TooOld(f"{', '.join(old)}: too old for {REFRESH}", remedy="upgrade the agent there, or name others")
        model = world().models.get(ModelName(order.source))
        source = model.profile.source if model is not None else order.source
        if not is_path(source):
            parse(source)
        fetch = FetchWeights(source=source, bytes_per_second=order.bytes_per_second, refresh=order.refresh)
        for id, directed in whence.directed(world(), [(node.id, fetch) for node in nodes]):
            admin.hub.tell(id, directed)
        who = nodes[0].id if len(nodes) == 1 else f"{len(nodes)} nodes"
        what = f"the newest of {source}" if order.refresh else source
        return answer(DoneReply(text=f"{who} will fetch {what}: see `llmgw ctl weights`"))

    @part.post("/weights/gc")
    async def gc() -> Response:
        order = await body(RemovalOrder)
        if not 0 <= order.grace <= _MOST_GRACE:
            raise BadInput(f"a grace of {format_duration(order.grace)} cannot be meant", remedy="give 0 s to a year")

        async def tidy(node: Node) -> RemovalView:
            try:
                return await removal(node.id, order)
            except LlmgwError as problem:
                return RemovalView(node=node.id, error=str(problem))

        return answer(RemovalReply(dry_run=order.dry_run, nodes=await _all(tidy, chosen(order.nodes))))

    async def removal(node: NodeId, order: RemovalOrder) -> RemovalView:
        there = await held(node)
        if order.sources:
            there = tuple(weights for weights in there if weights.source in order.sources)
        # What is wanted is read after the node has answered: a model applied meanwhile counts.
        proposed = judge.proposal(there, judge.needed(world()), order.grace)
        if not proposed.remove:
            return RemovalView(node=node, kept=dict(proposed.kept))
        question = RemoveWeightsRequest(sources=proposed.remove, dry_run=order.dry_run)
        reply = await admin.hub.ask(node, question, within=REMOVE_WITHIN)
        if reply.removed and not order.dry_run:
            text = f"{node} removed {', '.join(reply.removed)}: nothing needed it"
            admin.fleet.events.add("weights-removed", f"node:{node}", text, clock=admin.wall())
        return RemovalView(
            node=node, removed=reply.removed, kept={**proposed.kept, **reply.kept}, freed_bytes=reply.freed_bytes
        )

    return part


def cache_view(node: Node, held: Iterable[Weights], needed: dict[str, str], error: str = "") -> CacheView:
    """One node's cache as the API shows it. Pure."""
    disks = node.facts.host.disks if node.facts is not None else ()
    disk = next((disk for disk in disks if disk.purpose == "weights"), None)
    return CacheView(
        node=node.id,
        path=disk.path if disk is not None else "",
        free_bytes=disk.free_bytes if disk is not None else None,
        total_bytes=disk.total_bytes if disk is not None else None,
        error=error,
        shared_at=whence.shared_at(node),
        weights=tuple(
            HeldView(
                source=found.source,
                revision=found.revision,
                path=found.path,
                bytes=found.bytes,
                total_bytes=found.total_bytes,
                complete=found.complete,
                in_use=found.in_use,
                fetching=found.fetching,
                idle=found.idle,
                needed_by=needed.get(found.source, ""),
                error=found.error,
                came_from=found.came_from,
            )
            for found in held
        ),
    )


async def _all(work: Callable[[Node], Awaitable[T]], nodes: tuple[Node, ...]) -> tuple[T, ...]:
    """What comes of each node, in their order; many at a time."""
    found: dict[NodeId, T] = {}
    slots = trio.CapacityLimiter(AT_ONCE)

    async def one(node: Node) -> None:
        async with slots:
            found[node.id] = await work(node)

    async with trio.open_nursery() as nursery:
        for node in nodes:
            nursery.start_soon(one, node)
    return tuple(found[node.id] for node in nodes)

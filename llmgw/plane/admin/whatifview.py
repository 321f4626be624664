"""What would happen, as the admin API shows it; and what a name stands for that is to be lost. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from llmgw.convert import near
from llmgw.errors import NotFound
from llmgw.plane.fabrics.vantage import Vantage
from llmgw.plane.whatif import LoseFabric, LoseNode, PortName, Short, WhatIf
from llmgw.plane.world import World
from llmgw.rdma.managers import Managers
from llmgw.wire.facts import NodeId
from llmgw.wire.modelapi import ReasonView
from llmgw.wire.whatifapi import FateView, GapView, MomentView, ShortView, WhatIfReply

#: Reasons that are shown of a model that ends up short, and moments of the whole course.
REASONS, MOMENTS = 20, 1_000


class Named(Protocol):
    """The fabrics as they are watched: which ports are on which."""

    @property
    def managers(self) -> Managers: ...
    @property
    def names(self) -> tuple[str, ...]: ...
    def vantages(self) -> Mapping[str, list[Vantage]]: ...


def lost(world: World, fabrics: Named | None, name: str) -> tuple[LoseNode | LoseFabric, str]:
    """The node or the fabric of that name, and in words that it is lost. Raises NotFound, naming the near miss.

    A fabric goes by the name that `ctl fabrics` shows, or by the label of its ports.
    """
    if NodeId(name) in world.nodes:
        return LoseNode(NodeId(name)), f"{name} is lost"
    ports = frozenset(_ports(world, fabrics, name))
    if ports:
        nodes = len({port[0] for port in ports})
        text = f"the fabric {name} is lost ({len(ports)} ports of {nodes} node{'s' if nodes != 1 else ''})"
        return LoseFabric(name, ports), text
    known = [*world.nodes, *_labels(world), *(fabrics.names if fabrics is not None else ())]
    meant = near(name, known)
    remedy = f"did you mean {meant!r}?" if meant else "`llmgw ctl nodes` and `llmgw ctl fabrics` list them"
    raise NotFound(f"there is no node and no fabric {name!r}", remedy=remedy)


def _ports(world: World, fabrics: Named | None, name: str) -> Iterable[PortName]:
    for id, node in world.nodes.items():
        for port in node.facts.ports if node.facts is not None else ():
            if port.fabric and port.fabric == name:
                yield id, port.device, port.number
    if fabrics is None:
        return
    for key, fabric in fabrics.managers.at.items():
        if fabric == name:
            yield NodeId(key.node), key.device, key.number
    for look in fabrics.vantages().get(name, ()):
        yield look.node, look.device, look.number


def _labels(world: World) -> set[str]:
    nodes = (node.facts.ports for node in world.nodes.values() if node.facts is not None)
    return {port.fabric for ports in nodes for port in ports if port.fabric}


def reply(found: WhatIf, text: str) -> WhatIfReply:
    return WhatIfReply(
        text=text,
        replicas=tuple(
            FateView(
                model=fate.model,
                replica=fate.replica,
                what=fate.what,
                before=fate.before,
                after=fate.after,
                by=fate.by,
                at=fate.at,
                why=fate.why,
            )
            for fate in found.fates
        ),
        short=tuple(map(_short, found.short)),
        gaps=tuple(GapView(model=gap.model, begin=gap.begin, end=gap.end) for gap in found.gaps),
        moments=tuple(MomentView(at=m.at, kind=m.kind, text=m.text) for m in found.moments[:MOMENTS]),
        more_moments=max(0, len(found.moments) - MOMENTS),
        seconds=found.seconds,
        complete=found.complete,
        restless=found.restless,
    )


def _short(short: Short) -> ShortView:
    return ShortView(
        model=short.model,
        wanted=short.wanted,
        before=short.before,
        after=short.after,
        reasons=tuple(
            ReasonView(node=r.node, check=r.check, value=r.value, needed=r.needed, age=r.age, text=r.text)
            for r in short.reasons[:REASONS]
        ),
        more_reasons=max(0, len(short.reasons) - REASONS),
        smallest_change=short.smallest_change,
    )

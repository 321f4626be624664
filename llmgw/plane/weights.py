"""Which weights a node needs, which it may give up (C8), and where nodes have different ones. Pure.

The plane only proposes: it knows what is wanted. The node checks again, since it knows what is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from llmgw.plane.world import World
from llmgw.units import format_duration
from llmgw.wire.facts import NodeId, Weights


@attrs.frozen
class Proposal:
    """Sources that a node may remove, and the others with what keeps them."""

    remove: tuple[str, ...]
    kept: Mapping[str, str]


def needed(world: World) -> dict[str, str]:
    """Every source that something wants, and what: a model that is wanted, or a shard that is not stopped yet.

    A model of no replicas needs its weights too: they are kept for when it is scaled up again. Any node may be the
    next to serve a model, so this is one answer for all of them.
    """
    found = {shard.spec.source: f"shard {shard.id}" for _, shard in sorted(world.shards.items())}
    found |= {model.profile.source: f"model {name}" for name, model in sorted(world.models.items())}
    return found


def proposal(held: Iterable[Weights], needed: Mapping[str, str], grace: float) -> Proposal:
    """What of a node's cache nothing needs and no shard has used for `grace` seconds."""
    remove, kept = list[str](), dict[str, str]()
    for weights in sorted(held, key=lambda weights: weights.source):
        if reason := _keeping(weights, needed, grace):
            kept[weights.source] = reason
        else:
            remove.append(weights.source)
    return Proposal(tuple(remove), kept)


def _keeping(weights: Weights, needed: Mapping[str, str], grace: float) -> str:
    if who := needed.get(weights.source):
        return f"{who} needs it"
    if weights.in_use:
        return "a shard on this node uses it"
    if weights.fetching:
        return "it is being fetched"
    failed = weights.error and not weights.bytes
    if weights.idle is None:
        return f"the node does not say when it {'failed' if failed else 'was last used'}"
    if weights.idle < grace:
        what = "could not be fetched" if failed else "was used"
        return f"it {what} {format_duration(weights.idle)} ago, and the grace is {format_duration(grace)}"
    return ""


def differing(world: World) -> dict[str, dict[str, tuple[NodeId, ...]]]:
    """Sources of wanted models of which nodes hold different commits, and which node holds which.

    Replicas of one model would then answer differently; `ctl fetch --refresh` makes them one again.
    """
    wanted = {model.profile.source for model in world.models.values()}
    found: dict[str, dict[str, tuple[NodeId, ...]]] = {}
    for id, node in sorted(world.nodes.items()):
        for held in node.facts.weights if node.facts is not None else ():
            if held.source in wanted and held.complete and not held.error and held.revision:
                by = found.setdefault(held.source, {})
                by[held.revision] = (*by.get(held.revision, ()), id)
    return {source: by for source, by in sorted(found.items()) if len(by) > 1}


def warnings(world: World) -> tuple[str, ...]:
    """The same in sentences for an operator."""
    return tuple(
        f"{source} is not the same everywhere: "
        + "; ".join(f"{revision[:12]} on {_some(nodes)}" for revision, nodes in sorted(by.items()))
        + f". `llmgw ctl fetch --refresh {source}` brings the newest to all"
        for source, by in differing(world).items()
    )


def _some(nodes: tuple[NodeId, ...]) -> str:
    return ", ".join(nodes) if len(nodes) < 4 else f"{', '.join(nodes[:3])} and {len(nodes) - 3} more"

"""Which node is nearest to taking a replica, from what keeps it away. Pure: needs the reasons and nothing else."""

from __future__ import annotations

from collections.abc import Iterable

from llmgw.plane.changes import BOUGHT, EFFORT
from llmgw.plane.checks import Need
from llmgw.plane.world import Reason
from llmgw.wire.facts import NodeId

#: No command passes these: only another machine does, or a model that asks for less.
_BOUGHT = frozenset(check for check, effort in EFFORT.items() if effort >= BOUGHT)


def nearest(reasons: Iterable[Reason]) -> tuple[Reason, ...]:
    """The reasons with the node nearest to fitting first."""
    found = by_node(reasons)
    return tuple(reason for node in sorted(found, key=lambda n: (cost(found[n]), n)) for reason in found[node])


def smallest(reasons: Iterable[Reason], need: Need) -> str:
    """The change that makes one node pass all its checks with the least effort, in words; "" without any node.

    A sentence for a list of models, made of the reasons alone; `ctl why` looks closer (cheapest.py) and proves it.
    """
    found = by_node(reasons)
    if not found:
        return ""
    best = min(found, key=lambda node: (cost(found[node]), node))
    if short := [reason for reason in found[best] if reason.check in _BOUGHT]:
        # What else is in the way on that node does not matter: it would not fit after that either.
        return purchase(need, short[0])
    return "; ".join(_change(reason, need) for reason in found[best])


def beyond(reasons: Iterable[Reason], need: Need) -> str:
    """What is left where no set of changes is known: a node of which nothing is known yet, or another machine."""
    found = by_node(reasons)
    silent = sorted(node for node in found if any(reason.check == "inventory" for reason in found[node]))
    if silent:
        others = f" or another of {len(silent)} silent nodes" if len(silent) > 1 else ""
        return f"bring {silent[0]}{others} back: its agent is not heard, and what it has is not known"
    if not found:
        return ""
    best = min(found, key=lambda node: (cost(found[node]), node))
    return purchase(need, max(found[best], key=lambda reason: EFFORT.get(reason.check, BOUGHT)))


def purchase(need: Need, short: Reason) -> str:
    """To buy, in words; `short` is what the nearest node lacks."""
    return f"add a node with {machine(need)}, or ask for less: {short.node} is nearest and {_has(short)}"


def machine(need: Need) -> str:
    """What a node must have that no command gives it, in words."""
    resources = need.resources
    if not resources.gpus:
        words = (
            [f"{resources.cpu_threads} CPU thread{'s' if resources.cpu_threads != 1 else ''}"]
            if resources.cpu_threads
            else []
        )
        words += [f"{resources.memory_bytes / (1 << 30):.1f} GiB of memory"] if resources.memory_bytes else []
        words += [f"{resources.disk_bytes / (1 << 30):.1f} GiB of disk for weights"] if resources.disk_bytes else []
        return " and ".join(words) or "room"
    text = f"{resources.gpus} GPU{'s' if resources.gpus != 1 else ''}"
    if resources.gpu_memory_bytes:
        text += f" of {resources.gpu_memory_bytes / (1 << 30):.1f} GiB"
    if resources.compute_capability is not None:
        text += " and compute capability {}.{}".format(*resources.compute_capability)
    return text


def by_node(reasons: Iterable[Reason]) -> dict[NodeId, list[Reason]]:
    found: dict[NodeId, list[Reason]] = {}
    for reason in reasons:
        found.setdefault(reason.node, []).append(reason)
    return found


def cost(reasons: Iterable[Reason]) -> int:
    return sum(EFFORT.get(reason.check, BOUGHT) for reason in reasons)


def _has(reason: Reason) -> str:
    return reason.text.removeprefix(f"{reason.node}: ")


def _change(reason: Reason, need: Need) -> str:
    node, resources = reason.node, need.resources
    match reason.check:
        case "cordon":
            return f"`llmgw ctl uncordon {node}`"
        case "drain":
            return f"`llmgw ctl uncordon {node}` ends its drain"
        case "labels":
            return f"`llmgw ctl label {node} {reason.needed}`"
        case "stage" | "inventory":
            return f"bring {node} back: its agent is not heard"
        case "agent":
            return f"upgrade the agent of {node} ({reason.value})"
        case "engine" | "engine-match":
            return f"install {reason.needed} on {node} ({reason.value})"
        case "node-health" | "gpu-health":
            return f"mend {node} ({reason.value}), or acknowledge the problem"
        case "gpu-fabric" | "nvlink":
            return f"bring the NVLink fabric of {node} up ({reason.value})"
        case "rails":
            return f"mend the rails of {node} ({reason.value})"
        case "evidence":
            return f"mend what a test found between {node} and others ({reason.value}), and test again"
        case "ports":
            return f"give {node} a range of engine ports (`engine_ports` in node.toml): {reason.value}"
        case "apart":
            return f"stop on {node} what must not be beside it ({reason.value})"
        case "gpu-foreign":
            return f"stop what else holds GPU memory on {node} ({reason.value})"
        case "disk":
            return f"free disk for weights on {node}: {reason.needed} needed, {reason.value} there"
        case "gpus-free":
            return f"free GPUs on {node}: {reason.value}, {reason.needed} needed"
        case "cpu-threads":
            fewer = f", or ask for fewer than {resources.cpu_threads}" if resources.cpu_threads > 1 else ""
            return f"free CPU threads on {node}{fewer}: {reason.value}"
        case "memory":
            return f"free memory on {node}, or ask for less than {reason.needed}: {reason.value} is free"
    return f"{node}: {reason.check} {reason.value} must become {reason.needed}"

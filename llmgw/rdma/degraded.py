"""Links that run slower than they should, and how sure that is.

A map does not say what a link could do. So links are judged by their kind (the pair of models at their ends): what most
of a kind run at is what each should run at, and a slower one is a suspect until the PortInfo of both ends confirms
that they could do more. Never judged: a speed that this tool does not know (`???`), split ports, planarised XDR (one
lane a plane), and links of aggregation nodes, routers and UFM appliances. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import attrs

from llmgw.rdma.fabric import SPEEDS, Link, Map, Node, PortState, place

#: Most links of a kind must agree, and there must be so many, before one is called slow.
FEWEST, SHARE = 3, 0.5

Kind = tuple[str, tuple[int, int], str, tuple[int, int]]


@attrs.frozen
class Slow:
    """A link below what its kind runs at.

    `confirmed`: True when both ends say that they support more than they run at, False when one end
    cannot do more (so it is no fault), None while nobody asked. `cause` is "width", "speed" or "limited"
    (an end is set to no more than this: by an administrator, or by the port's own fallback).
    """

    link: Link
    width: int  # what it should be
    speed: str
    confirmed: bool | None = None
    cause: str = ""
    text: str = ""


def kind(link: Link, nodes: Mapping[int, Node]) -> Kind | None:
    """What kind of link it is; None for links that are not judged."""
    ends = [nodes.get(link.a), nodes.get(link.b)]
    if any(node is None or node.kind not in ("switch", "host") or not node.listed for node in ends):
        return None
    first, second = sorted((node.kind, node.model) for node in ends if node is not None)
    return (*first, *second)


def judged(link: Link) -> bool:
    """Whether width and speed of this link can be compared at all."""
    if link.rate is None:
        return False
    return not (link.speed == "XDR" and link.width == 1)


def usual(fabric: Map) -> dict[Kind, tuple[int, str]]:
    """The width and speed that most links of each kind run at, for kinds with a clear majority."""
    nodes = fabric.by_guid()
    counts: dict[Kind, Counter[tuple[int, str]]] = {}
    for link in fabric.links:
        which = kind(link, nodes)
        if which is not None and judged(link):
            counts.setdefault(which, Counter())[link.width, link.speed] += 1
    found: dict[Kind, tuple[int, str]] = {}
    for which, paces in counts.items():
        pace, count = paces.most_common(1)[0]
        if count >= FEWEST and count / paces.total() > SHARE:
            found[which] = pace
    return found


def suspects(fabric: Map) -> tuple[Slow, ...]:
    """The links that run below their kind, judged with the PortInfo that the map has of them; in the map's order."""
    nodes = fabric.by_guid()
    majority = usual(fabric)
    states = {(state.guid, state.port): state for state in fabric.states}
    found: list[Slow] = []
    for link in fabric.links:
        which = kind(link, nodes)
        if which is None or which not in majority or not judged(link):
            continue
        width, speed = majority[which]
        rate = link.rate
        assert rate is not None
        if rate >= SPEEDS[speed] * width:
            continue
        one = _confirmed(Slow(link, width, speed), states)
        if one.confirmed is None and _maybe_split(link, width, nodes):
            continue
        found.append(attrs.evolve(one, text=_text(one, nodes)))
    return tuple(found)


def faults(slow: Iterable[Slow]) -> tuple[Slow, ...]:
    """Those that both ends confirm."""
    return tuple(one for one in slow if one.confirmed)


def _maybe_split(link: Link, width: int, nodes: Mapping[int, Node]) -> bool:
    """Half the lanes at the full speed of a fast generation is what a split port looks like, on either end.

    Without PortInfo nothing tells it from two broken lanes; a switch in split mode counts twice its ports.
    """
    split = any(nodes[end].switch and nodes[end].ports in (81, 129) for end in (link.a, link.b) if end in nodes)
    return link.width * 2 == width and (link.speed in ("HDR", "NDR", "XDR") or split)


def _confirmed(slow: Slow, states: Mapping[tuple[int, int], PortState]) -> Slow:
    """What both ends' PortInfo make of it."""
    ends = [states.get(end) for end in slow.link.ends]
    cause = "width" if slow.link.width < slow.width else "speed"
    if any(state is None or not state.width or not state.speed for state in ends):
        return attrs.evolve(slow, cause=cause)
    both = [state for state in ends if state is not None]
    able = all(slow.width in state.widths and slow.speed in state.speeds for state in both)
    still = any(state.width < slow.width or SPEEDS[state.speed] < SPEEDS[slow.speed] for state in both)
    if not able or not still:
        return attrs.evolve(slow, confirmed=False, cause=cause)
    limited = any(
        (state.enabled_widths and slow.width not in state.enabled_widths)
        or (state.enabled_speeds and slow.speed not in state.enabled_speeds)
        for state in both
    )
    return attrs.evolve(slow, confirmed=True, cause="limited" if limited else cause)


def _text(slow: Slow, nodes: Mapping[int, Node]) -> str:
    ends = " - ".join(place(nodes[guid], port) for guid, port in slow.link.ends)
    pace = f"{ends} runs at {slow.link.pace}, links of its kind at {slow.width}x{slow.speed}"
    match slow.confirmed, slow.cause:
        case True, "limited":
            return f"{pace}; one end is set to no more than that (LinkWidthEnabled or LinkSpeedEnabled)"
        case True, _:
            return f"{pace}; both ends support more: cable, transceiver or connector"
        case False, _:
            return f"{pace}; an end supports no more than that, so it is no fault"
        case _:
            return f"{pace}; not confirmed by the ports themselves"

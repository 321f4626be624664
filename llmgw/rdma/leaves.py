"""Which host port is on which leaf switch and which rail, and which cable is in the wrong leaf.

In a rail-optimised fabric the same adapter of every host of a group goes to the same leaf. So a leaf shows its rail by
the adapters on it, and a host out of place shows by the others: nothing but the maps is needed. Where the adapters of
a leaf are mixed by design there are no rails, and nothing is judged. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import attrs

from llmgw.rdma.fabric import Map, Node

#: At least so many adapters, and this share of them, must agree before a leaf has a rail.
FEWEST, SHARE = 3, 0.7


@attrs.frozen
class Owner:
    """Whose port it is: a node's name and its adapter's. `rail` where the node's own survey knows it."""

    host: str
    device: str
    rail: int | None = None


@attrs.frozen
class Berth:
    """A host's port and the leaf switch port that it is cabled to. `fabric` is the map's place in what was given."""

    guid: int  # the adapter's
    number: int
    port_guid: int
    owner: Owner | None
    leaf: int
    leaf_port: int
    fabric: int = 0


@attrs.frozen
class Misplaced:
    """A cable in the wrong leaf. `swapped_with` is the berth it changed places with, when both are known."""

    berth: Berth
    belongs: str  # the device whose rail the leaf is on
    swapped_with: Berth | None = None
    should: int | None = None  # the leaf where it would belong
    text: str = ""


@attrs.frozen
class Rails:
    """All berths, the rail's device by leaf (by fabric and GUID), and what is out of place."""

    berths: tuple[Berth, ...] = ()
    rails: Mapping[tuple[int, int], str] = attrs.field(factory=dict)
    misplaced: tuple[Misplaced, ...] = ()


def berths(fabric: Map, owners: Mapping[int, Owner] | None = None, index: int = 0) -> tuple[Berth, ...]:
    """Every host port that is cabled to a switch.

    `owners` by port GUID are what nodes said of themselves and count before the map's descriptions, which
    are hints: a description is used only where no other adapter of the map claims the same host and device.
    """
    nodes, ends = fabric.by_guid(), fabric.by_end()
    claims = Counter(node.host_and_device for node in fabric.hosts if node.host_and_device)
    found: list[Berth] = []
    for node in fabric.hosts:
        hint = node.host_and_device
        named = Owner(*hint) if hint and claims[hint] == 1 else None
        for end in node.ends:
            link = ends.get((node.guid, end.number))
            if link is None:
                continue
            leaf, port = link.other(node.guid, end.number)
            if leaf in nodes and nodes[leaf].switch:
                owner = (owners or {}).get(end.guid) or named
                found.append(Berth(node.guid, end.number, end.guid, owner, leaf, port, index))
    return tuple(found)


def rails(maps: Iterable[Map], owners: Mapping[int, Owner] | None = None) -> Rails:
    """The rails of one fabric, or of several that are the planes of the same hosts, and what is out of place."""
    given = tuple(maps)
    every = tuple(berth for index, one in enumerate(given) for berth in berths(one, owners, index))
    known = [berth for berth in every if berth.owner is not None]
    on: dict[tuple[int, int], list[Berth]] = {}
    for berth in known:
        on.setdefault((berth.fabric, berth.leaf), []).append(berth)
    rail = {leaf: device for leaf, there in on.items() if (device := _agreed(there))}
    names = [one.by_guid() for one in given]
    wrong = _wrong_rail(known, on, rail, names)
    strangers = {(one.berth.fabric, one.berth.guid, one.berth.number) for one in wrong}
    wrong += _wrong_group(known, on, rail, names, strangers)
    return Rails(every, rail, tuple(sorted(wrong, key=lambda one: _by_name(one.berth))))


def _by_name(berth: Berth) -> tuple[str, str]:
    return (berth.owner.host, berth.owner.device) if berth.owner else ("", "")


def _agreed(there: list[Berth]) -> str:
    """The device that nearly all adapters of one leaf are, "" when they are too few or mixed by design."""
    devices = Counter(berth.owner.device for berth in there if berth.owner)
    device, count = devices.most_common(1)[0]
    return device if len(there) >= FEWEST and count / len(there) >= SHARE else ""


def _wrong_rail(
    known: list[Berth],
    on: Mapping[tuple[int, int], list[Berth]],
    rail: Mapping[tuple[int, int], str],
    names: Sequence[Mapping[int, Node]],
) -> list[Misplaced]:
    """Adapters on a leaf of another adapter's rail."""
    off = {
        (berth.owner.host, berth.owner.device): berth
        for berth in known
        if berth.owner and rail.get((berth.fabric, berth.leaf), berth.owner.device) != berth.owner.device
    }
    found: list[Misplaced] = []
    for (host, device), berth in off.items():
        belongs = rail[berth.fabric, berth.leaf]
        other = off.get((host, belongs))
        swapped = other if other is not None and rail[other.fabric, other.leaf] == device else None
        where = f"{host} {device} is on the leaf of rail {belongs} ({names[berth.fabric][berth.leaf].label})"
        text = f"{where}: swapped with {belongs}" if swapped else where
        found.append(Misplaced(berth, belongs, swapped, swapped.leaf if swapped else None, text))
    return found


def _wrong_group(
    known: list[Berth],
    on: Mapping[tuple[int, int], list[Berth]],
    rail: Mapping[tuple[int, int], str],
    names: Sequence[Mapping[int, Node]],
    strangers: set[tuple[int, int, int]],
) -> list[Misplaced]:
    """Adapters on the right rail but on the leaf of another group of hosts.

    The leaves of one group go together: each host of the group is on one of each rail. A host whose other
    rails say one group and one rail another is out of place there. That takes at least three rails.
    """
    homes: dict[str, dict[str, Berth]] = {}
    for berth in known:
        if berth.owner is None or (berth.fabric, berth.guid, berth.number) in strangers:
            continue
        if rail.get((berth.fabric, berth.leaf)) == berth.owner.device:
            homes.setdefault(berth.owner.host, {})[berth.owner.device] = berth
    partner: dict[tuple[tuple[int, int], str], Counter[tuple[int, int]]] = {}
    for home in homes.values():
        for berth in home.values():
            for device, other in home.items():
                if other is not berth:
                    leaf = (berth.fabric, berth.leaf)
                    partner.setdefault((leaf, device), Counter())[(other.fabric, other.leaf)] += 1
    suspects: dict[tuple[str, str], tuple[Berth, tuple[int, int]]] = {}
    for host, home in homes.items():
        if len(home) < 3:
            continue
        for device, berth in home.items():
            votes = Counter(
                partner[(other.fabric, other.leaf), device].most_common(1)[0][0]
                for name, other in home.items()
                if name != device
            )
            leaf, count = votes.most_common(1)[0]
            if leaf != (berth.fabric, berth.leaf) and count > (len(home) - 1) / 2:
                suspects[host, device] = (berth, leaf)
    found: list[Misplaced] = []
    for (host, device), (berth, leaf) in suspects.items():
        swapped = next(
            (
                other
                for (_, name), (other, home_leaf) in suspects.items()
                if name == device
                and (other.fabric, other.leaf) == leaf
                and home_leaf == (berth.fabric, berth.leaf)
                and other is not berth
            ),
            None,
        )
        here, there = names[berth.fabric][berth.leaf].label, names[leaf[0]][leaf[1]].label
        text = f"{host} {device} is on {here}, its other adapters' leaves belong to {there}"
        if swapped and swapped.owner:
            text += f": swapped with {swapped.owner.host} {swapped.owner.device}"
        found.append(Misplaced(berth, device, swapped, leaf[1], text))
    return found

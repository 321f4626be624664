"""What a node should have: as an operator confirmed it, else as its peers have it; never by a static list.

Pure. A node sees for itself what is worse than a moment ago, or than its own other ports; only the plane can see that
a node came back from a reboot with seven GPUs, or that all of its ports are slow. What is found is told after it has
lasted a moment, and clears after a clean window. What a node tells of itself is not told a second time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import TypeVar

import attrs
from immutables import Map
from msgspec import structs

from llmgw.plane.event import Event
from llmgw.plane.health import acknowledged, cleared, opened
from llmgw.plane.rooms import labels_of
from llmgw.plane.world import Inventory, Node, OpenProblem, Stage, World
from llmgw.wire.agent import Register
from llmgw.wire.facts import GpuLoad, Grade, NodeId, Port, Problem

#: Seconds that something must be missing before it is told (a driver that is loaded anew lists nothing for a moment),
#: and that it must be there again before it is not told any more.
AFTER, CLEAR = 15.0, 60.0
#: Seconds between two looks at the whole fleet.
EVERY = 5.0
#: Memory differs by some MiB between equal machines; less than this share of what is expected is less.
MEMORY_SHARE = 0.98
#: Among peers, who may differ by what a firmware keeps for itself.
PEERS_SHARE = 0.95

#: The label that says which nodes are alike; without it, nodes with GPUs of the same models are.
ROLE = "role"

Key = tuple[str, str]


@attrs.frozen
class Usual:
    """What most nodes of one sort have; a number without a clear majority is left out."""

    sort: str
    nodes: int
    have: Inventory


def inventory(node: Node) -> Inventory | None:
    """What a node has now; None while that is not known."""
    return None if node.facts is None else counted(node.facts, _nvlinks(node, node.facts))


def counted(facts: Register, nvlinks: dict[str, int]) -> Inventory:
    """A Register's inventory; `nvlinks` come from heartbeats."""
    ports: Counter[str] = Counter()
    up: Counter[str] = Counter()
    slowest: dict[str, float] = {}
    for port in facts.ports:
        if port.role == "vf":
            continue
        name = _group(port)
        ports[name] += 1
        if _active(port):
            up[name] += 1
            if port.rate_gbps is not None:
                slowest[name] = min(port.rate_gbps, slowest.get(name, port.rate_gbps))
    return Inventory(
        gpus=dict(Counter(gpu.name for gpu in facts.gpus)),
        ports=dict(ports),
        ports_up=dict(up),
        slowest=slowest,
        nvlinks=nvlinks,
        memory_bytes=facts.host.memory_bytes,
    )


def in_words(have: Inventory) -> str:
    """What a node has, or should have, as a sentence."""
    parts = [f"{count} {model} GPU{'s' if count != 1 else ''}" for model, count in have.gpus.items()]
    parts += [f"{links} NVLinks up on each {model}" for model, links in have.nvlinks.items()]
    for name, count in have.ports.items():
        rate = f" at {have.slowest[name]:g} Gb/s or more" if name in have.slowest else ""
        up = have.ports_up.get(name, 0)
        parts.append(f"{count} {name} port{'s' if count != 1 else ''}, {up} active{rate}")
    parts += [f"{have.memory_bytes / 2**30:.0f} GiB of memory"] if have.memory_bytes else []
    return ", ".join(parts) or "nothing that can be counted"


def sort_of(node: Node) -> str | None:
    """Which nodes a node is compared with: those of its label `role`, else with GPUs of its models. None: with none."""
    if role := labels_of(node).get(ROLE):
        return f"role {role}"
    models = sorted({gpu.name for gpu in node.facts.gpus}) if node.facts is not None else []
    return f"{' and '.join(models)} nodes" if models else None


def usual(sort: str, peers: Sequence[Inventory]) -> Usual:
    """What more than half of the peers have. Two nodes have no majority to speak of."""
    return Usual(
        sort,
        len(peers),
        Inventory(
            gpus=_most(peer.gpus for peer in peers),
            ports=_most(peer.ports for peer in peers),
            slowest=_most(peer.slowest for peer in peers),
            nvlinks=_most(peer.nvlinks for peer in peers),
            memory_bytes=_memory([peer.memory_bytes for peer in peers if peer.memory_bytes]),
        ),
    )


def problems(node: Node, peers: Sequence[Node], expectation: Inventory | None) -> tuple[Problem, ...]:
    """What this node lacks of what was confirmed; without that, of what most of its peers have, itself among them."""
    have = inventory(node)
    if have is None:
        return ()
    if expectation is not None:
        return missing(node, have, expectation)
    found = [seen for peer in peers if (seen := inventory(peer)) is not None]
    return unlike(node, have, usual(sort_of(node) or "", found))


def missing(node: Node, have: Inventory, confirmed: Inventory) -> tuple[Problem, ...]:
    """What was confirmed and is not there. Missing GPUs are bad, as engines over all of them cannot run."""
    return _compared(node, have, confirmed, _Sort("confirmed", Grade.BAD, Grade.WARN, MEMORY_SHARE))


def unlike(node: Node, have: Inventory, of: Usual) -> tuple[Problem, ...]:
    """What most peers have and this node has not: it may be meant so, and is told and no more."""
    words = f"usual among {of.nodes} {of.sort}" if of.sort.endswith("nodes") else f"usual among {of.nodes} of {of.sort}"
    return _compared(node, have, of.have, _Sort(words, Grade.WARN, Grade.NOTE, PEERS_SHARE))


@attrs.frozen
class _Sort:
    words: str
    gpus: Grade
    others: Grade
    memory: float

    @property
    def remedy(self) -> str:
        return "look at the machine (llmgw ctl doctor NODE); if it is meant so: llmgw ctl node expect NODE"


def _compared(node: Node, have: Inventory, want: Inventory, by: _Sort) -> tuple[Problem, ...]:
    told = list(node.problems)
    found: list[Problem] = []

    def say(code: str, grade: Grade, texts: Iterable[str]) -> None:
        if words := "; ".join(texts):
            found.append(Problem(subject="node", code=code, grade=grade, text=words, remedy=by.remedy))

    driver = any(subject == "node" and code.startswith("driver-") for subject, code in told)
    if not driver and _asked(node):
        say("fewer-gpus", by.gpus, _fewer_gpus(have, want, by.words))
        links = [
            f"{have.nvlinks[model]} NVLinks are up on the best {model}, {count} {by.words}"
            for model, count in want.nvlinks.items()
            if have.nvlinks.get(model, count) < count
        ]
        if not any(code == "nvlink-down" for _, code in told):
            say("fewer-nvlinks", by.others, links)
    gone = Counter(code for _, code in told)["port-missing"]
    say("fewer-ports", Grade.WARN, _fewer_ports(have, want, by.words, gone))
    say("ports-not-up", Grade.WARN, _not_up(node, have, want, by.words))
    say("ports-slower", by.others, _slower(node, want, by.words))
    if want.memory_bytes and have.memory_bytes < by.memory * want.memory_bytes:
        say(
            "less-memory",
            by.others,
            [f"{have.memory_bytes / 2**30:.1f} GiB of memory, {want.memory_bytes / 2**30:.1f} {by.words}"],
        )
    return tuple(found)


def _fewer_gpus(have: Inventory, want: Inventory, words: str) -> Iterator[str]:
    nameless = have.gpus.get("", 0)  # one that cannot be read has no name: it is whatever is missing
    for model, count in want.gpus.items():
        there = have.gpus.get(model, 0)
        taken = min(nameless, max(0, count - there))
        nameless -= taken
        if there + taken < count:
            yield f"{there + taken} {model or 'unnamed'} GPUs, {count} {words}"


def _fewer_ports(have: Inventory, want: Inventory, words: str, gone: int) -> Iterator[str]:
    for name, count in want.ports.items():
        there = have.ports.get(name, 0)
        told = min(gone, max(0, count - there))
        gone -= told
        if there + told < count:
            yield f"{there} {name} ports, {count} {words}"


def _not_up(node: Node, have: Inventory, want: Inventory, words: str) -> Iterator[str]:
    """Ports that are there and down, of which the node makes no more than a note: it never saw them up."""
    assert node.facts is not None
    for name, count in want.ports_up.items():
        down = [port for port in node.facts.ports if _group(port) == name and port.role != "vf" and not _active(port)]
        short = min(count - have.ports_up.get(name, 0), len(down))
        silent = [port for port in down if not _worse_than_note(node, port)]
        if short > 0 and silent and short > len(down) - len(silent):
            names = ", ".join(sorted(port.device for port in silent))
            yield f"{have.ports_up.get(name, 0)} {name} ports are active, {count} {words} (down: {names})"


def _slower(node: Node, want: Inventory, words: str) -> Iterator[str]:
    assert node.facts is not None
    for name, rate in want.slowest.items():
        slow = [
            port
            for port in node.facts.ports
            if _group(port) == name
            and port.role != "vf"
            and _active(port)
            and port.rate_gbps is not None
            and port.rate_gbps < rate
            and (f"port:{port.device}/{port.number}", "port-slow") not in node.problems
        ]
        if slow:
            rates = ", ".join(f"{port.device} {port.rate_gbps:g} Gb/s" for port in slow)
            yield f"{rates}; {rate:g} {words}"


def _worse_than_note(node: Node, port: Port) -> bool:
    subject = f"port:{port.device}/{port.number}"
    return any(
        key[0] == subject and not open_.by_plane and open_.problem.grade in (Grade.WARN, Grade.BAD)
        for key, open_ in node.problems.items()
    )


def _asked(node: Node) -> bool:
    """Whether the driver has answered at all, or was found to be absent: before that no GPUs are no news."""
    return node.facts is not None and bool(
        node.facts.gpus or node.facts.gpu_driver.version or node.facts.gpu_driver.absent
    )


def _nvlinks(node: Node, facts: Register) -> dict[str, int]:
    best: dict[str, int] = {}
    for gpu in facts.gpus:
        load = node.gpu_loads.get(gpu.uuid)
        if load is not None and load.nvlinks_up is not None and not gpu.unreadable:
            best[gpu.name] = max(load.nvlinks_up, best.get(gpu.name, 0))
    return {model: links for model, links in best.items() if links}


def _group(port: Port) -> str:
    return f"{port.role} {port.kind}"


def _active(port: Port) -> bool:
    return port.state.rpartition(":")[2].strip().upper().startswith("ACTIVE")


N = TypeVar("N", int, float)


def _most(peers: Iterable[Mapping[str, N]]) -> dict[str, N]:
    everyone = list(peers)
    values: dict[str, Counter[N]] = defaultdict(Counter)
    for peer in everyone:
        for name, value in peer.items():
            values[name][value] += 1
    found: dict[str, N] = {}
    for name, counts in values.items():
        value, count = max(counts.items(), key=lambda item: (item[1], item[0]))
        if count >= 2 and 2 * count > len(everyone):
            found[name] = value
    return found


def _memory(sizes: list[int]) -> int:
    """The middle of the peers' memory, where more than half are near it; else 0."""
    if not sizes:
        return 0
    middle = int(median(sizes))
    near = sum(abs(size - middle) <= (1 - PEERS_SHARE) * middle for size in sizes)
    return middle if near >= 2 and 2 * near > len(sizes) else 0


# --- over time -------------------------------------------------------------------------------------------


def settled(node: Node, found: Iterable[Problem], now: float, clock: float) -> tuple[Node, list[Event]]:
    """The node with what was found added to its problems, each once it has lasted, and what is gone cleared."""
    here: dict[Key, Problem] = {(each.subject, each.code): each for each in found}
    if not here and not node.suspects and not any(open_.by_plane for open_ in node.problems.values()):
        return node, []
    events: list[Event] = []
    problems_now, suspects = node.problems, {}
    for key, problem in here.items():
        open_ = problems_now.get(key)
        if open_ is not None:
            until = acknowledged(node, key, now)
            fresh = attrs.evolve(open_, problem=problem, last_at=now, acknowledged_until=until, gone_at=None)
            problems_now = problems_now.set(key, fresh)
            continue
        since = node.suspects.get(key, now)
        if now - since < AFTER:
            suspects[key] = since
            continue
        fresh = OpenProblem(problem, since, now, clock - (now - since), acknowledged(node, key, now), True)
        problems_now = problems_now.set(key, fresh)
        events.append(opened(node, problem, clock))
    for key, open_ in node.problems.items():
        if open_.by_plane and key not in here:
            if open_.gone_at is None:
                problems_now = problems_now.set(key, attrs.evolve(open_, gone_at=now))
            elif now - open_.gone_at >= CLEAR:
                problems_now = problems_now.delete(key)
                events.append(cleared(node, open_, now, clock))
    return attrs.evolve(node, problems=problems_now, suspects=Map(suspects)), events


@attrs.define
class _Seen:
    """A node as it was looked at last, and what came of it; nothing is done again while nothing of it has changed."""

    facts: Register
    labels: Map[str, str]
    sort: str | None
    have: Inventory
    loads: Map[str, GpuLoad]
    problems: object = None
    by: object = None
    found: tuple[Problem, ...] = ()


@attrs.define
class Expectations:
    """The fleet against what is expected of it. What has not changed since the last look costs next to nothing."""

    _seen: dict[NodeId, _Seen] = attrs.field(factory=dict)
    _usual: dict[str, tuple[dict[NodeId, Inventory], Usual]] = attrs.field(factory=dict)

    def judge(self, world: World, now: float, clock: float) -> tuple[World, tuple[Event, ...]]:
        """Every node that is there, against what is expected of it. One that is silent is not judged by old facts."""
        here: dict[NodeId, _Seen] = {}
        sorts: dict[str, dict[NodeId, Inventory]] = defaultdict(dict)
        for id, node in world.nodes.items():
            if node.stage is not Stage.READY or node.facts is None or not node.connected:
                continue
            seen = here[id] = self._look(node, node.facts)
            if seen.sort is not None:
                sorts[seen.sort][id] = seen.have
        self._seen = here
        self._usual = {name: (peers, self._most(name, peers)) for name, peers in sorts.items()}
        nodes, events = world.nodes, list[Event]()
        for id, seen in here.items():
            node = nodes[id]
            by: Inventory | Usual | None = node.expected
            if by is None and seen.sort is not None:
                by = self._usual[seen.sort][1]
            if seen.problems is not node.problems or seen.by is not by:
                seen.problems, seen.by = node.problems, by
                seen.found = _against(node, seen.have, by)
            if not seen.found and not node.suspects and not node.problems:
                continue
            after, more = settled(node, seen.found, now, clock)
            if after is not node:
                nodes = nodes.set(id, after)
                events += more
        if nodes is world.nodes:
            return world, ()
        return attrs.evolve(world, nodes=nodes, version=world.version + bool(events)), tuple(events)

    def _look(self, node: Node, facts: Register) -> _Seen:
        seen = self._seen.get(node.id)
        if seen is not None and seen.facts is facts and seen.labels is node.labels:
            if seen.loads is not node.gpu_loads:
                seen.loads = node.gpu_loads
                if (links := _nvlinks(node, facts)) != seen.have.nvlinks:
                    seen.have, seen.by = structs.replace(seen.have, nvlinks=links), None
            return seen
        have = counted(facts, _nvlinks(node, facts))
        if seen is not None and seen.have == have:
            have = seen.have
        return _Seen(facts, node.labels, sort_of(node), have, node.gpu_loads)

    def _most(self, sort: str, peers: dict[NodeId, Inventory]) -> Usual:
        """What is usual among peers: the very same object while they are what they were."""
        kept = self._usual.get(sort)
        if kept is None:
            return usual(sort, list(peers.values()))
        if kept[0].keys() == peers.keys() and all(kept[0][id] is have for id, have in peers.items()):
            return kept[1]
        fresh = usual(sort, list(peers.values()))
        return kept[1] if fresh == kept[1] else fresh


def _against(node: Node, have: Inventory, by: Inventory | Usual | None) -> tuple[Problem, ...]:
    match by:
        case Inventory():
            return missing(node, have, by)
        case Usual():
            return unlike(node, have, by)
    return ()

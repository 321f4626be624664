"""A fabric as a drawing: leaves with their hosts below, the switches that join them above, faults in colour.

Hosts are drawn by leaf, as small squares that each link to their cable; with few there is room for names, and with
very many only those that need looking at are drawn one by one. Cables between switches are drawn pair by pair, up to a
number that still can be told apart; a cable with a fault always is. Pure: a map in, a text out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

import attrs
import msgspec

from llmgw.plane.fabrics.verdict import Fault, owners_of
from llmgw.rdma import fabric, leaves
from llmgw.rdma.fabric import Link, Map, Node, place
from llmgw.rdma.leaves import Owner
from llmgw.rdma.tiers import tiers

WIDTH = 1180
#: Up to so many adapters have their names written, and up to so many are drawn one by one.
NAMED, DRAWN = 40, 4096
#: Up to so many pairs of switches have their cables drawn, and up to so many of a tier have boxes of their own.
PAIRS, BOXED = 600, 32
GAP, ROW = 10, 46
SQUARE, STEP, CHIP = 9, 12, 16

_COLOUR = {"bad": "#c62828", "warn": "#ef8f00", "good": "#4f7f52", "unknown": "#8a8a8a"}
_INK, _QUIET = "#1b2733", "#51606e"
_MODEL = re.compile(r"^MF0;(?P<name>[^:]+)(?::[^/]+(?:/U1)?(?P<part>/.*)?)?$")
_DIGITS = re.compile(r"(\d+)")


@attrs.frozen
class Box:
    """Where a switch is drawn."""

    node: Node
    x: float
    y: float
    width: float
    height: float
    name: str = ""
    chip: bool = False  # one of many in a band: a square without words

    @property
    def top(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y

    @property
    def bottom(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height


def drawn(packed: bytes, names: bytes, faults: bytes) -> bytes:
    """The drawing of a packed map, for `aside`."""
    owners = owners_of(msgspec.msgpack.decode(names, type=tuple[bytes, ...]))
    return draw(fabric.unpack(packed), msgspec.msgpack.decode(faults, type=tuple[Fault, ...]), owners).encode()


def draw(found: Map, faults: Sequence[Fault] = (), owners: Mapping[int, Owner] | None = None) -> str:
    """The SVG of a map."""
    return _Drawing(found, faults, owners or {}).svg()


class _Drawing:
    def __init__(self, found: Map, faults: Sequence[Fault], owners: Mapping[int, Owner]) -> None:
        self.map, self.nodes, self.owners = found, found.by_guid(), owners
        self.near = fabric.neighbours(found.links)
        self.tier = tiers(found)
        self.rails = leaves.rails([found], owners).rails
        self.faults: dict[tuple[int, int], Fault] = {}
        for fault in sorted(faults, key=lambda fault: fault.grade != "warn"):
            self.faults.update(dict.fromkeys(fault.ports, fault))
        self.adapters = len(found.hosts)
        self.out: list[str] = []
        self.boxes: dict[int, Box] = {}

    def svg(self) -> str:
        y = float(GAP) + 22
        rows: list[list[Box]] = []
        for level in sorted(set(self.tier.values()), reverse=True):
            here = sorted((node for node in self.map.switches if self.tier[node.guid] == level), key=_by_name)
            if level > 1 and len(here) > BOXED:
                boxes, y = self.band(here, y, level)
            else:
                boxes, y = self.placed(here, y, leaf=level == 1)
            rows.append(boxes)
            y += 70 if level > 1 and len(here) <= BOXED else 30 if level > 1 else 0
        self.wires()
        for boxes in rows:
            for box in boxes:
                self.switch(box)
        for node in self.map.hosts if not self.map.switches else ():
            self.text(GAP, y + 14, node.label)
            y += 18
        if not self.map.complete and self.map.holes:
            words = f"partial map: {'; '.join(self.map.holes[:2])}"
            self.text(GAP, y + 18, words[:150] + ("…" if len(words) > 150 else ""), "partial", _COLOUR["warn"])
            y += 24
        self.legend()
        height = max(y + GAP, 60)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="fabric" viewBox="0 0 {WIDTH} {height:.0f}" '
            f'font-family="system-ui, sans-serif" font-size="12" role="img" aria-label="{escape(self.summary())}">'
        )
        return "\n".join([head, f"<title>{escape(self.summary())}</title>", *self.out, "</svg>"])

    def legend(self) -> None:
        x = float(GAP)
        for grade, words in (
            ("good", "as it should be"),
            ("warn", "look at it"),
            ("bad", "faulty"),
            ("unknown", "rate unknown"),
        ):
            self.out.append(f'<rect x="{x}" y="8" width="9" height="9" rx="2" fill="{_COLOUR[grade]}"/>')
            self.text(x + 14, 17, words, "legend", _QUIET)
            x += 34 + 6.6 * len(words)

    def band(self, here: Sequence[Node], y: float, level: int) -> tuple[list[Box], float]:
        """A tier of very many switches: a line of words, then a square for each."""
        self.text(GAP, y + 12, f"tier {level}: {len(here)} switches, {_range(here)}", "tier", bold=True)
        y += 22
        each = int((WIDTH - 2 * GAP) // (CHIP + 3))
        boxes = [
            Box(node, GAP + at % each * (CHIP + 3), y + at // each * (CHIP + 3), CHIP, CHIP, chip=True)
            for at, node in enumerate(here)
        ]
        self.boxes.update((box.node.guid, box) for box in boxes)
        return boxes, y + -(-len(here) // each) * (CHIP + 3)

    def summary(self) -> str:
        return (
            f"{len(self.map.switches)} switches, {self.adapters} adapters, {len(self.map.links)} links, "
            f"{len({id(fault) for fault in self.faults.values()})} faults"
        )

    def placed(self, here: Sequence[Node], y: float, *, leaf: bool) -> tuple[list[Box], float]:
        """Boxes in rows from `y` on, and where the next thing can be drawn."""
        if not here:
            return [], y
        columns = min(len(here), 16 if len(here) > 96 else 12)
        columns = min(columns, self._even(len(here), columns))
        width = min(170.0, (WIDTH - GAP * (columns + 1)) / columns)
        names = _told_apart([short(node) for node in here], int((width - 8) / (7.6 if width > 80 else 6.8)))
        boxes: list[Box] = []
        for start in range(0, len(here), columns):
            row = here[start : start + columns]
            left = (WIDTH - len(row) * (width + GAP) + GAP) / 2
            heights = [self.height(node, width) if leaf else float(ROW) for node in row]
            for at, node in enumerate(row):
                box = Box(node, left + at * (width + GAP), y, width, heights[at], names[start + at])
                boxes.append(box)
                self.boxes[node.guid] = box
            y += max(heights) + GAP
        return boxes, y

    def _even(self, count: int, columns: int) -> int:
        """Columns that leave no ragged last row where a few fewer do."""
        return next((fewer for fewer in range(columns, max(columns - 6, 1), -1) if count % fewer == 0), columns)

    def hosts_of(self, node: Node) -> list[tuple[Node, int, Link]]:
        """The adapters on a leaf, by its port: (adapter, its port's number, the cable)."""
        found = []
        for link in self.near.get(node.guid, ()):
            mine, (there, port) = (link.ends[0], link.ends[1]) if link.a == node.guid else (link.ends[1], link.ends[0])
            other = self.nodes.get(there)
            if other is not None and other.kind == "host":
                found.append((mine[1], other, port, link))
        return [(other, port, link) for _, other, port, link in sorted(found, key=lambda one: one[0])]

    def height(self, node: Node, width: float) -> float:
        count = len(self.hosts_of(node))
        if self.adapters <= NAMED:
            return ROW + 16 * count + 2
        shown = (
            count if self.adapters <= DRAWN else sum(self.fault(link) is not None for *_, link in self.hosts_of(node))
        )
        each = max(1, int((width - 8) // STEP))
        return ROW + STEP * -(-shown // each) + 2

    def fault(self, link: Link) -> Fault | None:
        return next((self.faults[end] for end in link.ends if end in self.faults), None)

    def wires(self) -> None:
        """Cables between switches, those with a fault last so that they lie on top."""
        pairs: dict[tuple[int, int], list[Link]] = {}
        for link in self.map.links:
            if link.a in self.boxes and link.b in self.boxes:
                low, high = sorted((link.a, link.b), key=lambda guid: (self.tier[guid], guid))
                pairs.setdefault((low, high), []).append(link)
        many = len(pairs) > PAIRS
        if many:
            words = f"{sum(map(len, pairs.values()))} cables between switches: only those with a fault are drawn"
            self.text(WIDTH - GAP, 17, words, "note", _QUIET, "end")
        healthy = [(pair, links) for pair, links in pairs.items() if not any(map(self.fault, links))]
        faulty = [(pair, links) for pair, links in pairs.items() if any(map(self.fault, links))]
        for (low, high), links in ([] if many else healthy) + faulty:
            fault = next((found for link in links if (found := self.fault(link))), None)
            link = next((link for link in links if self.fault(link)), links[0])
            (x1, y1), (x2, y2) = self.boxes[low].top, self.boxes[high].bottom
            if self.tier[low] == self.tier[high]:
                y2 = self.boxes[high].y
            colour = _COLOUR[fault.grade] if fault else "#8aa0b4"
            shape = (
                f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
                f'stroke-width="{2.5 if fault else min(0.6 + 0.3 * len(links), 2)}" '
                f'stroke-opacity="{1 if fault else 0.35}"/>'
            )
            words = f"{len(links)} × " if len(links) > 1 else ""
            words += " - ".join(place(self.nodes[guid], port) for guid, port in link.ends) + f" {link.pace}"
            self.linked(link.ends[0], shape, f"{words}\n{fault.text}" if fault else words, fault)

    def switch(self, box: Box) -> None:
        node = box.node
        mine = [fault for end, fault in self.faults.items() if end[0] == node.guid]
        grade = "bad" if any(one.grade == "bad" for one in mine) else "warn" if mine else ""
        hosts = self.hosts_of(node)
        cables = len(self.near.get(node.guid, ()))
        rail = self.rails.get((0, node.guid), "")
        title = "\n".join((f"{node.label}: {len(hosts)} adapters, {cables} cables, {node.ports} ports",
                           *{one.text for one in mine}))  # fmt: skip
        fill = _COLOUR[grade] if grade and box.chip else "#f4f6f8"
        self.out.append(
            f'<g class="switch {grade}"><title>{escape(title)}</title><rect x="{box.x:.1f}" y="{box.y:.1f}" '
            f'width="{box.width:.1f}" height="{box.height:.1f}" rx="4" fill="{fill}" '
            f'stroke="{_COLOUR.get(grade, "#5b6b7a")}" stroke-width="{2 if grade else 1}"/></g>'
        )
        if box.chip:
            return
        self.text(box.x + 5, box.y + 17, box.name, "name", bold=True, size=12 if box.width > 80 else 11)
        below = f"{cables} links"
        if hosts:
            many = f"{len(hosts)} host{'s' if len(hosts) != 1 else ''}"
            fits = int((box.width - 8) / 6.4)
            below = next(
                (words for words in (f"{many} · {rail}", f"{len(hosts)} · {rail}") if len(words) <= fits), many
            )
            below = below if rail else many
        self.text(box.x + 5, box.y + 33, below, "rail", _QUIET)
        self.hosts(box, hosts)

    def hosts(self, box: Box, hosts: Sequence[tuple[Node, int, Link]]) -> None:
        each = max(1, int((box.width - 8) // STEP))
        shown = 0
        for node, port, link in hosts:
            fault = self.fault(link)
            if self.adapters > DRAWN and fault is None:
                continue
            words = f"{self.who(node, port)} {link.pace}" + (f"\n{fault.text}" if fault else "")
            colour = _COLOUR[fault.grade if fault else "good" if link.rate is not None else "unknown"]
            if self.adapters <= NAMED:
                y = box.y + ROW + 16 * shown
                mark = f'<rect x="{box.x + 6:.1f}" y="{y:.1f}" width="9" height="9" rx="2" fill="{colour}"/>'
                label = escape(_cut(self.who(node, port), int((box.width - 26) / 6.2)))
                ink = colour if fault else _INK
                text = f'<text x="{box.x + 20:.1f}" y="{y + 9:.1f}" fill="{ink}" font-size="11">{label}</text>'
                self.linked((node.guid, port), mark + text, words, fault)
            else:
                x, y = box.x + 6 + STEP * (shown % each), box.y + ROW - 4 + STEP * (shown // each)
                mark = f'<rect x="{x:.1f}" y="{y:.1f}" width="{SQUARE}" height="{SQUARE}" rx="2" fill="{colour}"/>'
                self.linked((node.guid, port), mark, words, fault)
            shown += 1

    def who(self, node: Node, port: int) -> str:
        guid = next((end.guid for end in node.ends if end.number == port), 0)
        owner = self.owners.get(guid)
        return f"{owner.host} {owner.device}" if owner else node.label

    def linked(self, end: tuple[int, int], shape: str, words: str, fault: Fault | None) -> None:
        """A shape that leads to its cable's numbers and history."""
        kind = f"cable {fault.grade}" if fault else "cable"
        self.out.append(f'<a class="{kind}" href="#{end[0]:016x}/{end[1]}"><title>{escape(words)}</title>{shape}</a>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        kind: str = "",
        colour: str = "#1b2733",
        anchor: str = "start",
        *,
        bold: bool = False,
        size: int = 12,
    ) -> None:
        weight = (' font-weight="600"' if bold else "") + (f' font-size="{size}"' if size != 12 else "")
        self.out.append(
            f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}"{weight}>'
            f"{escape(words)}</text>"
        )


def short(node: Node) -> str:
    """A switch's name without what its maker adds: "leaf-3" of "MF0;leaf-3:MQM9700/U1", "x/U2" of its second chip."""
    found = _MODEL.match(node.name)
    return f"{found['name']}{found['part'] or ''}" if found else node.label


def _cut(text: str, width: int) -> str:
    """As much as fits; of two parts of a name the end says more, so the middle goes."""
    if len(text) <= width or width < 5:
        return text[:width] if width < 5 else text
    keep = width - 1
    return f"{text[: keep // 2]}…{text[-(keep - keep // 2) :]}"


def _told_apart(names: Sequence[str], width: int) -> list[str]:
    """Names that fit: what all have in common at the beginning goes first, then the middle."""
    if all(len(name) <= width for name in names):
        return list(names)
    first, last = min(names), max(names)
    common = first[: next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)]
    cut = max(common.rfind("-"), common.rfind("_"), common.rfind(".")) + 1
    return [_cut(name[cut:], width) for name in names]


def _range(here: Sequence[Node]) -> str:
    return f"{short(here[0])} to {short(here[-1])}"


def _by_name(node: Node) -> tuple[list[tuple[int, str]], int]:
    """Names in the order of their numbers: leaf-9 before leaf-10."""
    parts = [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(node.name) if part]
    return parts, node.guid

"""The drawing of a fabric: whole, readable at every size, and never more than words where a name is."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmgw.plane.admin.fabricsvg import WIDTH, draw, short
from llmgw.plane.fabrics.verdict import Fault
from llmgw.rdma.fabric import Link, Map, Node
from tests.rdma import captures
from tests.rdma.trees import guid_of, link, tree
from tests.rigs.ib.net import host_guid

SVG = "{http://www.w3.org/2000/svg}"


def parsed(one: Map, *faults: Fault) -> ElementTree.Element:
    return ElementTree.fromstring(draw(one, faults))


def of(root: ElementTree.Element, tag: str, kind: str = "") -> list[ElementTree.Element]:
    return [each for each in root.iter(f"{SVG}{tag}") if not kind or kind in each.get("class", "").split()]


@pytest.mark.parametrize(
    ("hosts", "rails", "radix"), [(4, 1, 8), (16, 2, 8), (128, 2, 16), (128, 8, 32), (1024, 1, 64)]
)
def test_every_switch_and_every_host_is_drawn_from_4_to_1024_hosts(hosts: int, rails: int, radix: int) -> None:
    one = tree(hosts, rails, radix)
    root = parsed(one)
    assert len(of(root, "g", "switch")) == len(one.switches)
    ends = {each.get("href", "") for each in of(root, "a", "cable")}
    assert {f"#{node.guid:016x}/1" for node in one.hosts} <= ends


@pytest.mark.parametrize("name", ["big/h1024plane0.ibnetdiscover", "big/h1024x8.ibnetdiscover", "odd/ibnetdiscover"])
def test_nothing_is_drawn_outside_and_no_two_boxes_overlap(name: str) -> None:
    root = parsed(captures.fabric(name))
    height = float(root.get("viewBox", "").split()[3])
    boxes = []
    for group in of(root, "g", "switch"):
        rect = group.find(f"{SVG}rect")
        assert rect is not None
        x, y, width, tall = (float(rect.get(key, "")) for key in ("x", "y", "width", "height"))
        assert x >= 0
        assert x + width <= WIDTH
        assert y + tall <= height
        boxes.append((x, y, x + width, y + tall))
    boxes.sort(key=lambda box: (box[1], box[0]))
    for one, other in pairwise(boxes):
        assert other[1] >= one[3] or other[0] >= one[2] or other[3] <= one[1], (one, other)


def test_1024_hosts_with_8_rails_stay_a_drawing_and_do_not_become_a_wall() -> None:
    text = draw(captures.fabric("big/h1024x8.ibnetdiscover"))
    assert float(re.search(r'viewBox="0 0 \d+ (\d+)', text)[1]) < 2000  # type: ignore[index]
    assert len(text) < 1_000_000


def test_faults_are_in_colour_and_say_what_they_are() -> None:
    one = tree(16, 2, 8)
    host, wire = link(one, host_guid(3, 0), 1), link(one, guid_of(one, "MF0;leaf-su000-r0"), 5)
    root = parsed(
        one,
        Fault(kind="link-slow", key="a", text="runs at 1xHDR", grade="bad", ports=host.ends),
        Fault(kind="link-errors", key="b", text="errors grow", grade="warn", ports=wire.ends),
    )
    (bad,) = of(root, "a", "bad")
    assert bad.get("href") == f"#{host_guid(3, 0):016x}/1"
    assert "runs at 1xHDR" in (bad.findtext(f"{SVG}title") or "")
    (warn,) = of(root, "a", "warn")
    assert warn.find(f"{SVG}line") is not None


def test_with_too_many_cables_between_switches_those_with_a_fault_are_still_drawn() -> None:
    one = captures.fabric("big/h1024x8.ibnetdiscover")
    nodes = one.by_guid()
    wire = next(each for each in one.links if nodes[each.a].switch and nodes[each.b].switch)
    assert of(parsed(one), "line") == []
    fault = Fault(kind="link-slow", key="a", text="slow", grade="bad", ports=wire.ends)
    assert len(of(parsed(one, fault), "line")) == 1


def test_a_partial_map_says_so() -> None:
    words = " ".join(each.text or "" for each in of(parsed(captures.fabric("spine0-silent/ibnetdiscover")), "text"))
    assert "partial map: no answer behind port 5" in words


def test_switches_are_called_by_what_tells_them_apart() -> None:
    assert short(Node(1, "switch", 65, "MF0;leaf-3:MQM9700/U1")) == "leaf-3"
    assert short(Node(1, "switch", 65, "MF0;leaf-3:Q3400/U2")) == "leaf-3/U2"
    assert short(Node(1, "switch", 65, "")) == "unnamed 0x0000000000000001"


names = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), max_size=64)


@given(st.lists(names, min_size=1, max_size=12), st.booleans())
@example(["leaf-²"], False)
def test_any_names_make_well_formed_svg_with_nothing_but_known_shapes(labels: list[str], cabled: bool) -> None:
    switch = Node(1, "switch", 65, labels[0])
    hosts = tuple(Node(10 + at, "host", 1, label) for at, label in enumerate(labels))
    links = tuple(Link(1, at + 1, 10 + at, 1, 4, "HDR") for at in range(len(hosts))) if cabled else ()
    root = parsed(replace(Map(), nodes=(switch, *hosts), links=links, complete=True))
    assert {each.tag.removeprefix(SVG) for each in root.iter()} <= {"svg", "g", "a", "title", "rect", "line", "text"}

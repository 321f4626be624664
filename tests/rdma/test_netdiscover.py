"""`ibnetdiscover` line for line: every recording, the old forms, and any text at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.rdma import fabric
from llmgw.rdma.fabric import Map
from llmgw.rdma.netdiscover import parse, scan
from llmgw.rdma.ran import Ran, Trouble, trouble
from tests.rdma import captures

MAPS = [
    name
    for name in captures.every("*ibnetdiscover*")
    if not name.endswith((".err", ".rc"))
    and not any(form in name for form in ("-p.out", "-l.out", "-R.out"))
    and not name.startswith("no-umad")
]


def text_of(*records: str) -> str:
    head = "#\n# Topology file: generated on Mon Nov 30 08:06:53 2026\n#\n"
    return head + "# Initiated from node 1 port 2\n\n" + "\n\n".join(records) + "\n"


def one_map(text: str, err: str = "", exit_: int | None = 0) -> Map:
    found = scan(Ran("ibnetdiscover", exit_, text, err))
    assert isinstance(found, Map)
    return found


@pytest.mark.parametrize("name", MAPS)
def test_every_line_of_every_recorded_map_is_understood(name: str) -> None:
    topology = parse(captures.text(name).splitlines())
    assert topology.strange_count == 0, topology.strange
    assert topology.nodes
    assert topology.origin in topology.nodes


def test_all_forms_of_one_fabric_give_one_map() -> None:
    plain = captures.fabric("healthy/ibnetdiscover")
    for form in ("-f", "-g", "-m"):
        assert captures.fabric(f"healthy/ibnetdiscover{form}") == plain


def test_a_fabric_looks_the_same_from_every_port() -> None:
    here, there = captures.fabric("healthy/ibnetdiscover"), captures.fabric("healthy-from-other-rail/ibnetdiscover")
    assert (here.nodes, here.links) == (there.nodes, there.links)
    assert here.origin_port != there.origin_port


def test_the_fabric_of_16_adapters_has_its_switches_hosts_and_cables() -> None:
    found = captures.fabric("healthy/ibnetdiscover")
    assert found.complete
    assert len(found.hosts) == 16
    assert len(found.switches) == 6
    assert len([node for node in found.nodes if node.kind == "aggregation"]) == 6
    assert len(found.links) == 16 + 16 + 6
    host = found.by_guid()[0x946DAE0300005000]
    assert host.host_and_device == ("gpu-00005", "mlx5_0")
    assert host.ends[0].guid == 0x946DAE0300005001
    assert host.ends[0].lid == 17


@pytest.mark.parametrize(
    ("name", "hosts", "switches", "links"),
    [
        ("big/h10240plane0.ibnetdiscover", 10240, 800, 30080),
        ("big/h1024plane0.ibnetdiscover", 1024, 48, 2048),
        ("big/h1024x8.ibnetdiscover", 8192, 640, 24576),
        ("big/h128x8.ibnetdiscover", 1024, 48, 2048),
    ],
)
def test_large_fabrics_are_whole(name: str, hosts: int, switches: int, links: int) -> None:
    found = captures.fabric(name)
    assert (len(found.hosts), len(found.switches), len(found.links), found.complete) == (hosts, switches, links, True)


def test_a_map_without_a_subnet_manager_is_complete_and_has_no_lids() -> None:
    found = captures.fabric("no-sm/ibnetdiscover")
    assert found.complete
    assert {end.lid for node in found.nodes for end in node.ends} == {0}


def test_a_port_that_is_down_makes_a_partial_map() -> None:
    found = captures.fabric("own-port-down/ibnetdiscover")
    assert not found.complete
    assert found.holes == ("the port that looked (gpu-00005 mlx5_0) is not linked",)


def test_a_silent_switch_makes_a_partial_map_that_says_behind_which_ports_it_is() -> None:
    found = captures.fabric("spine0-silent/ibnetdiscover")
    assert not found.complete
    assert "no answer behind port 5 of MF0;leaf-su001-r0:MQM9700/U1" in found.holes
    assert len(found.holes) == 8


def test_a_lossy_switch_makes_a_partial_map_in_which_the_better_end_of_a_link_counts() -> None:
    found = captures.fabric("spine0-lossy30/ibnetdiscover")
    assert not found.complete
    spine = 0xB0CF0E0020000000
    paces = {link.pace for link in found.links if spine in (link.a, link.b)}
    assert paces == {"4xHDR"}, "the spine's own ends said ????? and the leaves' 4xHDR"
    assert found.by_guid()[spine].label == "unnamed 0xb0cf0e0020000000"


def test_no_umad_device_is_a_trouble_and_no_map() -> None:
    found = scan(captures.ran("no-umad/ibnetdiscover"))
    assert isinstance(found, Trouble)
    assert found.code == "no-umad"


def test_odd_names_routers_and_adapters_of_two_ports_are_read() -> None:
    found = captures.fabric("odd/ibnetdiscover")
    names = {node.name: node for node in found.nodes}
    assert names["it's; odd # [sw]:(1)/U1"].switch
    assert names["MF0;rtr:SB7780/R1"].kind == "router"
    assert {link.pace for link in found.links} == {"4xHDR", "2xHDR", "1xQDR", "4xEDR", "4xQDR"}
    double = found.by_guid()[0x946DAE0000000300]
    assert [end.number for end in double.ends] == [1, 2]
    assert double.host_and_device is None, "localhost is what many are called"


def test_names_with_quotes_brackets_and_everything_else_are_taken_whole() -> None:
    name = 'a "b" # [1](2) lid 3 "S-01"[2] " base port 0 lid 9 lmc 0'
    switch = f'switchguid=0xa(a)\nSwitch\t3 "S-000000000000000a"\t\t# "{name}" base port 0 lid 2 lmc 0'
    port = '[1]\t"H-0000000000000001"[1](2) \t\t# "h " lid 7" mlx5_0" lid 7 4xNDR'
    adapter = (
        'vendid=0x2c9\ndevid=0x1021\ncaguid=0x1\nCa\t1 "H-0000000000000001"\t\t# "h " lid 7" mlx5_0"\n'
        f'[1](2) \t"S-000000000000000a"[1]\t\t# lid 7 lmc 0 "{name}" lid 2 4xNDR'
    )
    found = one_map(text_of(f"{switch}\n{port}", adapter))
    assert found.complete
    assert [node.name for node in found.nodes] == ['h " lid 7" mlx5_0', name]
    assert found.links[0].pace == "4xNDR"


def test_a_speed_that_an_old_tool_does_not_know_is_unknown_and_not_slow() -> None:
    text = text_of(
        'switchguid=0xa(a)\nSwitch\t3 "S-000000000000000a"\t\t# "s" enhanced port 0 lid 2 lmc 0\n'
        '[1]\t"H-0000000000000001"[1](2) \t\t# "h mlx5_0" lid 7 4x???\n'
        '[2]\t"S-000000000000000b"[1]\t\t# "t" lid 3 ?????',
        'caguid=0x1\nCa\t1 "H-0000000000000001"\t\t# "h mlx5_0"',
        'switchguid=0xb(b)\nSwitch\t3 "S-000000000000000b"\t\t# "t" enhanced port 0 lid 3 lmc 0',
    )
    found = one_map(text)
    assert [(link.pace, link.rate) for link in found.links] == [("4x???", None), ("?x???", None)]
    assert found.complete


def test_the_forms_of_old_tools_and_copies_without_tabs_are_read() -> None:
    """TO03, TO05: blanks for tabs, `base port 0`, ` s=4 w=2 v=4 e=4`, the peer after `# lid N lmc N`."""
    old = text_of(
        "vendid=0x2c9\nsysimgguid=0xa0\nswitchguid=0xa(a)\n"
        'Switch 41 "S-000000000000000a"         # "MF0;x:MCS8500/L01/U1" base port 0 lid 226 lmc 0\n'
        '[21]    "S-000000000000000b"[1]         # "MF0;x:MCS8500/S01/U1" lid 387 4xHDR s=4 w=2 v=4 e=4\n'
        '[2][ext 7]    "H-0000000000000001"[1](2)                # "n ib0" lid 1181 4xHDR s=4 w=2 v=4 e=4',
        'switchguid=0xb(b)\nSwitch 24 "S-000000000000000b" # "MF0;x:MCS8500/S01/U1" port 0 lid 387',
        'caguid=0x1\nHca     1 "H-0000000000000001"          # "n ib0"\n'
        '[1]    "S-000000000000000a"[2]         # lid 1181 lmc 0 "MF0;x:MCS8500/L01/U1" lid 226 4xHDR s=4 w=2 v=3 e=4',
        'caguid=0x3\nHca     2 "H-0000000000000003"',
    )
    topology = parse(old.splitlines())
    assert topology.strange == ()
    assert sorted(node.kind for node in topology.nodes.values()) == ["host", "host", "switch", "switch"]
    assert len(topology.links) == 2


def test_aggregation_nodes_routers_and_ufm_are_no_hosts() -> None:
    """TO01, and the appliances that public maps show."""
    names = {
        "B11-P1-CUFM-02 mlx5_0": "ufm",
        "ufm-host01 mlx5_1": "ufm",
        "uforms mlx5_0": "host",
        "node-1 mlx5_0": "host",
    }
    assert {name: fabric.kind_of("H", 0x1021, name) for name in names} == names
    assert fabric.kind_of("H", 0xCF09, "") == "aggregation"
    assert fabric.kind_of("H", 0, "Mellanox Technologies Aggregation Node") == "aggregation"
    assert fabric.kind_of("R", 0xCF09, "x") == "router"


def test_two_hosts_back_to_back_are_a_complete_map() -> None:
    text = text_of(
        'caguid=0x1\nCa\t1 "H-0000000000000001"\t\t# "a mlx5_0"\n'
        '[1](2) \t"H-0000000000000003"[1] (4) \t\t# lid 0 lmc 0 "b mlx5_0" lid 0 4xHDR',
        'caguid=0x3\nCa\t1 "H-0000000000000003"\t\t# "b mlx5_0"\n'
        '[1](4) \t"H-0000000000000001"[1] (2) \t\t# lid 0 lmc 0 "a mlx5_0" lid 0 4xHDR',
    )
    found = one_map(text)
    assert found.complete
    assert found.port_guids() == {2, 4}


def test_a_scan_that_its_limit_ended_keeps_what_it_saw_as_a_partial_map() -> None:
    whole = captures.text("healthy/ibnetdiscover.out")
    found = scan(Ran("ibnetdiscover", -9, whole[: len(whole) // 2], "", 110.0, timed_out=True))
    assert isinstance(found, Map)
    assert not found.complete
    assert "did not end within 110 s" in found.holes[0]


def test_lines_of_no_known_form_make_the_map_partial_and_are_named() -> None:
    found = one_map(captures.text("healthy/ibnetdiscover.out") + "[3]\tsomething new\n")
    assert not found.complete
    assert any("something new" in hole for hole in found.holes)


fragments = st.sampled_from(
    [*captures.text("odd/ibnetdiscover.out").splitlines(), "", "#", "[1]", 'Ca\t1 "H-', '" lid ']
)
scraps = st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=60)


@given(
    st.lists(
        st.one_of(fragments, scraps, st.builds(lambda one, other: one[:20] + other, fragments, scraps)), max_size=60
    )
)
def test_any_text_gives_a_map_or_a_trouble_and_every_link_has_both_its_ends(lines: list[str]) -> None:
    ran = Ran("ibnetdiscover", 0, "\n".join(lines), "")
    found = scan(ran)
    if not isinstance(found, Map):
        assert found == trouble(ran), "no map only for what a tool says when it could not ask"
        return
    nodes = found.by_guid()
    assert all(end in nodes for link in found.links for end in (link.a, link.b))
    assert found.complete == (found.holes == ())
    assert fabric.unpack(fabric.pack(found)) == found


@given(st.text(), st.text(), st.integers(-20, 300))
def test_any_two_streams_and_status_are_judged_without_an_exception(out: str, err: str, status: int) -> None:
    assert scan(Ran("ibnetdiscover", status, out, err)) is not None

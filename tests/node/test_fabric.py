"""A node looks at real simulated fabrics with the real tools."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest
import trio
import trio.testing

from llmgw.errors import BadInput, Failed
from llmgw.node.answers import features
from llmgw.node.fabric import Scanner, linked
from llmgw.node.managers import ManagerWatch
from llmgw.rdma import degraded, routes
from llmgw.rdma.fabric import Map, unpack
from llmgw.rdma.netdiscover import parse
from llmgw.wire.agent import Listening, Working
from llmgw.wire.control import ManagersRequest, RoutesRequest, ScanReply, ScanRequest
from llmgw.wire.facts import Port
from tests.engines import until
from tests.leftovers import alive
from tests.rigs.ib.fixture import needs_tools, site

pytestmark = needs_tools


def say(_: Working | Listening) -> None:
    """Nobody waits here."""


async def look(scanner: Scanner, device: str = "mlx5_0", *, raw: bool = False) -> tuple[ScanReply, Map]:
    reply = await scanner.scan(ScanRequest(device=device, raw=raw), say)
    return reply, unpack(reply.map)


async def test_a_scan_shows_the_whole_fabric_as_it_is_cabled(tmp_path: Path) -> None:
    with site(tmp_path) as one:
        reply, found = await look(one.scanner(5), raw=True)
    assert (reply.complete, reply.holes, reply.device, reply.tool) == (True, (), "mlx5_0", "ibnetdiscover")
    assert {node.guid for node in found.nodes} == {box.guid for box in one.net.boxes}
    cabled = {
        frozenset(((box.guid, port), (peer.guid, peer_port)))
        for box in one.net.boxes
        for port, (peer, peer_port, _) in box.cables.items()
    }
    assert {frozenset(link.ends) for link in found.links} == cabled
    assert found.origin == one.net.host(5).guid
    assert parse(zlib.decompress(reply.raw).decode().splitlines()).nodes.keys() == found.by_guid().keys()


async def test_the_named_adapter_looks_and_not_another(tmp_path: Path) -> None:
    with site(tmp_path, managers=0) as one:
        scanner = one.scanner(5)
        origins = [(await look(scanner, device))[1].origin for device in ("mlx5_1", "mlx5_0", "")]
    assert origins == [one.net.host(5, 1).guid, one.net.host(5, 0).guid, one.net.host(5, 0).guid]


async def test_without_a_subnet_manager_the_map_is_complete_and_nothing_was_counted(tmp_path: Path) -> None:
    with site(tmp_path, managers=0) as one:
        reply, found = await look(one.scanner(5))
    assert reply.complete
    assert found.counters is None or found.counters == ()
    assert {end.lid for node in found.nodes for end in node.ends} == {0}


async def test_a_silent_switch_makes_the_map_partial_and_its_holes_name_the_ports_behind_which_it_is(
    tmp_path: Path,
) -> None:
    with site(tmp_path) as one:
        spine = one.net.spines[0]
        one.fabric.drop(spine, 100)
        reply, found = await look(one.scanner(5))
    assert not reply.complete
    assert spine.guid not in found.by_guid()
    behind = {peer.name for peer, _, _ in spine.cables.values() if peer.kind == "S"}
    assert any(name in hole for hole in reply.holes for name in behind), reply.holes


async def test_a_lossy_switch_makes_the_map_partial_and_never_a_slow_link(tmp_path: Path) -> None:
    with site(tmp_path) as one:
        one.fabric.drop(one.net.spines[0], 30)
        scanner = one.scanner(5)
        looks = [await look(scanner) for _ in range(3)]  # one of a thousand loses nothing
    assert not all(reply.complete for reply, _ in looks)
    assert {degraded.suspects(found) for _, found in looks} == {()}


async def test_a_link_at_1x_is_confirmed_by_the_portinfo_of_both_its_ends(tmp_path: Path) -> None:
    with site(tmp_path) as one:
        host, leaf = one.net.host(6, 1), one.leaf(1, 1)
        leaf_port = next(port for port, (peer, _, _) in leaf.cables.items() if peer is host)
        ran = one.fabric.tool(host, "ibportstate", "-D", "0,1", str(leaf_port), "width", "1")
        assert ran.exit == 0, ran
        _, found = await look(one.scanner(5))
    (slow,) = degraded.suspects(found)
    assert set(slow.link.ends) == {(host.guid, 1), (leaf.guid, leaf_port)}
    assert (slow.link.pace, slow.confirmed) == ("1xHDR", True)
    assert {(state.guid, state.port) for state in found.states} == set(slow.link.ends)


async def test_error_counters_come_with_the_map_under_the_nodes_own_guids(tmp_path: Path) -> None:
    with site(tmp_path) as one:
        leaf, host = one.leaf(0, 1), one.net.host(7, 0)
        one.fabric.count(leaf, 2, SymbolErrorCounter=7, LinkDownedCounter=1)
        one.fabric.count(host, 1, PortRcvErrors=3)
        _, found = await look(one.scanner(5))
    assert found.counters is not None
    counted = {(one.guid, one.port): one.counters for one in found.counters}
    assert counted[leaf.guid, 2] == {"LinkDownedCounter": 1, "SymbolErrorCounter": 7}
    assert counted[host.guid, 1]["PortRcvErrors"] == 3


async def test_the_managers_of_each_port_are_the_master_and_the_confirmed_standby(tmp_path: Path) -> None:
    with site(tmp_path) as one:
        reply = await one.scanner(5).managers(ManagersRequest(), say)
        assert one.first is not None
        assert one.second is not None
        guids = (one.first.guid, one.second.guid)
    assert [port.device for port in reply.ports] == ["mlx5_0", "mlx5_1"]
    for port in reply.ports:
        assert port.master is not None
        assert (port.master.guid, port.master.priority, port.master.state) == (guids[0], 14, "master")
        assert [(other.guid, other.priority, other.state, other.error) for other in port.others] == [
            (guids[1], 5, "standby", "")
        ]


async def test_without_any_manager_each_port_says_so_and_that_the_cable_may_be_fine(tmp_path: Path) -> None:
    with site(tmp_path, managers=0) as one:
        reply = await one.scanner(5).managers(ManagersRequest(), say)
    assert {(port.master, port.others) for port in reply.ports} == {(None, ())}
    assert all("no subnet manager" in port.error and "cable may be fine" in port.error for port in reply.ports)


async def test_the_watch_asks_cheaply_while_nothing_changes_and_fully_when_something_does(tmp_path: Path) -> None:
    with site(tmp_path) as one:
        watch = ManagerWatch(one.scanner(5))
        await watch.round()
        first = watch.latest.value
        await watch.round()
        assert [port.others for port in watch.latest.value] == [port.others for port in first]
        assert one.first is not None
        assert one.second is not None
        one.first.end()
        one.second.wait_for("SUBNET UP")
        await watch.round()
        masters = {port.master.guid for port in watch.latest.value if port.master}
        assert masters == {one.second.guid}
        assert all(other.state != "master" for port in watch.latest.value for other in port.others)


async def test_forwarding_tables_lead_every_pair_of_hosts_to_each_other(tmp_path: Path) -> None:
    with site(tmp_path) as one:
        scanner = one.scanner(5)
        _, found = await look(scanner)
        reply = await scanner.routes(RoutesRequest(device="mlx5_0"), say)
        some = await scanner.routes(RoutesRequest(device="mlx5_0", switches=(2, 3)), say)
    tables = routes.unpack(reply.tables)
    assert reply.holes == ()
    assert set(tables.switches) == {box.guid for box in one.net.switches}
    ports = [end.guid for node in found.hosts for end in node.ends]
    for end in ports[1:]:
        assert routes.way(found, tables, ports[0], end).broken == ""
    assert len(routes.unpack(some.tables).switches) == 2


async def test_a_port_the_node_does_not_have_and_one_that_is_no_infiniband_are_refused_in_words() -> None:
    ports = (Port(device="mlx5_0", kind="roce", state="ACTIVE"), Port(device="mlx5_1", kind="ib", state="DOWN"))
    scanner = Scanner(lambda: ports)
    with pytest.raises(BadInput, match="no port mlx5_9/1: it has mlx5_0/1, mlx5_1/1"):
        await scanner.scan(ScanRequest(device="mlx5_9"), say)
    with pytest.raises(BadInput, match="mlx5_0/1 is a roce port"):
        await scanner.scan(ScanRequest(device="mlx5_0"), say)
    with pytest.raises(BadInput, match="no active InfiniBand port"):
        await scanner.scan(ScanRequest(), say)


@pytest.mark.skipif(Path("/sys/class/infiniband_mad/abi_version").exists(), reason="this machine has ib_umad")
async def test_a_machine_without_umad_says_what_to_load(tmp_path: Path) -> None:
    """This very machine: its tools have no MAD device to open."""
    scanner = Scanner(lambda: [Port(device="mlx5_0", kind="ib", state="ACTIVE")], root=tmp_path)
    with pytest.raises(Failed, match="modprobe ib_umad"):
        await scanner.scan(ScanRequest(device="mlx5_0"), say)
    reply = await scanner.managers(ManagersRequest(), say)
    assert "modprobe ib_umad" in reply.ports[0].error


async def test_a_machine_without_the_tools_says_what_to_install(tmp_path: Path) -> None:
    scanner = Scanner(lambda: [Port(device="mlx5_0", kind="ib", state="ACTIVE")], environment={"PATH": str(tmp_path)})
    with pytest.raises(Failed, match="install the package infiniband-diags"):
        await scanner.scan(ScanRequest(device="mlx5_0"), say)
    with pytest.raises(Failed, match="infiniband-diags"):
        await scanner.routes(RoutesRequest(device="mlx5_0"), say)


def fake_tool(directory: Path, name: str, script: str) -> dict[str, str]:
    directory.mkdir(exist_ok=True)
    tool = directory / name
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return {"PATH": f"{directory}:{os.environ['PATH']}"}


async def test_in_a_container_without_mad_devices_the_adapter_is_not_called_missing(tmp_path: Path) -> None:
    """SY17: the module is loaded on the host, and /dev/infiniband/umad* is not passed in."""
    said = 'echo "ibwarn: [1] mad_rpc_open_port: can\'t open UMAD port (mlx5_0:1)" >&2; exit 255'
    environment = fake_tool(tmp_path / "bin", "sminfo", said)
    port = Port(device="mlx5_0", kind="ib", state="ACTIVE")
    scanner = Scanner(lambda: [port], root=tmp_path, environment=environment)
    (managers,) = (await scanner.managers(ManagersRequest(), say)).ports
    assert "finds no /dev/infiniband/umad*" in managers.error
    assert "no such InfiniBand device" not in managers.error
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/umad0").write_text("")
    (managers,) = (await scanner.managers(ManagersRequest(), say)).ports
    assert managers.code == "no-device"


async def test_a_cancelled_scan_leaves_no_process_of_its_tool_running(tmp_path: Path) -> None:
    """Not even one that the tool started itself."""
    pids = tmp_path / "pids"
    environment = fake_tool(
        tmp_path / "bin", "ibnetdiscover", f"sleep 600 &\necho $$ $! > {pids}.new; mv {pids}.new {pids}; wait"
    )
    scanner = Scanner(lambda: [Port(device="mlx5_0", kind="ib", state="ACTIVE")], environment=environment)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scanner.scan, ScanRequest(device="mlx5_0"), say)
            await until(pids.exists)
            scope.cancel()
    await until(lambda: not any(alive(int(pid)) for pid in pids.read_text().split()))


async def test_two_scans_of_one_node_run_at_once_and_a_third_waits(tmp_path: Path) -> None:
    started = tmp_path / "started"
    started.mkdir()
    environment = fake_tool(tmp_path / "bin", "ibnetdiscover", f"touch {started}/$$; sleep 600")
    scanner = Scanner(lambda: [Port(device="mlx5_0", kind="ib", state="ACTIVE")], environment=environment)
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(scanner.scan, ScanRequest(device="mlx5_0"), say)
        await until(lambda: len(list(started.iterdir())) >= 2)
        await trio.testing.wait_all_tasks_blocked(0.2)
        assert len(list(started.iterdir())) == 2
        nursery.cancel_scope.cancel()


def test_the_agent_announces_what_the_scanner_answers() -> None:
    assert features(Scanner(tuple).answers) == ("fabric-routes", "fabric-scan", "subnet-managers")


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("ACTIVE", True),
        ("4: ACTIVE", True),
        ("INIT", True),
        ("ARMED", True),
        ("DOWN", False),
        ("1: DOWN", False),
        ("", False),
    ],
)
def test_a_port_is_linked_when_its_link_trained(state: str, expected: bool) -> None:
    assert linked(Port(device="x", state=state)) is expected

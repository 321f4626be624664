"""When and from where fabrics are looked at, and what is kept of it (D8), on a clock that leaps."""

from __future__ import annotations

import pytest
import trio
from msgspec.structs import replace

from llmgw.errors import AgentGone, BadInput, Failed, NotFound, Unavailable
from llmgw.plane.fabrics.kept import NEWEST
from llmgw.rdma.fabric import Map, PortCounters, unpack
from llmgw.rdma.managers import Patience
from llmgw.wire.agent import Heartbeat
from llmgw.wire.control import ScanRequest
from llmgw.wire.facts import NodeId, PortLoad, PortManagers
from tests.plane.fabrics.fleets import MASTER, STANDBY, ib_port, on_fabric, plane, seen_by
from tests.rdma.trees import guid_of, link, paced, swapped, tree, without
from tests.rigs.ib.net import host_guid

TREE = tree(16, 2, 8)


def the_tree(node: NodeId, request: ScanRequest) -> Map:
    return TREE


async def test_the_first_map_comes_after_30_s_and_then_one_every_5_min(autojump_clock: trio.abc.Clock) -> None:
    one, hub = plane(the_tree)
    one.hears(on_fabric("a", ib_port(0), managers=[seen_by()]))
    async with trio.open_nursery() as nursery:
        began = trio.current_time()
        nursery.start_soon(one.fabrics.run)
        await trio.sleep(1000)
        nursery.cancel_scope.cancel()
    assert [round(at - began) for at, _, _ in hub.asked] == [30, 330, 630, 930]
    assert len(one.fabrics.kept.of(MASTER)) == 4


async def test_one_node_is_asked_for_each_fabric_the_first_by_name_and_all_at_once(
    autojump_clock: trio.abc.Clock,
) -> None:
    one, hub = plane(the_tree, takes=60.0)
    for number, name in enumerate(["c", "b", "a"]):
        rails = [seen_by("mlx5_0", MASTER), seen_by("mlx5_1", STANDBY)]
        one.hears(on_fabric(name, ib_port(number, 0), ib_port(number, 1), managers=rails))
    await one.fabrics.look_at_managers()
    began = trio.current_time()
    await one.fabrics.round()
    assert sorted((node, device) for _, node, device in hub.asked) == [("a", "mlx5_0"), ("a", "mlx5_1")]
    assert trio.current_time() - began == pytest.approx(60.0), "both at once"
    assert one.fabrics.names == (MASTER, STANDBY)


async def test_a_node_that_is_not_ready_cannot_look_or_has_no_active_port_is_passed_over() -> None:
    one, hub = plane(the_tree, takes=0.0)
    one.hears(
        on_fabric("a", ib_port(0, state="DOWN"), managers=[seen_by()]),
        on_fabric("b", ib_port(1), managers=[seen_by()], features=()),
        on_fabric("c", ib_port(2), managers=[seen_by()]),
        on_fabric("d", ib_port(3), managers=[seen_by()]),
        on_fabric("e", ib_port(4), managers=[seen_by()]),
    )
    one.fleet.detach(NodeId("c"), 3)
    one.beats("d", Heartbeat(ports=(PortLoad(device="mlx5_0", state="DOWN"),)))
    await one.fabrics.look_at_managers()
    await one.fabrics.round()
    assert [node for _, node, _ in hub.asked] == ["e"]


async def test_a_roce_port_is_never_looked_through() -> None:
    one, hub = plane(the_tree, takes=0.0)
    one.hears(on_fabric("a", ib_port(0, kind="roce"), managers=[]))
    await one.fabrics.round()
    assert hub.asked == []
    with pytest.raises(BadInput, match="mlx5_0/1 is a roce port"):
        await one.fabrics.scan_from(NodeId("a"), "mlx5_0")


async def test_a_second_vantage_is_taken_when_the_first_fails() -> None:
    one, hub = plane(lambda node, _: AgentGone("a has no agent connected") if node == "a" else TREE, takes=0.0)
    one.hears(*(on_fabric(name, ib_port(n), managers=[seen_by()]) for n, name in enumerate("abc")))
    await one.fabrics.look_at_managers()
    await one.fabrics.round()
    assert [node for _, node, _ in hub.asked] == ["a", "b"]
    standing = one.fabrics.standing(MASTER)
    assert standing.last is not None
    assert (standing.last.node, standing.last.error) == ("b", "")
    assert one.kinds() == []


async def test_a_vantage_that_sees_only_itself_is_a_failed_one() -> None:
    blind = replace(
        TREE, nodes=TREE.nodes[:1], links=(), complete=False, holes=("the port that looked (x) is not linked",)
    )
    one, hub = plane(lambda node, _: blind if node == "a" else TREE, takes=0.0)
    one.hears(*(on_fabric(name, ib_port(n), managers=[seen_by()]) for n, name in enumerate("ab")))
    await one.fabrics.look_at_managers()
    await one.fabrics.round()
    assert [node for _, node, _ in hub.asked] == ["a", "b"]
    assert one.kinds() == []


async def test_a_failed_scan_is_kept_with_its_error_and_the_last_good_map_stays() -> None:
    works = True
    one, _ = plane(lambda *_: TREE if works else AgentGone("a has no agent connected"), takes=0.0)
    one.hears(on_fabric("a", ib_port(0), managers=[seen_by()]))
    await one.fabrics.look_at_managers()
    await one.fabrics.round()
    works = False
    await one.fabrics.round()
    await one.fabrics.round()
    standing = one.fabrics.standing(MASTER)
    assert standing.last is not None
    assert standing.seen is not None
    assert "a mlx5_0/1: a has no agent connected" in standing.last.error
    assert unpack(await one.fabrics.map(standing.seen)) == TREE
    assert [bool(scan.error) for scan in one.fabrics.kept.of(MASTER)] == [False, True, True]
    assert one.kinds() == ["fabric-scan-failed"], "told once"


async def test_what_was_known_is_known_after_a_restart_and_told_only_once() -> None:
    seen = [TREE]
    one, _ = plane(lambda *_: seen[-1], takes=0.0)
    one.hears(on_fabric("a", ib_port(0), managers=[seen_by()]))
    await one.fabrics.look_at_managers()
    await one.fabrics.round()
    again, _ = plane(lambda *_: seen[-1], store=one.store, takes=0.0)
    await again.fabrics.load()
    assert again.fabrics.names == (MASTER,)
    again.hears(on_fabric("a", ib_port(0), managers=[seen_by("mlx5_0", MASTER)]))
    await again.fabrics.look_at_managers()
    await again.fabrics.round()
    assert again.kinds() == []
    seen.append(without(TREE, link(TREE, guid_of(TREE, "MF0;leaf-su000-r0"), 5)))
    await again.fabrics.round()
    assert again.kinds() == ["fabric-link-gone"]


async def test_a_fabric_keeps_its_name_through_a_failover_and_a_restart() -> None:
    one, _ = plane(the_tree, takes=0.0)
    one.hears(on_fabric("a", ib_port(0), managers=[seen_by("mlx5_0", MASTER, STANDBY)]))
    await one.fabrics.look_at_managers()
    again, _ = plane(the_tree, store=one.store, takes=0.0)
    await again.fabrics.load()
    again.hears(on_fabric("a", ib_port(0), managers=[seen_by("mlx5_0", STANDBY)]))
    await again.fabrics.look_at_managers()
    await again.fabrics.round()
    assert [name for name in again.fabrics.names if again.fabrics.kept.of(name)] == [MASTER]


async def test_a_partial_map_is_told_once_and_never_says_that_a_link_is_gone() -> None:
    partial = replace(
        without(TREE, nodes=(guid_of(TREE, "MF0;spine-0000"),)), complete=False, holes=("no answer behind port 5 of x",)
    )
    seen = [TREE, partial, partial, TREE]
    one, _ = plane(lambda *_: seen.pop(0), takes=0.0)
    one.hears(on_fabric("a", ib_port(0), managers=[seen_by()]))
    await one.fabrics.look_at_managers()
    for _ in range(4):
        await one.fabrics.round()
    assert one.kinds() == ["fabric-partial", "fabric-partial-over"]
    assert "no answer behind port 5 of x" in one.events()[0].text


async def test_a_change_is_told_with_the_nodes_and_rails_it_touches() -> None:
    seen = [TREE, without(TREE, link(TREE, guid_of(TREE, "MF0;leaf-su000-r1"), 5))]
    one, _ = plane(lambda *_: seen.pop(0), takes=0.0)
    one.hears(
        *(on_fabric(f"n{h}", ib_port(h, 0), ib_port(h, 1), managers=[seen_by(), seen_by("mlx5_1")]) for h in range(4))
    )
    await one.fabrics.look_at_managers()
    await one.fabrics.round()
    await one.fabrics.round()
    (event,) = one.events()
    assert (event.kind, event.subject) == ("fabric-link-gone", f"fabric:{MASTER}")
    assert event.data == {"fabric": MASTER, "nodes": "n0,n1,n2,n3", "rails": "1"}


async def test_swapped_cables_are_one_event_and_stay_open_as_misplaced_until_they_are_put_right() -> None:
    wrong = swapped(TREE, link(TREE, host_guid(3, 0), 1), link(TREE, host_guid(3, 1), 1))
    seen = [TREE, wrong, wrong, TREE]
    one, _ = plane(lambda *_: seen.pop(0), takes=0.0)
    one.hears(on_fabric("a", ib_port(0), managers=[seen_by()]))
    await one.fabrics.look_at_managers()
    await one.fabrics.round()
    await one.fabrics.round()
    assert one.kinds() == ["fabric-cables-swapped"]
    assert [fault.kind for fault in one.fabrics.standing(MASTER).open] == ["cable-misplaced"] * 2
    await one.fabrics.round()
    await one.fabrics.round()
    assert one.kinds() == ["fabric-cables-swapped"] * 2
    assert one.fabrics.standing(MASTER).open == ()


async def test_cables_that_were_wrong_from_the_start_are_found_by_the_first_map() -> None:
    wrong = swapped(TREE, link(TREE, host_guid(3, 0), 1), link(TREE, host_guid(3, 1), 1))
    one, _ = plane(lambda *_: wrong, takes=0.0)
    one.hears(on_fabric("a", ib_port(0), managers=[seen_by()]))
    await one.fabrics.look_at_managers()
    await one.fabrics.round()
    assert one.kinds() == ["fabric-cable-misplaced"] * 2
    assert "gpu-00003 mlx5_0 is on the leaf of rail mlx5_1" in one.events()[0].text


async def test_counters_that_grow_between_two_scans_are_an_event_and_old_totals_are_none() -> None:
    leaf = guid_of(TREE, "MF0;leaf-su000-r0")

    def counted(at: float, errors: int) -> Map:
        return replace(TREE, counters=(PortCounters(leaf, 2, {"SymbolErrorCounter": errors}),), counters_at=at)

    seen = [counted(0.0, 50000), counted(300.0, 50000), counted(600.0, 51000), counted(900.0, 51000)]
    one, _ = plane(lambda *_: seen.pop(0), takes=0.0)
    one.hears(on_fabric("a", ib_port(0), managers=[seen_by()]))
    await one.fabrics.look_at_managers()
    for _ in range(2):
        await one.fabrics.round()
    assert one.kinds() == []
    await one.fabrics.round()
    assert one.kinds() == ["fabric-link-errors"]
    assert "SymbolErrorCounter +1000 in 300 s (12000/h); bit error rate" in one.events()[0].text
    await one.fabrics.round()
    assert one.kinds() == ["fabric-link-errors", "fabric-link-errors-over"]


async def test_a_slow_link_without_portinfo_is_told_as_a_change_only() -> None:
    seen = [TREE, paced(TREE, link(TREE, host_guid(3, 0), 1), 1, "HDR")]
    one, _ = plane(lambda *_: seen.pop(0), takes=0.0)
    one.hears(on_fabric("a", ib_port(0), managers=[seen_by()]))
    await one.fabrics.look_at_managers()
    await one.fabrics.round()
    await one.fabrics.round()
    assert one.kinds() == ["fabric-link-slower"]


async def test_ports_of_which_no_manager_is_known_are_on_one_fabric_when_one_map_shows_them() -> None:
    one, hub = plane(the_tree, takes=0.0)
    one.hears(*(on_fabric(name, ib_port(n)) for n, name in enumerate("abc")))
    await one.fabrics.look_at_managers()
    await one.fabrics.look_for_vantages()
    assert len(one.fabrics.vantages()) == 3, "nothing tells them apart or together yet"
    await one.fabrics.round()
    await one.fabrics.look_for_vantages()
    assert len(one.fabrics.vantages()) == 1
    hub.asked.clear()
    await one.fabrics.round()
    assert [node for _, node, _ in hub.asked] == ["a"]
    one.beats("a", Heartbeat(managers=(seen_by(),)))
    await one.fabrics.look_at_managers()
    assert MASTER in one.fabrics.names
    assert one.fabrics.kept.of(MASTER), "what was seen of it so far is kept under its name"


async def test_labels_name_fabrics_with_or_without_managers() -> None:
    one, _ = plane(the_tree, takes=0.0)
    one.hears(on_fabric("a", ib_port(0, label="compute/east")), on_fabric("b", ib_port(1, label="compute/east")))
    await one.fabrics.look_at_managers()
    await one.fabrics.round()
    assert one.fabrics.names == ("compute/east",)
    again, _ = plane(the_tree, store=one.store)
    await again.fabrics.load()
    assert again.fabrics.names == ("compute/east",)


async def test_history_is_bounded_and_its_maps_with_it() -> None:
    one, _ = plane(the_tree, takes=0.0)
    one.hears(on_fabric("a", ib_port(0), managers=[seen_by()]))
    await one.fabrics.look_at_managers()
    for _ in range(NEWEST + 8):
        await one.fabrics.round()
    assert len(one.fabrics.kept.of(MASTER)) <= NEWEST + 2
    stored = (await one.store.load("fabrics/")).values
    assert len([key for key in stored if "/maps/" in key]) == len(one.fabrics.kept.of(MASTER))


async def test_a_map_that_nobody_can_judge_is_a_failed_scan_and_the_next_round_comes() -> None:
    one, _ = plane(the_tree, takes=0.0)
    one.hears(on_fabric("a", ib_port(0), managers=[seen_by()]))
    await one.fabrics.look_at_managers()
    think = one.fabrics._think

    async def killed(*args: object, **more: object) -> bytes:
        raise Failed("judged in a process of its own ended with signal 9")

    one.fabrics._think = killed
    await one.fabrics.round()
    assert one.kinds() == ["fabric-scan-failed"]
    assert "signal 9" in one.events()[0].text
    one.fabrics._think = think
    await one.fabrics.round()
    assert one.fabrics.standing(MASTER).whole is not None


async def test_a_store_that_cannot_be_written_costs_a_scan_and_not_the_watch() -> None:
    one, hub = plane(the_tree, takes=0.0)
    one.hears(on_fabric("a", ib_port(0), managers=[seen_by()]))
    await one.fabrics.look_at_managers()
    commit = one.store.commit

    async def full(*args: object, **more: object) -> int:
        raise Unavailable("the disk is full")

    one.store.commit = full  # type: ignore[method-assign]
    await one.fabrics.round()
    one.store.commit = commit  # type: ignore[method-assign]
    await one.fabrics.round()
    assert len(hub.asked) == 2
    assert len(one.fabrics.kept.of(MASTER)) == 1


async def test_a_scan_can_be_asked_for_now_by_fabric_or_by_port() -> None:
    one, _ = plane(the_tree, takes=0.0)
    one.hears(on_fabric("a", ib_port(0), managers=[seen_by()]), on_fabric("b", ib_port(1), managers=[seen_by()]))
    await one.fabrics.look_at_managers()
    scan = await one.fabrics.scan(MASTER)
    assert (scan.node, scan.forced, scan.complete) == ("a", True, True)
    assert (scan.counts.switches, scan.counts.adapters, scan.counts.links) == (12, 32, 64)
    again, _ = await one.fabrics.scan_from(NodeId("b"), "mlx5_0")
    assert (again.fabric, again.node, again.id) == (MASTER, "b", scan.id + 1)


async def test_names_that_nothing_has_are_refused_in_words() -> None:
    one, _ = plane(the_tree)
    one.hears(on_fabric("a", ib_port(0, state="DOWN"), managers=[seen_by()]))
    await one.fabrics.look_at_managers()
    with pytest.raises(NotFound, match="no fabric 'east'"):
        await one.fabrics.scan("east")
    with pytest.raises(Unavailable, match="no node can look at fabric"):
        await one.fabrics.scan(MASTER)
    with pytest.raises(NotFound, match="no node 'z'"):
        await one.fabrics.scan_from(NodeId("z"), "mlx5_0")
    with pytest.raises(BadInput, match="no port mlx5_7/1: it has mlx5_0/1"):
        await one.fabrics.scan_from(NodeId("a"), "mlx5_7")


async def test_a_change_of_master_is_one_event_of_the_fleet_and_other_troubles_are_ours(
    autojump_clock: trio.abc.Clock,
) -> None:
    one, _ = plane(the_tree, patience=Patience(hold=20.0))
    one.hears(
        *(on_fabric(name, ib_port(n), managers=[seen_by("mlx5_0", MASTER, STANDBY)]) for n, name in enumerate("abc"))
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.fabrics.run)
        await trio.sleep(5)
        for name in "abc":
            one.beats(name, Heartbeat(managers=(seen_by("mlx5_0", STANDBY),)))
            await trio.sleep(2)
        assert one.kinds() == ["sm-changed"]
        for name in "abc":
            one.beats(name, Heartbeat(managers=(PortManagers(device="mlx5_0", error="the manager does not answer"),)))
        await trio.sleep(15)
        assert one.kinds() == ["sm-changed"]
        await trio.sleep(10)
        assert one.kinds() == ["sm-changed", "sm-none"]
        nursery.cancel_scope.cancel()

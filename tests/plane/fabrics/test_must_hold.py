"""What must hold over real fabrics: each thing that happens gives the right events, and nothing else."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from llmgw.aside import aside
from llmgw.wire.agent import Heartbeat
from llmgw.wire.facts import PortManagers
from tests.plane.fabrics.watched import Watch, watched
from tests.rigs.ib.fabric import Manager
from tests.rigs.ib.fixture import needs_tools
from tests.rigs.ib.net import host_guid

pytestmark = needs_tools


class Hung(Exception):
    """Over the simulator, opensm 3.3.23 on a busy machine may hang for ever when it gives or is given the fabric."""


async def in_a_rig_that_goes_on(directory: Path, play: Callable[[Watch], Awaitable[None]], **shape: Any) -> None:
    """A rig in which opensm hung is thrown away, as one that did so at its start is."""
    for turn in range(6):
        try:
            async with watched(directory / str(turn), **shape) as watch:
                return await play(watch)
        except Hung:
            continue
    raise AssertionError("opensm hung in six rigs one after the other")


def took_over(manager: Manager) -> None:
    """Wait until this one has configured the fabric. Raises Hung."""
    try:
        manager.wait_for("SUBNET UP", within=60)
    except TimeoutError:
        raise Hung from None


async def poll_until(
    watch: Watch, kind: str, within: float = 60.0, *, hung: Callable[[], bool] = lambda: False
) -> list[str]:
    """Ask for the managers again and again until this was told; everything that was told meanwhile.

    Raises Hung when it was not, and the managers' own logs say that they have not done their part.
    """
    news: list[str] = []
    with trio.move_on_after(within):
        while kind not in news:
            await watch.poll()
            news += watch.news()
        return news
    if hung():
        raise Hung
    raise AssertionError(f"{kind} was not told within {within:.0f} s, but {news}")


async def poll_for(watch: Watch, seconds: float) -> list[str]:
    news: list[str] = []
    until = trio.current_time() + seconds
    while trio.current_time() < until:
        await watch.poll()
        news += watch.news()
    return news


async def test_a_healthy_fabric_has_one_name_a_whole_map_and_nothing_to_tell(tmp_path: Path) -> None:
    async with watched(tmp_path) as watch:
        await watch.poll()
        await watch.scan()
        assert watch.news() == []
        assert watch.site.first is not None
        assert watch.fabric == watch.site.first.guid
        standing = watch.plane.fabrics.standing(watch.fabric)
        assert standing.whole is not None
        assert (standing.whole.counts.switches, standing.whole.counts.adapters) == (12, 32)
        fabric = watch.plane.fabrics.managers.fabrics[watch.fabric]
        assert [one.state for one in fabric.standbys] == ["standby"]


async def test_a_killed_master_is_one_event_with_both_guids_within_one_poll_of_its_successor(tmp_path: Path) -> None:
    async with watched(tmp_path, nodes=(2, 14), aggregation=False) as watch:
        first, second = watch.site.first, watch.site.second
        assert first is not None
        assert second is not None
        first.end(signal.SIGKILL)
        second.wait_for("SUBNET UP")
        await watch.poll()
        assert watch.news() == ["sm-changed"]
        event = watch.plane.events()[-1]
        assert (event.data["from"], event.data["to"]) == (first.guid, second.guid)
        assert await poll_for(watch, 8.0) == [], "no standby was lost, the master was, and that has been told"
        await watch.scan()
        assert watch.news() == [], "to the cables nothing happened"
        assert watch.fabric == first.guid, "and the fabric keeps its name"


async def test_a_hand_back_is_one_event_and_its_moment_of_standby_is_none(tmp_path: Path) -> None:
    async def play(watch: Watch) -> None:
        first, second = watch.site.first, watch.site.second
        assert first is not None
        assert second is not None
        first.end(signal.SIGTERM)
        assert await poll_until(watch, "sm-changed", hung=lambda: "SUBNET UP" not in second.log) == ["sm-changed"]
        again = watch.site.fabric.manager(first.at, 14, sweep=1)
        took_over(again)
        assert await poll_until(watch, "sm-changed") == ["sm-changed"]
        event = watch.plane.events()[-1]
        assert (event.data["from"], event.data["to"]) == (second.guid, first.guid)
        assert await poll_for(watch, 3.0) == []

    # Longer than a slow machine's manager needs to notice that it is alone.
    await in_a_rig_that_goes_on(tmp_path, play, nodes=(2, 14), aggregation=False, hold=30.0)


async def test_a_split_and_its_merge_are_told_of_managers_and_of_the_half_that_is_not_seen(tmp_path: Path) -> None:
    async def play(watch: Watch) -> None:
        one = watch.site
        first, second = one.first, one.second
        assert first is not None
        assert second is not None
        cuts = [
            (leaf, port)
            for leaf in one.net.leaves
            for port, (peer, _, _) in leaf.cables.items()
            if peer.name.startswith("MF0;spine")
            and ("su000" in leaf.name or "su001" in leaf.name)
            != (peer.name[:14] in ("MF0;spine-0000", "MF0;spine-0001"))
        ]
        assert len(cuts) == 16
        for leaf, port in cuts:
            one.fabric.cut(leaf, port)
        took_over(second)
        news = await poll_until(watch, "sm-split")
        assert news == ["sm-changed", "sm-split"]
        assert first.guid in watch.last
        assert second.guid in watch.last
        await watch.scan()
        assert watch.news() == ["fabric-part-gone"]
        assert "hang together are not to be seen any more" in watch.last
        swept = first.log.count("SUBNET UP")
        for leaf, port in cuts:
            one.fabric.heal(leaf, port)

        def hung() -> bool:
            return second.log.count("Entering STANDBY") < 2 or first.log.count("SUBNET UP") == swept

        news = await poll_until(watch, "sm-split-over", hung=hung)
        assert sorted(news) == ["sm-changed", "sm-split-over"]
        await watch.scan()
        assert watch.news() == ["fabric-part-new"]

    await in_a_rig_that_goes_on(tmp_path, play, nodes=(2, 14), at=(0, 9), aggregation=False, hold=12.0)


async def test_a_cut_cable_between_switches_is_one_event_and_so_is_its_repair(tmp_path: Path) -> None:
    async with watched(tmp_path) as watch:
        leaf = watch.site.leaf(1, 0)
        watch.site.fabric.cut(leaf, 5)
        await watch.scan()
        assert watch.news() == ["fabric-link-gone"]
        assert f"port 5 of {leaf.name}" in watch.last
        assert watch.plane.events()[-1].data["nodes"] == "gpu-00004,gpu-00006,gpu-00007,node-05"
        watch.site.fabric.heal(leaf, 5)
        await watch.scan()
        assert watch.news() == ["fabric-link-new"]


async def test_a_hosts_cut_cable_is_one_event(tmp_path: Path) -> None:
    async with watched(tmp_path) as watch:
        watch.site.fabric.cut(watch.site.net.host(6, 1))
        await watch.scan()
        assert watch.news() == ["fabric-host-gone"]
        assert "gpu-00006 mlx5_1 is gone" in watch.last


async def test_two_swapped_cables_are_one_event_and_stay_open_until_they_are_put_right(tmp_path: Path) -> None:
    async with watched(tmp_path) as watch:
        first, second = watch.site.leaf(1, 0), watch.site.leaf(1, 1)
        port = next(port for port, (peer, _, _) in first.cables.items() if peer.guid == host_guid(7, 0))
        watch.site.fabric.swap(first, port, second, port)
        await watch.scan()
        assert watch.news() == ["fabric-cables-swapped"]
        faults = [fault.text for fault in watch.plane.fabrics.standing(watch.fabric).open]
        assert [text.split(" is on")[0] for text in faults] == ["gpu-00007 mlx5_0", "gpu-00007 mlx5_1"]
        assert all("swapped with" in text for text in faults)


async def test_a_dead_leaf_is_one_event_with_its_hosts(tmp_path: Path) -> None:
    async with watched(tmp_path) as watch:
        leaf = watch.site.leaf(2, 1)
        watch.site.fabric.cut(leaf)
        await watch.scan()
        assert watch.news() == ["fabric-switch-gone"]
        assert leaf.name in watch.last
        assert "gpu-00008 mlx5_1" in watch.last
        watch.site.fabric.heal(leaf)
        await watch.scan()
        assert watch.news() == ["fabric-switch-new"]


async def test_a_silent_switch_makes_the_map_partial_and_nothing_is_called_gone(tmp_path: Path) -> None:
    async with watched(tmp_path) as watch:
        spine = watch.site.net.spines[0]
        watch.site.fabric.drop(spine, 100)
        await watch.scan()
        assert watch.news() == ["fabric-partial"]
        await watch.scan()
        assert watch.news() == []
        watch.site.fabric.drop(spine, 0)
        await watch.scan()
        assert watch.news() == ["fabric-partial-over"]


async def test_a_lossy_switch_makes_the_map_partial_and_no_link_slow(tmp_path: Path) -> None:
    async with watched(tmp_path) as watch:
        spine = watch.site.net.spines[0]
        watch.site.fabric.drop(spine, 30)
        for _ in range(3):
            await watch.scan()
        news = watch.news()
        assert news[0] == "fabric-partial"
        assert set(news) <= {"fabric-partial", "fabric-partial-over"}
        watch.site.fabric.drop(spine, 0)
        await watch.scan()
        assert set(watch.news()) <= {"fabric-partial-over"}


async def test_a_link_at_1x_is_one_event_and_so_is_its_end(tmp_path: Path) -> None:
    async with watched(tmp_path) as watch:
        host, leaf = watch.site.net.host(6, 1), watch.site.leaf(1, 1)
        port = next(port for port, (peer, _, _) in leaf.cables.items() if peer is host)
        assert watch.site.fabric.tool(host, "ibportstate", "-D", "0,1", str(port), "width", "1").exit == 0
        await watch.scan()
        assert watch.news() == ["fabric-link-slow"]
        assert "runs at 1xHDR, links of its kind at 4xHDR" in watch.last
        await watch.scan()
        assert watch.news() == []
        assert watch.site.fabric.tool(host, "ibportstate", "-D", "0,1", str(port), "width", "3").exit == 0
        await watch.scan()
        assert watch.news() == ["fabric-link-slow-over"]


async def test_a_link_at_edr_is_one_event(tmp_path: Path) -> None:
    async with watched(tmp_path) as watch:
        host, leaf = watch.site.net.host(10, 0), watch.site.leaf(2, 0)
        port = next(port for port, (peer, _, _) in leaf.cables.items() if peer is host)
        assert watch.site.fabric.tool(host, "ibportstate", "-D", "0,1", str(port), "espeed", "2").exit == 0
        await watch.scan()
        assert watch.news() == ["fabric-link-slow"]
        assert "runs at 4xEDR" in watch.last


async def test_raised_counters_are_one_event_for_each_port_and_end_with_the_next_quiet_scan(tmp_path: Path) -> None:
    async with watched(tmp_path) as watch:
        leaf = watch.site.leaf(0, 1)
        watch.site.fabric.count(leaf, 2, SymbolErrorCounter=700, LinkDownedCounter=2)
        await watch.scan()
        assert watch.news() == ["fabric-link-errors"]
        assert "LinkDownedCounter +2" in watch.last
        assert "SymbolErrorCounter +700" in watch.last
        await watch.scan()
        assert watch.news() == ["fabric-link-errors-over"]


async def test_a_replaced_adapter_is_one_event_with_both_guids(tmp_path: Path) -> None:
    async with watched(tmp_path) as watch:
        box = watch.site.net.host(7, 1)
        watch.site.fabric.replace(box, 0x1070FD0300AA0000)
        await watch.scan()
        assert watch.news() == ["fabric-adapter-replaced"]
        assert f"0x{box.guid:016x}" in watch.last
        assert "0x1070fd0300aa0000" in watch.last


async def test_no_manager_at_all_is_one_event_and_the_map_is_whole(tmp_path: Path) -> None:
    async with watched(tmp_path, managers=0, label="compute") as watch:
        assert watch.news() == ["sm-none"]
        assert "no subnet manager" in watch.last
        await watch.poll()
        await watch.scan()
        assert watch.news() == []
        standing = watch.plane.fabrics.standing("compute")
        assert standing.whole is not None
        manager = watch.site.fabric.manager(watch.site.net.host(0), 14)
        manager.wait_for("SUBNET UP", within=60)
        assert await poll_until(watch, "sm-none-over") == ["sm-none-over"]


@pytest.mark.skipif(Path("/sys/class/infiniband_mad/abi_version").exists(), reason="this machine has ib_umad")
async def test_no_umad_device_is_a_failed_scan_with_what_to_load_and_no_word_of_the_manager(tmp_path: Path) -> None:
    """The node's tools find no such simulated adapter, so they look at this machine, which has none."""
    async with watched(tmp_path, nodes=(2,), label="compute", hold=2.0) as watch:
        (tmp_path / "node-2" / "rig.json").write_text('{"preload": "", "devices": {}}')
        await watch.poll()
        await watch.scan()
        assert watch.news() == ["fabric-scan-failed"]
        assert "modprobe ib_umad" in watch.last
        assert await poll_until(watch, "sm-unseen") == ["sm-unseen"]
        standing = watch.plane.fabrics.standing("compute")
        assert standing.whole is not None, "the last good map stays"
        assert standing.last is not None
        assert "modprobe ib_umad" in standing.last.error


async def test_a_second_node_looks_when_the_first_has_lost_its_cable(tmp_path: Path) -> None:
    async with watched(tmp_path) as watch:
        watch.site.fabric.cut(watch.site.net.host(2, 0))
        await watch.scan()
        standing = watch.plane.fabrics.standing(watch.fabric)
        assert standing.last is not None
        assert standing.last.node == "node-05"
        assert watch.news() == ["fabric-host-gone"]


async def test_two_standbys_of_one_priority_and_one_that_goes_are_told(tmp_path: Path) -> None:
    async with watched(tmp_path, nodes=(2,), priorities=(9, 9), aggregation=False, hold=3.0) as watch:
        assert watch.news() == ["sm-equal-priority"]
        assert watch.site.second is not None
        watch.site.second.end(signal.SIGKILL)
        news = await poll_until(watch, "sm-standby-missing")
        assert sorted(news) == ["sm-equal-priority-over", "sm-standby-missing"]
        assert watch.site.second.guid in watch.last


async def test_a_manager_that_hangs_is_told_when_nobody_takes_over(tmp_path: Path) -> None:
    async with watched(tmp_path, nodes=(2,), managers=1, aggregation=False, hold=3.0) as watch:
        assert watch.site.first is not None
        watch.site.first.send(signal.SIGSTOP)
        news = await poll_until(watch, "sm-none")
        assert news == ["sm-none"]
        assert "does not answer and none took over" in watch.last


async def test_the_plane_says_nothing_of_the_manager_when_a_node_vanishes(tmp_path: Path) -> None:
    async with watched(tmp_path) as watch:
        quiet = tuple(PortManagers(device=f"mlx5_{rail}", error="port down", code="port-down") for rail in range(2))
        watch.plane.beats("node-02", Heartbeat(managers=quiet))
        assert await poll_for(watch, 1.0) == []


@pytest.mark.slow
@pytest.mark.parametrize(("rails", "radix"), [(2, 16), (8, 32)])
async def test_128_hosts_with_two_and_eight_rails_hold_the_same(tmp_path: Path, rails: int, radix: int) -> None:
    """Also with the thinking done where it is done in earnest: in a process of its own."""
    async with watched(
        tmp_path, nodes=(2, 77), think=aside, hosts=128, rails=rails, radix=radix, aggregation=False
    ) as watch:
        assert watch.news() == []
        standing = watch.plane.fabrics.standing(watch.fabric)
        assert standing.whole is not None
        assert standing.whole.counts.adapters == 128 * rails
        leaf = watch.site.leaf(3, 1)
        watch.site.fabric.cut(watch.site.leaf(0, 0), radix // 2 + 1)
        await watch.scan()
        assert watch.news() == ["fabric-link-gone"]
        watch.site.fabric.cut(leaf)
        await watch.scan()
        assert watch.news() == ["fabric-switch-gone"]
        watch.site.fabric.heal(leaf)
        await watch.scan()
        assert watch.news() == ["fabric-switch-new"]
        other = watch.site.leaf(3, 0)
        port = next(iter(leaf.cables))
        watch.site.fabric.swap(leaf, port, other, port)
        await watch.scan()
        assert watch.news() == ["fabric-cables-swapped"]
        assert watch.site.first is not None
        assert watch.site.second is not None
        watch.site.first.end(signal.SIGKILL)
        watch.site.second.wait_for("SUBNET UP")
        await watch.poll()
        assert watch.news() == ["sm-changed"]

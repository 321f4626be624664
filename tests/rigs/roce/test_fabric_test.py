"""Bandwidth tests as an operator runs them, over real verbs: ctl and the plane here, whole agents in two guests.

Each fault ends in bounded time with the right words, and leaves no ib_write_bw on either side.
"""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from subprocess import DEVNULL, PIPE
from typing import Any

import pytest
import trio

from tests.rigs.roce.fleet import BOUND, GOOD, Fleet
from tests.rigs.roce.guests import IN_GUESTS, Guest

pytestmark = IN_GUESTS

#: Seconds of a test in whose middle something is to break: long, so that a busy machine is in time for its middle.
MIDDLE = "25"
Break = Callable[[], Awaitable[object]]


@pytest.fixture(autouse=True)
async def _nothing_is_left(whole: Fleet) -> AsyncIterator[None]:
    yield
    for guest in (whole.a, whole.b):
        await guest.no_perftest()


async def broken(whole: Fleet, fault: Break, *args: str) -> dict[str, Any]:
    """The first rail's result when something breaks in the middle of its run."""
    found: list[dict[str, Any]] = []

    async def test() -> None:
        found.append(await whole.test("--rail", "0", "--seconds", MIDDLE, *GOOD, *args))

    with trio.fail_after(BOUND):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(test)
            await running(whole.a)
            await fault()
    (rail,) = found[0]["rails"]
    assert isinstance(rail, dict)
    return rail


async def running(guest: Guest) -> None:
    """Wait until the client's data flows: its process is there and packets were sent since."""
    await guest.sh(
        "until pgrep -x ib_write_bw; do sleep 0.2; done; cd /sys/class/infiniband/rxe0/ports/1/hw_counters;"
        "was=$(cat sent_pkts); until [ $(cat sent_pkts) -gt $((was + 200)) ]; do sleep 0.2; done"
    )


def active(port: dict[str, Any]) -> bool:
    return bool(port["state"].startswith("ACTIVE"))


async def known(whole: Fleet, guest: Guest, device: str, holds: Callable[[dict[str, Any]], bool]) -> None:
    """Wait until the plane knows something of a port."""
    with trio.fail_after(BOUND):
        while True:
            if holds(await whole.port(guest, device)):
                return
            await trio.sleep(0.5)


async def test_two_rails_are_tested_with_everything_agreed_before(whole: Fleet) -> None:
    with trio.fail_after(BOUND):
        result = await whole.test(*GOOD)
    assert [rail["verdict"]["grade"] for rail in result["rails"]] == ["good", "good"], result
    for at, rail in enumerate(result["rails"]):
        assert (rail["a"]["device"], rail["b"]["device"]) == (f"rxe{at}", f"rxe{at}")
        assert rail["gbps"] > 0
        assert (rail["kind"], rail["mtu"], rail["rate_gbps"]) == ("roce", 4096, 25.0)
        for end, guest in ((rail["a"], whole.a), (rail["b"], whole.b)):
            assert end["address"] == guest.address(at)
            assert {"-x", "-m", "-d", "-D"} <= set(end["command"])
            assert end["exit_code"] == 0
        # The two sides meet over the other rail, so that a cut link cannot hang them.
        assert rail["a"]["command"][-1] == whole.b.address(1 - at)


async def test_an_emulated_link_is_bad_by_the_usual_thresholds_and_says_so_with_numbers(whole: Fleet) -> None:
    with trio.fail_after(BOUND):
        result = await whole.test("--rail", "1")
    (rail,) = result["rails"]
    assert rail["verdict"]["grade"] == "bad"
    assert "below 90%" in rail["verdict"]["rule"]
    assert "25 Gb/s x 0.980 (MTU 4096, RoCE)" in rail["verdict"]["rule"]


async def test_latency_and_both_directions_are_measured(whole: Fleet) -> None:
    with trio.fail_after(BOUND):
        latency = await whole.test("--rail", "0", "--latency")
        both = await whole.test("--rail", "0", "--bidirectional", *GOOD)
    assert latency["rails"][0]["latency_us"] > 0, latency
    assert "gbps" not in latency["rails"][0]
    assert both["rails"][0]["verdict"]["grade"] == "good", both
    assert "2 x 25 Gb/s" in both["rails"][0]["verdict"]["rule"]


async def test_each_side_gets_its_own_gid_index_where_the_tables_differ(whole: Fleet) -> None:
    """A VLAN and more addresses, in another order on each side; only the VLANs share a subnet in the end."""
    await whole.a.sh(
        "ip link add link eth2 name eth2.100 type vlan id 100; ip link set eth2.100 up;"
        "ip addr add 10.77.0.11/24 dev eth2.100;"
        "ip addr add 172.21.1.11/24 dev eth2; ip addr add 172.21.2.11/24 dev eth2"
    )
    await whole.b.sh(
        "ip addr add 172.22.1.12/24 dev eth2; ip addr add 172.22.2.12/24 dev eth2; ip addr add 172.22.3.12/24 dev eth2;"
        "ip link add link eth2 name eth2.100 type vlan id 100; ip link set eth2.100 up;"
        "ip addr add 10.77.0.12/24 dev eth2.100"
    )
    try:
        for guest in (whole.a, whole.b):
            mapped = f"0a4d:00{guest.number:02x}"
            await known(whole, guest, "rxe1", lambda port, tail=mapped: tail in str(port["gids"]))  # type: ignore[misc]
        with trio.fail_after(BOUND):
            first = (await whole.test("--rail", "1", *GOOD))["rails"][0]
        assert (first["a"]["address"], first["b"]["address"]) == (whole.a.address(1), whole.b.address(1)), first
        for guest in (whole.a, whole.b):
            await guest.sh(f"ip addr del {guest.address(1)}/24 dev eth2")
            await known(whole, guest, "rxe1", lambda port: "c0a8:65" not in str(port["gids"]))
        with trio.fail_after(BOUND):
            second = (await whole.test("--rail", "1", *GOOD))["rails"][0]
        assert (second["a"]["address"], second["b"]["address"]) == ("10.77.0.11", "10.77.0.12"), second
        assert second["a"]["gid_index"] != second["b"]["gid_index"]
        assert second["verdict"]["grade"] == "good", second
        for end in (second["a"], second["b"]):
            assert end["command"][end["command"].index("-x") + 1] == str(end["gid_index"])
    finally:
        for guest in (whole.a, whole.b):
            await guest.sh(
                "ip link del eth2.100; for at in $(ip -o -4 addr show dev eth2 | awk '{print $4}'); do"
                f" ip addr del $at dev eth2; done; ip addr add {guest.address(1)}/24 dev eth2"
            )
        for guest in (whole.a, whole.b):
            await known(whole, guest, "rxe1", lambda port: "c0a8:65" in str(port["gids"]))


async def test_a_rail_that_is_down_is_not_started_and_the_other_is_tested(whole: Fleet) -> None:
    await whole.b.sh("ip link set eth1 down")
    try:
        await known(whole, whole.b, "rxe0", lambda port: not port["state"].startswith("ACTIVE"))
        with trio.fail_after(BOUND):
            first, second = (await whole.test(*GOOD))["rails"]
    finally:
        await whole.b.sh("ip link set eth1 up")
        await known(whole, whole.b, "rxe0", active)
    assert first["failure"]["code"] == "port-disabled", first
    assert "b rxe0/1" in first["failure"]["error"]
    assert first["failure"]["remedy"] == "ip link set eth1 up"
    assert second["verdict"]["grade"] == "good", second
    # The other rail is down, so that the sides can only meet over the one under test, and that is said.
    assert any("over the rail under test" in words for words in second["warnings"])


async def test_a_cable_that_is_pulled_in_the_middle_is_a_failure_and_no_low_figure(whole: Fleet) -> None:
    try:
        rail = await broken(whole, lambda: whole.a.link(0, False))
    finally:
        await whole.a.link(0, True)
        await known(whole, whole.a, "rxe0", active)
    assert "gbps" not in rail
    assert (rail["failure"]["code"], rail["failure"]["side"]) == ("link-died", "a"), rail
    assert "DOWN Polling" in rail["failure"]["cause"]


async def test_loss_on_the_way_is_a_low_figure_with_the_counters_that_tell(whole: Fleet) -> None:
    clean = (await whole.test("--rail", "0", *GOOD))["rails"][0]["gbps"]
    await whole.a.sh("tc qdisc add dev eth1 root netem loss 20%")
    try:
        with trio.fail_after(BOUND):
            rail = (await whole.test("--rail", "0", "--seconds", "8"))["rails"][0]
    finally:
        await whole.a.sh("tc qdisc del dev eth1 root")
    assert rail["gbps"] < clean / 2, rail
    assert rail["verdict"]["grade"] == "bad"
    assert any("completer_retry_err grew by" in words for words in rail["verdict"]["why"]), rail["verdict"]


async def test_a_killed_server_is_named(whole: Fleet) -> None:
    rail = await broken(whole, lambda: whole.b.sh("pkill -KILL -x ib_write_bw"))
    assert rail["failure"]["side"] == "b", rail
    assert rail["failure"]["error"] == "killed by SIGKILL"
    assert any("Couldn't read remote address" in line for line in rail["a"]["lines"]), rail["a"]


async def test_a_killed_client_is_named(whole: Fleet) -> None:
    rail = await broken(whole, lambda: whole.a.sh("pkill -KILL -x ib_write_bw"))
    assert rail["failure"]["side"] == "a", rail
    assert rail["failure"]["error"] == "killed by SIGKILL"
    assert any("Couldn't read remote address" in line for line in rail["b"]["lines"]), rail["b"]


async def test_ctrl_c_ends_the_real_processes_on_both_sides(whole: Fleet) -> None:
    command = whole.ctl("fabric-test", "a", "b", "--rail", "0", "--seconds", "600", "--size", "4KiB")
    process = await trio.lowlevel.open_process(
        [*command, "--queue-pairs", "1", "--perftest-option=-t 8"],
        env=dict(whole.env), stdin=DEVNULL, stdout=PIPE, stderr=PIPE,
    )  # fmt: skip
    with trio.fail_after(BOUND):
        await running(whole.a)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        async with trio.open_nursery() as nursery:
            for guest in (whole.a, whole.b):
                nursery.start_soon(guest.sh, "while pgrep -x ib_write_bw; do sleep 0.05; done")
        took = time.monotonic() - began
        await process.wait()
    for pipe in (process.stdout, process.stderr):
        assert pipe is not None
        await pipe.aclose()
    # An emulated guest needs a moment only to look; on machines it is under a second (tests/e2e).
    assert took < 120


async def test_a_lost_agent_ends_the_test_on_both_sides(whole: Fleet) -> None:
    """Last: the agent is gone afterwards."""
    rail = await broken(whole, lambda: whole.b.sh("pkill -KILL -f '[s]hare/agent/node.toml'"))
    assert rail["failure"]["side"] == "b", rail
    assert "stream" in rail["failure"]["error"]
    await whole.b.sh("pkill -KILL -x ib_write_bw || true")

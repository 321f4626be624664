"""The survey's view of real adapters (Soft-RoCE) in a guest: kinds, addresses, rails, and a pulled cable."""

from __future__ import annotations

import json
import sys
from typing import Any

import trio

from tests.rigs.roce.guests import IN_GUESTS, START, Guest

pytestmark = IN_GUESTS

LOOK = """
import json, sys, msgspec, trio
from llmgw.node.ports import Ports
from llmgw.node.view import View
ports = Ports(View(fabrics={"rxe*": "lab"}))

async def look():
    # An adapter of a busy guest may answer late, which is not what is tested.
    while (view := await ports.look()).silent:
        await trio.sleep(0.2)
    return view

view = trio.run(look)
json.dump(msgspec.to_builtins({"ports": view.ports, "loads": view.loads}), sys.stdout)
"""

#: How doctor says that adapters did not answer in its time.
UNSEEN = ("see rdma.adapters", "no RDMA adapters")


async def look(guest: Guest) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((await guest.run(sys.executable, "-c", LOOK)).ok())
    return found


async def doctor(guest: Guest, *only: str) -> list[dict[str, Any]]:
    """What doctor finds. It has a few seconds for all, and adapters of a busy guest may answer later: again then."""
    ask = "from llmgw.node.doctor.command import doctor; doctor()"
    options = [word for name in only for word in ("--only", name)]
    while True:
        done = await guest.run(sys.executable, "-c", ask, "--dir", "/tmp/none", "-o", "json", *options)
        findings: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
        if not any(word in finding["text"] for finding in findings for word in UNSEEN):
            return findings


async def test_soft_adapters_are_roce_rails_with_their_interfaces_rate_and_addresses(
    pair: tuple[Guest, Guest],
) -> None:
    with trio.fail_after(START):
        seen = await look(pair[0])
    assert [(port["device"], port["kind"], port["rail"]) for port in seen["ports"]] == [
        ("rxe0", "roce", 0),
        ("rxe1", "roce", 1),
    ]
    for rail, port in enumerate(seen["ports"]):
        assert (port["netdev"], port["driver"], port["mtu"]) == (f"eth{rail + 1}", "rxe", 4096)
        assert (port["rate_gbps"], port["state"], port["fabric"]) == (25.0, "ACTIVE", "lab")
        assert any(gid[2:] == ["RoCE v2", f"eth{rail + 1}"] for gid in port["gids"])
    assert "sent_pkts" in seen["loads"][0][6]


async def test_a_pulled_cable_is_polling_without_a_rate_and_doctor_names_the_port(pair: tuple[Guest, Guest]) -> None:
    guest = pair[1]
    with trio.fail_after(4 * START):
        well = await doctor(guest, "rdma.state", "rdma.gid")
        assert [finding["outcome"] for finding in well] == ["pass", "pass"]
        await guest.link(1, up=False)
        try:
            await guest.sh("until grep -q DOWN /sys/class/infiniband/rxe1/ports/1/state; do sleep 0.2; done")
            (load,) = (load for load in (await look(guest))["loads"] if load[0] == "rxe1")
            assert load[2:4] == ["DOWN", "Polling"]
            assert load[4] is None
            (finding,) = await doctor(guest, "rdma.state")
        finally:
            await guest.link(1, up=True)
            await guest.sh("until grep -q ACTIVE /sys/class/infiniband/rxe1/ports/1/state; do sleep 0.2; done")
    assert finding["outcome"] == "warn"
    assert finding["subject"] == "port:rxe1/1"
    assert "Polling" in finding["text"]

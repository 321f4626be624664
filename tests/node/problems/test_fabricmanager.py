"""Whether the fabric manager is missed."""

from __future__ import annotations

import attrs
import pytest
from msgspec.structs import replace

from llmgw.node.problems.memory import Facts
from llmgw.wire.facts import GpuFabric, Grade, Host, HostLimits
from tests.node.problems.test_gpus import READY, found, verdict, view, with_fabric


def switched(facts: Facts, switches: int = 4) -> Facts:
    limits = replace(facts.host.limits, nvswitches=switches)
    return attrs.evolve(facts, host=replace(facts.host, limits=limits))


def test_a_fabric_manager_that_ended_is_missed_where_it_is_this_nodes_own() -> None:
    board = switched(with_fabric(GpuFabric(state="completed"), "inactive"))
    assert [each.code for each in verdict((0, board), (61, board)).problems] == ["fabric-manager-down"]
    assert verdict((0, board), (61, board)).problems[0].grade is Grade.WARN
    rack = switched(with_fabric(READY, "inactive"))
    assert verdict((0, rack), (61, rack)).problems == ()
    for word in ("active", None):
        there = switched(with_fabric(GpuFabric(state="completed"), word))
        assert verdict((0, there), (61, there)).problems == ()


def test_a_manager_that_has_nothing_to_manage_is_not_missed() -> None:
    """Images of virtual machines have it installed; the host's manager makes the fabric."""
    guest = switched(with_fabric(GpuFabric(state="completed"), "inactive"), 0)
    assert verdict((0, guest), (61, guest)).problems == ()


@pytest.mark.parametrize(
    ("way", "switches", "manager", "bad"),
    [
        ("NV12", 6, "inactive", True),
        ("SYS", 6, "inactive", True),  # never ran since the machine booted: no NVLink is up
        ("NV12", 6, "active", False),
        ("NV12", 6, None, False),
        ("NV12", 0, "inactive", False),  # a virtual machine
        ("PIX", 0, "inactive", False),
    ],
)
def test_switched_gpus_that_do_not_tell_of_their_fabric_need_the_manager(
    way: str, switches: int, manager: str | None, bad: bool
) -> None:
    """An A100 knows no fabric state; CUDA fails with 802 all the same."""
    seen = view()
    linked = tuple(replace(each, topology={"GPU-x": way}) for each in seen.gpus)
    host = Host(boot_id="boot", limits=HostLimits(fabric_manager=manager, nvswitches=switches))
    problems = found(Facts(host=host, gpus=attrs.evolve(seen, gpus=linked)))
    assert ("gpu:GPU-0 fabric-manager" in problems) is bad

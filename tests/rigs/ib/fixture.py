"""What the tests of real fabrics share: a fat tree with two managers, and the machine of one of its hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import attrs
import pytest

from llmgw.node.fabric import Scanner
from llmgw.wire.facts import Port
from tests.rigs.ib.fabric import Fabric, Manager, until
from tests.rigs.ib.machine import machine
from tests.rigs.ib.net import Box, Net, fat_tree
from tests.rigs.ib.tools import missing

#: Simulated fabrics that are begun at most until one settles. About one of twenty does not.
MOST = 12

_numbers = count()

#: Marks for a test that runs the real tools; without them it says which is missing.
needs_tools = [pytest.mark.real, pytest.mark.skipif(bool(missing()), reason=missing() or "the tools are here")]


def port(box: Box, device: str, *, state: str = "ACTIVE") -> Port:
    """An adapter's port as the survey would tell it."""
    return Port(
        device=device, kind="ib", state=state, physical_state="LinkUp", link_layer="InfiniBand",
        node_guid=f"{box.guid:016x}", port_guid=f"{box.guid + 1:016x}",
    )  # fmt: skip


@attrs.define
class Site:
    """One simulated fabric with its managers, and the nodes on it."""

    fabric: Fabric
    directory: Path
    first: Manager | None = None
    second: Manager | None = None

    @property
    def net(self) -> Net:
        return self.fabric.net

    def leaf(self, group: int, rail: int) -> Box:
        return next(box for box in self.net.leaves if box.name.startswith(f"MF0;leaf-su{group:03d}-r{rail}:"))

    def scanner(self, host: int) -> Scanner:
        """The scanner of one host's agent: its adapters by name, its tools found on its own PATH."""
        devices = {f"mlx5_{rail}": (self.fabric, self.net.host(host, rail)) for rail in range(self.net.rails)}
        place = self.directory / f"node-{host}"
        environment = machine(place, devices)
        return Scanner(lambda: [port(box, name) for name, (_, box) in devices.items()], environment=environment)


@contextmanager
def site(
    directory: Path,
    *,
    hosts: int = 16,
    rails: int = 2,
    radix: int = 8,
    managers: int = 2,
    aggregation: bool = True,
    priorities: tuple[int, int] = (14, 5),
    at: tuple[int, int] = (0, 1),
) -> Iterator[Site]:
    """A fat tree; `managers` subnet managers on the hosts `at`, up and settled.

    The simulated MAD layer has no time-outs of its own, so that now and then a manager waits for ever for a packet
    that got lost while two of them met. That is the rig's fault alone: such a start is thrown away.
    """
    net = fat_tree(hosts, rails, radix=radix, aggregation=aggregation)
    for attempt in range(MOST):
        with Fabric(net, directory, f"ib-{os.getpid()}-{next(_numbers)}") as fabric:
            one = Site(fabric, directory)
            try:
                _settle(one, managers, priorities, at)
            except TimeoutError:
                if attempt == MOST - 1:
                    raise
                continue
            yield one
            return


def _settle(one: Site, managers: int, priorities: tuple[int, int], at: tuple[int, int]) -> None:
    fabric = one.fabric
    if managers > 0:
        one.first = fabric.manager(fabric.net.host(at[0]), priorities[0], sweep=1)
        one.first.wait_for("SUBNET UP", 30)
    if managers > 1:
        one.second = fabric.manager(fabric.net.host(at[1]), priorities[1], sweep=1)
        one.second.wait_for("Entering STANDBY", 15)
        # The master notices it at its next sweep.
        there = fabric.net.hosts[-1]
        until(lambda: fabric.tool(there, "saquery", "SMIR", within=15).out.count("SMInfoRecord") == 2, "both", 15)

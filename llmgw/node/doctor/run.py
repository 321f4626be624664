"""The examination: look at everything once, then run every check side by side."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence

import trio

from llmgw.errors import BadInput
from llmgw.node.doctor import agent, gpus, host, rdma
from llmgw.node.doctor.check import CHECKS, FAIL, WARN, Check
from llmgw.node.doctor.patient import Patient, examined
from llmgw.node.nvml.probe import Probe
from llmgw.node.settings import NodeSettings
from llmgw.wire.control import DoctorReply, Finding

#: The groups of checks, in the order in which they are shown; importing a module makes its checks known.
GROUPS = {"host": host, "gpu": gpus, "rdma": rdma, "agent": agent}


def all_checks() -> tuple[Check, ...]:
    order = list(GROUPS)
    return tuple(sorted(CHECKS.values(), key=lambda check: order.index(check.id.partition(".")[0])))


def chosen(only: Sequence[str]) -> tuple[Check, ...]:
    """The checks that are wanted, by id or by group ("gpu"); all when none is named. Raises BadInput."""
    for name in only:
        if not any(_means(name, check) for check in CHECKS):
            near = difflib.get_close_matches(name, [*CHECKS, *GROUPS], n=1)
            remedy = f"did you mean {near[0]}?" if near else f"there are {', '.join(GROUPS)}, or single ids"
            raise BadInput(f"there is no check {name!r}", remedy=remedy)
    return tuple(check for check in all_checks() if not only or any(_means(name, check.id) for name in only))


def _means(wanted: str, check: str) -> bool:
    return check == wanted or check.startswith(f"{wanted}.")


async def doctor(
    settings: NodeSettings, only: Sequence[str] = (), *, probe: Callable[[], Probe] | None = None
) -> DoctorReply:
    """Examine this node. Takes less than ten seconds, needs no plane, disturbs nothing. Raises BadInput."""
    began = trio.current_time()
    checks = chosen(only)
    patient = await examined(settings, probe=probe)
    results = await findings(checks, patient)
    return DoctorReply(findings=results, seconds=round(trio.current_time() - began, 2))


async def findings(checks: Iterable[Check], patient: Patient) -> tuple[Finding, ...]:
    """What each check finds, in the checks' order."""
    found: dict[str, tuple[Finding, ...]] = {}

    async def one(check: Check) -> None:
        found[check.id] = await check.findings(patient)

    listed = tuple(checks)
    async with trio.open_nursery() as nursery:
        for check in listed:
            nursery.start_soon(one, check)
    return tuple(finding for check in listed for finding in found[check.id])


def exit_status(reply: DoctorReply) -> int:
    """2 when a check failed, 1 when one warns, else 0."""
    outcomes = {finding.outcome for finding in reply.findings}
    return 2 if FAIL in outcomes else 1 if WARN in outcomes else 0

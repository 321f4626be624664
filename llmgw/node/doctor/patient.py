"""What checks look at: everything the survey can see of the node, looked at once, each part under its own deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import attrs
import trio

from llmgw.node.gpus import Gpus, GpuView, own_pid_namespace
from llmgw.node.host import Meter, boot_id, host
from llmgw.node.imex import imex, own_addresses
from llmgw.node.kernel import KernelEvent, so_far
from llmgw.node.nvml.probe import Probe
from llmgw.node.ports import Ports
from llmgw.node.problems.memory import Facts, Symptom, recalled
from llmgw.node.problems.verdict import now_wrong
from llmgw.node.settings import NodeSettings
from llmgw.node.view import View
from llmgw.wire.facts import Host, Imex

T = TypeVar("T")

#: Seconds for all looking together, checks not counted; doctor as a whole takes less than ten.
WITHIN = 5.5
#: Seconds after which the others are not kept waiting for an adapter that does not answer.
HANGS = 0.3


@attrs.frozen
class Patient:
    """The node as it is now. `missed` names the parts that did not answer in time, `log_readable` whether the kernel's
    log may be read here; `symptoms` is what the rules of the survey make of all this."""

    settings: NodeSettings
    view: View
    facts: Facts
    symptoms: tuple[Symptom, ...] = ()
    log_readable: bool = True
    own_pids: bool = True
    missed: tuple[str, ...] = ()

    @property
    def host(self) -> Host:
        return self.facts.host


async def examined(settings: NodeSettings, *, probe: Callable[[], Probe] | None = None) -> Patient:
    """Look at everything side by side. Never raises for what hardware does; harmless to what runs."""
    view, missed = settings.view, list[str]()
    found: dict[str, object] = {}

    async def part(name: str, look: Callable[[], Awaitable[T]]) -> None:
        with trio.move_on_after(WITHIN) as scope:
            found[name] = await look()
        if scope.cancelled_caught:
            missed.append(name)

    async def all_gpus() -> GpuView:
        asker = probe() if probe else Probe(first_within=WITHIN - 1, within=WITHIN - 1, death_within=WITHIN / 5)
        return await Gpus(view, probe=asker, keep=False).once()

    adapters = Ports(
        view, lambda: listed.gpus if isinstance(listed := found.get("gpus"), GpuView) else (), within=HANGS
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(part, "host", partial(_threaded, partial(host, view)))
        nursery.start_soon(part, "gpus", all_gpus)
        nursery.start_soon(part, "ports", partial(_ports, adapters))
        nursery.start_soon(part, "kernel", partial(_threaded, partial(so_far, view)))
        nursery.start_soon(part, "imex", partial(_imex, view))
    log = found.get("kernel")
    machine = found.get("host")
    gpus, domain = found.get("gpus"), found.get("imex")
    facts = Facts(
        host=machine if isinstance(machine, Host) else Host(boot_id=boot_id(view)),
        load=Meter(view).host(),
        gpus=gpus if isinstance(gpus, GpuView) else GpuView(),
        # Which GPUs are near is known only now that both were looked at.
        ports=adapters.so_far(),
        imex=domain if isinstance(domain, Imex) else None,
        events=tuple(each for each in log if isinstance(each, KernelEvent)) if isinstance(log, tuple) else (),
        host_stalled=time.monotonic() - WITHIN if "host" in missed else None,
    )
    memory = recalled(view.state / "problems.json" if view.state else None)
    return Patient(
        settings=settings,
        view=view,
        facts=facts,
        symptoms=tuple(now_wrong(facts, memory, time.monotonic())),
        log_readable=log is not None,
        own_pids=own_pid_namespace(view),
        missed=tuple(missed),
    )


async def _ports(adapters: Ports) -> None:
    """Look at all adapters; a slow one has until shortly before the time is up, and however many hang, the others are
    seen."""
    with trio.move_on_after(WITHIN - 0.5):
        await adapters.look()
        while adapters.view.value.silent:
            await trio.sleep(0.25)
            await adapters.look()


async def _threaded(look: Callable[[], T]) -> T:
    return await trio.to_thread.run_sync(look, abandon_on_cancel=True)


async def _imex(view: View) -> Imex | None:
    from llmgw.node.interfaces import interfaces

    return await imex(view, own_addresses(await _threaded(partial(interfaces, view)), os.uname().nodename))

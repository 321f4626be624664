"""The node's problems as one list (B3): every rule applied to what was seen, joined with what was known."""

from __future__ import annotations

from functools import partial

from llmgw.node.problems import gpus, host, ports
from llmgw.node.problems.memory import Facts, Memory, PortPast, Symptom, Verdict, settled, told


def problems(facts: Facts, previous: Memory, now: float) -> Verdict:
    """What is wrong, and what to remember. `now` is the monotonic clock; another boot's memory counts for nothing."""
    if previous.boot != facts.host.boot_id:
        previous = Memory(boot=facts.host.boot_id)
    port_past = ports.remembered(facts, previous.ports, now) if facts.ports.at is not None else previous.ports
    held = settled(previous.held, symptoms(facts, previous, port_past, now), now, partial(gpus.unseen, facts))
    gpu_past = gpus.remembered(facts, previous.gpus, now)
    return Verdict(told(held), Memory(boot=previous.boot, held=held, ports=port_past, gpus=gpu_past))


def now_wrong(facts: Facts, previous: Memory, now: float) -> list[Symptom]:
    """What is wrong at this moment, whether it lasts or not."""
    previous = previous if previous.boot == facts.host.boot_id else Memory()
    return symptoms(facts, previous, ports.remembered(facts, previous.ports, now), now)


def symptoms(facts: Facts, previous: Memory, port_past: dict[str, PortPast], now: float) -> list[Symptom]:
    return [
        *gpus.driver(facts),
        *gpus.gpus(facts, previous.gpus, now),
        *gpus.xids(facts, now),
        *gpus.kernel(facts, now),
        *gpus.imex(facts),
        *ports.ports(facts, port_past, now),
        *ports.kernel(facts, now),
        *host.host(facts, now),
    ]

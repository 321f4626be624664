"""What goes wrong in one run, and when: drawn from a seed, and cut down to what matters when it finds a fault. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable

import attrs

#: Steps of the plane and of an agent at which a kill is most likely to hurt.
PLANE_STEPS = ("commit", "committed", "told")
AGENT_STEPS = ("record", "recorded", "gate", "started", "removing", "removed", "told", "sent")
#: How long things go wrong, in seconds.
TROUBLE = 90.0


@attrs.frozen
class Fault:
    """One thing that goes wrong, or that an operator does, `at` so many seconds."""

    at: float
    kind: str
    node: str = ""
    step: str = ""
    seconds: float = 0.0
    number: int = 0

    def __str__(self) -> str:
        words = [f"{self.at:7.2f} s  {self.kind}", self.node, self.step]
        words.append(f"for {self.seconds:.2f} s" if self.seconds else "")
        words.append(f"({self.number})" if self.number else "")
        return " ".join(filter(None, words))


@attrs.frozen
class Schedule:
    """One run: everything random in it comes from `seed`, everything that goes wrong is in `faults`."""

    seed: int
    nodes: tuple[str, ...]
    faults: tuple[Fault, ...]
    lingers: float = 10.0  # seconds after the last fault before everything is made well again

    def __str__(self) -> str:
        return "\n".join([f"seed {self.seed}, nodes {', '.join(self.nodes)}", *map(str, self.faults)])


#: What may go wrong, with its weight.
KINDS = {
    "plane killed": 3,
    "plane killed at": 5,
    "plane frozen": 1,
    "store slow": 1,
    "store fails": 1,
    "agent killed": 4,
    "agent killed at": 6,
    "engine killed": 4,
    "machine reboots": 1,
    "disk full": 2,
    "cut off": 3,
    "cannot speak": 2,
    "cannot hear": 2,
    "all cut off": 1,
    "stream cut": 2,
    "network slow": 1,
    "frames repeated": 2,
    "wall clock jumps": 1,
    "hardware changes": 2,
    "apply": 3,
    "apply wide": 4,
    "cordon": 1,
    "uncordon": 1,
    "drain": 2,
    "undrain": 1,
    "forget": 1,
    "ask": 2,
}


def drawn(seed: int) -> Schedule:
    """The schedule of a seed."""
    rng = random.Random(seed)
    nodes = tuple(f"n{n}" for n in range(1, rng.choice((2, 3, 3, 4)) + 1))
    kinds = rng.choices(list(KINDS), list(KINDS.values()), k=rng.randint(3, 14))
    faults = [Fault(0.5, rng.choice(("apply", "apply wide")), number=rng.randint(1, 1 << 16))]
    for kind in kinds:
        # What happens together hurts most: often on the heels of the fault before.
        at = rng.uniform(0.0, TROUBLE) if rng.random() < 0.5 else faults[-1].at + rng.expovariate(1.0)
        step = ""
        if kind == "plane killed at":
            step = rng.choice(PLANE_STEPS)
        elif kind == "agent killed at":
            step = rng.choice(AGENT_STEPS)
        seconds = rng.choice((0.05, 0.5, 3.0, 9.0, 25.0, 50.0)) * rng.uniform(0.5, 1.5)
        faults.append(Fault(at, kind, rng.choice(nodes), step, seconds, rng.randint(1, 1 << 16)))
    return Schedule(seed, nodes, tuple(sorted(faults, key=lambda fault: fault.at)), rng.choice((0.0, 3.0, 10.0, 40.0)))


def shrunk(schedule: Schedule, fails: Callable[[Schedule], bool], tries: int = 200) -> Schedule:
    """The smallest part of a schedule that still fails: halves, then quarters, then single faults are left out."""
    size = max(1, len(schedule.faults) // 2)
    while size and tries > 0:
        at = 0
        while at < len(schedule.faults) and tries > 0:
            fewer = attrs.evolve(schedule, faults=schedule.faults[:at] + schedule.faults[at + size :])
            tries -= 1
            if fails(fewer):
                schedule = fewer
            else:
                at += size
        size //= 2
    return schedule

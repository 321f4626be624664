"""What judging a node must remember from one look to the next, and across a restart of the agent.

Times are the kernel's monotonic clock, which an agent's restart does not touch and a reboot does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import msgspec
from msgspec import Struct, structs

from llmgw.node import files
from llmgw.node.gpus import GpuView
from llmgw.node.kernel import KernelEvent
from llmgw.node.ports import PortView
from llmgw.wire.facts import Host, HostLoad, Imex, Problem


@attrs.frozen
class Facts:
    """What was seen of the node. `host_stalled` is since when the host's own files do not return, None: they do."""

    host: Host = Host()
    load: HostLoad = HostLoad()
    gpus: GpuView = GpuView()
    ports: PortView = PortView()
    imex: Imex | None = None
    events: tuple[KernelEvent, ...] = ()
    host_stalled: float | None = None


#: Stands in a symptom's words for how long it has lasted.
AGE = "\N{HOURGLASS}"


@attrs.frozen
class Symptom:
    """One thing that is wrong now.

    `after`: seconds that it must last before it is a problem; `clear`: seconds that it must be gone before it is none.
    Where its words have `AGE`, they are told with the seconds since it began.
    """

    problem: Problem
    after: float = 0.0
    clear: float = 60.0


class Held(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A symptom's history: since when, and since when it is gone (None: it is there).

    Gone counts from a look that did not find it, so that time in which nobody looked clears nothing.
    """

    problem: Problem
    first: float
    gone_at: float | None = None
    told_at: float = 0.0
    told: bool = False
    clear: float = 60.0


class Baseline(Struct, frozen=True, array_like=True):
    at: float
    counters: dict[str, int]


class PortPast(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A port's history. `downs` are times at which its link went away, for at most a day."""

    state: str = ""
    up_at: float | None = None  # when it was last seen active
    down_since: float | None = None
    downs: tuple[float, ...] = ()
    link_downed: int | None = None
    baselines: tuple[Baseline, ...] = ()
    seen_at: float = 0.0
    pci: str = ""
    vf: bool = False


class GpuPast(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU's NVLink errors over the last hour: (time, count), oldest first."""

    nvlink_errors: tuple[tuple[float, int], ...] = ()


class Memory(Struct, frozen=True, kw_only=True, omit_defaults=True):
    boot: str = ""
    held: dict[str, Held] = {}
    ports: dict[str, PortPast] = {}
    gpus: dict[str, GpuPast] = {}


def recalled(file: Path | None) -> Memory:
    """What an earlier agent wrote down; nothing where that cannot be read."""
    text = files.text(file) if file is not None else None
    try:
        return msgspec.json.decode(text, type=Memory) if text else Memory()
    except (msgspec.MsgspecError, RecursionError):
        return Memory()


@attrs.frozen
class Verdict:
    problems: tuple[Problem, ...]
    memory: Memory


def key(problem: Problem) -> str:
    return f"{problem.subject} {problem.code}"


def settled(
    before: Mapping[str, Held], symptoms: list[Symptom], now: float, unseen: Callable[[Problem], bool] | None = None
) -> dict[str, Held]:
    """The symptoms joined with their history: new ones begin, lasting ones go on, gone ones wait out their window.

    `unseen` says of which problems nobody could look whether they are gone: they stay.
    A problem's words keep still for a minute, so that a number in them that moves does not make news of it.
    """
    held: dict[str, Held] = {}
    for symptom in symptoms:
        name, old = key(symptom.problem), before.get(key(symptom.problem))
        if name in held:
            continue  # the first of two with one identity counts
        first = old.first if old is not None else now
        told = (old is not None and old.told) or now - first >= symptom.after
        fresh = old is None or not old.told or old.problem.grade != symptom.problem.grade or now - old.told_at >= 60
        held[name] = Held(
            problem=_aged(symptom.problem, now - first) if fresh or old is None else old.problem,
            first=first,
            told_at=now if fresh or old is None else old.told_at,
            told=told,
            clear=symptom.clear,
        )
    for name, old in before.items():
        if name not in held and unseen is not None and unseen(old.problem):
            held[name] = old
        elif name not in held and old.told:
            gone_at = now if old.gone_at is None else old.gone_at
            if now - gone_at < old.clear:
                held[name] = structs.replace(old, gone_at=gone_at)
    return held


def _aged(problem: Problem, seconds: float) -> Problem:
    if AGE not in problem.text:
        return problem
    return structs.replace(problem, text=problem.text.replace(AGE, f"{round(seconds)} s"))


def told(held: Mapping[str, Held]) -> tuple[Problem, ...]:
    return tuple(each.problem for _, each in sorted(held.items()) if each.told)

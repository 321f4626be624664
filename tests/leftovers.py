"""Processes that a test started, seen as the kernel shows them, and their end.

SIGKILL is sent in a moment, but a process dies only when it runs next, and one that is no child of ours tells nobody.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

from llmgw.node import processes
from llmgw.node.engines.environment import STATE


def alive(pid: int) -> bool:
    seen = processes.look(pid)
    return seen is not None and seen.alive


def alive_in(group: int) -> list[int]:
    """The living processes of a process group."""
    return [pid for pid, seen in processes.everyone().items() if seen.group == group and seen.alive]


def marked(state: Path) -> set[int]:
    """The living processes that carry an agent's mark: the engines and tools that it started.

    One that is just becoming another program has no environment, and so no mark, for a moment.
    """
    everyone = processes.everyone()
    return {pid for pid in processes.carrying(STATE, str(state), everyone) if everyone[pid].alive}


def end(pids: Iterable[int]) -> None:
    """SIGKILL to each; who has ended by itself meanwhile is at rest."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def end_marked(state: Path) -> None:
    """What a failed test left of an agent's processes does not outlive it."""
    end(marked(state))

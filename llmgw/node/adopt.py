"""Knowing one's own engines again after a restart of the agent. Pure: what the record says against what is seen."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import attrs

from llmgw.node.engines.environment import SHARD, TOKEN
from llmgw.node.processes import Seen
from llmgw.node.records import Record


class Known(StrEnum):
    """OURS: every mark fits. GONE: that process has ended, for certain. UNSURE: it cannot be told."""

    OURS = "ours"
    GONE = "gone"
    UNSURE = "unsure"


@attrs.frozen
class Verdict:
    known: Known
    text: str = ""


def verify(record: Record, seen: Seen | None, environment: Mapping[str, str] | None, boot: str) -> Verdict:
    """Whether the process with the record's number is the one that was started (C2)."""
    if not record.pid:
        return Verdict(Known.GONE, "it had not been started yet when the agent ended")
    if not boot or not record.boot:
        return Verdict(Known.UNSURE, "the machine's boot id cannot be read")
    if record.boot != boot:
        return Verdict(Known.GONE, "the machine was booted since")
    if seen is None or not seen.alive:
        return Verdict(Known.GONE, "it ended while no agent watched")
    if seen.started != record.started:
        return Verdict(Known.GONE, f"it ended while no agent watched (process {seen.pid} is another one by now)")
    if environment is None:
        return Verdict(Known.UNSURE, f"the environment of process {seen.pid} cannot be read")
    if environment.get(TOKEN) != record.token:
        mark = f"carries {SHARD}={environment[SHARD]!r}" if SHARD in environment else "does not carry its token"
        return Verdict(Known.UNSURE, f"process {seen.pid} has the number and start time of the engine but {mark}")
    return Verdict(Known.OURS)

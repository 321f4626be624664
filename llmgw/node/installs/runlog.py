"""What installers print, as runs among the node's logs: `ctl logs NODE install:ENGINE-VERSION`. Blocks on the disk."""

from __future__ import annotations

from pathlib import Path

import structlog

from llmgw.node.logs import Logs
from llmgw.node.runs import RunEnd, RunName
from llmgw.wire.facts import ShardId

log = structlog.get_logger("llmgw.installs")


def begin(logs: Logs, name: ShardId) -> tuple[RunName, Path]:
    """The next run of a source, and its empty file. Raises OSError."""
    runs = [run for source in logs.sources() if source.name == name for run in source.runs]
    last = max((run for text in runs if (run := RunName.parse(text)) is not None), default=None)
    if last is not None:
        # The agent that made it may have been killed: a log without an end is kept for ever.
        logs.end(name, last, RunEnd(failed=True))
    run = RunName(1 if last is None else last.generation + 1)
    path = logs.begin(name, run)
    path.touch()
    return run, path


def end(logs: Logs, name: ShardId, run: RunName, failed: bool) -> None:
    """Note how a run ended."""
    try:
        logs.end(name, run, RunEnd(failed=failed))
    except OSError as error:
        log.warning("the end of an installation could not be noted", source=name, error=str(error))

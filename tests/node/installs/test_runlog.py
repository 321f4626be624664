"""Runs of installers among the node's logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.log import Ring
from llmgw.node.installs import runlog
from llmgw.node.logs import Logs
from llmgw.node.runs import RunName
from llmgw.wire.facts import ShardId

pytestmark = pytest.mark.real

NAME = ShardId("install:vllm-1.0")


def test_runs_are_numbered_one_after_the_other(tmp_path: Path) -> None:
    logs = Logs(tmp_path, Ring())
    for number in (1, 2, 3):
        run, path = runlog.begin(logs, NAME)
        assert (run, path.read_bytes()) == (RunName(number), b"")
        runlog.end(logs, NAME, run, failed=number == 1)
    assert [source.runs for source in logs.sources() if source.name == NAME] == [("1", "2", "3")]


def test_runs_whose_agent_was_killed_are_not_kept_for_ever(tmp_path: Path) -> None:
    logs = Logs(tmp_path, Ring(), keep=2)
    for _ in range(6):
        run, _ = runlog.begin(logs, NAME)
    runlog.end(logs, NAME, run, failed=False)
    (runs,) = [source.runs for source in logs.sources() if source.name == NAME]
    assert runs == ("5", "6")

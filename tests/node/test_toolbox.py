"""What an agent knows of the perftest on its node."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmgw.node import toolbox
from llmgw.node.toolbox import Toolbox

pytestmark = pytest.mark.real


async def test_a_program_that_answered_too_late_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "ib_write_bw"
    program.write_text(f"#!/bin/sh\n[ -e {tmp_path}/slow ] && exec sleep 600\necho 'Version: 6.06 --use_cuda'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    box = Toolbox()
    (tmp_path / "slow").touch()
    with monkeypatch.context() as hurried:
        hurried.setattr(toolbox, "ASK_WITHIN", 0.1)
        assert (await box.tools()).version == ""
    (tmp_path / "slow").unlink()
    found = await box.tools()
    assert (found.version, found.cuda) == ("6.06", True)
    (tmp_path / "slow").touch()
    assert await box.tools() is found, "the program is asked once"

"""An agent's installing part with nothing of this machine's to find."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.node.installs.packages import Where
from tests.node.installs.rig import Site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    # No llama-server and no vllm of this machine's: what is found is what was installed.
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr("llmgw.node.engines.places._packaged", lambda: None)
    made = Site(tmp_path, Where(find_links=(str(tmp_path / "wheels"),), offline=True))
    made.wheels.mkdir()
    return made

"""A busy machine is no sick one."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part of the node has much longer to answer than a doctor would wait."""
    for limit in ("patient.WITHIN", "check.WITHIN", "agent.CONNECT_WITHIN"):
        monkeypatch.setattr(f"llmgw.node.doctor.{limit}", 60.0)

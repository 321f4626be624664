"""What the doctor reads of the machine by itself."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from llmgw.node.doctor.agent import listening
from llmgw.node.doctor.patient import Patient
from llmgw.node.problems.memory import Facts
from llmgw.node.settings import NodeSettings

pytestmark = pytest.mark.real


def test_ports_that_somebody_listens_on_are_known_by_proc(tmp_path: Path) -> None:
    mine = NodeSettings(directory=tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        patient = Patient(settings=mine, view=mine.view, facts=Facts())
        assert server.getsockname()[1] in listening(patient)

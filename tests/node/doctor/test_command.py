"""`llmgw-node doctor` as a person and as a program meet it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmgw.node.doctor.command import doctor
from llmgw.node.doctor.run import all_checks

pytestmark = pytest.mark.real


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "node.toml"
    file.write_text(f'root = "{tmp_path}/root"\n')
    return file


def test_a_program_gets_json_and_the_worst_outcome_as_exit_status(config: Path) -> None:
    result = CliRunner().invoke(doctor, ["--config", str(config), "-o", "json"], catch_exceptions=False)
    reply = json.loads(result.stdout)
    found = {finding["outcome"] for finding in reply["findings"]}
    assert {finding["check"] for finding in reply["findings"]} == {check.id for check in all_checks()}
    assert result.exit_code == (2 if "fail" in found else 1 if "warn" in found else 0)


def test_a_person_gets_lines_with_remedies_and_a_count(config: Path) -> None:
    result = CliRunner().invoke(doctor, ["--config", str(config), "--only", "host.log"], catch_exceptions=False)
    assert result.exit_code == 1
    assert "WARN" in result.stdout
    assert "CAP_SYSLOG" in result.stdout
    assert "0 fail, 1 warn, 0 pass, 0 skipped" in result.stdout


def test_the_checks_can_be_listed(config: Path) -> None:
    result = CliRunner().invoke(doctor, ["--list", "--only", "gpu"], catch_exceptions=False)
    assert "gpu.xid" in result.stdout.split()


def test_skipped_checks_of_one_reason_are_told_together(config: Path) -> None:
    result = CliRunner().invoke(doctor, ["--config", str(config), "--only", "rdma"], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout.count("there are no RDMA adapters here") == 1

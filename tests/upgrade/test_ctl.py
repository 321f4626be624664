"""`llmgw ctl` of one version against a plane of another: what both know works; what only one knows is said clearly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from llmgw.demo.processes import command
from tests.upgrade.releases import PRESENT, Release, previous
from tests.upgrade.rig import Mixed, mixed

pytestmark = [pytest.mark.real, pytest.mark.slow]

COMMANDS = (
    "status", "nodes", "node n1", "models", "replicas", "why tiny", "problems", "events", "logs n1", "token list",
    "certs", "weights", "fabrics",
)  # fmt: skip


async def ctl(fleet: Mixed, release: Release, words: str) -> tuple[int, str, str]:
    fleet.speaks = release
    argv = command("llmgw", "ctl", "--dir", str(fleet.directory), *words.split())
    done = await trio.run_process(argv, env=fleet.env, capture_stdout=True, capture_stderr=True, check=False)
    assert done.returncode is not None
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize(
    ("plane", "operator"),
    [
        pytest.param(previous(), PRESENT, id="this ctl, the last release's plane"),
        pytest.param(PRESENT, previous(), id="the last release's ctl, this plane"),
    ],
)
async def test_ctl_works_with_a_plane_of_another_version(tmp_path: Path, plane: Release, operator: Release) -> None:
    async with mixed(tmp_path, plane, [plane], replicas=1) as fleet:
        failed: list[str] = []
        for words in COMMANDS:
            text = words if words.startswith("logs") else f"{words} -o json"
            status, out, errors = await ctl(fleet, operator, text)
            if status or not (out.strip() if text == words else answers(out)):
                failed.append(f"{text}: {status} {errors} {out[:200]}")
        for words in ("status", "nodes", "replicas"):
            status, out, errors = await ctl(fleet, operator, words)
            if status or "Traceback" in errors or not out.strip():
                failed.append(f"{words}: {status} {errors}")
        assert failed == []
        for words in ("cordon n1", "label n1 rack=a7"):
            status, _, errors = await ctl(fleet, operator, words)
            assert status == 0, errors
        assert (await fleet.node("n1"))["labels"] == {"rack": "a7"}
        if operator is PRESENT:
            # The plane has never heard of it: an answer in words, and no traceback.
            status, _, errors = await ctl(fleet, operator, "scale tiny 2")
            assert status not in (0, 1), errors
            assert "is ctl newer than the plane?" in errors


def answers(out: str) -> bool:
    """Whether it is JSON: one document, or one a line."""
    try:
        documents: list[Any] = [json.loads(out)]
    except ValueError:
        documents = [json.loads(line) for line in out.splitlines()]
    return bool(documents)

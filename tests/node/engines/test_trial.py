"""Trying engines that are Python packages, by their own Python."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from llmgw.errors import Failed, NotFound
from llmgw.node.engines.places import Whereabouts
from llmgw.node.engines.trial import Trial
from llmgw.node.engines.vllm import Vllm
from tests.engines import until
from tests.leftovers import marked

pytestmark = pytest.mark.real


def place(folder: Path) -> Whereabouts:
    program = folder / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return Whereabouts((str(program),), "1.0")


def python(folder: Path, script: str) -> str:
    """A Python of the engine's own, which does this instead of the trial."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("said", "did"),
    [
        ('llmgw-trial: {"did": "it computes"}', "it computes"),
        ("llmgw-trial: nonsense", "it was tried"),
        ("llmgw-trial: [1]", "it was tried"),
        ('llmgw-trial: {"did": "first"}\nnoise\nllmgw-trial: {"did": "last"}', "last"),
    ],
)
async def test_what_a_trial_says_it_did_is_taken_from_its_last_word(tmp_path: Path, said: str, did: str) -> None:
    own = python(tmp_path, f"print({said!r})")
    assert await Trial(tmp_path).python(Vllm(), place(tmp_path), own, tmp_path, within=60) == did


async def test_a_trial_that_says_nothing_or_leaves_with_an_error_has_failed(tmp_path: Path) -> None:
    where = place(tmp_path)
    for script in ("pass", 'print(\'llmgw-trial: {"did": "x"}\'); raise SystemExit(1)'):
        with pytest.raises(Failed, match="vllm"):
            await Trial(tmp_path).python(Vllm(), where, python(tmp_path, script), tmp_path, within=60)


async def test_a_known_last_word_is_the_cause(tmp_path: Path) -> None:
    own = python(tmp_path, "raise RuntimeError('CUDA error: no kernel image is available for execution on the device')")
    with pytest.raises(Failed) as caught:
        await Trial(tmp_path).python(Vllm(), place(tmp_path), own, tmp_path, within=60)
    assert caught.value.remedy
    assert "exited with code 1: " in caught.value.what


async def test_a_trial_that_hangs_is_ended_with_its_workers(tmp_path: Path) -> None:
    own = python(tmp_path, "import subprocess, time\nsubprocess.Popen(['sleep', '1000'])\ntime.sleep(1000)")
    with pytest.raises(Failed, match="not tried to the end within 1 s"):
        await Trial(tmp_path).python(Vllm(), place(tmp_path), own, tmp_path, within=1)
    await until(lambda: not marked(tmp_path))


async def test_a_program_that_is_not_there_is_not_tried(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nowhere"):
        await Trial(tmp_path).python(Vllm(), Whereabouts(("/nowhere/vllm",)), sys.executable, tmp_path, within=60)

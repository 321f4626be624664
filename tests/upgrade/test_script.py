"""scripts/release: what it makes, and what it refuses to tag."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.real


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    names = {f"GIT_{who}_{what}": "nobody@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")} | names
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small checkout at version 1.2.0, which is ready to be released."""
    made = tmp_path / "project"
    for name, text in {
        "pyproject.toml": '[project]\nversion = "1.2.0"\n',
        "llmgw/__init__.py": '__version__ = "1.2.0"\n',
        "CHANGELOG.md": "# Changelog\n\n## 1.2.0 (2027-01-31)\n",
        "tests/golden/wire.json": "{}\n",
    }.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(text)
    (made / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "release", made / "scripts")
    for words in ("git init -q", "git add -A", "git commit -qm first"):
        done = run(made, *words.split())
        assert done.returncode == 0, done.stderr
    return made


def test_a_release_is_tagged_and_kept_with_its_frames(project: Path) -> None:
    done = run(project, "scripts/release")
    assert done.returncode == 0, done.stderr
    assert run(project, "git", "tag", "--list").stdout.split() == ["v1.2.0"]
    with tarfile.open(project / "tests" / "releases" / "llmgw-1.2.0.tar.xz") as archive:
        files = sorted(member.name for member in archive if member.isfile())
    assert files == ["llmgw-1.2.0/llmgw/__init__.py", "llmgw-1.2.0/pyproject.toml"]
    assert (project / "tests" / "golden" / "wire-1.2.0.json").read_text() == "{}\n"


def test_what_was_released_already_can_be_kept_again(project: Path) -> None:
    assert run(project, "scripts/release").returncode == 0
    kept = project / "tests" / "releases" / "llmgw-1.2.0.tar.xz"
    before = kept.read_bytes()
    kept.unlink()
    assert run(project, "scripts/release", "--keep", "1.2.0").returncode == 0
    assert kept.read_bytes() == before
    refused = run(project, "scripts/release", "--keep", "9.9.9")
    assert (refused.returncode, refused.stderr) == (1, "release: there is no tag v9.9.9\n")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("llmgw/__init__.py", '__version__ = "1.1.0"\n', "names another version than 1.2.0"),
        ("CHANGELOG.md", "# Changelog\n", "says nothing of 1.2.0"),
        ("CHANGELOG.md", "## 1.2.0 (unreleased)\n", "calls 1.2.0 unreleased"),
    ],
)
def test_a_tree_that_is_not_that_version_is_not_tagged(project: Path, name: str, text: str, words: str) -> None:
    (project / name).write_text(text)
    refused = run(project, "scripts/release")
    assert "changes that are not committed" in refused.stderr
    run(project, "git", "commit", "-qam", "second")
    refused = run(project, "scripts/release")
    assert refused.returncode == 1
    assert words in refused.stderr
    assert run(project, "git", "tag", "--list").stdout == ""

"""What is kept of releases is what was released."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from llmgw import __version__
from tests.upgrade.releases import GOLDEN, Release, parts, previous, releases

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.real


def git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
    return done.stdout


def tags() -> set[str]:
    """The tags of this checkout; none where it is no checkout, or a shallow one."""
    try:
        return set(git("tag", "--list", "v*").split())
    except (OSError, subprocess.CalledProcessError):
        return set()


def test_the_version_is_one() -> None:
    (named,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert named == __version__
    assert f"## {__version__} (" in (ROOT / "CHANGELOG.md").read_text()


def test_the_release_before_this_one_is_kept_with_its_frames() -> None:
    before = previous()
    assert parts(before.version) < parts(__version__)
    assert (GOLDEN / f"wire-{before.version}.json").is_file()


@pytest.mark.parametrize("release", releases(), ids=lambda release: release.version)
def test_what_is_kept_runs_as_that_version_and_not_as_this_one(release: Release) -> None:
    code = "import llmgw, llmgw.plane.cli, llmgw.node.cli; print(llmgw.__version__, llmgw.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | release.env, capture_output=True, text=True, check=True, cwd=ROOT
    )
    version, file = done.stdout.split()
    assert version == release.version
    assert Path(file).is_relative_to(release.unpacked())


@pytest.mark.parametrize("release", releases(), ids=lambda release: release.version)
def test_what_is_kept_is_what_the_tag_says(release: Release) -> None:
    """A checkout without the tag cannot tell: the file alone is what it has, and the other tests run with it."""
    tag = f"v{release.version}"
    if tag not in tags():
        with tarfile.open(release.file) as archive:
            names = archive.getnames()
        assert f"llmgw-{release.version}/llmgw/cli.py" in names
        return
    there = {}
    for line in git("ls-tree", "-r", tag, "llmgw", "pyproject.toml").splitlines():
        mode, _, rest = line.split(" ", 2)
        sha, _, path = rest.partition("\t")
        there[path] = (sha, mode == "100755")
    root = release.unpacked()
    kept = {
        str(path.relative_to(root)): (blob(path), bool(path.stat().st_mode & 0o100))
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert kept == there
    assert git("show", f"{tag}:tests/golden/wire.json") == (GOLDEN / f"wire-{release.version}.json").read_text()


def blob(path: Path) -> str:
    """The name that git gives to a file's content."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def test_every_release_that_was_tagged_is_kept() -> None:
    kept = {f"v{release.version}" for release in releases()}
    assert {tag for tag in tags() if re.fullmatch(r"v\d+\.\d+\.\d+", tag)} - kept - {f"v{__version__}"} == set()

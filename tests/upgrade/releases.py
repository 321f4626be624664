"""The release before this one, as it was shipped: its code beside ours, in the same virtual environment.

It lies in tests/releases, so that a checkout without tags or history has it, too; `scripts/release` writes it there.
"""

from __future__ import annotations

import re
import sys
import tarfile
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import attrs

from llmgw import __version__

HERE = Path(__file__).parents[1]
RELEASES = HERE / "releases"
GOLDEN = HERE / "golden"


def parts(version: str) -> tuple[int, ...]:
    """A version as numbers that compare."""
    found = re.match(r"\d+(\.\d+)*", version)
    assert found is not None, version
    return tuple(int(part) for part in found[0].split("."))


@attrs.frozen
class Release:
    """A version and the file that its code lies in."""

    version: str
    file: Path

    def unpacked(self) -> Path:
        """A folder in which its `llmgw` lies."""
        return _unpacked(self.file) / f"llmgw-{self.version}"

    @property
    def env(self) -> dict[str, str]:
        """What makes an interpreter, and all that it starts, run this release and not the tree it stands in."""
        return {"PYTHONPATH": str(self.unpacked()), "PYTHONSAFEPATH": "1"}


@cache
def _unpacked(file: Path) -> Path:
    folder = Path(mkdtemp(prefix="llmgw-release-"))
    with tarfile.open(file) as archive:
        archive.extractall(folder, filter="data") if sys.version_info >= (3, 11, 4) else archive.extractall(folder)
    return folder


def releases() -> tuple[Release, ...]:
    """Every release that is kept, oldest first."""
    found = [Release(path.name.removeprefix("llmgw-").removesuffix(".tar.xz"), path) for path in RELEASES.glob("*.xz")]
    return tuple(sorted(found, key=lambda release: parts(release.version)))


def previous() -> Release:
    """The newest release that is older than this code."""
    older = [release for release in releases() if parts(release.version) < parts(__version__)]
    assert older, f"no release before {__version__} lies in {RELEASES}: scripts/release --keep VERSION"
    return older[-1]

"""The release before this one, as it was shipped: its code beside ours, in the same virtual environment.

It lies in tests/releases, so that a checkout without tags or history has it, too; `scripts/release` writes it there.
"""

from __future__ import annotations

import atexit
import re
import shutil
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


def _folder() -> Path:
    """One that lasts as long as this process."""
    folder = Path(mkdtemp(prefix="llmgw-release-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def _unpacked(file: Path) -> Path:
    folder = _folder()
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


@cache
def _varied(version: str, more: tuple[tuple[str, str], ...]) -> Path:
    """A copy of this tree that calls itself `version`, with text appended to some of its files."""
    folder = _folder()
    tree = folder / f"llmgw-{version}"
    shutil.copytree(HERE.parent / "llmgw", tree / "llmgw", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in (*more, ("__init__.py", f'\n__version__ = "{version}"\n')):
        file = tree / "llmgw" / name
        file.write_text((file.read_text() if file.exists() else "") + text)
    return tree


@attrs.frozen
class Variation(Release):
    """This tree, as another version of it would be: what nobody has released yet, or what is too old to be kept."""

    more: tuple[tuple[str, str], ...] = ()

    def unpacked(self) -> Path:
        return _varied(self.version, self.more)


#: Every frame has a field more, also inside, and each is followed by one of an unknown kind.
_STRANGE = """

_plain = encode


def encode(frame: object) -> bytes:
    shape = getattr(frame, "__struct_config__", None)
    if shape is None or shape.tag is None or shape.array_like:
        return _plain(frame)
    told = msgspec.msgpack.decode(_plain(frame))
    told["of the future"] = {"deep": [1, None, {"er": "x"}]}
    return _plain(told)
"""
_STRANGE_PLANE = """

_greet = AgentStream.greet


def _more(self, *commands):
    self._first.append(encode({"type": "of-the-future", "x": [1]}))
    _greet(self, *commands)
    self._first.append(encode({"type": "of-the-future", "x": [2]}))


AgentStream.greet = _more
"""
_STRANGE_AGENT = """

_put = Outbox.put


def _more(self, frame):
    _put(self, frame)
    self._short.append(encode({"type": "of-the-future", "x": [1]}))


Outbox.put = _more
"""


def _minor(by: int) -> str:
    major, minor, *_ = parts(__version__)
    return f"{major}.{minor + by}.0"


#: Two minor versions ahead of this one, with a state that this one must not touch.
FUTURE = Variation(
    _minor(2),
    HERE,
    (
        ("wire/codec.py", _STRANGE),
        ("plane/stream.py", _STRANGE_PLANE),
        ("node/outbox.py", _STRANGE_AGENT),
        ("plane/store/schema/9999.sql", "create table of_the_future (x integer);\n"),
    ),
)
#: An agent of the very first days: it answers `logs`, and announces nothing.
ANCIENT = Variation(
    "0.0.1",
    HERE,
    (
        (
            "node/main.py",
            "\n_register = Node.register\n\n\nasync def _first(self):\n"
            "    self.newest[0] = whole = structs.replace(await _register(self), features=())\n    return whole\n\n\n"
            "Node.register = _first\n",
        ),
    ),
)


@attrs.frozen
class Present(Release):
    """This tree as it is."""

    def unpacked(self) -> Path:
        return HERE.parent


PRESENT = Present(__version__, HERE)

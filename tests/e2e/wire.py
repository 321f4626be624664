"""Two ends of a wire in network namespaces, and a switch between them that swallows packets when told to.

Nothing is refused or reset while it is cut: each end keeps its carrier and its connections, and hears nothing more.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import pytest

#: From the range that is set aside for tests of networks (RFC 2544).
OURS, THEIRS = "198.18.77.1", "198.18.77.2"


@attrs.frozen
class Wire:
    """`prefix` runs a command at the far end."""

    middle: str
    far: str
    name: str

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.far)

    def cut(self) -> None:
        ip("-n", self.middle, "link", "set", f"{self.name}b", "nomaster")

    def mend(self) -> None:
        ip("-n", self.middle, "link", "set", f"{self.name}b", "master", "switch")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def wire() -> Iterator[Wire]:
    """Needs root and network namespaces: without them the test is skipped, and with CI set it fails."""
    name = f"lg{os.getpid() % 100000}"
    made = Wire(f"{name}m", f"{name}f", name)
    try:
        ip("netns", "add", made.middle)
    except (OSError, subprocess.CalledProcessError) as error:
        words = f"needs root and network namespaces: {getattr(error, 'stderr', b'') or error}"
        if os.environ.get("CI"):
            pytest.fail(words)
        pytest.skip(words)
    try:
        ip("netns", "add", made.far)
        ip("-n", made.middle, "link", "add", "switch", "type", "bridge")
        ip("-n", made.middle, "link", "set", "switch", "up")
        for near, far, space, address in (
            (f"{name}a", f"{name}b", "", OURS),
            (f"{name}d", f"{name}c", made.far, THEIRS),
        ):
            ip("link", "add", near, "type", "veth", "peer", "name", far)
            ip("link", "set", far, "netns", made.middle)
            ip("-n", made.middle, "link", "set", far, "master", "switch", "up")
            if space:
                ip("link", "set", near, "netns", space)
            at = ("-n", space) if space else ()
            ip(*at, "addr", "add", f"{address}/24", "dev", near)
            ip(*at, "link", "set", near, "up")
            if space:
                ip(*at, "link", "set", "lo", "up")
        yield made
    finally:
        for space in (made.far, made.middle):
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", f"{name}a"], check=False, capture_output=True)

"""File systems of their own, small enough to be filled. With CI=true not having one is a failure."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_file_system(place: Path, size: str, mode: str = "1777") -> Iterator[Path]:
    """A new directory that holds so much, "2m", while the block runs."""
    place.mkdir()
    words = f"size={size},mode={mode}"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", words, "tmpfs", str(place)], capture_output=True)
    if done.returncode:
        if os.environ.get("CI"):
            pytest.fail(f"cannot mount: {done.stderr.decode()}")
        pytest.skip(f"needs root and mounts: {done.stderr.decode()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)

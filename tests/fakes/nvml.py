"""Builds the driver library that answers as a test's script says, and runs the real probe against it."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from pathlib import Path

from llmgw.node.nvml.probe import Probe

SOURCE = Path(__file__).with_name("nvml.c")


@functools.cache
def library() -> Path:
    """The folder with a `libnvidia-ml.so.1`, compiled once per test run."""
    folder = tempfile.TemporaryDirectory(prefix="llmgw-nvml-")
    library.folder = folder  # type: ignore[attr-defined]  # lives as long as the process
    target = Path(folder.name) / "libnvidia-ml.so.1"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run(["gcc", *flags, "-o", target, SOURCE], check=True)
    return target.parent


class Driver:
    """A machine's driver, whose behaviour is a script that can change while it is asked."""

    def __init__(self, folder: Path, *lines: str) -> None:
        self._script = folder / "nvml.txt"
        self._stamp = 0
        self.says(*lines)

    def says(self, *lines: str) -> None:
        """From now on the library behaves as these statements say (see nvml.c)."""
        beside = self._script.with_suffix(".new")
        beside.write_text("\n".join(lines) + "\n")
        # A time stamp of its own for each version, however fast they follow one another.
        self._stamp += 1
        os.utime(beside, ns=(self._stamp, self._stamp))
        beside.replace(self._script)

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "LD_LIBRARY_PATH": str(library()), "FAKE_NVML": str(self._script)}

    def probe(self, *, first_within: float = 60.0, within: float = 60.0, death_within: float = 60.0) -> Probe:
        return Probe(env=self.env, first_within=first_within, within=within, death_within=death_within)


def uuid(gpu: int) -> str:
    return f"GPU-{gpu:08x}-0000-0000-0000-000000000000"

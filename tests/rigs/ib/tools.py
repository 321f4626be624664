"""Where the real tools are, and whether they are here at all."""

from __future__ import annotations

import glob
import shutil
from pathlib import Path

PRELOAD = next(iter(glob.glob("/usr/lib/*/umad2sim/libumad2sim.so")), "")
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


def real(tool: str) -> str:
    """The tool's own path. Raises LookupError."""
    found = shutil.which(tool, path=_PATH)
    if found is None:
        raise LookupError(f"{tool} is not installed")
    return found


def missing() -> str:
    """Why the rig cannot run here; "" when it can. Debian has it in ibsim-utils, opensm and infiniband-diags."""
    for tool in ("ibsim", "opensm", "ibnetdiscover", "sminfo", "saquery", "smpquery", "ibqueryerrors", "dump_fts"):
        try:
            real(tool)
        except LookupError as error:
            return str(error)
    return "" if PRELOAD and Path(PRELOAD).exists() else "libumad2sim.so is not installed"

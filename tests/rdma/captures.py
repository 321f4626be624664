"""Reads the recordings of the real InfiniBand tools, taken over simulated fabrics (some with faults injected).

Per folder one state of a fabric of 8 hosts with 2 rails, 4 leaves and 2 spines; `NAME.out` and `NAME.err` are a run's
streams and `RC` its exit status. Files that end in .gz are large fabrics.
"""

from __future__ import annotations

import gzip
import re
from functools import cache
from pathlib import Path

from llmgw.rdma.fabric import Map
from llmgw.rdma.netdiscover import scan
from llmgw.rdma.ran import Ran

IB = Path(__file__).parents[1] / "recorded" / "ib"


def text(name: str) -> str:
    path = IB / name
    if path.suffix == ".gz":
        return gzip.decompress(path.read_bytes()).decode()
    return path.read_text(errors="replace")


def every(pattern: str) -> list[str]:
    """The recordings whose name matches, relative to the folder of all."""
    return sorted(str(path.relative_to(IB)) for path in IB.rglob(pattern) if path.is_file())


def ran(name: str) -> Ran:
    """A recorded run by "folder/name": its streams and its exit status."""
    folder, _, base = name.rpartition("/")
    out = next((IB / f"{name}{end}" for end in (".out", ".gz") if (IB / f"{name}{end}").exists()), None)
    err = IB / f"{name}.err"
    status = 0
    if (IB / folder / "RC").exists():
        found = re.search(rf"^{re.escape(base)}\trc=(-?\d+)", text(f"{folder}/RC"), re.MULTILINE)
        status = int(found[1]) if found else 0
    elif (IB / f"{name}.rc").exists():
        status = int(text(f"{name}.rc").strip().removeprefix("rc="))
    return Ran(
        tool=base.split(".")[-1].split("-")[0] if "." in base else base.split("-")[0],
        exit=status,
        out=text(str(out.relative_to(IB))) if out else "",
        err=err.read_text(errors="replace") if err.exists() else "",
    )


@cache
def fabric(name: str) -> Map:
    """The map of a recorded `ibnetdiscover`."""
    found = scan(ran(name))
    assert isinstance(found, Map), found
    return found

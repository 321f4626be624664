"""A node with several simulated adapters: the tools on its PATH find them by name, as on a real one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.rigs.ib import shim
from tests.rigs.ib.fabric import Fabric
from tests.rigs.ib.net import Box
from tests.rigs.ib.tools import PRELOAD

TOOLS = (
    "ibnetdiscover", "iblinkinfo", "sminfo", "saquery", "smpquery", "perfquery", "ibqueryerrors", "ibroute", "dump_fts",
    "ibstat", "ibportstate",
)  # fmt: skip


def machine(directory: Path, adapters: Mapping[str, tuple[Fabric, Box]]) -> dict[str, str]:
    """The environment for an agent of this node: {"mlx5_0": (fabric, host)} becomes what its tools see."""
    bin_ = directory / "bin"
    bin_.mkdir(parents=True)
    source = Path(shim.__file__).read_text()
    script = bin_ / "shim"
    script.write_text(f"#!{sys.executable} -IS\n{source}")
    script.chmod(0o755)
    for tool in TOOLS:
        (bin_ / tool).symlink_to("shim")
    devices = {device: {"host": box.id, "socket": fabric.name} for device, (fabric, box) in adapters.items()}
    where = directory / "rig.json"
    where.write_text(json.dumps({"preload": PRELOAD, "devices": devices}))
    return {"PATH": f"{bin_}:{os.environ.get('PATH', '')}", "LLMGW_IB_RIG": str(where)}

"""Runs the real tool for a node of several simulated adapters: `sminfo -C mlx5_3 -P 1` as on hardware.

A folder of links to this file stands in PATH. LLMGW_IB_RIG names a JSON file of
{device: {"host": simulator id, "socket": simulator name}}. -C picks the entry, -C and -P are taken out, and the
tool runs with the preload, in a folder of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType


def main() -> int:
    tool = Path(sys.argv[0]).name
    rig = json.loads(Path(os.environ["LLMGW_IB_RIG"]).read_text())
    devices: dict[str, dict[str, str]] = rig["devices"]
    device, argv = None, []
    rest = iter(sys.argv[1:])
    for word in rest:
        if word == "-C":
            device = next(rest, "")
        elif word == "-P":
            next(rest, None)
        else:
            argv.append(word)
    real = shutil.which(tool, path="/usr/sbin:/usr/bin:/sbin:/bin")
    if real is None:
        print(f"{tool} is not installed", file=sys.stderr)
        return 127
    environment = dict(os.environ)
    if device is None:
        device = next(iter(devices), "")
    if device in devices:
        at = devices[device]
        environment |= {"LD_PRELOAD": rig["preload"], "SIM_HOST": at["host"], "IBSIM_SOCKNAME": at["socket"]}
    else:
        # No such simulated adapter: the tool itself says so, since this machine has none either.
        argv = ["-C", device, "-P", "1", *argv]
    with tempfile.TemporaryDirectory(prefix="ib-shim-", ignore_cleanup_errors=True) as place:
        child = subprocess.Popen([real, *argv], env=environment, cwd=place, start_new_session=False)

        def ended(number: int, frame: FrameType | None) -> None:
            child.kill()

        signal.signal(signal.SIGTERM, ended)
        status = child.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())

"""Becomes the real tool for a node of several simulated adapters: `sminfo -C mlx5_3 -P 1` as on hardware.

A folder of links to this file stands in PATH. LLMGW_IB_RIG names a JSON file of {device: {"host": simulator id,
"socket": simulator name}}. -C picks the entry, -C and -P are taken out, and the tool takes this process over, with the
preload and in a folder of its own, since it leaves files where it stands. It is started often, so it imports little.
"""

from __future__ import annotations

import json
import os
import sys

_PATH = ("/usr/sbin", "/usr/bin", "/sbin", "/bin")


def main() -> None:
    tool = os.path.basename(sys.argv[0])
    where = os.environ["LLMGW_IB_RIG"]
    with open(where) as file:
        rig = json.load(file)
    devices = rig["devices"]
    device, argv = None, []
    rest = iter(sys.argv[1:])
    for word in rest:
        if word == "-C":
            device = next(rest, "")
        elif word == "-P":
            next(rest, None)
        else:
            argv.append(word)
    real = next((path for folder in _PATH if os.access(path := f"{folder}/{tool}", os.X_OK)), None)
    if real is None:
        sys.exit(f"{tool} is not installed")
    environment = dict(os.environ)
    if device is None:
        device = next(iter(devices), "")
    if device in devices:
        at = devices[device]
        environment |= {"LD_PRELOAD": rig["preload"], "SIM_HOST": at["host"], "IBSIM_SOCKNAME": at["socket"]}
    else:
        # No such simulated adapter: the tool itself says so, since this machine has none either.
        argv = ["-C", device, "-P", "1", *argv]
    place = f"{os.path.dirname(where)}/run-{os.getpid()}"
    os.makedirs(place, exist_ok=True)
    os.chdir(place)
    os.execve(real, [tool, *argv], environment)


if __name__ == "__main__":
    main()

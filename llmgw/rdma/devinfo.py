"""What `ibv_devinfo` says that sysfs does not: the MTU that a port's link uses."""

from __future__ import annotations

import re

_line = re.compile(r"\s*(hca_id|port|active_mtu)\s*:\s*(\S+)")


def active_mtus(text: str) -> dict[tuple[str, int], int]:
    """(device, port) -> bytes, from `ibv_devinfo`'s text. Lines that mean nothing here are passed over."""
    found: dict[tuple[str, int], int] = {}
    device, port = "", 0
    for line in text.splitlines():
        match = _line.match(line)
        if match is None:
            continue
        name, value = match[1], match[2]
        if name == "hca_id":
            device, port = value, 0
        elif not value.isdecimal() or not value.isascii():
            continue
        elif name == "port":
            port = int(value)
        elif device and port:
            found[device, port] = int(value)
    return found

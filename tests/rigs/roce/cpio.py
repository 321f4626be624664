"""An initial RAM disk: a cpio archive in the "newc" form that the Linux kernel unpacks at boot."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path


def archive(root: Path) -> bytes:
    """Everything below a folder, owned by root, parents before what is in them."""
    parts = [_entry(number, name, path) for number, (name, path) in enumerate(_walk(root), 1)]
    return b"".join(parts) + _record(0, "TRAILER!!!", 0, b"")


def _walk(root: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(root.rglob("*")):
        yield str(path.relative_to(root)), path


def _entry(number: int, name: str, path: Path) -> bytes:
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        data = str(path.readlink()).encode()
    elif stat.S_ISREG(found.st_mode):
        data = path.read_bytes()
    else:
        data = b""
    return _record(number, name, found.st_mode, data)


def _record(number: int, name: str, mode: int, data: bytes) -> bytes:
    """One member: a header of hexadecimal fields, the name and the data, each padded to four bytes."""
    label = name.encode() + b"\0"
    fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(label), 0)
    header = b"070701" + b"".join(b"%08x" % field for field in fields)
    return _padded(header + label) + _padded(data)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)

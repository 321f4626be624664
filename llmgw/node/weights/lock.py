"""One at a time in a folder of the cache, in this process or another.

The lock is the open file's (flock): it ends with the process, however that ends, so no lock is ever stale.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import msgspec
import trio
from msgspec import Struct

_FIRST, _LONGEST = 0.02, 1.0


class Note(Struct, frozen=True):
    """What whoever holds a folder's lock is doing: for which source, and whether it brings bytes or still waits."""

    source: str
    moving: bool = False


def _path(root: Path, folder: str) -> Path:
    return root / ".llmgw" / "locks" / f"{folder}.lock"


@contextmanager
def attempt(root: Path, folder: str) -> Iterator[bool]:
    """Try to hold a folder's lock for the block; False when somebody else has it. Raises OSError."""
    handle = os.open(_path(root, folder), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            try:
                yield True
            finally:
                # A child that is just being started has the open file too for a moment: closing alone is not the end.
                fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)


def held(root: Path, folder: str) -> Note | None:
    """What is being done under a folder's lock; None when nobody holds it. Makes nothing."""
    path = _path(root, folder)
    if not path.exists():
        return None
    with attempt(root, folder) as nobody:
        if nobody:
            return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Note)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return Note("")


@asynccontextmanager
async def locked(root: Path, folder: str, waiting: Callable[[], None]) -> AsyncIterator[Callable[[Note], None]]:
    """Hold a folder's lock for the block, which gets a way to write down what it is doing, for `held` to read.

    `waiting` is called once when somebody else has it first.
    """
    pause = _FIRST
    while True:
        with attempt(root, folder) as mine:
            if mine:
                yield partial(_write, _path(root, folder))
                return
        if pause == _FIRST:
            waiting()
        # The kernel can only make a thread wait for a lock, and that thread could not be cancelled.
        await trio.sleep(pause)
        pause = min(pause * 2, _LONGEST)


def _write(path: Path, note: Note) -> None:
    """Into the lock's own file, in place: a new file would be another lock. A full disk costs the note and no more."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, msgspec.json.encode(note), 0)
    except OSError:
        pass
    finally:
        os.close(handle)

"""One at a time in a folder of the cache, in this process or another.

The lock is the open file's (flock): it ends with the process, however that ends, so no lock is ever stale.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import trio

_FIRST, _LONGEST = 0.02, 1.0


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
            yield True
    finally:
        os.close(handle)


@asynccontextmanager
async def locked(root: Path, folder: str, waiting: Callable[[], None]) -> AsyncIterator[None]:
    """Hold a folder's lock for the block. `waiting` is called once when somebody else has it first."""
    pause = _FIRST
    while True:
        with attempt(root, folder) as mine:
            if mine:
                yield
                return
        if pause == _FIRST:
            waiting()
        # The kernel can only make a thread wait for a lock, and that thread could not be cancelled.
        await trio.sleep(pause)
        pause = min(pause * 2, _LONGEST)

"""Whether a blob in the cache is what its manifest says: by size, and by digest where that was not seen yet."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import structlog
import trio

from llmgw.node.weights import layout
from llmgw.node.weights.manifest import File, hash_of

log = structlog.get_logger(__name__)

_STRETCH = 64 << 20


async def verified(file: File, at: Path, reading: Callable[[], None]) -> tuple[int, int] | None:
    """The stamp of a blob that is right; None when it has to be fetched, and then what lay there is gone.

    A blob that was found right and has not been touched since is not read again. `reading` is called before
    another one is. Raises OSError.
    """
    found = await trio.to_thread.run_sync(_plain, at)
    if found is None:
        return None
    if found == file.checked and found[0] == file.size:
        return found
    right = found[0] == file.size
    if right and (hashed := hash_of(file)) is not None:
        reading()

        def stretch(offset: int) -> int:
            with at.open("rb") as opened:
                opened.seek(offset)
                data = opened.read(_STRETCH)
            hashed.update(data)
            return len(data)

        done = 0
        while count := await trio.to_thread.run_sync(stretch, done):
            done += count
        right = hashed.hexdigest() == file.digest.partition(":")[2] and layout.stamp(at) == found
    if right:
        return found
    log.warning(
        "a file in the cache is not what it should be: fetched anew", path=str(at), bytes=found[0], due=file.size
    )
    await trio.to_thread.run_sync(os.unlink, at)
    return None


def _plain(at: Path) -> tuple[int, int] | None:
    found = layout.stamp(at)
    if found is None and os.path.lexists(at):
        raise OSError(errno.EINVAL, "it is a link or folder where a plain file is due", str(at))
    return found

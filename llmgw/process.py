"""What long-lived processes ask of the system, and how one is ordered by its parent."""

from __future__ import annotations

import ctypes
import gc
import resource

import trio

_libc = ctypes.CDLL(None)
_ARENA_MAX = -8  # M_ARENA_MAX of mallopt(3)


def prepare() -> None:
    """Call once, after everything that lives as long as the process has been made."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # A full collection stops every stream (0.4 s with 5,000 of them). What is here now lives for ever, and what comes
    # makes few cycles.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def share_heap() -> None:
    """Let all threads allocate from one heap. glibc gives each a heap of its own, which a few short calls in threads
    leave behind half empty; in a process that does little at once that is memory for nothing. Elsewhere: no effect.
    """
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENA_MAX, 1)


def give_back() -> None:
    """Return the heap's free pages to the system: after imports, and after a burst of work (glibc's malloc_trim)."""
    gc.collect()
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)


async def first_line(stream: trio.abc.ReceiveStream) -> bytes | None:
    """The line by which a parent orders its child; None when the parent went before it was whole."""
    line = b""
    while not line.endswith(b"\n"):
        piece = await stream.receive_some()
        if not piece:
            return None
        line += piece
    return line

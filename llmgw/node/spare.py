"""Imports without what an agent has no use for: it shares its machine with engines, and lives for months.

structlog and httpx take rich (and with it pygments) along wherever it is installed, for tracebacks in colours and a
command line of their own; httpcore takes h2 for HTTP/2, and anyio. All do without as well; that saves the agent more
than a tenth of its memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

#: What an agent leaves out.
NEEDLESS = ("rich", "pygments", "h2", "anyio")


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Modules of these names cannot be imported inside the block, except for who had them before."""
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        # What is None there cannot be imported (the import system's documented way to say so).
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]

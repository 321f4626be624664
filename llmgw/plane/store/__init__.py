"""What the plane keeps over a restart: a small map with revisions, behind one seam.

Only what cannot be seen again is kept (wanted models, placements, cordons, labels, tokens, certificates, epochs,
events, results). Keys are paths ("shards/tiny-0-0"), values readable JSON. Heartbeats never write (B9).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import attrs

from llmgw.errors import Conflict


class Moved(Conflict):
    """The store was written by somebody else since the revision that a commit was based on."""

    code = "moved"


@attrs.frozen
class Snapshot:
    """The values under a prefix at one revision of the whole store."""

    revision: int
    values: Mapping[str, bytes]


@attrs.frozen
class Change:
    """One key's newest value after some revision; None: deleted."""

    key: str
    value: bytes | None
    revision: int


class Store(Protocol):
    """Every implementation passes the one conformance suite in tests/plane/store."""

    async def load(self, prefix: str) -> Snapshot:
        """All keys that begin with `prefix`."""
        ...

    async def commit(
        self, puts: Mapping[str, bytes], deletes: Iterable[str] = (), *, if_revision: int | None = None
    ) -> int:
        """Write all or nothing; the new revision. Raises Moved when the store's revision is not `if_revision`."""
        ...

    async def changes(self, since: int) -> tuple[Change, ...]:
        """What changed after revision `since`, oldest first, one entry a key; empty when nothing did."""
        ...

    async def aclose(self) -> None: ...

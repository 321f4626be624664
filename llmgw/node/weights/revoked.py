"""Certificates of the fleet that are honoured no more: the plane tells them, in a file for whoever looks at one.

The plane refuses such a node by itself. Between nodes nobody but the other node can.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec
import structlog

from llmgw.errors import LlmgwError
from llmgw.files import write_whole

log = structlog.get_logger(__name__)


class Revocations:
    """The list in a node's directory, as the agent was told it last. Read anew when the file has changed."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "revoked.json"
        self._seen: tuple[int, int] | None = None
        self._serials: frozenset[str] = frozenset()

    def take(self, serials: Collection[str]) -> None:
        """Keep a new list. A disk that takes nothing leaves the one before."""
        if self._now() == frozenset(serials):
            return
        try:
            write_whole(self._path, msgspec.json.encode(sorted(serials)))
        except LlmgwError as error:
            log.error("revoked certificates cannot be noted", why=str(error))

    def __contains__(self, serial: str) -> bool:
        return serial in self._now()

    def _now(self) -> frozenset[str]:
        try:
            stat = self._path.stat()
            seen = (stat.st_mtime_ns, stat.st_ino)
            if seen != self._seen:
                self._serials = frozenset(msgspec.json.decode(self._path.read_bytes(), type=list[str]))
                self._seen = seen
        except FileNotFoundError:
            self._serials, self._seen = frozenset(), None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.error("revoked certificates cannot be read", path=str(self._path), why=str(error))
        return self._serials

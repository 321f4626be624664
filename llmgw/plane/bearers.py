"""Bearer tokens of the admin API: a file of them, read again whenever it changed."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path

import attrs

from llmgw.errors import BadInput, LlmgwError
from llmgw.files import read_whole, refuse_shared

_word = re.compile(r"[A-Za-z0-9_.~+/=-]{16,256}")


def new_bearer() -> str:
    """A new token: 256 random bits."""
    return "lga-" + secrets.token_urlsafe(32)


@attrs.define
class Bearers:
    """Whose token a text is. A line of the file is a token, or a name and a token; "#" begins a comment."""

    path: Path
    _seen: tuple[int, int, int, int] | None = None
    _known: tuple[tuple[str, bytes], ...] = attrs.field(default=(), repr=False)

    @classmethod
    def load(cls, path: Path) -> Bearers:
        """Raises LlmgwError for a file that is missing, can be read by others, or holds something else."""
        found = cls(path)
        found._known, found._seen = _read(path), _stamp(path)
        return found

    def __call__(self, token: str) -> str | None:
        """The name that a token belongs to; None for a wrong one, found out in the same time as a right one."""
        stamp = _stamp(self.path)
        if stamp != self._seen:
            try:
                self._known = _read(self.path)
            except LlmgwError:
                return None  # gone, half-written or open to others: the next request looks again
            self._seen = stamp
        digest, found = _digest(token), None
        for name, known in self._known:
            if hmac.compare_digest(known, digest):
                found = name
        return found


def _read(path: Path) -> tuple[tuple[str, bytes], ...]:
    text = read_whole(path, "the admin API's tokens", "make one with `llmgw-plane init`").decode(errors="replace")
    refuse_shared(path, "the admin API's tokens")
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        match line.partition("#")[0].split():
            case []:
                continue
            case [token] if _word.fullmatch(token):
                found.append(("admin", _digest(token)))
            case [name, token] if _word.fullmatch(token):
                found.append((name, _digest(token)))
            case _:
                raise BadInput(f"{path}, line {number}: neither TOKEN nor NAME TOKEN (16 to 256 letters and digits)")
    return tuple(found)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()


def _stamp(path: Path) -> tuple[int, int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size, found.st_mode

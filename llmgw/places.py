"""Where in a TOML file each key stands, so that an error can name the line.

The standard parser tells a place only for what it cannot parse. This one walks over text which that
parser has accepted, notes the line of every key, and understands no value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import count

#: Keys and array positions from the document's root: ("endpoints", 0, "url").
Path = tuple[str | int, ...]

_bare = re.compile(r"[A-Za-z0-9_-]+")
_blank = re.compile(r"[ \t]*")
_gap = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_scalar = re.compile(r"[^,\]}\n#]*")
_strings = (
    re.compile(r'"""(?:[^\\]|\\.)*?"{3,5}', re.S),
    re.compile(r"'''.*?'{3,5}", re.S),
    re.compile(r'"(?:[^"\\]|\\.)*"'),
    re.compile(r"'[^']*'"),
)
_escape = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))")
_controls = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", "e": "\x1b"}


def places(text: str) -> Mapping[Path, int]:
    """The line, from 1, of every key, table and array element of a well-formed document.

    Text that is not well-formed gives the places found before it stops making sense.
    """
    walk = _Walk(text)
    try:
        walk.document()
    except (_Lost, RecursionError):
        return walk.found
    return walk.found


class _Lost(Exception):
    pass


class _Walk:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.line, self.counted = 1, 0  # the line at offset `counted`
        self.found: dict[Path, int] = {}
        self.lengths: dict[Path, int] = {}  # of arrays of tables

    def document(self) -> None:
        table: Path = ()
        while True:
            self.skip(_gap)
            if self.at >= len(self.text):
                return
            if self.text.startswith("[[", self.at):
                self.at += 2
                *parents, last = self.key()
                array = (*self.resolve(parents), last)
                self.lengths[array] = self.lengths.get(array, 0) + 1
                table = (*array, self.lengths[array] - 1)
                self.note(table)
                self.take("]]")
            elif self.text[self.at] == "[":
                self.at += 1
                table = self.resolve(self.key())
                self.note(table)
                self.take("]")
            else:
                self.pair(table)

    def resolve(self, keys: list[str]) -> Path:
        # [a.b] below [[a]] speaks of the newest element of a.
        path: Path = ()
        for key in keys:
            path = (*path, key)
            if path in self.lengths:
                path = (*path, self.lengths[path] - 1)
        return path

    def pair(self, table: Path) -> None:
        path = (*table, *self.key())
        for length in range(len(table) + 1, len(path) + 1):
            self.note(path[:length])
        self.take("=")
        self.value(path)

    def value(self, path: Path) -> None:
        self.skip(_blank)
        opening = self.text[self.at : self.at + 1]
        if opening == "[":
            self.at += 1
            for index in self.elements("]"):
                self.note((*path, index))
                self.value((*path, index))
        elif opening == "{":
            self.at += 1
            for _ in self.elements("}"):
                self.pair(path)
        elif opening and opening in "\"'":
            self.string()
        else:
            self.skip(_scalar)

    def elements(self, closing: str) -> Iterator[int]:
        """Stop before each element; at the end, stand behind the closing bracket."""
        for index in count():
            self.skip(_gap)
            if index and self.text.startswith(",", self.at):
                self.at += 1
                self.skip(_gap)
            if self.text.startswith(closing, self.at):
                self.at += 1
                return
            if self.at >= len(self.text):
                raise _Lost
            yield index

    def key(self) -> list[str]:
        keys = []
        while True:
            self.skip(_blank)
            if self.text[self.at : self.at + 1] in ('"', "'"):
                raw = self.string()
                keys.append(_unescape(raw[1:-1]) if raw[0] == '"' else raw[1:-1])
            else:
                keys.append(self.skip(_bare))
            self.skip(_blank)
            if self.text[self.at : self.at + 1] != ".":
                return keys
            self.at += 1

    def string(self) -> str:
        for pattern in _strings:
            if found := pattern.match(self.text, self.at):
                self.at = found.end()
                return found[0]
        raise _Lost

    def skip(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        if found is None:
            raise _Lost
        self.at = found.end()
        return found[0]

    def take(self, token: str) -> None:
        self.skip(_blank)
        if not self.text.startswith(token, self.at):
            raise _Lost
        self.at += len(token)

    def note(self, path: Path) -> None:
        self.line += self.text.count("\n", self.counted, self.at)
        self.counted = self.at
        self.found.setdefault(path, self.line)


def _unescape(text: str) -> str:
    def plain(found: re.Match[str]) -> str:
        code = found[1] or found[2]
        return chr(int(code, 16)) if code else _controls.get(found[3], found[3])

    return _escape.sub(plain, text)

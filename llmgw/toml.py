"""Reads TOML into frozen values, with errors that name the file, the line, the key and what was probably meant.

A settings class (attrs) is the documentation of its table: the names, types and defaults of its fields are what
the table may hold. `Bytes` and `Seconds` mark numbers that may be written with a unit.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar, cast, get_args, get_origin, get_type_hints

import attrs

from llmgw import places
from llmgw.convert import Bytes, Seconds, convert, from_text, is_mapping, kind, near, unwrap
from llmgw.errors import BadInput

T = TypeVar("T")

_place = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


class BadToml(BadInput):
    """A file whose text or content cannot be meant. `line` and `column` count from 1; 0: not known."""

    def __init__(self, name: str, words: str, *, line: int = 0, column: int = 0, remedy: str = "") -> None:
        where = name + (f", line {line}" if line else "") + (f", column {column}" if column else "")
        super().__init__(f"{where}: {words}", remedy=remedy)
        self.name, self.words, self.line, self.column = name, words, line, column


def parse_toml(text: str, name: str) -> dict[str, object]:
    """A document as plain values. Raises BadToml with line and column for what is not TOML."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        words = str(error)
    except ValueError:
        raise BadToml(name, "holds a number of more digits than any that can be meant") from None
    except RecursionError:
        raise BadToml(name, "nested too deep") from None
    found = _place.search(words)
    line, column = (int(found[1]), int(found[2])) if found and found[1] else _end(text)
    words = _place.sub("", words)
    raise BadToml(name, f"not TOML: {words[:1].lower()}{words[1:]}", line=line, column=column)


def read_toml(text: str, name: str, environment: Environment | None = None) -> Table:
    """A document as a table that knows the line of every key. `name` is the file's, for errors."""
    text = text.removeprefix("\ufeff")  # some editors begin with it
    return Table(parse_toml(text, name), File(name, text), environment=environment)


def load_toml(path: Path, environment: Environment | None = None) -> Table:
    """A file as a table. Raises BadToml also for a file that cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadToml(str(path), f"cannot be read: {error.strerror}") from None
    try:
        text = data.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line, column = data.count(b"\n", 0, error.start) + 1, error.start - data.rfind(b"\n", 0, error.start)
        raise BadToml(str(path), "not UTF-8 text", line=line, column=column) from None
    return read_toml(text, str(path), environment)


@attrs.frozen
class File:
    """A file's name and text, for saying where something stands."""

    name: str
    text: str = attrs.field(default="", repr=False)

    def line(self, path: places.Path) -> int:
        """The line of a key, or of the innermost thing around it that has one; 0 when nothing has."""
        found = _places(self.text)
        while path and path not in found:
            path = path[:-1]
        return found.get(path, 0)


@attrs.frozen
class Environment:
    """Variables that replace keys: LLMGW_NODE_LOG_LEVEL replaces `level` in [log] under the prefix LLMGW_NODE."""

    prefix: str
    values: Mapping[str, str] = attrs.field(repr=False)

    def name(self, key: str) -> str:
        return f"{self.prefix}_{key.upper()}"

    def below(self, key: str) -> Environment:
        return Environment(self.name(key), self.values)


class Table:
    """One table, and where it stands. Reads whole settings classes, or key by key where names are free."""

    def __init__(
        self,
        values: Mapping[str, object],
        file: File,
        path: places.Path = (),
        environment: Environment | None = None,
    ) -> None:
        self.values, self.file, self.path = values, file, path
        self.environment = environment or Environment("", {})

    def error(self, words: str, key: str | None = None, *, remedy: str = "") -> BadToml:
        """An error that names this table, or one of its keys, and the line."""
        path = self.path if key is None else (*self.path, key)
        words = f"{dotted(path)}: {words}" if path else words
        return BadToml(self.file.name, words, line=self.file.line(path), remedy=remedy)

    def refuse_unknown(self, known: Iterable[str]) -> None:
        """Raise for a key that is not among `known`, naming the nearest one that is."""
        names = sorted(known)
        for key in self.values:
            if key not in names:
                meant = near(key, names)
                where = f" in [{dotted(self.path)}]" if self.path else ""
                remedy = f"did you mean {meant!r}?" if meant else f"known keys are {', '.join(names) or 'none'}"
                line = self.file.line((*self.path, key))
                raise BadToml(self.file.name, f"unknown key {key!r}{where}", line=line, remedy=remedy)

    def table(self, key: str) -> Table:
        """The table under `key`; an empty one when there is none."""
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            remedy = f"write [{dotted((*self.path, key))}]"
            raise self.error(f"a table is due, not {kind(value)}", key, remedy=remedy)
        return Table(value, self.file, (*self.path, key), self.environment.below(key))

    def tables(self, key: str) -> tuple[Table, ...]:
        """The array of tables under `key`; none when the key is absent."""
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            found = "a list of other things" if isinstance(value, list) else kind(value)
            raise self.error(f"tables are due, not {found}", key, remedy=f"write [[{dotted((*self.path, key))}]]")
        return tuple(Table(item, self.file, (*self.path, key, index)) for index, item in enumerate(value))

    def read(self, settings: type[T], also: Iterable[str] = (), *, unit: str = "") -> T:
        """This table as a settings class: every key checked, unknown ones refused.

        `also` are keys that the caller reads itself. `unit` "seconds" says that the class counts all its fractions
        in seconds. A ValueError or BadInput of the class or of a field's validator becomes an error with its line.
        """
        fields = [field for field in attrs.fields(cast("type[attrs.AttrsInstance]", settings)) if field.init]
        self.refuse_unknown([*(field.name for field in fields), *also])
        hints = _hints(settings, unit)
        found: dict[str, object] = {}
        for field in fields:
            hint = hints[field.name]
            nested = _is_settings(unwrap(hint)[0]) and field.default is not None
            if field.name in self.values or nested:
                found[field.name] = self.value(field.name, hint)
            name = self.environment.name(field.name)
            text = self.environment.values.get(name)
            if text is not None and not nested:
                try:
                    found[field.name] = from_text(text, hint)
                except ValueError as error:
                    raise BadInput(f"{name}: {error}") from None
            if field.name not in found:
                if field.default is attrs.NOTHING:
                    raise self.error(f"the key {field.name!r} is missing")
            elif field.validator is not None:
                self._validate(field, found[field.name])
        try:
            return settings(**found)
        except (ValueError, BadInput) as error:
            raise self._wrapped(error) from None

    def value(self, key: str, hint: object) -> object:
        """One key's value as a plain type, `Bytes`, `Seconds`, a settings class, or a tuple or mapping of those."""
        bare, unit = unwrap(hint)
        if _is_settings(bare):
            return self.table(key).read(cast("type[object]", bare), unit=unit)
        if key not in self.values:
            raise self.error(f"the key {key!r} is missing")
        arguments = get_args(bare)
        if get_origin(bare) is tuple and _is_settings(arguments[0]):
            return tuple(table.read(arguments[0]) for table in self.tables(key))
        if is_mapping(bare) and _is_settings(arguments[1]):
            below = self.table(key)
            return {name: below.table(name).read(arguments[1]) for name in below.values}
        try:
            return convert(self.values[key], hint)
        except ValueError as error:
            raise self.error(str(error), key) from None

    def _validate(self, field: attrs.Attribute[object], value: object) -> None:
        assert field.validator is not None
        try:
            field.validator(None, field, value)
        except (ValueError, BadInput) as error:
            raise self._wrapped(error, field.name) from None

    def _wrapped(self, error: ValueError | BadInput, key: str | None = None) -> BadToml:
        if isinstance(error, BadToml):
            return error
        if isinstance(error, BadInput):
            return self.error(error.what, key, remedy=error.remedy)
        words = str(error.args[0] if error.args else error)  # attrs' own validators carry more arguments
        return self.error(words.removeprefix(f"{key!r} "), key)


def names(settings: type[object], environment: Environment) -> frozenset[str]:
    """Every environment variable that `Table.read` looks at for a settings class."""
    found: set[str] = set()
    fields = {field.name for field in attrs.fields(cast("type[attrs.AttrsInstance]", settings)) if field.init}
    for name, hint in _hints(settings).items():
        if name not in fields:
            continue
        bare, _ = unwrap(hint)
        found |= (
            names(cast("type[object]", bare), environment.below(name))
            if _is_settings(bare)
            else {environment.name(name)}
        )
    return frozenset(found)


def dotted(path: places.Path) -> str:
    """A place as TOML would write it: endpoints[0].url."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            bare = part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else '"' + part.replace('"', '\\"') + '"'
            text += f".{bare}" if text else bare
    return text


def _end(text: str) -> tuple[int, int]:
    return text.count("\n") + 1, len(text) - text.rfind("\n")


def _is_settings(hint: object) -> bool:
    return isinstance(hint, type) and attrs.has(hint) and not hasattr(hint, "parse")


_places = cache(places.places)


def _hints(settings: type[object], unit: str = "") -> Mapping[str, object]:
    """The types of a class's fields. A field of bytes is known by its name, too: `most_body_bytes`."""
    found = get_type_hints(settings, include_extras=True)
    for name, hint in found.items():
        if hint is int and name.endswith("_bytes"):
            found[name] = Bytes
        elif hint is float and unit == "seconds":
            found[name] = Seconds
    return found


__all__ = [
    "BadToml",
    "Bytes",
    "Environment",
    "File",
    "Seconds",
    "Table",
    "dotted",
    "load_toml",
    "names",
    "near",
    "parse_toml",
    "read_toml",
]

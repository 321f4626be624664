"""A plain value, from TOML or from the environment, as the type that a setting has.

Everything raises ValueError in words for an operator; who knows the file and the line adds them.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal, Protocol, TypeGuard, Union, get_args, get_origin

from llmgw.units import parse_duration, parse_size

#: A setting in bytes: an integer, or "512MiB".
Bytes = Annotated[int, "bytes"]
#: A setting in seconds: a number, or "30s".
Seconds = Annotated[float, "seconds"]

_TRUE, _FALSE = frozenset({"true", "yes", "on", "1"}), frozenset({"false", "no", "off", "0"})


class Parsed(Protocol):
    """A type of ours that is written as text."""

    @classmethod
    def parse(cls, text: str) -> Parsed: ...


def convert(value: object, hint: object) -> object:
    """A TOML value as `hint`."""
    hint, unit = unwrap(hint)
    if unit and isinstance(value, str):
        return parse_size(value) if unit == "bytes" else parse_duration(value)
    origin = get_origin(hint)
    if origin is Literal:
        return _one_of(value, get_args(hint))
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"a list is due, not {kind(value)}")
        return tuple(convert(item, get_args(hint)[0]) for item in value)
    if is_mapping(hint):
        if not isinstance(value, dict):
            raise ValueError(f"a table is due, not {kind(value)}")
        return {name: convert(item, get_args(hint)[1]) for name, item in value.items()}
    return _scalar(value, hint, unit)


def from_text(text: str, hint: object) -> object:
    """An environment variable's text as `hint`; a list is separated by commas."""
    hint, unit = unwrap(hint)
    if unit:
        return convert(text, Bytes if unit == "bytes" else Seconds)
    if get_origin(hint) is tuple:
        return tuple(from_text(part.strip(), get_args(hint)[0]) for part in text.split(",") if part.strip())
    if is_mapping(hint):
        pairs = [part.partition("=") for part in text.split(",") if part.strip()]
        if any(not equals for _, equals, _ in pairs):
            raise ValueError(f"{text!r} is not a list of name=value")
        return {name.strip(): from_text(item.strip(), get_args(hint)[1]) for name, _, item in pairs}
    if hint is bool:
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        raise ValueError(f"true or false is due, not {text!r}")
    if hint is int or hint is float:
        try:
            return _scalar(hint(text), hint, "")
        except ValueError:
            raise ValueError(f"a {'whole ' if hint is int else ''}number is due, not {text!r}") from None
    return convert(text, hint)


def unwrap(hint: object) -> tuple[object, str]:
    """The bare type of a hint and its unit, if any: Optional, NewType and Annotated taken off."""
    unit = ""
    while True:
        if get_origin(hint) is Annotated:
            hint, *marks = get_args(hint)
            unit = next((mark for mark in marks if mark in ("bytes", "seconds")), unit)
        elif get_origin(hint) in (Union, types.UnionType):
            hint = next(arm for arm in get_args(hint) if arm is not type(None))
        elif hasattr(hint, "__supertype__"):
            hint = hint.__supertype__
        else:
            return hint, unit


def is_mapping(hint: object) -> bool:
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def near(word: str, known: Iterable[str], closeness: float = 0.6) -> str:
    """The known word that was probably meant; "" when none is close."""
    by_fold = {name.casefold().replace("-", "_"): name for name in known}
    found = difflib.get_close_matches(word.casefold().replace("-", "_"), by_fold, n=1, cutoff=closeness)
    return by_fold[found[0]] if found else ""


def kind(value: object) -> str:
    """What a TOML value is, in TOML's words."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return f"the text {value!r}" if len(value) <= 40 else f"the text {value[:37]!r}..."
        case int() | float():
            return f"the number {value}"
        case list():
            return "a list"
        case dict():
            return "a table"
    return f"a {type(value).__name__}"


def _scalar(value: object, hint: object, unit: str) -> object:
    if hint is bool:
        if not isinstance(value, bool):
            raise ValueError(f"true or false is due, not {kind(value)}")
        return value
    if hint is int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{_UNITS.get(unit, 'a whole number')} is due, not {kind(value)}")
        if unit and value < 0:
            raise ValueError(f"{_UNITS[unit]} is due, not less than nothing ({value})")
        if value.bit_length() > 63:
            raise ValueError(f"{kind(value)} is too large")
        return value
    if hint is float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value):
            raise ValueError(f"{_UNITS.get(unit, 'a number')} is due, not {kind(value)}")
        if unit and value < 0:
            raise ValueError(f"{_UNITS[unit]} is due, not less than nothing ({value})")
        return float(value)
    if not isinstance(value, str):
        raise ValueError(f"text is due, not {kind(value)}")  # noqa: TRY004 - the file's fault, not the code's
    if hint is str or hint is object:
        return value
    if hint is Path:
        return _path(value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(_one_of(value, tuple(member.value for member in hint)))
    if _is_parsed(hint):
        return hint.parse(value)
    raise TypeError(f"no way to read a setting of type {hint!r}")


_UNITS = {"bytes": "a size (bytes, or text such as '512MiB')", "seconds": "a duration (seconds, or text such as '30s')"}


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _path(text: str) -> Path:
    if not text or "\0" in text:
        raise ValueError("a path is due, not an empty text" if not text else "a path cannot hold a NUL character")
    return Path(text).expanduser() if text.startswith("~/") else Path(text)


def _is_parsed(hint: object) -> TypeGuard[type[Parsed]]:
    return isinstance(hint, type) and hasattr(hint, "parse")


def _one_of(value: object, words: tuple[object, ...]) -> object:
    if any(value == word and type(value) is type(word) for word in words):
        return value
    meant = near(value, map(str, words)) if isinstance(value, str) else ""
    choices = ", ".join(repr(word) for word in words)
    raise ValueError(f"one of {choices} is due, not {kind(value)}" + (f"; did you mean {meant!r}?" if meant else ""))

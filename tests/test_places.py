from __future__ import annotations

import json
import tomllib

from hypothesis import given
from hypothesis import strategies as st

from llmgw.places import Path, places

DOCUMENT = '''\
# a comment = not a key
name = "plane"   # [not.a.table]
text = """
hidden = 1
[hidden]
"""
raw = \'\'\'
also = "hidden"\'\'\'
list = [
  1, # one
  { deep = [ { deeper = 2 } ], "quoted key" = 3 },
  "]",
]
a.b.c = 5

[log]
level = "info"
"with.dot" = { x = 1, y = "}" }

[[endpoints]]
model = "one"
[endpoints.more]
key = 1

[[endpoints]]
model = "two"

[x."y.z"]
q = 1979-05-27T07:32:00Z
'''


def test_every_key_has_its_line() -> None:
    expected: dict[Path, int] = {
        ("name",): 2,
        ("text",): 3,
        ("raw",): 7,
        ("list",): 9,
        ("list", 0): 10,
        ("list", 1, "deep", 0, "deeper"): 11,
        ("list", 1, "quoted key"): 11,
        ("list", 2): 12,
        ("a",): 14,
        ("a", "b", "c"): 14,
        ("log",): 16,
        ("log", "level"): 17,
        ("log", "with.dot", "y"): 18,
        ("endpoints", 0): 20,
        ("endpoints", 0, "model"): 21,
        ("endpoints", 0, "more", "key"): 23,
        ("endpoints", 1, "model"): 26,
        ("x", "y.z", "q"): 29,
    }
    found = places(DOCUMENT)
    assert {path: found.get(path) for path in expected} == expected


def test_nothing_inside_text_is_taken_for_a_key() -> None:
    names = {path[0] for path in places(DOCUMENT)}
    assert names == {"name", "text", "raw", "list", "a", "log", "endpoints", "x"}


_words = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=8)
_values: st.SearchStrategy[object] = st.recursive(
    st.integers(-(2**40), 2**40) | st.booleans() | _words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_words, inner, max_size=3),
    max_leaves=12,
)


def _toml(value: object) -> str:
    """A value in one line. JSON's strings are TOML's."""
    match value:
        case dict():
            return "{ " + ", ".join(f"{_string(key)} = {_toml(item)}" for key, item in value.items()) + " }"
        case list():
            return "[" + ", ".join(map(_toml, value)) + "]"
        case str():
            return _string(value)
    return json.dumps(value)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _paths(value: object, path: Path = ()) -> set[Path]:
    inner: list[tuple[str | int, object]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    return {path} - {()} | {deeper for key, item in inner for deeper in _paths(item, (*path, key))}


@given(st.dictionaries(_words, _values, max_size=5))
def test_what_the_parser_reads_is_found_on_the_line_where_it_was_written(document: dict[str, object]) -> None:
    text = "".join(f"{_string(key)} = {_toml(value)}\n" for key, value in document.items())
    assert tomllib.loads(text) == document
    found = places(text)
    assert set(found) == _paths(document)
    lines = {key: number for number, key in enumerate(document, 1)}
    assert all(line == lines[str(path[0])] for path, line in found.items())


@given(st.text())
def test_text_that_is_no_toml_never_raises(text: str) -> None:
    places(text)

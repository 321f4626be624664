from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.errors import BadInput
from llmgw.toml import BadToml, Bytes, Environment, Seconds, load_toml, names, parse_toml, read_toml


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@attrs.frozen
class Inner:
    inside: bool = True
    hold: Seconds = 30.0
    most_body_bytes: int = 100


@attrs.frozen
class Times:
    lost: float = 1.0


@attrs.frozen
class Item:
    model: str
    url: str = ""


def _refuse_odd(_settings: object, _field: object, value: int) -> None:
    if value % 2:
        raise BadInput(f"{value} is odd", remedy="take an even one")


@attrs.frozen
class Sample:
    heartbeat: Seconds = 5.0
    memory: Bytes = 1
    ratio: float = 0.5
    limit: int = attrs.field(default=4, validator=attrs.validators.ge(1))
    even: int = attrs.field(default=2, validator=_refuse_odd)
    node: str | None = None
    path: Path = Path("x")
    level: Literal["info", "warning"] = "info"
    colour: Colour = Colour.RED
    words: tuple[str, ...] = ()
    labels: Mapping[str, str] = attrs.field(factory=dict)
    on: bool = False
    inner: Inner = Inner()
    times: Annotated[Times, "seconds"] = Times()
    items: tuple[Item, ...] = ()
    named: Mapping[str, Item] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if self.limit == 99:
            raise ValueError("a limit of 99 is never meant")


def read(text: str, environ: Mapping[str, str] | None = None) -> Sample:
    return read_toml(text, "x.toml", Environment("LLMGW_X", environ or {})).read(Sample)


def test_every_kind_of_value_is_read() -> None:
    text = """
    heartbeat = "5m"
    memory = "1.5GiB"
    ratio = 1
    node = "a"
    path = "/p"
    level = "warning"
    colour = "blue"
    words = ["a", "b"]
    labels = { rack = "7" }
    on = true
    [inner]
    hold = "1s"
    most_body_bytes = "2k"
    [times]
    lost = "2m"
    [[items]]
    model = "m"
    [named.n]
    model = "o"
    """
    assert read(text) == Sample(
        heartbeat=300.0,
        memory=3 << 29,
        ratio=1.0,
        node="a",
        path=Path("/p"),
        level="warning",
        colour=Colour.BLUE,
        words=("a", "b"),
        labels={"rack": "7"},
        on=True,
        inner=Inner(hold=1.0, most_body_bytes=2048),
        times=Times(120.0),
        items=(Item("m"),),
        named={"n": Item("o")},
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = [\n1,\n", "x.toml, line 3, column 1: not TOML: "),
        ("ok = 1\nbad = = 2\n", "x.toml, line 2, column 7: not TOML: invalid value"),
        ("a = 1\na = 2", "x.toml, line 2, column 6: not TOML: "),
        ("a = " + "[" * 20000, "x.toml: nested too deep"),
        ("a = " + "9" * 5000, "x.toml: holds a number of more digits"),
        ("\n\nhertbeat = 3", "x.toml, line 3: unknown key 'hertbeat': did you mean 'heartbeat'?"),
        ("Heartbeat = 3", "x.toml, line 1: unknown key 'Heartbeat': did you mean 'heartbeat'?"),
        ("qqqqqq = 3", "x.toml, line 1: unknown key 'qqqqqq': known keys are colour, even, heartbeat, "),
        ("[inner]\ninsid = true", "x.toml, line 2: unknown key 'insid' in [inner]: did you mean 'inside'?"),
        ("inner = { insid = true }", "x.toml, line 1: unknown key 'insid' in [inner]: did you mean 'inside'?"),
        ("[[items]]\nmodel='a'\n\n[[items]]\nurl='u'", "x.toml, line 4: items[1]: the key 'model' is missing"),
        ("[[items]]\nmodel='a'\nurk='u'", "x.toml, line 3: unknown key 'urk' in [items[0]]: did you mean 'url'?"),
        ("[named.\"a b\"]\nmodl='a'", "x.toml, line 2: unknown key 'modl' in [named.\"a b\"]: did you mean 'model'?"),
        ("heartbeat = '5x'", "x.toml, line 1: heartbeat: '5x' is not a duration: "),
        ("heartbeat = -5", "x.toml, line 1: heartbeat: a duration (seconds, or text such as '30s') is due, not less"),
        ("heartbeat = inf", "x.toml, line 1: heartbeat: a duration "),
        ("heartbeat = 1" + "0" * 400, "x.toml, line 1: heartbeat: a duration "),
        ("heartbeat = true", "x.toml, line 1: heartbeat: a duration (seconds, or text such as '30s') is due, not true"),
        ("memory = 1.5", "x.toml, line 1: memory: a size (bytes, or text such as '512MiB') is due, not the number 1.5"),
        ("memory = 'much'", "x.toml, line 1: memory: 'much' is not a size: "),
        ("limit = 9223372036854775808", "x.toml, line 1: limit: the number 9223372036854775808 is too large"),
        ("limit = '5'", "x.toml, line 1: limit: a whole number is due, not the text '5'"),
        ("limit = 0", "x.toml, line 1: limit: must be >= 1: 0"),
        ("limit = 99", "x.toml: a limit of 99 is never meant"),
        ("even = 3", "x.toml, line 1: even: 3 is odd: take an even one"),
        ("node = 5", "x.toml, line 1: node: text is due, not the number 5"),
        ("path = ''", "x.toml, line 1: path: a path is due, not an empty text"),
        ("level = 'warn'", "x.toml, line 1: level: one of 'info', 'warning' is due, not the text 'warn'; did you"),
        ("colour = 'rad'", "x.toml, line 1: colour: one of 'red', 'blue' is due, not the text 'rad'; did you mean"),
        ("words = 'a'", "x.toml, line 1: words: a list is due, not the text 'a'"),
        ("words = [1]", "x.toml, line 1: words: text is due, not the number 1"),
        ("labels = []", "x.toml, line 1: labels: a table is due, not a list"),
        ("on = 1", "x.toml, line 1: on: true or false is due, not the number 1"),
        ("inner = 3", "x.toml, line 1: inner: a table is due, not the number 3: write [inner]"),
        ("items = 3", "x.toml, line 1: items: tables are due, not the number 3: write [[items]]"),
        ("items = [3]", "x.toml, line 1: items: tables are due, not a list of other things: write [[items]]"),
        ("node = 1979-05-27", "x.toml, line 1: node: text is due, not a date"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_file_line_and_key(text: str, words: str) -> None:
    with pytest.raises(BadInput) as caught:
        read(text)
    assert str(caught.value).startswith(words)


def test_the_environment_replaces_what_the_file_says() -> None:
    environ = {
        "LLMGW_X_LIMIT": "7",
        "LLMGW_X_HEARTBEAT": "1m",
        "LLMGW_X_MEMORY": "1k",
        "LLMGW_X_WORDS": "a, b",
        "LLMGW_X_LABELS": "rack=7,row=2",
        "LLMGW_X_ON": "yes",
        "LLMGW_X_INNER_HOLD": "2m",
        "LLMGW_X_TIMES_LOST": "3s",
        "LLMGW_X_LEVEL": "warning",
        "UNRELATED": "1",
    }
    found = read("limit = 3\nheartbeat = 1", environ)
    assert found == Sample(
        limit=7,
        heartbeat=60.0,
        memory=1024,
        words=("a", "b"),
        labels={"rack": "7", "row": "2"},
        on=True,
        inner=Inner(hold=120.0),
        times=Times(3.0),
        level="warning",
    )


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("LIMIT", "x", "LLMGW_X_LIMIT: a whole number is due, not 'x'"),
        ("RATIO", "nan", "LLMGW_X_RATIO: a number is due, not 'nan'"),
        ("ON", "maybe", "LLMGW_X_ON: true or false is due, not 'maybe'"),
        ("LABELS", "rack", "LLMGW_X_LABELS: 'rack' is not a list of name=value"),
        ("INNER_HOLD", "x", "LLMGW_X_INNER_HOLD: 'x' is not a duration"),
    ],
)
def test_a_wrong_variable_is_named(name: str, text: str, words: str) -> None:
    with pytest.raises(BadInput) as caught:
        read("", {f"LLMGW_X_{name}": text})
    assert str(caught.value).startswith(words)


def test_the_variables_of_a_class_are_known_down_to_its_tables() -> None:
    found = names(Sample, Environment("LLMGW_X", {}))
    assert {"LLMGW_X_HEARTBEAT", "LLMGW_X_INNER_HOLD", "LLMGW_X_TIMES_LOST"} <= found


def test_a_file_that_cannot_be_read_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(BadToml, match="cannot be read: No such file"):
        load_toml(tmp_path / "none.toml")
    with pytest.raises(BadToml, match="cannot be read: Is a directory"):
        load_toml(tmp_path)
    bad = tmp_path / "bad.toml"
    bad.write_bytes(b"a = 1\nb = '\xff'\n")
    with pytest.raises(BadToml, match=r"bad\.toml, line 2, column 6: not UTF-8 text"):
        load_toml(bad)


def test_windows_line_ends_and_a_byte_order_mark_are_no_hindrance(tmp_path: Path) -> None:
    file = tmp_path / "w.toml"
    file.write_bytes(b"\xef\xbb\xbflimit = 3\r\nnode = 'x'\r\n")
    assert load_toml(file).read(Sample) == Sample(limit=3, node="x")


@given(st.text())
def test_any_text_is_a_document_or_an_error_that_says_where(text: str) -> None:
    error = None
    try:
        parse_toml(text, "x.toml")
    except BadToml as caught:
        error = caught
    assert error is None or (error.name == "x.toml" and error.line <= text.count("\n") + 1)


def test_a_byte_order_mark_is_no_part_of_a_document() -> None:
    assert read_toml("\ufeffa = 1\nb = 2", "a.toml").values == {"a": 1, "b": 2}
    with pytest.raises(BadToml, match=r"a\.toml, line 2"):
        read_toml("\ufeffa = 1\nb = ", "a.toml")

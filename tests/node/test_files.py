"""Reads of small files that may be anything."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from llmgw.node import files
from tests.fakes.sysfs import REFUSES


def test_what_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert files.text(tmp_path) is None
    assert files.text(tmp_path / "absent") is None
    assert files.text("nul\0") is None
    assert files.text(REFUSES) is None
    assert files.number(tmp_path / "absent") is None
    assert files.names(tmp_path / "absent") == ()
    assert files.real(tmp_path / "absent") is None
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert files.real(loop) is None


def test_bytes_that_are_no_text_are_replaced_and_nuls_dropped(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"  ok\0\xff\n")
    assert files.text(file) == "ok�"
    assert files.text(file, most=4) == "ok"


def test_numbers_fields_and_kilobytes() -> None:
    assert files.integer(" 12 ") == 12
    assert files.integer("0x1f", 16) == 31
    assert files.integer("twelve") is None
    assert files.fields("MemTotal:  5 kB\nMemTotal: 6 kB\njunk\n") == {"MemTotal": "5 kB"}
    assert files.kilobytes("5 kB") == 5120
    assert files.kilobytes(None) is None


@given(st.text(), st.text(max_size=2).filter(bool))
def test_any_text_has_fields_and_maybe_numbers(text: str, separator: str) -> None:
    files.fields(text, separator)
    files.kilobytes(text)
    files.integer(text)
